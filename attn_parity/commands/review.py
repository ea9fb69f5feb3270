"""``attn-bridge review``: the pairs of a repository's manifest, judged at a commit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_bridge.cli.output import progress

from .compare import check_timeout

if TYPE_CHECKING:
    from ..review.judging import Judgement
    from ..review.report import Review

OUT = Path("attn-bridge-review")

SHOWN = 3
"""Most uncommitted paths that are named."""


def review(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="Commit, branch or tag to review; default: HEAD.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the report: new, or that of an earlier review.")
    ] = OUT,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Compare verdicts with this earlier review; default: the one in --out."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest that a pair may take.")] = 600.0,
    memory: Annotated[float, typer.Option(metavar="GIB", min=0.1, help="Memory that a pair may take.")] = 16.0,
) -> int:
    """Judge the pairs of parity.toml at a commit, and write a report folder.

    Each pair runs in a separate process on the files of the commit, not on those of the working tree, with an empty
    home and temporary folder. A pair that can't be judged, or that changes other files, is one line. The folder has
    report.json, report.html, environment.json, and the reports of each pair. Another run compares its verdicts.

    Example: attn-bridge review main --out review

    Exit status: 0 = all pairs are equal, 1 = one differs, or is less precise, 2 = bad usage, or one can't be judged.
    """
    from ..review import report
    from ..review.driver import review as run

    check_timeout(timeout)
    earlier = report.check_target(out)
    if against is not None:
        earlier = report.read(against)
    own = [path.resolve() for path in (out, Path(OUT), against) if path is not None]
    with progress() as advance:
        result = run(Path.cwd(), ref, seconds=timeout, memory=int(memory * (1 << 30)), progress=advance, own=own)
    lines = [] if earlier is None else report.comparison(earlier, result.to_json())
    report.write(result, out, lines)
    _show(result, lines, out)
    return result.status


def _show(review: Review, lines: list[str], out: Path) -> None:
    """Print a line per pair, allowances, and the lines on an earlier review; warnings go to stderr."""
    width = max(len(result.pair.name) for result in review.results)
    for result in review.results:
        typer.echo(f"{result.pair.name:<{width}}  {_short(result)}")
        for line in result.allowed:
            typer.echo(f"{'':<{width}}  allowed: {line}")
        for line in result.unneeded:
            print(f"warning: {result.pair.name}: an allowance is not needed: {line}", file=sys.stderr)
    typer.echo(review.summary())
    for line in [*lines, *review.notes]:
        typer.echo(line)
    if review.unreviewed:
        paths = ", ".join(map(_line, review.unreviewed[:SHOWN])) + ", ..." * (len(review.unreviewed) > SHOWN)
        print(f"warning: uncommitted changes are not judged: {paths}", file=sys.stderr)
    typer.echo(f"wrote {out}")


def _short(result: Judgement) -> str:
    """Return the result of a pair in one line, which begins with its verdict."""
    return result.message if result.report is not None else f"{result.verdict}: {result.message}"


def _line(text: str) -> str:
    from attn_bridge.printable import printable

    return printable(text)
