"""The summary after the tests: a line on all comparisons, allowed differences, annotations for GitHub."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .comparing import FOUND, shown

if TYPE_CHECKING:
    from ..results.report import ParityError

WORST_FIRST = ("different", "precision", "inconclusive", "equal")

REPORT_ATTRIBUTE = "attn_bridge_parity"
"""Where a test's report carries verdicts and the annotation, also from an xdist worker to the process that prints."""


def hand_over(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Move the results of a test's comparisons to its report."""
    if FOUND not in item.stash:
        return
    findings = item.stash[FOUND]
    handed: dict[str, object] = {"found": list(findings)}
    findings.clear()
    error = _mismatch(call)
    if error is not None and call.excinfo is not None:
        own = Path(__file__).parents[1]
        visible = [entry for entry in call.excinfo.traceback if not Path(entry.path).is_relative_to(own)]
        base = Path(os.environ.get("GITHUB_WORKSPACE") or item.config.rootpath)
        if visible:
            handed["file"], handed["line"] = shown(Path(visible[-1].path), base), visible[-1].lineno + 1
        handed["title"] = f"parity: {error.report.verdict} in {item.name}"
        handed["message"] = str(error)
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:  # pytest's own line begins with the path of the exception's class
            crash.message = _headline(error)
    setattr(report, REPORT_ATTRIBUTE, handed)


def _headline(error: ParityError) -> str:
    """Return the line of a failed test in the summary: the difference and its location."""
    from ..rendering.text import headline
    from ..results.report import Report

    return headline(error.report) if isinstance(error.report, Report) else str(error).partition("\n")[0]


def _mismatch(call: pytest.CallInfo[None]) -> ParityError | None:
    from .. import ParityError

    error = None if call.excinfo is None else call.excinfo.value
    return error if isinstance(error, ParityError) else None


class Summary:
    """Collects the results from the reports of all tests and prints them at the end."""

    def __init__(self, config: pytest.Config):
        self.verdicts: Counter[str] = Counter()
        self.allowing = 0
        self.allowances: dict[tuple[str, str], _Allowed] = {}
        self.annotations: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over the results of a report; in an xdist run, it comes from a worker."""
        handed = getattr(report, REPORT_ATTRIBUTE, None)
        if handed is None:
            return
        for finding in handed["found"]:
            self.verdicts[finding["verdict"]] += 1
            self.allowing += finding["verdict"] == "equal" and any(covers for _, _, covers, _ in finding["allowed"])
            for path, reason, covers, is_known in finding["allowed"]:
                self.allowances.setdefault((path, reason), _Allowed()).add(
                    report.nodeid, covers, is_known, finding["notes"]
                )
        if report.failed and "message" in handed:
            self.annotations.append(_annotation(handed))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what all comparisons found and, on GitHub, an annotation per failed test."""
        if self.verdicts:
            total = self.verdicts.total()
            counts = [f"{self.verdicts[verdict]} {verdict}" for verdict in WORST_FIRST if self.verdicts[verdict]]
            if self.allowing:  # "equal" is the last one
                counts[-1] += f" ({self.allowing} with differences that are allowed)"
            terminalreporter.write_line(", ".join([f"parity: {total} comparison{'s' if total > 1 else ''}", *counts]))
        for (path, reason), allowed in self.allowances.items():
            terminalreporter.write_line(f"  allowed: {path}: {reason} ({allowed.where})")
        for note in dict.fromkeys(note for one in self.allowances.values() for note in one.notes):
            terminalreporter.write_line(f"  note: {note}")
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for annotation in self.annotations:
                terminalreporter.write_line(annotation)


@dataclasses.dataclass
class _Allowed:
    """The effect of one allowance in all comparisons that had it.

    Attributes:
        tests: the tests in which something that it covers differs.
        is_named: whether any comparison has a tensor or submodule of its name.
        notes: notes of the reports on it.
    """

    tests: dict[str, None] = dataclasses.field(default_factory=dict)
    is_named: bool = False
    notes: dict[str, None] = dataclasses.field(default_factory=dict)

    def add(self, test: str, covers: bool, is_known: bool, notes: Iterable[str]) -> None:
        """Add the result of one comparison."""
        self.is_named |= is_known
        if covers:
            self.tests[test] = None
            self.notes |= dict.fromkeys(notes)

    @property
    def where(self) -> str:
        """The test that needs it, or how many; why it allows nothing."""
        if self.tests:
            return next(iter(self.tests)) if len(self.tests) == 1 else f"{len(self.tests)} tests"
        return "nothing there differs" if self.is_named else "nothing has that name"


def _annotation(handed: Mapping[str, Any]) -> str:
    """Return GitHub's workflow command that shows an error next to the line of the comparison."""
    places = {name: str(handed[name]) for name in ("file", "line", "title") if name in handed}
    escapes = {":": "%3A", ",": "%2C"}
    properties = ",".join(f"{name}={_escape(value, escapes)}" for name, value in places.items())
    return f"::error {properties}::{_escape(handed['message'], {})}"


def _escape(text: str, more: Mapping[str, str]) -> str:
    escapes = {"%": "%25", "\r": "%0D", "\n": "%0A", **more}
    return "".join(escapes.get(character, character) for character in text)
