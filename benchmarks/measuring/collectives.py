"""The communication of a compiled JAX program: number of collectives, and bytes received per device."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"\b[a-z]+(\d*)(?:e\d\w*)?\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|calls|to_apply)=%?([\w.-]+)|\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')


@dataclasses.dataclass
class Traffic:
    """Collective operations of a program.

    Attributes:
        counts: kind -> number of executions.
        bytes: total bytes that they give one device.
    """

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bytes: int = 0

    @property
    def words(self) -> str:
        """The counts in words."""
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS if self.counts[kind]) or "none"

    def add(self, other: Traffic, times: int) -> None:
        """Add operations that run a number of times more."""
        for kind, count in other.counts.items():
            self.counts[kind] += times * count
        self.bytes += times * other.bytes


def traffic(program: str) -> Traffic:
    """Return the collective operations of a program; those in loops count once per iteration.

    Args:
        program: HLO as text, of one device.

    Raises:
        ValueError: a loop with collectives has an unknown number of iterations.
    """
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in program.splitlines():
        if hit := _COMPUTATION.match(line):
            lines = bodies.setdefault(hit[1], [])
            entry = hit[1] if line.startswith("ENTRY ") else entry
        else:
            lines.append(line)
    totals: dict[str, Traffic] = {}

    def of(name: str) -> Traffic:
        if name not in totals:
            totals[name] = total = Traffic()
            for line in bodies.get(name, ()):
                if hit := _COLLECTIVE.search(line):
                    total.add(Traffic(collections.Counter([hit[2]]), _size(hit[1])), 1)
                for callee, several in _CALLED.findall(line):
                    for called in [callee] if callee else re.findall(r"[\w.-]+", several):
                        inside = of(called)
                        total.add(inside, _turns(line) if inside.counts else 1)
        return totals[name]

    return of(entry)


def _turns(line: str) -> int:
    if " while(" not in line:
        return 1
    hit = _TRIPS.search(line)
    if hit is None:
        raise ValueError(f"a loop with collectives must say how often it turns: {line.strip()[:120]}")
    return int(hit[1])


def _size(shapes: str) -> int:
    """Return the bytes of a shape, or of a tuple of them."""
    return sum(
        math.prod(map(int, filter(None, sizes.split(",")))) * max(int(bits or 8) // 8, 1)
        for bits, sizes in _SHAPE.findall(shapes)
    )
