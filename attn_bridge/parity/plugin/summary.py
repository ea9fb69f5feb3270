"""What is printed after the tests: a line on all comparisons and, on GitHub, an annotation per failed one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .comparing import VERDICTS, shown

if TYPE_CHECKING:
    from ..compare.results.report import ParityError

WORST_FIRST = ("different", "precision", "inconclusive", "equal")

REPORT_ATTRIBUTE = "attn_bridge_parity"
"""Where a test's report carries verdicts and the annotation, also from an xdist worker to the process that prints."""


def hand_over(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Hand the verdicts of a test over to its report."""
    if VERDICTS not in item.stash:
        return
    verdicts = item.stash[VERDICTS]
    handed: dict[str, Any] = {"verdicts": list(verdicts)}
    verdicts.clear()
    error = _mismatch(call)
    if error is not None and call.excinfo is not None:
        own = Path(__file__).parents[1]
        visible = [entry for entry in call.excinfo.traceback if not Path(entry.path).is_relative_to(own)]
        base = Path(os.environ.get("GITHUB_WORKSPACE") or item.config.rootpath)
        if visible:
            handed["file"], handed["line"] = shown(Path(visible[-1].path), base), visible[-1].lineno + 1
        handed["title"] = f"parity: {error.report.verdict} in {item.name}"
        handed["message"] = str(error)
    setattr(report, REPORT_ATTRIBUTE, handed)


def _mismatch(call: pytest.CallInfo[None]) -> ParityError | None:
    from .. import ParityError

    error = None if call.excinfo is None else call.excinfo.value
    return error if isinstance(error, ParityError) else None


class Summary:
    """Collects what the reports of all tests carry and prints it at the end."""

    def __init__(self, config: pytest.Config):
        self.verdicts: Counter[str] = Counter()
        self.annotations: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over what a report carries; in an xdist run, it comes from a worker."""
        handed = getattr(report, REPORT_ATTRIBUTE, None)
        if handed is None:
            return
        self.verdicts.update(handed["verdicts"])
        if report.failed and "message" in handed:
            self.annotations.append(_annotation(handed))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print one line on all comparisons and, on GitHub, an annotation per failed test."""
        if self.verdicts:
            total = self.verdicts.total()
            counts = [f"{self.verdicts[verdict]} {verdict}" for verdict in WORST_FIRST if self.verdicts[verdict]]
            terminalreporter.write_line(", ".join([f"parity: {total} comparison{'s' if total > 1 else ''}", *counts]))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for annotation in self.annotations:
                terminalreporter.write_line(annotation)


def _annotation(handed: Mapping[str, Any]) -> str:
    """Return GitHub's workflow command that shows an error beside the line of the comparison."""
    places = {name: str(handed[name]) for name in ("file", "line", "title") if name in handed}
    escapes = {":": "%3A", ",": "%2C"}
    properties = ",".join(f"{name}={_escape(value, escapes)}" for name, value in places.items())
    return f"::error {properties}::{_escape(handed['message'], {})}"


def _escape(text: str, more: Mapping[str, str]) -> str:
    escapes = {"%": "%25", "\r": "%0D", "\n": "%0A", **more}
    return "".join(escapes.get(character, character) for character in text)
