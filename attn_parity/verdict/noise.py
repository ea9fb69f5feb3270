"""What a side does to itself: run to run, in one batch or two halves, eager or compiled, moved by one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..pair import SIDES
from ..results.findings import Side
from ..samples import sampling
from ..samples.sampling import FIRST, Sample
from ..sides.dtypes import is_float, unit_of, wide
from ..sides.subject import Array, ModuleFailedError
from .measures import scale_of

if TYPE_CHECKING:
    from .runner import Live

ULP_SEEDS = 8
"""How many times weights and inputs are moved by one ulp where neither side has float64."""

HALVES_SIZE = 1 << 18
"""Most elements of an input whose batch is also run in halves."""

Named = Mapping[str, tuple[str, Array]]
"""Name -> kind and array."""


@dataclasses.dataclass
class Noise:
    """Noise of a pair in one precision.

    Attributes:
        shown: variation -> largest relative difference.
        floors: tensor -> units of the last place that the sides differ from themselves, which is allowed.
        notes: what a reader has to know.
    """

    shown: dict[str, float] = dataclasses.field(default_factory=dict)
    floors: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


def measured_noise(
    runner: Live, dtype: str, modes: tuple[str, ...], sides: Iterable[Side] = SIDES, *, perturb: bool | None = None
) -> Noise:
    """Measure the noise of some sides of a live pair on the first sample.

    Args:
        runner: what runs the pair.
        dtype: the precision.
        modes: the modes that are compared; the first is measured.
        sides: the sides.
        perturb: move weights and inputs by one ulp, too; None does so where neither side has float64.
    """
    pair, found = runner.pair, Noise()
    sample = runner.sample(FIRST)
    for side in sides:
        runs = [runner.run(side, sample, dtype, modes[0]) for _ in range(2)]
        once, again = (pair.named(side, run) for run in runs)
        label = pair.labels[side]
        found.shown[f"{dtype}, {label}, run to run"] = relative(once, again)
        for name, units in _units(once, again, dtype).items():
            found.floors[name] = max(found.floors.get(name, 0.0), units)
        if len(modes) > 1:
            other = runner.run(side, sample, dtype, modes[1])
            found.shown[f"{dtype}, {label}, eager or compiled"] = relative(once, pair.named(side, other))
    if "first" in sides and not pair.train:  # a half would draw other masks
        halves = _in_halves(runner, sample)
        if halves is not None:
            found.shown[f"{dtype}, {pair.labels['first']}, whole batch or halves"] = halves
    if perturb if perturb is not None else len(pair.lacks) == len(SIDES):
        for name, units in perturbed(runner, dtype).items():
            found.floors[name] = max(found.floors.get(name, 0.0), units)
        found.notes.append(
            f"neither side has float64: judged by how far {ULP_SEEDS} perturbations of one ulp move the results"
        )
    return found


def relative(one: Named, two: Named) -> float:
    """Return the largest difference of two runs, relative to the largest value of its tensor."""
    largest = 0.0
    for name, (_, first) in one.items():
        second = two[name][1]
        if is_float(first) and first.shape == second.shape:
            apart = float(np.nanmax(np.abs(wide(first) - wide(second)), initial=0.0))
            largest = max(largest, apart / (scale_of([wide(first)]) or 1.0))
    return largest


def perturbed(runner: Live, dtype: str) -> dict[str, float]:
    """Return how far moves of weights and inputs by one ulp move the first side's results, three times over."""
    pair, eps = runner.pair, unit_of(dtype)
    sample = runner.sample(FIRST)
    before = pair.named("first", runner.run("first", sample, dtype))
    floors: dict[str, float] = {}
    for seed in range(ULP_SEEDS):
        call = sampling.moved_inputs(sample.arguments["first"], (seed, 99), eps)
        moved = dataclasses.replace(
            sample,
            weights=sampling.moved(sample.weights, (seed, 99), eps),
            arguments={**sample.arguments, "first": call},
        )
        after = pair.named("first", runner.run("first", moved, dtype))
        for name, units in _units(before, after, dtype).items():
            floors[name] = max(floors.get(name, 0.0), 3.0 * units)
    return floors


def _units(one: Named, two: Named, dtype: str) -> dict[str, float]:
    """Return how far two runs are apart per tensor, in units of the last place of its largest value."""
    found = {}
    for name, (_, first) in one.items():
        if is_float(first):
            apart = float(np.nanmax(np.abs(wide(first) - wide(two[name][1])), initial=0.0))
            atom = unit_of(dtype) * (scale_of([wide(first)]) or 1.0)
            units = (
                apart / atom if atom else 0.0
            )  # float64 itself has no unit for numbers below its smallest normal one
            found[name] = units if np.isfinite(units) else 0.0
    return found


def _in_halves(runner: Live, sample: Sample) -> float | None:
    """Run the first side on each half of the batch, where all inputs share a first axis, and compare with the whole."""
    leaves = sample.arguments["first"].leaves
    sizes = {leaf.shape[0] if leaf.ndim > 1 else 0 for leaf in leaves}
    if len(sizes) != 1 or not (size := sizes.pop()) or size < 2 or any(leaf.size > HALVES_SIZE for leaf in leaves):
        return None
    whole = runner.outputs("first", sample)
    halves = []
    for part in (slice(0, size // 2), slice(size // 2, None)):
        call = sample.arguments["first"].with_leaves([leaf[part] for leaf in leaves])
        try:
            halves.append(runner.outputs("first", dataclasses.replace(sample, arguments={"first": call})))
        except ModuleFailedError:
            return None
    joined = {}
    for i, output in enumerate(whole.outputs):
        pieces = [half.outputs[i] for half in halves]
        if is_float(output) and output.ndim and sum(len(piece) for piece in pieces if piece.ndim) == len(output):
            joined[str(i)] = (output, np.concatenate(pieces))
    if not joined:
        return None
    one, two = ({name: ("output", arrays[k]) for name, arrays in joined.items()} for k in (0, 1))
    return relative(one, two)
