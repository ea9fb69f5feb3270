"""What other roundings would cost one side of a pair: a side is run once more, and how far its results move is kept.

- ``jitter``: every operation rounds at random, by up to one unit in the last place of its result.
- ``logsumexp``: softmax is computed as exp(score - logsumexp(score)), as fused attention kernels recompute it in their
  backward pass (FlashAttention). It says what gradients may lose, and nothing about outputs.
- ``flash``: the same in float64, of fused attention alone: how far apart its formula and softmax itself are. No kernel
  runs, so that what a kernel does wrong is no part of it.
- ``tables``: in float64, constants and all that is computed from them alone (rotary tables, positions) are moved by up
  to one unit of float32.
- ``literals``: in float64, literals of float32 accuracy are moved by a unit of their last digit, and branches that
  float32 can't tell apart are exchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np

from ..pair import Pair
from ..results.findings import Side
from ..samples.sampling import Sample
from ..sides.dtypes import is_float
from ..sides.large import release
from ..sides.subject import Array, Run
from ..sides.tables import STILL
from .measures import CHUNK, chunk

Kind = Literal["jitter", "logsumexp", "flash", "tables", "literals"]

KINDS: tuple[Kind, ...] = ("jitter", "logsumexp", "flash", "tables", "literals")

EXACT: tuple[Kind, ...] = ("tables", "literals")
"""Probes that run in float64."""

FLASH_SEEDS = 2
"""How many times the roundings of fused attention are drawn in float64."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far one tensor moved: root mean square, and largest."""

    rms: float
    largest: float

    def joined(self, other: Moved) -> Moved:
        """Return the larger of both."""
        return Moved(max(self.rms, other.rms), max(self.largest, other.largest))


Probe = Mapping[str, Moved]
"""Name of a tensor -> how far it moved; empty where there was nothing to move."""


class Runs(Protocol):
    """What runs a live pair."""

    pair: Pair

    def run(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Run one side in a precision."""

    def exact(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Run one side in float64."""

    def plain(self, side: Side, sample: Sample, dtype: str, *, exact: bool) -> Run:
        """Run one side in a precision or in float64, or return what that gave before."""


def probed(runner: Runs, kind: Kind, side: Side, sample: Sample, dtype: str, seed: int) -> dict[str, Moved]:
    """Run one side of a live pair with other roundings.

    Args:
        runner: what runs the pair.
        kind: which roundings.
        side: the side.
        sample: the sample.
        dtype: the precision that is judged.
        seed: of the random roundings; those of ``flash`` are always the same.
    """
    if kind == "flash":
        return _lost_by_flash(runner, side, sample, dtype)
    pair = runner.pair
    run = runner.exact if kind in EXACT else runner.run
    moved = run(side, sample, dtype, kind, seed)
    if kind != "jitter" and not moved.moved:
        return {}
    plain = pair.named(side, runner.plain(side, sample, dtype, exact=kind in EXACT))
    other = pair.named(side, moved)
    return {
        name: moved_by(array, other[name][1])
        for name, (what, array) in plain.items()
        if is_float(array) and not (kind == "logsumexp" and what == "output")
    }


def _lost_by_flash(runner: Runs, side: Side, sample: Sample, dtype: str) -> dict[str, Moved]:
    """Return how far the gradients of one side move in float64 when fused attention rounds as its formula does."""
    still = runner.exact(side, sample, dtype, "flash", STILL)
    if not still.moved:
        return {}
    plain = runner.pair.named(side, still)
    found: dict[str, Moved] = {}
    for seed in range(FLASH_SEEDS):
        other = runner.pair.named(side, runner.exact(side, sample, dtype, "flash", seed))
        for name, (what, array) in plain.items():
            if what != "output" and is_float(array):
                moved = moved_by(array, other[name][1])
                found[name] = moved.joined(found.get(name, moved))
    return found


def moved_by(plain: Array, other: Array) -> Moved:
    """Return how far a result is from the plain one, where both are finite."""
    one, two = plain.reshape(-1), other.reshape(-1)
    square = largest = 0.0
    for start in range(0, one.size, CHUNK):
        with np.errstate(invalid="ignore"):
            error = np.abs(chunk(two, start) - chunk(one, start))
        if not math.isfinite(top := float(error.max())):
            both = np.isfinite(chunk(one, start)) & np.isfinite(chunk(two, start))
            error = np.where(both, error, 0.0)
            top = float(error.max())
        square += float(error @ error)
        largest = max(largest, top)
    release(plain, other)
    return Moved(math.sqrt(square / max(one.size, 1)), largest)
