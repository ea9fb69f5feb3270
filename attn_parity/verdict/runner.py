"""Run the samples of a live pair, and further runs of one side that judging asks for.

`Runner` is the protocol; `Live` runs two subjects, `dumps.replay` looks up recorded results. Noise is the distance of a
side from itself: run to run, in one batch or two halves, eager or compiled, moved by one unit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..pair import SIDES, Pair
from ..pairing import Match
from ..results.findings import DtypeLeak, Side
from ..samples import calls, sampling
from ..samples.sampling import FIRST, Planned, Sample
from ..sides.arrays import class_of, is_float, spilled, unit_of, wide, width_of
from ..sides.subject import Arguments, Array, Arrays, CannotPromoteError, ModuleFailedError, Run
from ..sides.tables import STILL, Tables
from .dtype_leaks import leaks_of
from .measures import MEANING_LIMIT, scale_of
from .probes import Kind, Probe, probed

ULP_SEEDS = 8
"""How many times weights and inputs are moved by one ulp where neither side has float64."""

HALVES_SIZE = 1 << 18
"""Most elements of an input whose batch is also run in halves."""

OutputArrays = Mapping[Side, list[Array]]
"""The outputs of each side, in float64."""

NamedArrays = Mapping[str, tuple[str, Array]]
"""Name -> kind and array."""


@dataclasses.dataclass
class Noise:
    """Noise of a pair in one precision.

    Attributes:
        differences: variation -> largest relative difference.
        floors: tensor -> units of the last place that the sides differ from themselves, which is allowed.
        notes: notes for the reader.
    """

    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    floors: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


class Runner(Protocol):
    """The runs that judging asks for; recorded results (`live` is False) cannot be extended."""

    pair: Pair
    live: bool

    def sample(self, planned: Planned) -> Sample | None:
        """Return a sample; None where there is none."""

    def run(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Run one side on a sample as a precision holds it, in that precision."""

    def exact(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Run one side on a sample as a precision holds it, in float64."""

    def noise(self, dtype: str, modes: tuple[str, ...]) -> Noise:
        """Return the noise of each side in one precision."""

    def probe(self, kind: Kind, side: Side, sample: Sample, dtype: str, seed: int) -> Probe:
        """Return how far other roundings move one side on a sample; empty if unavailable."""

    def tables(self, side: Side, sample: Sample, dtype: str) -> Tables | None:
        """Return the tables of one side; None if unavailable."""

    def same_literals(self, sample: Sample, dtype: str) -> bool:
        """Return whether both sides have the same literals of float32 accuracy; False if unavailable."""

    def dtype_leaks(self, dtype: str) -> list[DtypeLeak]:
        """Return where a side widens numbers in a precision; recorded results don't show it."""

    def unstable(self) -> str:
        """Return which side gives different results for the same input, and how; "" if neither."""

    def changed(self, side: Side, matches: Sequence[Match], by: float) -> list[Array]:
        """Return the outputs of one side with some parameters poisoned (NaN) or changed at random."""

    def reaches(self, side: Side, before: OutputArrays, matches: Sequence[Match], by: float) -> bool:
        """Return whether a change of some parameters changes the outputs; NaN asks whether they are used at all."""


class Live:
    """Runs both subjects of a pair.

    Args:
        pair: the pair.
    """

    live = True

    def __init__(self, pair: Pair):
        self.pair = pair
        self._latest: Sample | None = None
        self._plain: dict[tuple[Side, str, bool], Run] = {}

    def sample(self, planned: Planned) -> Sample:
        """Draw a sample."""
        pair, (kind, group, copy, seed) = self.pair, planned
        weights = pair.own_weights["first"]
        if kind.startswith("own"):
            weights = pair.draw((abs(seed), group))
        drawn = arguments = pair.arguments["first"]
        if seed >= 0:
            arguments = sampling.draw_inputs(
                drawn, (seed, group), stress="stress" in kind, fixed=pair.fixed, vary=pair.vary
            )
        if copy:
            weights = sampling.moved(weights, (abs(seed), group, copy), kept=pair.kept)
            arguments = sampling.moved_inputs(arguments, (abs(seed), group, copy), fixed=pair.fixed)
        # What the second side does not hold, too, stays as given: it could not follow.
        shared = set(map(calls.place_index, pair.same_inputs))
        leaves = zip(drawn.leaves, arguments.leaves, strict=True)
        first = arguments.with_leaves([new if i in shared else old for i, (old, new) in enumerate(leaves)])
        second = calls.like(pair.arguments["second"], first, pair.same_inputs)
        return Sample(weights, {"first": first, "second": second}, planned)

    def run(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Run one side on a sample as a precision holds it, in that precision."""
        run = self._run(side, sample, self._cast(dtype), self._cast(dtype), mode, seed)
        return self._kept(run, side, sample, dtype, mode, seed, exact=False)

    def exact(self, side: Side, sample: Sample, dtype: str, mode: str = "eager", seed: int = 0) -> Run:
        """Run one side on a sample as a precision holds it, in float64."""
        cast = self._cast(dtype)
        # Weights and inputs as the low precision holds them: else the error of rounding these would count as the side's
        # own.
        run = self._run(side, sampling.rounded(sample, cast), cast, "float64", mode, seed)
        return self._kept(run, side, sample, dtype, mode, seed, exact=True)

    def of_part(self, side: Side, sample: Sample, dtype: str, kept: Sequence[Array]) -> Run:
        """Run one side in float64, with a gradient of the loss for some elements of the outputs alone: 1 in `kept`."""
        cast = self._cast(dtype)
        masked = [one * part for one, part in zip(self.cotangents(sample, cast), kept, strict=True)]
        return self._run(side, sampling.rounded(sample, cast), cast, "float64", "eager", 0, masked)

    def plain(self, side: Side, sample: Sample, dtype: str, *, exact: bool) -> Run:
        """Return a plain run of the latest sample again, which many probes are compared with; a large pair runs it."""
        if sample is self._latest and (side, dtype, exact) in self._plain:
            return self._plain[side, dtype, exact]
        return (self.exact if exact else self.run)(side, sample, dtype)

    def _kept(self, run: Run, side: Side, sample: Sample, dtype: str, mode: str, seed: int, *, exact: bool) -> Run:
        """Return the run, after storing it for `plain` if it is eager, of seed 0, and the pair is not large."""
        if mode == "eager" and not seed and not self.pair.effort.large:
            if sample is not self._latest:
                self._latest, self._plain = sample, {}
            self._plain[side, dtype, exact] = run
        return run

    def outputs(self, side: Side, sample: Sample) -> Run:
        """Run one side forward on a sample, in its own precision."""
        run: Run = self.pair.subject(side).run(self.pair.weights(sample, side), sample.arguments[side])
        return run

    def precisely(self, side: Side, weights: Arrays, arguments: Arguments) -> Run:
        """Run one side forward in float64, or in its own precision where it has no float64."""
        pair = self.pair
        if side not in pair.lacks:
            try:
                promoted: Run = pair.subject(side).run(weights, arguments, dtype="float64")
            except CannotPromoteError as error:
                # Where its own precision fails, too, these numbers are the reason, such as NaN, and float64 is not.
                own: Run = pair.subject(side).run(weights, arguments)
                pair.lacks[side] = str(error)
                return own
            return promoted
        run: Run = pair.subject(side).run(weights, arguments)
        return run

    def noise(self, dtype: str, modes: tuple[str, ...]) -> Noise:
        """Measure the noise of each side in one precision."""
        return measured_noise(self, dtype, modes)

    def probe(self, kind: Kind, side: Side, sample: Sample, dtype: str, seed: int) -> Probe:
        """Run one side once more with other roundings."""
        return probed(self, kind, side, sample, dtype, seed)

    def tables(self, side: Side, sample: Sample, dtype: str) -> Tables | None:
        """Run one side in float64 once more and look at its tables."""
        run: Run = self.exact(side, sample, dtype, "tables", STILL)
        return run.tables

    def same_literals(self, sample: Sample, dtype: str) -> bool:
        """Run both sides in float64 once more and return whether they have the same literals, and any at all.

        False without any literal: then only branches that are close can explain a difference.
        """
        runs = [self.exact(side, sample, dtype, "literals", STILL) for side in SIDES]
        first, second = (run.tables for run in runs)
        are_same = first is not None and second is not None and first.equals(second)
        return are_same and (first is None or first.count > 0)

    def _returns_wider(self, dtype: str) -> bool:
        """Return whether an output of the first side is wider than a dtype."""
        return any(class_of(own) == "float" and width_of(own) > width_of(dtype) for _, _, own in self.pair.outputs)

    def dtype_leaks(self, dtype: str) -> list[DtypeLeak]:
        """Run both sides forward once on their own weights, in a precision, and look at the dtypes of all calls."""
        pair, cast = self.pair, self._cast(dtype)
        leaks: list[DtypeLeak] = []
        for side in SIDES:
            subject, weights = pair.subject(side), pair.own_weights[side]
            if dtype == "float32" and not subject.holds_float64:
                continue  # JAX has nothing wider
            if side == "first" and cast is None and len(subject.modules()) == 1 and not self._returns_wider(dtype):
                continue  # without layers inside, only the outputs can show it
            dtypes: dict[str, set[str]] = {}
            for name, parameter in subject.parameters().items():
                if parameter.role != "state":
                    array = weights[name]
                    own = array.dtype.name if cast is None or not is_float(array) else cast
                    dtypes.setdefault(parameter.path, set()).add(own)
            with contextlib.suppress(CannotPromoteError, ModuleFailedError):
                leaks += leaks_of(subject.dtypes(weights, pair.arguments[side], cast), dtypes, pair.labels[side])
        return leaks

    def unstable(self, sides: Sequence[Side] = SIDES) -> str:
        """Return which side gives different results for the same input, and how; "" if neither."""
        pair = self.pair
        for side in sides:
            subject, weights, arguments = pair.subject(side), pair.own_weights[side], pair.arguments[side]
            precise = None if side in pair.lacks else "float64"
            try:
                # Two seeds: a module that draws gives two results, and one that adds up in any order may as well.
                runs = [subject.run(weights, arguments, dtype=precise, seed=seed) for seed in (0, 1)]
            except CannotPromoteError as error:
                pair.lacks[side] = str(error)
                precise, runs = None, [subject.run(weights, arguments, seed=seed) for seed in (0, 1)]
            difference = _apart(runs[0].outputs, runs[1].outputs, MEANING_LIMIT if precise else 1e-3)
            if difference:
                return f"the {pair.shown[side]} module is not deterministic: {difference}"
        return ""

    def reaches(self, side: Side, before: OutputArrays, matches: Sequence[Match], by: float) -> bool:
        """Return whether a change of some parameters changes the outputs; NaN asks whether they are used at all.

        A module that fails by the change uses them.
        """
        large = self.pair.effort.large
        try:
            pairs = list(zip(before[side], self.changed(side, matches, by), strict=True))
        except ModuleFailedError:
            return True
        if np.isnan(by) and any(np.isnan(two).sum() > np.isnan(one).sum() for one, two in pairs if is_float(one)):
            return True
        # Fused attention passes over NaN, and takes a query with nothing else for one that sees no key: it gives zeros.
        # A parameter that is not used changes nothing: the limits are far above what two runs differ by in float64, or
        # in the own precision.
        limit = 1e-11 if side not in self.pair.lacks and not large else 1e-4
        scale = scale_of([one for one, _ in pairs]) or 1.0
        if any(not is_float(one) and not np.array_equal(one, two) for one, two in pairs):
            return True
        return any(
            float(np.nanmax(np.abs(one - two), initial=0.0)) > limit * scale for one, two in pairs if is_float(one)
        )

    def changed(self, side: Side, matches: Sequence[Match], by: float) -> list[Array]:
        """Return the outputs of one side with some parameters poisoned (NaN) or changed at random.

        Drawn weights are changed, in a large pair the held ones, in its own precision.
        """
        pair = self.pair
        large = pair.effort.large
        held_weights = pair.own_weights["first"]
        drawn = held_weights if large else pair.draw((0, 2))
        weights = drawn if side == "first" else {**pair.own_weights["second"], **pair.pairing.to_second(drawn)}
        random = np.random.default_rng(5)
        for match in matches:
            tensor = match.first if side == "first" else match.second
            weights = {**weights, tensor.source: weights[tensor.source].copy()}
            part = tensor.take(weights, side)
            part += np.asarray(by * (1.0 + random.normal(size=part.shape))).astype(part.dtype)
        arguments = pair.arguments[side]
        run = pair.subject(side).run(weights, arguments) if large else self.precisely(side, weights, arguments)
        return [wide(one) for one in run.outputs]

    def cotangents(self, sample: Sample, cast: str | None) -> list[Array]:
        """Draw a gradient of the loss for every output, in a precision or, for None, in the output's."""
        return sampling.cotangents(self.pair.outputs, sample.seed, cast)

    def _cast(self, dtype: str) -> str | None:
        return None if dtype == self.pair.dtype else dtype

    def _run(
        self,
        side: Side,
        sample: Sample,
        cast: str | None,
        dtype: str | None,
        mode: str,
        seed: int,
        cotangents: list[Array] | None = None,
    ) -> Run:
        pair = self.pair
        gradients = self.cotangents(sample, cast) if cotangents is None else cotangents
        more: dict[str, Any] = {"masks": sample.group} if pair.train else {}
        more |= {"tables": pair.tables(side)} if mode == "tables" else {}
        call = pair.weights(sample, side), sample.arguments[side], gradients
        run: Run = pair.subject(side).run(*call, dtype=dtype, mode=mode, seed=seed, **more)
        kept = {name: spilled(gradient) for name, gradient in run.parameter_gradients.items()}
        return dataclasses.replace(run, parameter_gradients=kept)


def _apart(first: Sequence[Array], second: Sequence[Array], limit: float) -> str:
    """Return how two runs of one side differ, "" if they agree."""
    for first_output, second_output in zip(first, second, strict=True):
        if first_output.shape != second_output.shape:
            return f"it returned shapes {first_output.shape} and {second_output.shape}"
        first_output, second_output = first_output.astype(np.float64), second_output.astype(np.float64)
        finite = np.isfinite(first_output) & np.isfinite(second_output)
        apart = float(
            np.abs(np.where(finite, first_output, 0.0) - np.where(finite, second_output, 0.0)).max(initial=0.0)
        )
        if apart > limit * (scale_of([first_output]) or 1.0):
            return f"the same input gave results that differ by {apart:.3g}; switch its randomness off"
    return ""


def measured_noise(
    runner: Live, dtype: str, modes: tuple[str, ...], sides: Iterable[Side] = SIDES, *, perturb: bool | None = None
) -> Noise:
    """Measure the noise of some sides of a live pair on the first sample.

    Args:
        runner: runs the pair.
        dtype: the precision.
        modes: the modes that are compared; the first is measured.
        sides: the sides.
        perturb: move weights and inputs by one ulp, too; None does so where neither side has float64.
    """
    pair, noise = runner.pair, Noise()
    sample = runner.sample(FIRST)
    for side in sides:
        # The same numbers twice: kernels that add in any order give other bits.
        runs = [runner.run(side, sample, dtype, modes[0]) for _ in range(2)]
        once, again = (pair.named(side, run) for run in runs)
        label = pair.labels[side]
        noise.differences[f"{dtype}, {label}, run to run"] = relative(once, again)
        for name, units in _units(once, again, dtype).items():
            noise.floors[name] = max(noise.floors.get(name, 0.0), units)
        if len(modes) > 1:
            other = runner.run(side, sample, dtype, modes[1])
            noise.differences[f"{dtype}, {label}, eager or compiled"] = relative(once, pair.named(side, other))
    if "first" in sides and not pair.train:  # a half would draw other masks
        halves = _in_halves(runner, sample)
        if halves is not None:
            noise.differences[f"{dtype}, {pair.labels['first']}, whole batch or halves"] = halves
    if perturb if perturb is not None else len(pair.lacks) == len(SIDES):
        for name, units in perturbed(runner, dtype).items():
            noise.floors[name] = max(noise.floors.get(name, 0.0), units)
        noise.notes.append(
            f"neither side has float64: judged by how far {ULP_SEEDS} perturbations of one ulp move the results"
        )
    return noise


def relative(run: NamedArrays, other_run: NamedArrays) -> float:
    """Return the largest difference of two runs, relative to the largest value of its tensor."""
    largest = 0.0
    for name, (_, first) in run.items():
        second = other_run[name][1]
        if is_float(first) and first.shape == second.shape:
            apart = float(np.nanmax(np.abs(wide(first) - wide(second)), initial=0.0))
            largest = max(largest, apart / (scale_of([wide(first)]) or 1.0))
    return largest


def perturbed(runner: Live, dtype: str) -> dict[str, float]:
    """Return per result 3 times its largest change when weights and inputs of the first side move by one ulp.

    In units of rounding, over `ULP_SEEDS` random moves.
    """
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


def _units(run: NamedArrays, other_run: NamedArrays, dtype: str) -> dict[str, float]:
    """Return how far two runs are apart per tensor, in units of the last place of its largest value."""
    units_of = {}
    for name, (_, first) in run.items():
        if is_float(first):
            apart = float(np.nanmax(np.abs(wide(first) - wide(other_run[name][1])), initial=0.0))
            atom = unit_of(dtype) * (scale_of([wide(first)]) or 1.0)
            # float64 itself has no unit for numbers below its smallest normal one.
            units = apart / atom if atom else 0.0
            units_of[name] = units if np.isfinite(units) else 0.0
    return units_of


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
        # A row with a number per row of the batch, as of a contrastive model, is shorter in a half.
        has_rows = output.ndim and all(piece.shape[1:] == output.shape[1:] for piece in pieces)
        if is_float(output) and has_rows and sum(len(piece) for piece in pieces) == len(output):
            joined[str(i)] = (output, np.concatenate(pieces))
    if not joined:
        return None
    whole_outputs, half_outputs = ({name: ("output", arrays[k]) for name, arrays in joined.items()} for k in (0, 1))
    return relative(whole_outputs, half_outputs)
