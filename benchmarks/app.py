"""The command ``python -m benchmarks``: its options, and how errors become one line and an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from attn_bridge.cli.output import check_writable, progress, write_json

from .measuring import cells

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SEVERAL = "may be repeated, or several with commas"


@app.command()
def bench(
    subjects: Annotated[
        list[str] | None, typer.Argument(metavar="[SUBJECT ...]", help=f"Default: {' and '.join(cells.SUBJECTS)}.")
    ] = None,
    cells_: Annotated[
        list[str] | None,
        typer.Option("--cells", metavar="BxTxHxD", help=f"Default: {', '.join(map(str, cells.CELLS))} ({_SEVERAL})."),
    ] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(cells.DTYPES)} ({_SEVERAL}).")] = None,
    directions: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(cells.DIRECTIONS)} ({_SEVERAL}).")
    ] = None,
    modes: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(cells.MODES)} ({_SEVERAL}).")] = None,
    frameworks: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(cells.FRAMEWORKS)} ({_SEVERAL}).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How often each contender is timed; default: 9, with --quick 2.", min=1)
    ] = None,
    memory: Annotated[
        bool | None,
        typer.Option(
            "--memory/--no-memory", help="Measure peak memory, in a process per contender; default: not with --quick."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes in float32: shows that it works, not how fast it is.")
    ] = False,
    saved: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="Show the report in a JSON file; measure nothing.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Show ours next to the peers only, one line per comparison.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw time and memory over T as an SVG.")] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all tables as Markdown, the plot beside them as SVG.")
    ] = None,
) -> int:
    """Measure causal attention, and modules around it, next to their peers, alternately and on this machine.

    Functions: each of our implementations, torch's SDPA, jax.nn.dot_product_attention. Modules: MultiHeadAttention,
    the book's plain version, torch.nn.MultiheadAttention, flax.nnx.MultiHeadAttention. Each answer is first compared
    with float64; a wrong one is shown as wrong, without its time. The default takes one to two hours on two cores.

    Example: python -m benchmarks attention --cells 4x1024x12x64 --dtypes float32 --json bench.json --plot bench.svg

    Exit status: 0 = done, 1 = one of ours is wrong or fails, 2 = bad usage.
    """
    from .measuring.session import Plan, groups, measure
    from .reporting import page
    from .reporting.plot import svg
    from .reporting.report import Report

    files = {"--json": json_file, "--plot": plot, "--markdown": markdown}
    for option, target in files.items():
        if target is not None:
            check_writable(target, option)
    if saved is not None:
        report = _load(saved)
    else:
        wanted = groups(
            cells.chosen("subject", subjects or (), cells.SUBJECTS),
            _cells(cells_ or (), quick),
            cells.chosen("dtype", dtypes or (("float32",) if quick else ()), cells.DTYPES),
            cells.chosen("direction", directions or (), cells.DIRECTIONS),
        )
        plan = Plan(
            tuple(wanted),
            cells.chosen("framework", frameworks or (), cells.FRAMEWORKS),
            cells.chosen("mode", modes or (), cells.MODES),
            rounds or (2 if quick else 9),
            not quick if memory is None else memory,
            **({"matmul": 256, "sample": 0.002, "quick": True} if quick else {}),
        )
        with progress() as advance:
            report = measure(plan, advance)
    if json_file is not None:
        write_json(report.to_json(), json_file)
    if plot is not None:
        Path(plot).write_text(svg(report), encoding="utf-8")
    if markdown is not None:
        picture = Path(markdown).with_suffix(".svg")
        picture.write_text(svg(report), encoding="utf-8")
        Path(markdown).write_text(page.markdown(report, picture.name), encoding="utf-8")
    if json_file != "-" and not (saved and markdown):
        _show(report, summary)
    assert isinstance(report, Report)
    return 0 if report.passed or saved else 1


def _show(report: object, summary: bool) -> None:
    from rich.console import Console

    from .reporting.report import LEGEND, Report

    assert isinstance(report, Report)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110 if summary else 150)
    for table in report.summaries() if summary else report.tables():
        console.print(table)
    if not summary:
        console.print(LEGEND, markup=False)
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)


def _cells(arguments: Sequence[str], quick: bool) -> tuple[cells.Cell, ...]:
    texts = [text for one in arguments for text in one.split(",")]
    return tuple(dict.fromkeys(map(cells.Cell.parse, texts))) or (cells.QUICK_CELLS if quick else cells.CELLS)


def _load(path: str) -> object:
    from .reporting.report import Report

    try:
        return Report.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of python -m benchmarks: {error}") from error


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status; expected errors become one line on stderr."""
    try:
        status = get_command(app).main(list(arguments), prog_name="python -m benchmarks", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except Exception as error:  # typer's parser has no public class for its errors; all others go on
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        return _fail(usage())
    return int(status or 0)


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(sys.argv[1:]))
