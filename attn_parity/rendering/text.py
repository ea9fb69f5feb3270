"""Format names, numbers and their meanings, the same in every rendering."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attn_bridge.printable import visible

from ..results.findings import SEVERITY, TensorVerdict, between_words, itself, shown

if TYPE_CHECKING:
    from ..results.report import Report

NONE = "-"


def one_line(text: object) -> str:
    """Return a text without line breaks and repeated spaces."""
    return " ".join(visible(text).split())


def folded(names: Iterable[str]) -> list[str]:
    """Return the names with those that differ by a number alone as one: ``h.{i}.bias (12)``."""
    names = list(names)
    counts = Counter(_numberless(name) for name in names)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_numberless(name), name)
    return [first[key] if count == 1 else f"{key} ({count})" for key, count in counts.items()]


def _numberless(name: str) -> str:
    return re.sub(r"(?<![^.\[])\d+(?![^.\]])", "{i}", name)


def relative(value: float | None) -> str:
    """Write a relative difference: ``1.2e-15``."""
    if value is None:
        return NONE
    return f"{value:.1e}" if value and math.isfinite(value) else f"{value:g}"


def share(value: float | None) -> str:
    """Write a share of an allowance: ``35%``, or ``120x`` from ten times the allowance on."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return f"{value:g}"
    if 0 < value < 0.01:
        return "<1%"
    return f"{value:.0%}" if value < 10 else f"{value:.3g}x"


def times(value: float | None) -> str:
    """Format a share of the allowance in words: ``35% of the allowed error``."""
    if value is None:
        return NONE
    if value < 1 or not math.isfinite(value):
        return f"{share(value)} of the allowed error"
    return f"{value:.2g} x the allowed error" if value < 100 else f"{value:.3g} x the allowed error"


def shortened(value: str, room: int) -> str:
    """Return a name in at most `room` characters, the middle of a longer one left out."""
    if len(value) <= room:
        return value
    head = max(room - 1, 1) // 3
    return f"{value[:head]}…{value[len(value) - max(room - 1 - head, 0) :]}"[: max(room, 1)]


def ulps(value: float | None) -> str:
    """Write an error in units of the last place: ``0.31``, ``5210``."""
    if value is None:
        return NONE
    return f"{value:.2g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def growth(value: float | None) -> str:
    """Write how much larger a difference became: ``x1.3``."""
    return NONE if value is None else f"x{value:.2g}" if value < 100 else f"x{value:.0e}"


def number(value: float | None, digits: int = 9) -> str:
    """Write a value, by default with all digits that float32 has."""
    return NONE if value is None else f"{value:.{digits}g}"


def index(value: tuple[int, ...]) -> str:
    """Write the index of an element: ``(0, 3, 12)``."""
    return str(tuple(int(one) for one in value))


def shape(value: tuple[int, ...]) -> str:
    """Write a shape: ``2 x 14 x 48``."""
    return " x ".join(str(int(one)) for one in value) or "scalar"


def count(number_of: int, what: str) -> str:
    """Write how many there are of something: ``1 seed``, ``1,200 tensors``."""
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"


def memory(size: int) -> str:
    """Write a number of bytes: ``1.3 GB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def cut(value: str, room: int) -> str:
    """Return a text in at most `room` characters: of a longer one its first words, and an ellipsis."""
    if len(value) <= room:
        return value
    at = value.rfind(" ", room // 2, room - 1)
    return f"{value[: at if at >= 0 else max(room - 2, 0)].rstrip(' ,;:(')} …"


LEGEND = "largest errors, in % of what is allowed (100 % fails)"
"""Legend of the share that every rendering gives of a tensor, `TensorVerdict.used`."""

_NOT_GIVEN = re.compile(r"(?P<side>the .+'s) `(?P<name>.+)` \(you gave none\)")

MAX_TEXT = 150
"""Most characters of a message that replaces a number."""


def measured(tensor: TensorVerdict, report: Report) -> str:
    """Return the one number of a tensor, with its unit."""
    clause = one_line(tensor.message).partition(";")[0]
    if tensor.verdict == "precision" and tensor.side is not None:
        label = report.first_label if _is_first(tensor, report) else report.second_label
        return f"{shown(label)}: {times(used(tensor, report))}"
    if tensor.verdict == "different" and tensor.relative and math.isfinite(tensor.relative):
        return f"{relative(tensor.relative)} of the largest value"
    if tensor.verdict in ("different", "inconclusive", "precision") and clause:
        return cut(clause, MAX_TEXT)
    return times(used(tensor, report))


def used(tensor: TensorVerdict, report: Report) -> float | None:
    """Return the share of the allowance that a tensor's line shows; for precision, that of the losing side."""
    if tensor.verdict == "precision" and tensor.side is not None:
        return tensor.first_used if _is_first(tensor, report) else tensor.second_used
    return tensor.used


def _is_first(tensor: TensorVerdict, report: Report) -> bool:
    return tensor.side in ("first", report.first_label)


def where(tensor: TensorVerdict, report: Report) -> str:
    """Return the element that is furthest off, both values, and the sample; "" where nothing is known."""
    worst = tensor.worst
    if worst is None:
        return f"on {tensor.on}" if tensor.sample else ""
    values = f"{shown(report.first_label)} {number(worst.first)}, {shown(report.second_label)} {number(worst.second)}"
    shards = f", {tensor.shards}" if tensor.shards else ""
    return f"at {index(worst.index)}: {values}, on {tensor.on}{shards}"


def worst_first(tensors: Iterable[TensorVerdict]) -> list[TensorVerdict]:
    """Return tensors by verdict, then by the number that is shown of them, the worst first (no number: all of it)."""

    def rank(tensor: TensorVerdict) -> tuple[int, float]:
        size = tensor.relative if tensor.verdict == "different" else tensor.used
        return -SEVERITY.index(tensor.verdict), -(math.inf if not size or math.isnan(size) else size)

    return sorted(tensors, key=rank)


def headline(report: Report) -> str:
    """Return the difference and its place in the length that a line of a test summary has."""
    names = [one.name for one in worst_first(report.failures)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = f"{names[0]}{more}" if names else report.message or report.sides
    first = report.first_divergence
    if first is None:
        where = ""
    elif first.between is not None:
        where = f", first {between_words(first.path, first.between)}"
    else:
        where = f", first in {first.path or itself(first.first_name)}"
    return one_line(f"{report.verdict}: {what}{where}")


def not_given(lines: Iterable[str], most: int | None = None) -> list[str]:
    """Return the uncovered parts, with the missing arguments of a side in one line.

    Args:
        lines: as in `Report.unreached`.
        most: most arguments to name; None for all.
    """
    texts: dict[str, list[str]] = {}
    for line in lines:
        match = _NOT_GIVEN.fullmatch(line)
        texts.setdefault(match["side"] if match else line, []).extend([match["name"]] if match else [])
    phrases = []
    for key, names in texts.items():
        named = [f"`{name}`" for name in names[:most]]
        named += [f"{len(names) - len(named)} more"] * (len(names) > len(named))
        phrases.append(f"{key} {_listed(named)} (you gave none)" if names else key)
    return phrases


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def telling_notes(report: Report) -> list[str]:
    """Return the notes without those that repeat the divergence or its hint."""
    first = report.first_divergence
    divergence_text = f"{first.message} {first.hint}" if first is not None else ""
    return [note for note in dict.fromkeys(report.notes) if note not in divergence_text]


def closest(report: Report) -> list[TensorVerdict]:
    """Return the equal tensors that a number judged, the nearest to their limit first."""
    equal = [one for one in report.tensors if one.used is not None and one.verdict == "equal"]
    return sorted(equal, key=lambda tensor: -(tensor.used or 0.0))
