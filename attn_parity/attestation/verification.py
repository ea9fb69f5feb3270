"""Check a statement against a folder: the files of both sides at once, and the numbers by one sample.

In: the comparisons of a statement whose signature is right, and the folder with the code. Out: problems, one line each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attn_bridge.printable import printable

from ..confinement import process
from ..results import changes
from ..results.changes import Data
from . import subjects
from .statement import AttestationError, AttestedComparison

LEFT_OUT = ("--baseline", "--timeout")
"""Options of the attested command that a sample does without; each has a value."""


def check_files(comparison: AttestedComparison, folder: Path) -> Iterator[str]:
    """Yield a line on each file of a side that is missing or has other bytes than the attested ones."""
    for side in subjects.SIDES:
        for name, digest in comparison.subjects[side]["files"].items():
            try:
                is_same = subjects.of_file(folder / name) == digest
            except OSError:
                yield f"code of the {side} side: {printable(name)} is missing"
            else:
                if not is_same:
                    yield f"code of the {side} side: {printable(name)} is not the attested file"


def check_sample(comparison: AttestedComparison, folder: Path, seconds: float) -> Iterator[str]:
    """Run a comparison with one draw in a confined process, and yield a line on each digest or verdict that differs.

    Raises:
        AttestationError: it could not be judged, or a difference is not visible in one draw.
    """
    report = _sample(comparison, folder, seconds)
    attested, now = comparison.subjects, report["subjects"]
    for side in subjects.SIDES:
        files = {**attested[side]["files"], **attested[side]["modules"]}
        others = [
            name
            for name, digest in {**now[side]["files"], **now[side]["modules"]}.items()
            if files.get(name, "") != digest
        ]
        yield from (f"code of the {side} side: {printable(name)} is not the attested file" for name in others)
        if now[side]["weights"] != attested[side]["weights"]:
            yield f"weights of the {side} side: they are not the attested ones"
    for name in ("inputs", "rules"):
        if now[name] != attested[name]:
            yield f"{name}: they are not the attested ones"
    verdict = report["verdict"]
    if (comparison.verdict == "equal") != (verdict == "equal"):
        line = f"numbers: attested {comparison.verdict}, one sample is {verdict}"
        if verdict == "equal":
            raise AttestationError(
                f"{line}; a difference may need more draws: run attn-bridge {' '.join(comparison.words)}"
            )
        yield line


def _sample(comparison: AttestedComparison, folder: Path, seconds: float) -> Data:
    with tempfile.TemporaryDirectory(prefix="attn-bridge-") as name:
        scratch = Path(name).resolve()
        file = scratch / "report.json"
        words = [*_without_left_out(list(comparison.words)), "--seeds=1", f"--json={file}"]
        ending = process.run(words, folder, scratch, seconds=seconds)
        try:
            report = json.loads(process.content(file)) if ending.end == "exit" else None
        except (ValueError, RecursionError):
            report = None
    if not isinstance(report, dict) or not changes.is_report(report) or report["verdict"] == "inconclusive":
        line = process.error_line(ending, seconds)
        raise AttestationError(
            f"the sample{f' of {comparison.name}' if comparison.name else ''} was not judged: {line}"
        )
    return report


def _without_left_out(words: list[str]) -> list[str]:
    """Return the words of a command without the options in `LEFT_OUT` and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word not in LEFT_OUT:
            kept.append(word)
        skip = word in LEFT_OUT and not skip
    return kept
