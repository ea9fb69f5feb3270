"""Judge an entry of the gallery: what ``compare`` says of a pair, right or with a fault, and whether rightly."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from attn_bridge import parity

from .gallery import Entry, Fault


@dataclasses.dataclass(frozen=True)
class Finding:
    """A row of the table: what was said, where, in how many seconds; `right` if both are as they should be."""

    entry: str
    fault: str
    verdict: str
    place: str
    seconds: float
    seen: bool
    placed: bool

    @property
    def right(self) -> bool:
        """Whether verdict and place are right."""
        return self.seen and self.placed


def judge(entry: Entry, name: str | None) -> tuple[Any, Fault | None]:
    """Return the report on an entry, with a fault by name, and the fault."""
    case = entry.build(name)
    report = parity.compare(case.first, case.second, case.inputs, **case.options)
    return report, entry.faults[name] if name else None


def finding(entry: Entry, name: str | None) -> Finding:
    """Judge and say whether verdict and place are right; what is raised becomes the verdict."""
    started = time.perf_counter()
    try:
        report, fault = judge(entry, name)
    except Exception as error:  # a table with every row
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(entry.name, name or "", said, "", time.perf_counter() - started, False, False)
    seen = report.verdict in fault.verdicts if fault else report.verdict == "equal"
    placed = fault.is_placed_by(report.first_divergence) if fault else True
    seconds = time.perf_counter() - started
    return Finding(entry.name, name or "", report.verdict, place(report.first_divergence), seconds, seen, placed)


def place(divergence: Any) -> str:
    """Name a divergence in one line."""
    if divergence is None:
        return ""
    between = getattr(divergence, "between", None)
    where = f"between {between[0]} and {between[1]}" if between else divergence.path or "(whole)"
    return f"{where}, {divergence.direction}"
