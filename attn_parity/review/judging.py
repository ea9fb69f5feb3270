"""Judge one pair of a manifest in a folder: run `compare` confined, and read its report."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attn_bridge.printable import printable

from ..attestation.subjects import SIDES
from ..confinement import process
from ..results import changes
from ..results.changes import Data
from .manifest import ManifestPair, file_of

Verdict = Literal["equal", "precision", "different", "inconclusive"]

REPORT, PAGE = "report.json", "report.html"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The result of one pair.

    Attributes:
        pair: the pair.
        verdict: of its comparison; ``inconclusive`` where it could not be judged.
        message: one line: the summary, or why it could not be judged.
        report: the data of the comparison's report; None where it could not be judged.
        page: the report as HTML, "" for none.
    """

    pair: ManifestPair
    verdict: Verdict
    message: str
    report: Data | None = None
    page: str = ""

    def refused(self, reason: str) -> Judgement:
        """Return it as not judged."""
        return Judgement(self.pair, "inconclusive", reason)

    @property
    def allowed(self) -> list[str]:
        """A line on each allowance that covers a difference."""
        covering = [entry["path"] for entry in self._allowances if entry.get("covers")]
        return [printable(f"{path}: {self.pair.allow[path]}", 400) for path in covering]

    @property
    def unneeded(self) -> list[str]:
        """A line on each allowance that covers nothing."""
        why = {True: "nothing there differs", False: "nothing has that name"}
        return [
            printable(f"{entry['path']}: {why[bool(entry.get('known'))]}", 400)
            for entry in self._allowances
            if not entry.get("covers")
        ]

    @property
    def _allowances(self) -> list[Data]:
        entries = [] if self.report is None else self.report.get("allowed", [])
        is_list = isinstance(entries, list)
        entries = [entry for entry in entries if isinstance(entry, Mapping)] if is_list else []
        paths = set(self.pair.allow)
        return [entry for entry in entries if isinstance(entry.get("path"), str) and entry["path"] in paths]


def judge(
    pair: ManifestPair,
    folder: Path,
    scratch: Path,
    *,
    seconds: float,
    memory: int | None = None,
    avoid: Path | None = None,
    is_open: bool = False,
) -> Judgement:
    """Judge a pair in a separate, confined process.

    Args:
        pair: the pair.
        folder: the folder of the manifest.
        scratch: an existing, empty folder outside of it; the pair writes there.
        seconds: limit of time.
        memory: limit of resident memory, in bytes; None for none.
        avoid: a folder whose code must not be imported; None for none.
        is_open: whether the pair may write to `folder`.
    """
    if avoid is not None and (module := _from(pair, folder, avoid)):
        reason = f"{module} is imported from the working tree, not from the commit: name its file, src/file.py:factory"
        return Judgement(pair, "inconclusive", reason)
    out = scratch / "out"
    out.mkdir()
    words = [*pair.words, f"--json={out / REPORT}", f"--html={out / PAGE}"]
    writable = (folder,) if is_open else ()
    ending = process.run(words, folder, scratch, writable=writable, avoid=avoid, seconds=seconds, memory=memory)
    text = process.content(out / REPORT) if ending.end == "exit" and ending.status in (0, 1, 2) else ""
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        data = None
    if not changes.is_report(data) or not _is_whole(data):
        return Judgement(pair, "inconclusive", process.error_line(ending, seconds, memory))
    expected = {"equal": 0, "inconclusive": 2}.get(data["verdict"], 1)
    if ending.status != expected:
        reason = f"its report is {data['verdict']}, and its process ended with status {ending.status}"
        return Judgement(pair, "inconclusive", reason)
    message = printable(data.get("summary") or data["verdict"], process.MAX_LINE)
    return Judgement(pair, data["verdict"], message, data, process.content(out / PAGE))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _is_whole(data: Data) -> bool:
    """Return whether a report has all that a review reads of it: code that is judged may have written it."""
    subjects = data.get("subjects")
    sides = [subjects.get(side) for side in SIDES] if isinstance(subjects, Mapping) else [None]
    files = [side.get("files") if isinstance(side, Mapping) else None for side in sides]
    has_files = all(isinstance(each, Mapping) and all(isinstance(one, str) for one in each.values()) for each in files)
    return has_files and isinstance(data.get("environment"), Mapping) and isinstance(data.get("summary"), str)


def _from(pair: ManifestPair, folder: Path, avoid: Path) -> str:
    """Return the module of a side that would be imported from a folder, "" for none."""
    for side in (pair.first, pair.second):
        top = side.partition(":")[0].partition(".")[0]
        if file_of(side) is not None or importlib.machinery.PathFinder.find_spec(top, [str(folder)]) is not None:
            continue
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            continue
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        # The origin of a module of the standard library may be a word: "frozen", "built-in".
        if any(Path(place).is_absolute() and Path(place).resolve().is_relative_to(avoid) for place in places):
            return top
    return ""
