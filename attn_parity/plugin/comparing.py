"""The object that the fixture `parity` hands to a test: it compares with the settings of that test."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .availability import skip_if_absent
from .settings import PASSED_ON, SETTINGS, WHOLE, Device, read_markers

if TYPE_CHECKING:
    from ..results.report import Report

FOUND = pytest.StashKey[list[dict[str, object]]]()
"""Results of a test's comparisons, from `summarised`, until its report takes them over."""

Allowed = tuple[str, str, bool, bool]
"""Path and reason of an allowance, whether it covers a difference, and whether anything has that name."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """One combination that a test runs in; None for an unspecified axis."""

    variant: str | None = None
    dtype: str | None = None
    device: Device | None = None
    mode: str | None = None

    def __str__(self) -> str:
        parts = (part for part in dataclasses.astuple(self) if part is not None)
        return "-".join(part if isinstance(part, str) else ",".join(part) for part in parts)


def hide_own_frames(error: BaseException | None) -> None:
    """Have pytest leave the judge's modules out of the traceback of an exception and of its causes."""
    while error is not None:
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
                at.tb_frame.f_globals["__tracebackhide__"] = True
            at = at.tb_next
        error = error.__cause__ or error.__context__


class Parity:
    """Compares any two sides: ``parity(first, second, inputs)``.

    Attributes:
        variant: name of the variant that the test runs in; like all of these, None if unspecified.
        dtype: the precision.
        device: the kind of device; a pair for one of torch and one of Flax.
        mode: ``eager`` or ``jit``.
        seeds: number of draws.
        first_seed: the first seed.
    """

    def __init__(self, node: pytest.Item, cell: Combination):
        settings = node.config.stash[SETTINGS]
        given_settings = {**settings.values, **read_markers(node)}
        self.variant, self.dtype, self.device, self.mode = cell.variant, cell.dtype, cell.device, cell.mode
        self.seeds: int | None = given_settings.get("seeds")
        self.first_seed: int | None = given_settings.get("first_seed")
        self._node, self._settings, self._calls = node, settings, 0
        self._options = {name: given_settings[name] for name in (*WHOLE, *PASSED_ON) if name in given_settings}
        self._options |= {} if cell.dtype is None else {"dtypes": (cell.dtype,)}
        self._options |= {} if cell.device is None else {"device": cell.device}
        self._options |= {} if cell.mode is None else {"modes": (cell.mode,)}
        file = Path(os.path.relpath(node.path, node.config.invocation_params.dir)).as_posix()
        _, mark, name = node.nodeid.partition("::")
        self._options["command"] = shlex.join(["pytest", f"{file}{mark}{name}", *settings.arguments])

    def __call__(self, first: object, second: object, inputs: object, **options: object) -> Report:
        """Return the report of `attn_bridge.parity.compare`, which takes the same arguments.

        Raises:
            ParityError: (an AssertionError) the verdict is not ``equal``; the message names the difference and its
                location.
        """
        __tracebackhide__ = True
        from .. import compare

        chosen = self._options | options
        skip_if_absent(chosen.get("device"))
        try:
            report: Report = compare(first, second, inputs, **chosen)
        except Exception as error:
            hide_own_frames(error)
            raise
        self._calls += 1
        self._record(report)
        return report.raise_for_mismatch()

    def _changes(self, report: Report) -> list[str]:
        """Return the changes since the report of the same comparison in an earlier run, if one exists."""
        folder = self._settings.baseline
        path = folder and folder / f"{file_name(self._node.nodeid, self._calls)}.json"
        if path is None:
            return []
        return report.changes_since(path).lines() if path.exists() else ["since the baseline: it was equal, or not run"]

    def _record(self, report: Report) -> None:
        """Record the result: for the summary, for JUnit and, on a mismatch, as a section of the test's report."""
        node = self._node
        allowed = [(one.path, one.reason, bool(one.covers), one.known) for one in report.allowed]
        node.stash.setdefault(FOUND, []).append(summarised(report.verdict, allowed, report.notes))
        node.user_properties.append(("parity_verdict", report.verdict))
        for allowance in report.allowed:
            if allowance.covers:
                node.user_properties.append(("parity_allowed", f"{allowance.path}: {allowance.reason}"))
        if report.first_divergence is not None:
            node.user_properties.append(("parity_first_divergence", str(report.first_divergence)))
        if report.passed:
            return
        lines = [f"note: {note}" for note in report.notes] + self._changes(report)
        for kind, folder, write in (
            ("html", self._settings.html, report.to_html),
            ("json", self._settings.json, report.to_json),
        ):
            if folder is not None:
                path = folder / f"{file_name(node.nodeid, self._calls)}.{kind}"
                folder.mkdir(parents=True, exist_ok=True)
                write(path)
                lines.append(f"{kind}: {shown(path, node.config.invocation_params.dir)}")
        if report.environment:
            lines.append(", ".join(f"{name} {value}" for name, value in report.environment.items()))
        if lines:
            node.add_report_section("call", "parity", "\n".join(lines))


def summarised(verdict: str, allowed: Sequence[Allowed], notes: Iterable[str]) -> dict[str, object]:
    """Return the summary of a comparison: plain data, which a worker of xdist can send."""
    paths = [re.escape(path) for path, _, covers, _ in allowed if covers]
    named = re.compile(rf"(?<![\w.])(?:{'|'.join(paths)})(?![\w])")
    return {"verdict": verdict, "allowed": allowed, "notes": [note for note in notes if paths and named.search(note)]}


def file_name(nodeid: str, call: int) -> str:
    """Return a name that any file system accepts; the digest distinguishes names that would read the same."""
    readable = re.sub("[^A-Za-z0-9._]+", "-", nodeid)[-100:].strip("-.")
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:8]
    return f"{readable}-{digest}" if call == 1 else f"{readable}-{digest}-{call}"


def shown(path: Path, base: Path) -> str:
    """Return a path as its reader would write it: relative to `base` if it is below it."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
