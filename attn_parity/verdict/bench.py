"""Judge a pair in one precision: run and measure the planned samples, then repeat where precision is in doubt.

The verdict on a correct pair must not depend on how its arithmetic is executed. A side in doubt is therefore measured
again with other roundings (`probes`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..pair import SIDES, Aligned, Pair
from ..results.findings import SEVERITY, Picture, Side, TensorVerdict, Worst
from ..samples import calls
from ..samples.sampling import Planned, Sample
from ..sides.arrays import is_float, is_large
from ..sides.subject import Array, CannotPromoteError, Run
from ..sides.tables import Branches
from . import notes
from .criterion import agree, beyond, decide
from .measures import Explained, FarEntries, Measure, MeasureKey, measure, scale_of, sum_floor
from .notes import Findings, Reached
from .probes import Probing
from .runner import Noise, Runner

PICTURE_SIZE = 1 << 18
"""Most elements of a tensor that are kept for pictures."""

MAX_PICTURES = 64
"""Most tensors that are kept for pictures. A page draws fewer (`figures.MAX`); which differ is known at the end."""


@dataclasses.dataclass(frozen=True)
class Unequal:
    """Whole numbers or truth values that are not the same: how many, the first of them, and the sample in words."""

    message: str
    worst: Worst | None
    sample: str


@dataclasses.dataclass
class Taken:
    """The runs of one sample: low precision per side and mode, float64 per side that has it."""

    sample: Sample
    low: dict[tuple[Side, str], Run]
    exact: dict[Side, Run]


class Bench:
    """The measures of all samples taken so far in one precision."""

    def __init__(self, runner: Runner, dtype: str, modes: tuple[str, ...]):
        self.runner, self.dtype, self.modes = runner, dtype, modes
        self.pair: Pair = runner.pair
        self.noise = Noise()
        self.measures: dict[MeasureKey, list[Measure]] = {}
        self.planned: list[Planned] = []
        self.about: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self.exactly: dict[str, Unequal | None] = {}
        self.unequal: Sample | None = None
        self.probed: dict[Side, dict[MeasureKey, list[Measure]]] = {}
        self.pictures: list[Picture] = []
        self.outputs: dict[Side, list[Array]] = {}
        self.furthest: Sample | None = None
        self._furthest = -1.0
        self.count = 0
        self.drawn: set[int] = set()
        self.explained = Explained()
        self.reached = Reached()
        self.branches: dict[Side, Branches] = {side: Branches() for side in SIDES}
        self.notes: list[str] = []
        self.apart: dict[tuple[Side, str], str] = {}
        self.mesh: dict[str, int] = {}

    @functools.cached_property
    def _probing(self) -> Probing:
        return Probing(self.runner, self.dtype, self.modes)

    def findings(self, verdicts: list[TensorVerdict]) -> Findings:
        """Return the findings so far, with notes on allowances."""
        if self.explained.tables:
            self.notes.append(
                "tables in float32 (constants, buffers, positions): what a few units of their last place do to the "
                f"float64 results is allowed, here up to {self.explained.tables:.1g} of the largest value"
            )
        if self.explained.flash:
            self.notes.append(notes.on_flash(self.explained.flash))
        return Findings(
            verdicts,
            max(len(self.drawn), 1),
            self.count,
            self.noise.differences,
            self.zero,
            self.pictures,
            self._telling(verdicts),
            self.outputs,
            self.explained,
            [*self.noise.notes, *self.notes],
            [*self.reached.unreached(), *notes.on_flushed(self.measures, self.dtype), *self._untaken()],
            frozenset(self.about),
            self.apart,
            self.mesh,
        )

    def _telling(self, verdicts: Sequence[TensorVerdict]) -> Sample | None:
        """Return the sample on which a place is looked for; one of unequal whole numbers where these alone differ."""
        floats = (one.verdict for one in verdicts if one.name not in self.exactly)
        return self.furthest if self.unequal is None or any(one != "equal" for one in floats) else self.unequal

    def _untaken(self) -> Iterator[str]:
        """Yield the branches of code that no sample took; a mask that hides nothing is reported on its own."""
        is_hiding = not any(map(calls.is_constant, self.pair.arguments["first"].leaves))
        for side in SIDES:
            yield from self.branches[side].untaken(self.pair.shown[side], conditions=is_hiding)

    @property
    def zero(self) -> list[str]:
        """Parameters whose gradient is zero in every sample."""
        return [
            name.removeprefix("grad ")
            for (name, mode), measures in self.measures.items()
            if mode == self.modes[0]
            and self.about[name][0].endswith(("matrix gradient", "vector gradient"))
            and all(one.is_zero for one in measures)
        ]

    # ---- taking samples

    def take_all(self, plan: Sequence[Planned], what: str) -> None:
        """Take the samples of a plan, one after the other."""
        for done, planned in enumerate(plan):
            self.pair.progress(what, done, len(plan))
            self.take(planned)

    def take(self, planned: Planned) -> None:
        """Run one sample on both sides and measure it."""
        sample = self.runner.sample(planned)
        if sample is None:
            return
        result = self._run(sample)
        if self.pair.effort.large and sample.kind == "held":
            self.outputs = {side: result.low[side, self.modes[0]].outputs for side in SIDES}
        for mode in self.modes:
            self._measure(result, mode)
        self._note_copies(result)
        for side, run in result.exact.items():
            self.branches[side].join(run.branches or Branches())
        self.planned.append(planned)
        self._allow_explained(result)
        self._remember(sample)
        self.count += 1
        if planned.seed >= 0 and "stress" not in planned.kind:
            self.drawn.add(planned.seed)

    def _run(self, sample: Sample) -> Taken:
        low = {(side, mode): self.runner.run(side, sample, self.dtype, mode) for mode in self.modes for side in SIDES}
        exact: dict[Side, Run] = {}
        for side in SIDES:
            if side not in self.pair.lacks:
                try:
                    exact[side] = self.runner.exact(side, sample, self.dtype)
                except CannotPromoteError as error:
                    self.pair.lacks[side] = str(error)
        return Taken(sample, low, exact)

    def _note_copies(self, result: Taken) -> None:
        """Note where devices hold other copies of one result than others do."""
        runs = [(side, run) for (side, _), run in result.low.items()] + list(result.exact.items())
        for side, run in runs:
            if run.shares.parameters or any(any(cut.axes) for cut in run.shares.outputs):
                self.mesh |= run.shares.sizes
            for line in run.shares.apart:
                what, _, how = line.partition(": ")
                self.apart.setdefault((side, what), how)

    def agrees(self, planned: Planned) -> bool:
        """Run one sample without float64, and return whether the sides are as close as in the samples so far."""
        sample = self.runner.sample(planned)
        if sample is None:
            return True
        runs = {side: self.runner.run(side, sample, self.dtype, self.modes[0]) for side in SIDES}
        self.outputs = {side: run.outputs for side, run in runs.items()}
        tensors = self.pair.aligned(runs["first"], runs["second"])
        far = _far_entries(tensors, {})
        scales: dict[str, float] = {}
        for name, tensor in tensors.items():
            scale = scale_of([tensor.first]) if name not in far else far[name].scale
            scales[tensor.kind] = max(scales.get(tensor.kind, 0.0), scale)
        for name, tensor in tensors.items():
            earlier = self.measures.get((name, self.modes[0]), [])
            if not is_float(tensor.first) or not is_float(tensor.second):
                self._compare_exactly(name, tensor.first, tensor.second, sample)
            elif not earlier or not agree(
                tensor.first, tensor.second, self.dtype, scales[tensor.kind], earlier, far.get(name)
            ):
                return False
        self.count += 1
        return True

    def _measure(self, result: Taken, mode: str) -> None:
        pair, sample = self.pair, result.sample
        low = pair.aligned(result.low["first", mode], result.low["second", mode])
        truths = {side: pair.named(side, run) for side, run in result.exact.items()}
        far = _far_entries(low, truths["first"] if "first" in truths else truths.get("second", {}))
        scales: dict[str, float] = {}
        for named in truths.values() or [pair.named("first", result.low["first", mode])]:
            for name, (kind, array) in named.items():
                scale = scale_of([array]) if name not in far else far[name].scale
                scales[kind] = max(scales.get(kind, 0.0), scale)
        for name, tensor in low.items():
            self.about[name] = (tensor.kind, tensor.second_name, tensor.first.shape)
            if not is_float(tensor.first) or not is_float(tensor.second):
                exact = {side: named[name][1] for side, named in truths.items()}
                values = (exact.get("first", tensor.first), exact.get("second", tensor.second))
                self._compare_exactly(name, *values, sample)
                continue
            oracle, other = (truths[side][name][1] if side in truths else None for side in SIDES)
            measured = measure(
                tensor.first,
                tensor.second,
                oracle,
                other,
                kind_scale=scales[tensor.kind],
                dtype=self.dtype,
                group=sample.group,
                weights=sample.kind,
                sample=self.count,
                stress=sample.stress,
                title=sample.title(),
                far=far.get(name),
            )
            self.measures.setdefault((name, mode), []).append(measured)
            if tensor.kind.endswith("matrix gradient") and mode == self.modes[0]:
                self.reached.note(name, tensor.first if oracle is None else oracle)
            if not self.count and mode == self.modes[0]:
                self._keep_picture(name, tensor.first, tensor.second, oracle)

    def _keep_picture(self, name: str, first: Array, second: Array, oracle: Array | None) -> None:
        if first.size <= PICTURE_SIZE and len(self.pictures) < MAX_PICTURES:
            self.pictures.append(Picture(name, first, second, oracle))

    def _compare_exactly(self, name: str, first: Array, second: Array, sample: Sample) -> None:
        differs = np.asarray(first != second)
        if differs.any() and not self.exactly.get(name):
            message = f"{int(differs.sum())} of {first.size} elements are not the same"
            index = tuple(map(int, np.unravel_index(int(differs.argmax()), differs.shape)))
            is_real = {first.dtype.kind, second.dtype.kind} <= set("iub")
            values = (float(first[index]), float(second[index])) if is_real else None
            worst = None if values is None else Worst(self.count, index, *values, None)
            self.exactly[name] = Unequal(message, worst, sample.title())
            self.unequal = self.unequal or sample
        self.exactly.setdefault(name, None)

    def _allow_explained(self, result: Taken) -> None:
        """Allow the differences in meaning of the last sample that tables, literals or fused attention explain."""
        last = {key: measures[-1] for key, measures in self.measures.items() if len(measures) == len(self.planned)}
        if len(result.exact) == len(SIDES) and beyond(last, self.dtype):
            kinds = {name: kind for name, (kind, _, _) in self.about.items()}
            allowed, explained = self._probing.explain(result.sample, result.exact, last, kinds)
            for key, measured in allowed.items():
                self.measures[key][-1] = measured
            self.explained.join(explained)

    def _remember(self, sample: Sample) -> None:
        """Remember the sample on which the sides are furthest apart; hard inputs count by meaning alone."""
        for measures in self.measures.values():
            latest = measures[-1]
            rounding = 0.0 if sample.stress else max(latest.first_max, latest.second_max)
            # Unexplained meaning first: 1e-12 of it weighs as much as 1,000 units of rounding.
            distance = max((latest.meaning or 0.0) - latest.allowance, 0.0) * 1e6 + rounding * 1e-9
            if len(measures) == len(self.planned) and distance > self._furthest:
                self._furthest, self.furthest = distance, sample

    # ---- verdicts

    def verdicts(self) -> list[TensorVerdict]:
        """Return the verdict on every tensor."""
        verdicts = []
        for name, (kind, second_name, shape) in self.about.items():
            if name in self.exactly:
                verdict = TensorVerdict(name, second_name, kind, shape, self.dtype, "equal")
                if (unequal := self.exactly[name]) is not None:
                    verdict = dataclasses.replace(verdict, verdict="different", **vars(unequal))
                verdicts.append(verdict)
            else:
                verdicts.append(max((self._decide(name, mode) for mode in self.modes), key=_badness))
        return verdicts

    def _decide(self, name: str, mode: str) -> TensorVerdict:
        kind, second_name, shape = self.about[name]
        decided = functools.partial(
            decide,
            name,
            second_name,
            kind,
            shape,
            self.dtype,
            mode=mode,
            noise=self.noise.floors.get(name, 0.0) + self._growth(kind),
            labels=self.pair.labels,
        )
        judged = self.pair.judged
        verdict: TensorVerdict = decided(self.measures.get((name, mode), []), sides=judged)
        # Other roundings can only widen what a side may lose, so they are asked in doubt alone.
        if verdict.verdict != "precision" or not self.probed:
            return verdict
        # Each side by what the other one loses when its roundings are drawn again: where softmax saturates, one may be
        # exact by luck of its roundings, and the other is not to blame then.
        ways = ((side, other) for side, other in (SIDES, SIDES[::-1]) if side in judged)
        return max((decided(self._probed(other, name, mode), sides=(side,)) for side, other in ways), key=_badness)

    def _growth(self, kind: str) -> float:
        """Return the extra allowance of a parameter's gradient for being a sum over the rows of the input.

        Zero for other kinds of tensors; in units of the last place.
        """
        if not kind.endswith(("matrix gradient", "vector gradient")):
            return 0.0
        leaves = self.pair.arguments["first"].leaves
        rows = max((int(np.prod(leaf.shape[:-1])) for leaf in leaves if leaf.ndim), default=1)
        return sum_floor(self.dtype, rows)

    def note(self, verdicts: Sequence[TensorVerdict]) -> None:
        """Add notes on the measures to those on the verdicts."""
        mode, kinds = self.modes[0], {name: kind for name, (kind, _, _) in self.about.items()}
        self.notes += notes.on_stress(self.measures, mode, verdicts, self.pair.labels)
        self.notes += notes.on_nonfinite(self.measures, mode)
        if "first" not in self.pair.judged:
            self.notes += notes.on_reference(verdicts, self.pair.shown)
        self.notes += notes.on_small(self.measures, mode, kinds)

    # ---- probes of precision

    def probe_doubted(self) -> list[TensorVerdict]:
        """Measure the cost of other roundings for the side that another is judged by, if precision is still in doubt.

        Returns:
            The verdicts in doubt before.
        """
        doubted = [one for one in self.verdicts() if one.verdict == "precision"]
        names = {one.name for one in doubted}
        for measured, other in (SIDES, SIDES[::-1]):
            shares = [one.first_used if other == "first" else one.second_used for one in doubted]
            if max((share or 0.0 for share in shares), default=0.0) > 1.0:
                chosen = {key: some for key, some in self.measures.items() if key[0] in names}
                self.probed[measured] = self._probing.raised(measured, self.planned, chosen, self.noise.floors)
        return doubted

    def _probed(self, side: Side, name: str, mode: str) -> list[Measure]:
        """Return the measures of a tensor with the errors of one side raised where that was probed."""
        probed = self.probed.get(side, {}).get((name, mode), [])
        return probed + self.measures[name, mode][len(probed) :]


def _badness(verdict: TensorVerdict) -> tuple[int, float]:
    return SEVERITY.index(verdict.verdict), max(
        verdict.meaning_used or 0.0, verdict.first_used or 0.0, verdict.second_used or 0.0
    )


def judge_in(runner: Runner, dtype: str, modes: tuple[str, ...], seeds: int, first_seed: int) -> Findings:
    """Judge a pair in one precision.

    Args:
        runner: runs the pair.
        dtype: the precision.
        modes: modes to run: ``eager``, ``jit``.
        seeds: number of draws.
        first_seed: the first of them.
    """
    pair = runner.pair
    plan = pair.effort.first_look(seeds, first_seed, transfer=pair.transfer)
    bench = Bench(runner, dtype, modes)
    if pair.effort.large:
        _take_large(bench, plan)
    else:
        bench.noise = runner.noise(dtype, modes)
        bench.take_all(plan, f"comparing in {dtype}")
    verdicts = bench.verdicts()
    doubted = [one.name for one in verdicts if one.verdict == "precision"]
    if doubted:
        verdicts = _looked_again(bench, verdicts, seeds, first_seed)
    bench.note(verdicts)
    return bench.findings(verdicts)


def _take_large(bench: Bench, plan: Sequence[Planned]) -> None:
    """Judge drawn weights in full; held weights need float64 only if the sides are further apart on them.

    If the weights are too large to be stored twice and are not transferred, held weights are judged in full, and drawn
    ones only if a gradient is zero on the held ones.
    """
    own, held_sample = plan
    runner, pair = bench.runner, bench.pair
    if runner.live and not pair.transfer and any(map(is_large, pair.own_weights["first"].values())):
        bench.take(held_sample)
        if bench.zero:
            bench.take(own)
        bench.probe_doubted()
        return
    bench.take(own)
    bench.probe_doubted()
    pair.progress(f"comparing in {bench.dtype}", 1, 2)
    needed = not runner.live or bool(pair.lacks) or not pair.transfer
    if needed or not bench.agrees(held_sample):
        bench.take(held_sample)


def _looked_again(bench: Bench, verdicts: list[TensorVerdict], seeds: int, first_seed: int) -> list[TensorVerdict]:
    """Judge precision again on fresh samples, which alone decide: chance does not repeat.

    Tensors that are in doubt even then are judged by the loss of the other side when its roundings are redrawn, and by
    the loss that the formula of fused attention kernels would cause on either side.
    """
    pair = bench.pair
    plan = pair.effort.second_look(seeds, first_seed, transfer=pair.transfer)
    if not bench.runner.live and not any(bench.runner.sample(one) for one in plan):
        return verdicts
    fresh = Bench(bench.runner, bench.dtype, bench.modes)
    fresh.noise = bench.noise
    fresh.take_all(plan, "looking again at what is in doubt")
    doubted = fresh.probe_doubted()
    bench.count += fresh.count
    bench.drawn |= fresh.drawn
    bench.explained.join(fresh.explained)
    bench.notes += fresh.notes
    bench.reached.join(fresh.reached)
    second = {one.name: one for one in fresh.verdicts()}
    bench.notes += _cleared(doubted, second, pair.shown)
    return [second.get(one.name, one) if one.verdict == "precision" else one for one in verdicts]


def _cleared(
    doubted: Sequence[TensorVerdict], second: Mapping[str, TensorVerdict], labels: Mapping[Side, str]
) -> list[str]:
    """Return a note on each side whose loss exceeds that of the plain formula, but is explained by other roundings."""
    largest: dict[Side, tuple[float, str]] = {}
    for tensor in doubted:
        if second[tensor.name].verdict == "equal":
            for side, used in zip(SIDES, (tensor.first_used, tensor.second_used), strict=True):
                largest[side] = max(largest.get(side, (1.0, "")), (used or 0.0, tensor.name))
    return [
        f"the {labels[side]} side loses up to {used:.1f} times its share of precision against the other one's "
        f"arithmetic, most in {name}; other roundings, or softmax recomputed from its log-sum-exp as fused attention "
        "kernels do, explain it, and it is allowed"
        for side, (used, name) in largest.items()
        if name
    ]


def _far_entries(tensors: Mapping[str, Aligned], truths: Mapping[str, tuple[str, Array]]) -> dict[str, FarEntries]:
    """Return the far entries of outputs by name, from float64 results, or the first side's own where there are none."""
    far = {}
    for name, tensor in tensors.items():
        if tensor.kind == "output" and is_float(tensor.first) and is_float(tensor.second):
            truth = truths[name][1] if name in truths else tensor.first
            entries = FarEntries.of(truth, (tensor.first, tensor.second))
            if entries is not None:
                far[name] = entries
    return far
