"""The findings on a pair in one precision, and notes that a reader needs in addition to the verdicts.

Notes report where little or nothing was compared, and the parameters that no gradient reached: a parameter without a
gradient may be unused, used without effect on the outputs, or part of a branch that was not entered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from attn_bridge.printable import listed

from ..pair import SIDES, Pair
from ..pairing import Match
from ..results.findings import Picture, Side, TensorVerdict, shown
from ..samples import calls
from ..samples.sampling import Sample
from ..sides.arrays import is_float, release
from ..sides.subject import Array
from .criterion import precision_used
from .measures import Explained, Measure, MeasureKey, flushed_below
from .runner import OutputArrays, Runner

# The share below which `measures.measure` takes the scale of the kind instead of the tensor's own.
SMALL = 1e-6
"""A note reports a tensor that is smaller than this share of the largest of its kind, which it is judged by."""

NOTED = 2.0
"""Share of precision from which on a side that is not judged by it is named."""

MAX_NAMES = 4
"""How many small tensors are named."""

Measures = Mapping[MeasureKey, Sequence[Measure]]


@dataclasses.dataclass
class Findings:
    """The findings on a pair in one precision.

    Attributes:
        verdicts: one per tensor.
        seeds: number of draws.
        samples: number of samples.
        noise: variation -> relative difference.
        zero: parameters whose gradient is zero in every sample.
        pictures: tensors of the first sample.
        furthest: the sample on which the sides are furthest apart.
        outputs: outputs of each side on the pair's own weights, where a large pair was run on them.
        explained: the explanations of differences in meaning.
        notes: notes for the reader.
        unreached: rows and columns of matrices that no gradient reached, in words.
        compared: names of the tensors that were compared.
        apart: side and name of a result -> how its copies on several devices differ.
        mesh: axis -> number of devices, for the axes that shard a result.
    """

    verdicts: list[TensorVerdict]
    seeds: int
    samples: int
    noise: dict[str, float]
    zero: list[str]
    pictures: list[Picture]
    furthest: Sample | None
    outputs: dict[Side, list[Array]]
    explained: Explained
    notes: list[str]
    unreached: list[str]
    compared: frozenset[str]
    apart: dict[tuple[Side, str], str] = dataclasses.field(default_factory=dict)
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)


def on_stress(
    measures: Measures, mode: str, verdicts: Sequence[TensorVerdict], labels: Mapping[Side, str]
) -> Iterator[str]:
    """Report a side that loses much precision on hard inputs only, which is not a fault."""
    largest: tuple[float, Side, str] = (NOTED, "first", "")
    for verdict in verdicts:
        hard = [found for found in measures.get((verdict.name, mode), []) if found.stress]
        if verdict.verdict == "equal" and hard:
            for side, used in zip(SIDES, precision_used(hard), strict=True):
                largest = max(largest, (used, side, verdict.name))
    used, side, name = largest
    if name:
        yield (
            f"on hard inputs (vectors nearly constant and far from zero, or very small) the "
            f"{shown(labels[side])} side loses {used:.0f} times its share of precision, most in {name}; on "
            "inputs like the given ones it does not"
        )


def on_reference(verdicts: Sequence[TensorVerdict], labels: Mapping[Side, str]) -> Iterator[str]:
    """Report a reference that loses much more precision than the side that is judged by it, which is not a fault."""
    used, name = max(((one.first_used or 0.0, one.name) for one in verdicts), default=(0.0, ""))
    if used > NOTED:
        yield (
            f"the {labels['first']} side, which is the reference, loses up to {used:.1f} times its share of precision "
            f"against the {labels['second']} side's arithmetic, most in {name}; that is no fault of the "
            f"{labels['second']} side"
        )


def on_small(measures: Measures, mode: str, kinds: Mapping[str, str]) -> Iterator[str]:
    """Report outputs and gradients that are far smaller than the largest of their kind, which they are judged by.

    Gradients that are zero up to rounding are left out: that of a key bias, for example, consists of rounding errors.
    """
    parts = {
        name: max(one.part for one in found)
        for (name, ran), found in measures.items()
        if ran == mode and (kinds[name] == "output" or not all(one.is_zero for one in found))
    }
    small = {name: part for name, part in parts.items() if 0.0 < part < SMALL}
    if small:
        names = listed([f"{name} ({part:.0e})" for name, part in small.items()], MAX_NAMES)
        yield (
            f"judged by the largest of their kind, beside which they are small: {names}; a fault that small "
            "shows where they are returned or differentiated alone"
        )


def on_literals(size: float, path: str = "") -> str:
    """Name the size and the place of a difference that literals and branches of float32 accuracy explain."""
    return (
        f"{f'in {path}: ' if path else ''}float64 results differ by {size:.1g} of the largest value, which no float32 "
        "run of either side shows: a literal with the digits of float32, or the branch of a formula that float32 can't "
        "tell from the other; it is allowed"
    )


def on_flash(allowed: float) -> str:
    """Report the float64 allowance of gradients for fused attention."""
    return (
        "fused attention recomputes the weights from their log-sum-exp in its backward pass: what that formula loses "
        f"in float64 is allowed to gradients, here up to {allowed:.1g} of the largest value"
    )


def on_nonfinite(measures: Measures, mode: str) -> Iterator[str]:
    """Report elements that are not finite on both sides alike, which were not compared."""
    for (name, ran), measured in measures.items():
        bad = [one for one in measured if one.finite < one.count and not one.mismatched]
        if bad and ran == mode:
            first = bad[0]
            yield (
                f"{name}: {first.count - first.finite} of {first.count} elements are NaN or infinite on both sides "
                f"({first.title}), and were not compared"
            )


def on_flushed(measures: Measures, dtype: str) -> Iterator[str]:
    """Report tensors that are too small for their precision to be judged."""
    names = dict.fromkeys(name for (name, _), found in measures.items() if any(one.is_flushed for one in found))
    if names:
        yield (
            f"precision of {', '.join(names)}: numbers below {flushed_below(dtype):.0e} in some sample, which "
            "processors may take for zero"
        )


MAX_RANGES = 4
"""How many ranges of rows are named."""


class Reached:
    """Keeps which rows and columns of matrices have had a gradient."""

    def __init__(self) -> None:
        self._found: dict[str, list[Array]] = {}

    def note(self, name: str, gradient: Array) -> None:
        """Keep which rows and columns of a matrix have had a gradient."""
        moved = gradient != 0
        reached = [moved.any(axis=tuple(other for other in range(moved.ndim) if other != axis)) for axis in (0, 1)]
        release(gradient)
        self._join(name, reached)

    def join(self, other: Reached) -> None:
        """Add the gradients reached in other samples."""
        for name, reached in other._found.items():
            self._join(name, reached)

    def _join(self, name: str, reached: list[Array]) -> None:
        before = self._found.get(name, reached)
        self._found[name] = [one | two for one, two in zip(before, reached, strict=True)]

    def unreached(self) -> Iterator[str]:
        """Yield the rows and columns of matrices that no gradient reached, for matrices that a gradient did reach."""
        for name, axes in self._found.items():
            for what, reached in zip(("rows", "columns"), axes, strict=True):
                # Without any gradient the whole parameter is classified elsewhere, as unused or unexercised.
                if reached.any() and not reached.all():
                    left = np.flatnonzero(~reached)
                    yield (
                        f"{left.size} of {reached.size} {what} of {name.removeprefix('grad ')}: no gradient reached "
                        f"{ranges(left)}"
                    )


def ranges(numbers: Array) -> str:
    """Write whole numbers in order: ``0, 9-11``; the first few where there are many."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MAX_RANGES]]
    return ", ".join([*texts, *["..."] * (len(runs) > MAX_RANGES)])


MAX_PROBES = 200
"""Most parameters without a gradient to classify as unused, unreached or an invariance."""


@dataclasses.dataclass
class Coverage:
    """The parts of a pair that a comparison did not cover.

    Attributes:
        invariances: parameters that are used and do not change the outputs.
        unexercised: parameters that no run reached.
        unused: parameters that one side has and does not use -> name of that side in messages.
        unreached: branches that were not run.
        notes: notes for the reader.
    """

    invariances: list[str] = dataclasses.field(default_factory=list)
    unexercised: list[str] = dataclasses.field(default_factory=list)
    unused: dict[str, str] = dataclasses.field(default_factory=dict)
    unreached: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def applied(self, tensors: Sequence[TensorVerdict]) -> list[TensorVerdict]:
        """Return the verdicts with those of parameters that one side does not use made ``different``."""
        verdicts = []
        for verdict in tensors:
            label = self.unused.get(verdict.name.removeprefix("grad ")) if verdict.name.startswith("grad ") else None
            if label is not None:
                message = f"the {label} side has this parameter and does not use it"
                verdict = dataclasses.replace(verdict, verdict="different", message=message)
            verdicts.append(verdict)
        return verdicts


def covered(runner: Runner, findings: Findings) -> Coverage:
    """Return the coverage of a comparison; classify parameters without a gradient as invariances or unreached.

    Args:
        runner: runs the pair.
        findings: the findings in one precision.
    """
    zero, outputs = findings.zero, findings.outputs
    pair, coverage = runner.pair, Coverage()
    matches = {match.first.name: match for match in pair.pairing.matches}
    if pair.effort.large:
        _cover_large(runner, [matches[name] for name in zero], outputs, coverage)
    else:
        _cover(runner, {name: matches[name] for name in zero[:MAX_PROBES]}, coverage)
    coverage.unreached = [
        *_changed_alone(pair),
        *(line for side in SIDES for line in pair.subject(side).unreached(pair.arguments[side])),
        *findings.unreached,
        *_not_compared(pair, findings.compared),
        *_given(pair),
    ]
    return coverage


def _cover(runner: Runner, matches: dict[str, Match], coverage: Coverage) -> None:
    if not matches:
        return
    before = {side: runner.changed(side, [], 0.0) for side in SIDES}
    # All of them at once: if nothing moves then, none of them has to be moved alone.
    still = not any(runner.reaches(side, before, list(matches.values()), 1.0) for side in SIDES)
    silent = []
    for name, match in matches.items():
        reached = {side: runner.reaches(side, before, [match], np.nan) for side in SIDES}
        if all(reached.values()):
            if still or not any(runner.reaches(side, before, [match], 1.0) for side in SIDES):
                coverage.invariances.append(name)
            else:
                silent.append(name)
        elif any(reached.values()):
            idle = next(side for side, used in reached.items() if not used)
            coverage.unused[name] = runner.pair.shown[idle]
        else:
            coverage.unexercised.append(name)
    if silent:
        them = "it, but its" if len(silent) == 1 else "them, but their"
        coverage.notes.append(
            f"{listed(silent, MAX_NAMES)}: the output depends on {them} gradient is zero on both sides"
        )


def _cover_large(runner: Runner, matches: list[Match], outputs: OutputArrays, coverage: Coverage) -> None:
    """Do the same with one run of one side: all parameters without a gradient change at once."""
    names = [match.first.name for match in matches]
    if matches and outputs and runner.reaches("first", outputs, matches, 1.0):
        coverage.notes.append(f"{', '.join(names)}: the output depends on some of them, but their gradient is zero")
    else:
        coverage.invariances = names


def _changed_alone(pair: Pair) -> Iterator[str]:
    """Report paired state that calls change on one side alone, such as a cache that the other never writes."""
    changed = {side: pair.subject(side).changed for side in SIDES}
    for side in SIDES:
        other: Side = "second" if side == "first" else "first"
        names = [
            match.first.name
            for match in pair.pairing.matches
            if match.tensor(side).source in changed[side] and match.tensor(other).source not in changed[other]
        ]
        if names:
            yield f"state after a call: {listed(names, MAX_NAMES)}, which {pair.shown[side]} alone changes"


def _not_compared(pair: Pair, compared: Collection[str]) -> Iterator[str]:
    """Report gradients that are not compared: of paired complex weights, and of masks in floating point."""
    for match in pair.pairing.matches:
        dtype = match.first.parameter.dtype
        if f"grad {match.first.name}" not in compared and dtype.startswith("complex"):
            yield f"gradient of {match.first.name}: {dtype} is taken as held; give real and imaginary parts as two"
    call, shared = pair.arguments["first"], set(map(calls.place_index, pair.same_inputs))
    named = enumerate(zip(call.named(pair.first.argument_names), call.leaves, strict=True))
    masks = [name for i, (name, leaf) in named if i in shared & pair.discrete and is_float(leaf)]
    if masks:
        yield f"gradient of {', '.join(masks)}: masks and targets, which hold 0 and 1 alone, have none"


def _given(pair: Pair) -> Iterator[str]:
    """Report inputs that no sample changes: axes of size 1, masks that hide nothing, whole numbers and the rest."""
    call, names = pair.arguments["first"], pair.first.argument_names
    kept = []
    for i, (name, leaf, mask) in enumerate(zip(call.named(names), call.leaves, calls.masks(call), strict=True)):
        thin = [str(axis) for axis, size in enumerate(leaf.shape) if size == 1 and leaf.ndim > 1 and not mask]
        if thin:
            axes, them = ("axis", "it") if len(thin) == 1 else ("axes", "them")
            yield f"another size than 1 of {axes} {' and '.join(thin)} of {name}: a mean over {them} would not show"
        if calls.is_constant(leaf):
            yield f"another {name}: {leaf.flat[0]} everywhere, so that a side may ignore it"
        elif i in pair.fixed or (i not in pair.vary and (mask or not is_float(leaf))):
            kept.append(name)
    kept += call.plain(names)
    if kept:
        yield f"other values of {', '.join(kept)}: taken as given in every sample"
