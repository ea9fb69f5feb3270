"""``attn-bridge convert``, ``inspect`` and ``verify``: checkpoints between layouts and containers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import check_writable, write_json
from .places import is_remote, place

if TYPE_CHECKING:
    from rich.console import Console

    from ..checkpoints.planning.plans import Plan, Target

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="What names and shapes can't say, such as num_heads=12; else read from config.json (may be repeated).",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write the report as JSON to FILE (with a dot or slash in its name), or to stdout.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB; default: 3 x the largest tensor."),
]
Rules = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML file of your own rules, in place of the layouts.")
]


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="File or folder to convert, or its URL.", parser=place)],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="DST", help="File (its extension says the container), or folder (safetensors).", parser=place
        ),
    ],
    from_layout: Annotated[
        str | None, typer.Option("--from", metavar="LAYOUT", help="Layout of SRC; default: found by its names.")
    ] = None,
    to_layout: Annotated[
        str | None,
        typer.Option("--to", metavar="LAYOUT", help="Layout of DST; default: flax, or torch for what is Flax's; same."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(metavar="CONTAINER", help="Container of DST: safetensors, torch, npz, msgpack, orbax, dcp."),
    ] = None,
    rules: Rules = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors: bf16, f16, f32, f64; default: never.")
    ] = None,
    settings: Settings = None,
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", help="Make floating point of MXFP4 and of float8 with scales: --dtype, or bf16."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, from headers alone; write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run stopped (safetensors, msgpack).")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    max_memory: Memory = None,
    json_file: Json = None,
) -> int:
    """Convert a checkpoint to another layout and container, tensor by tensor, without losing a bit.

    Layouts: torch, flax, book, fused-qkv, torch-mha, nnx-mha, linen-mha, hf-gpt2, hf-bert, hf-llama,
    hf-phi3, hf-diffllama, hf-mixtral, hf-gemma, hf-qwen3-moe,
    hf-gpt-oss, hf-olmo, hf-olmo2, hf-deepseek, hf-qwen3-next, hf-bloom, hf-bart, hf-whisper, meta-llama,
    openai-gpt-oss, book-llama3, book-qwen3, book-gemma3, tunix-llama3, tunix-qwen2, tunix-qwen3,
    tunix-gemma3, gemma-linen, maxtext; same leaves it.
    Containers: .safetensors (or a folder of them), .pt .pth .bin, .npz, .msgpack, .orbax, .dcp.

    Example: attn-bridge convert gpt2/ gpt2-flax/ --dry-run

    Exit status: 0 = written, 2 = bad usage or bad input; nothing is left half-written.
    """
    from .. import checkpoints

    check_report(json_file, source, target)
    given = parse_settings(settings or [])
    memory = None if max_memory is None else parse_size(max_memory)
    layouts: dict[str, Any] = {"from_layout": from_layout, "to_layout": to_layout, "format": format, "rules": rules}
    layouts["dequantize"] = dequantize
    planned = checkpoints.plan(source, target, **layouts, dtype=dtype, settings=given)
    console = make_console()
    if json_file != "-":
        for name, reason in planned.dropped.items():
            console.print(f"kept aside: {name}: {reason}", markup=False, soft_wrap=True)
        for note in planned.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
    if dry_run:
        if json_file is not None:
            write_json(_plan_json(planned), json_file)
        if json_file != "-":
            _print_plan(planned, console)
        return 0
    with _bytes_bar() as advance:
        result = checkpoints.convert(
            source,
            target,
            **layouts,
            dtype=dtype,
            settings=given,
            resume=resume,
            overwrite=overwrite,
            max_memory=memory,
            progress=advance,
        )
    if json_file is not None:
        changed = {
            "changed": result.changed,
            "resumed": result.resumed,
            "digests": result.digests,
            "restart_reason": result.restart_reason,
        }
        write_json({**_plan_json(planned), **changed}, json_file)
    if json_file != "-":
        if result.changed:
            total = sum(result.changed.values())
            console.print(f"the cast changed {total} elements of {len(result.changed)} tensors", markup=False)
        if result.resumed:
            console.print(f"{result.resumed} tensors were there from before", markup=False)
        if result.restart_reason:
            console.print(f"restarted: {result.restart_reason}", markup=False, soft_wrap=True)
        console.print(_summary(planned, f"wrote {target}:"), markup=False, soft_wrap=True)
    return 0


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or folder, or its URL.", parser=place)],
    format: Annotated[
        str | None,
        typer.Option(metavar="CONTAINER", help="Container of PATH, where its extension says none, or another."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every tensor, not the first of each kind.")] = False,
    json_file: Json = None,
) -> int:
    """Show what a checkpoint holds, from headers alone: container, layout, names, shapes, dtypes.

    Example: attn-bridge inspect model.safetensors

    Exit status: 0 = it can be read, 2 = it can't.
    """
    from rich.table import Table

    from .. import checkpoints

    check_report(json_file, path)
    found = checkpoints.inspect(path, format=format)
    if json_file is not None:
        tensors = {
            name: {"dtype": info.dtype, "shape": list(info.shape), "file": info.file, "bytes": info.nbytes}
            for name, info in found.tensors.items()
        }
        data = {
            "path": str(path),
            "format": found.format,
            "layout": found.layout,
            "tensors": tensors,
            "bytes": found.nbytes,
            "dtypes": found.dtypes,
            "metadata": found.metadata,
            "manifest": found.has_manifest,
        }
        write_json(data, json_file)
    if json_file == "-":
        return 0
    console = make_console()
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "dtype", "shape", "bytes", "file"):
        table.add_column(title, justify="right" if title == "bytes" else "left", overflow="fold")
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, info in found.tensors.items():
        kind = name if full else re.sub(r"(?<![^.])[0-9]+(?![^.])", "{i}", name)
        shape = " x ".join(map(str, info.shape)) or "scalar"
        kinds.setdefault((kind, info.dtype, shape, _size(info.nbytes)), []).append(name)
    for (kind, *rest), names in kinds.items():
        files = dict.fromkeys(found.tensors[name].file for name in names)
        file = next(iter(files)) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        table.add_row(f"{kind} (x {len(names)})" if len(names) > 1 else names[0], *rest, file)
    console.print(table)
    numbers = ", ".join(f"{count:,} {dtype}" for dtype, count in found.dtypes.items())
    layout = f"layout {found.layout}" if found.layout else f"no known layout ({found.why})"
    digests = "digests beside it" if found.has_manifest else "no digests beside it"
    console.print(
        f"{found.format}, {layout}, {len(found.tensors)} tensors, {numbers}, {_size(found.nbytes)}, {digests}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[SRC] DST",
            help="What DST was made of, or digests of it, and DST; or DST alone, by its digests.",
            parser=place,
        ),
    ],
    from_layout: Annotated[
        str | None, typer.Option("--from", metavar="LAYOUT", help="Layout of SRC; default: as it was converted.")
    ] = None,
    to_layout: Annotated[
        str | None, typer.Option("--to", metavar="LAYOUT", help="Layout of DST; default: as it was converted.")
    ] = None,
    rules: Rules = None,
    settings: Settings = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="SRC was dequantised; default: as the manifest says.")
    ] = False,
    max_memory: Memory = None,
    json_file: Json = None,
) -> int:
    """Check every bit of a checkpoint: by the digests beside it, and by converting SRC again in memory.

    SRC may be a file that digest --json wrote; then DST is a checkpoint, a manifest or another such file.

    Example: attn-bridge verify gpt2/ gpt2-flax/

    Exit status: 0 = every bit is right, 1 = something is wrong, 2 = it can't be read.
    """
    from .. import checkpoints
    from ..checkpoints import live

    if len(paths) > 2:
        raise ValueError(f"verify takes [SRC] DST, got {len(paths)} paths")
    check_report(json_file, *paths)
    memory = None if max_memory is None else parse_size(max_memory)
    source = paths[0] if len(paths) == 2 else None
    taken = None if source is None else live.read(source)
    given = parse_settings(settings or [])
    if taken is not None:
        options = {"--from": from_layout, "--to": to_layout, "--rules": rules, "--dequantize": dequantize or None}
        for option, value in {**options, "--max-memory": memory}.items():
            if value is not None:
                raise ValueError(f"{option} ({value}) says how a source was converted; {source} holds digests")
    with _bytes_bar() as advance:
        found = (
            live.verify(taken, paths[-1], given)
            if taken is not None
            else checkpoints.verify(
                source,
                paths[-1],
                from_layout=from_layout,
                to_layout=to_layout,
                rules=rules,
                settings=given,
                dequantize=dequantize,
                max_memory=memory,
                progress=advance,
            )
        )
    if json_file is not None:
        data = {
            "passed": found.passed,
            "tensors": found.tensors,
            "problems": found.problems,
            "by_digest": found.by_digest,
            "by_source": found.by_source,
        }
        write_json(data, json_file)
    if json_file != "-":
        console = make_console()
        for name, problem in found.problems.items():
            console.print(f"{name} {problem}", markup=False, soft_wrap=True)
        ways = [way for way, used in (("digests", found.by_digest), ("the source", found.by_source)) if used]
        verdict = (
            "every bit is right"
            if found.passed
            else f"{len(found.problems)} tensor{'s are' if len(found.problems) > 1 else ' is'} wrong"
        )
        console.print(f"{paths[-1]}: {verdict} ({found.tensors} tensors, by {' and '.join(ways)})", markup=False)
    return 0 if found.passed else 1


def check_report(json_file: str | None, *paths: Path) -> None:
    """Refuse a report that can't be written, or that would be written over a checkpoint.

    Raises:
        ValueError: it is one of the paths, in one of them, beside one of them, or named as a checkpoint is.
    """
    from ..checkpoints.containers import ENDINGS

    if json_file in (None, "-"):
        return
    assert json_file is not None
    check_writable(json_file)
    report = Path(os.path.realpath(json_file))
    for path in (Path(os.path.realpath(one)) for one in paths if not is_remote(one)):
        if path in (report, *report.parents) or report.name.startswith(f"{path.name}.attn-bridge."):
            raise ValueError(f"--json {json_file} must not be part of {path}")
    if report.suffix in ENDINGS:
        raise ValueError(f"--json {json_file} is named as a checkpoint is; choose another name")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Return settings by name; whole numbers as such."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes KEY=VALUE, got {setting}")
        found[key] = int(value) if value.isdecimal() else value
    return found


def parse_size(text: str) -> int:
    """Return a number of bytes: ``1000000``, ``512MiB``, ``2GB``."""
    hit = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if hit is None:
        raise ValueError(f"--max-memory ({text}) must be a size such as 512MiB or 2GB")
    return int(Decimal(hit.group(1)) * _UNITS[(hit.group(2) or "").lower()])


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def make_console() -> Console:
    """Return the console that a table goes to: as wide as a terminal, else wide enough."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 140)


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "source": {"path": str(plan.source), "format": plan.source_format, "layout": plan.source_layout},
        "layout": plan.target_layout,
        "tensors": [
            {
                "name": one.info.name,
                "dtype": one.info.dtype,
                "shape": list(one.info.shape),
                "file": one.info.file,
                "operation": one.operation,
                "sources": _sources(plan, one),
                "bytes": one.info.nbytes,
            }
            for one in plan.targets
        ],
        "kept_aside": plan.dropped,
        "notes": list(plan.notes),
        "bytes": plan.nbytes,
        "peak_memory": plan.peak,
    }


def _sources(plan: Plan, target: Target) -> list[str]:
    """Return what a target is made of, scales of quantised numbers among it."""
    return [one for name in target.sources for one in (name, plan.scales.get(name, "")) if one]


def _print_plan(plan: Plan, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "dtype", "shape", "bytes", "operation", "from", "file"):
        table.add_column(title, justify="right" if title == "bytes" else "left", overflow="fold")
    for one in plan.targets:
        shape = " x ".join(map(str, one.info.shape)) or "scalar"
        sources = ", ".join(_sources(plan, one))
        table.add_row(
            one.info.name, one.info.dtype, shape, _size(one.info.nbytes), one.operation, sources, one.info.file
        )
    console.print(table)
    console.print(_summary(plan, "would write"), markup=False, soft_wrap=True)


def _summary(plan: Plan, begin: str) -> str:
    layouts = f"{plan.source_layout} to {plan.target_layout}" if plan.source_layout else "same layout"
    kept = f", {len(plan.dropped)} kept aside" if plan.dropped else ""
    memory = f", peak memory about {_size(plan.peak)}" if begin.startswith("would") else ""
    return f"{begin} {len(plan.targets)} tensors, {_size(plan.nbytes)}, {layouts}{kept}{memory}"


@contextlib.contextmanager
def _bytes_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """Show bytes, rate and time left on stderr while the terminal is one; nothing otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as stream,
        Progress(*columns, TimeRemainingColumn(), console=Console(file=stream), transient=True) as bar,
    ):
        task = bar.add_task("reading headers")

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, description=name[:40], completed=done, total=total)

        yield advance
