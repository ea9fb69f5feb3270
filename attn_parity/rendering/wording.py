"""What every rendering says in the same words: the one number of a tensor, its worst element, the notes that matter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..results.findings import TensorVerdict, shown
from .text import cut, index, number, one_line, relative, times

if TYPE_CHECKING:
    from ..results.report import Report

MAX_TEXT = 150
"""Most characters of a message that stands in place of a number."""


def measured(tensor: TensorVerdict, report: Report) -> str:
    """Return the one number of a tensor, with what it is relative to."""
    clause = one_line(tensor.message).partition(";")[0]
    if tensor.verdict == "precision" and tensor.side is not None:
        is_first = tensor.side in ("first", report.first_label)
        label = report.first_label if is_first else report.second_label
        return f"{shown(label)}: {times(tensor.first_used if is_first else tensor.second_used)}"
    if tensor.verdict == "different" and tensor.relative and math.isfinite(tensor.relative):
        return f"{relative(tensor.relative)} of the largest value"
    if tensor.verdict in ("different", "inconclusive", "precision") and clause:
        return cut(clause, MAX_TEXT)
    return times(tensor.used)


def where(tensor: TensorVerdict, report: Report) -> str:
    """Return the element that is furthest off, both values, and the sample; "" where nothing is known."""
    worst = tensor.worst
    if worst is None:
        return f"on {tensor.on}" if tensor.sample else ""
    values = f"{shown(report.first_label)} {number(worst.first)}, {shown(report.second_label)} {number(worst.second)}"
    shards = f", {tensor.shards}" if tensor.shards else ""
    return f"at {index(worst.index)}: {values}, on {tensor.on}{shards}"


def telling_notes(report: Report) -> list[str]:
    """Return the notes without those that the place or its hint says already."""
    first = report.first_divergence
    said = f"{first.message} {first.hint}" if first is not None else ""
    return [note for note in dict.fromkeys(report.notes) if note not in said]


def closest(report: Report) -> list[TensorVerdict]:
    """Return the tensors that are equal and judged by a number, those first that came closest to what is allowed."""
    used = [one for one in report.tensors if one.used is not None and one.verdict == "equal"]
    return sorted(used, key=lambda one: -(one.used or 0.0))
