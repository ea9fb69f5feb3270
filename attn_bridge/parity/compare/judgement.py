"""All samples of a comparison in one precision: which are run, what is measured on them, and the verdicts."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from . import samples as numbers
from .criterion import Measure, agree, decide, measure, precision_used, scale_of, sum_floor, unit_of, with_error
from .report import SEVERITY, Picture, Side, TensorVerdict, Verdict
from .samples import Outputs, Sample
from .subject import Array, CannotLiftError, ModuleFailedError, Run, is_float, wide

if TYPE_CHECKING:
    from .pair import Comparison

__all__ = ["Judgement", "Outputs"]

SIDES: tuple[Side, Side] = ("torch", "flax")

COPIES = 3
"""Slightly moved copies of each draw, which redraw every rounding."""

AGAIN = 4
"""A loss of precision is confirmed on this many times as many fresh seeds before it is called one."""

QUICK, SLOW = 5e9, 2e11
"""Work of one run (6 x parameters x rows, the operations of forward and backward) up to which every sample is run, and
beyond which only one of held and one of own weights is. Work, not time: the same pair is always judged alike."""

TOO_SLOW = 2.0
"""Seconds per sample beyond which there are fewer of them all the same."""

ULP_SEEDS = 8
"""How many times weights and inputs are moved by one ulp where neither side has float64."""

PICTURE_SIZE = 1 << 18
"""Most elements of a tensor that are kept for pictures."""

Low = Mapping[tuple[Side, str], Run]
"""Side and mode -> its run in the precision that is judged."""

Named = Mapping[str, tuple[str, Array]]
"""Name -> kind and array."""


class Judgement:
    """All samples in one precision, measured as they come."""

    def __init__(self, comparison: Comparison, dtype: str, modes: tuple[str, ...]):
        self.comparison = comparison
        self.dtype = dtype
        self.cast = None if dtype == comparison.dtype else dtype
        self.modes = modes
        self.measures: dict[tuple[str, str], list[Measure]] = {}
        self.about: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self.noise: dict[str, float] = {}
        self.floors: dict[str, float] = {}
        self.pictures: list[Picture] = []
        self.furthest: Sample | None = None
        self._furthest = -1.0
        self.count = self.seeds = 0
        self.exact: dict[str, str] = {}
        self.quick = False
        self.redrawn: dict[Side, dict[tuple[str, str], list[Measure]]] = {}

    def run(self, seeds: int, first_seed: int) -> list[TensorVerdict]:
        """Run the plan, look again where precision is in doubt, and return the verdicts."""
        comparison = self.comparison
        plan = [("held", 0, 0, -1)]
        plan += [("own", 1 + s, 0, first_seed + s) for s in range(seeds)]
        plan.insert(2, ("own stress", 1000, 0, first_seed))
        plan += [("held stress", 1001, 0, first_seed + 1)] if comparison.transfer else []
        if comparison.large:
            return self._run_large(plan[0], plan[1], seeds, first_seed)
        self.take(*plan[0])
        self._measure_noise()
        taken = time.perf_counter()
        self.take(*plan[1])
        seconds = time.perf_counter() - taken
        self.seeds = 1
        if seconds <= 5 * TOO_SLOW:
            quick = self.quick = comparison.work() <= QUICK and seconds <= TOO_SLOW
            rest = plan[2:] if quick else plan[2:4]
            self.seeds = seeds if quick else min(seeds, 3)
            if quick:
                rest += [
                    (kind, group, copy, seed)
                    for copy in range(1, COPIES)
                    for kind, group, _, seed in plan
                    if "stress" not in kind and (kind == "own" or comparison.transfer)
                ]
            for done, one in enumerate(rest):
                comparison.progress(f"comparing in {self.dtype}", done + 2, len(rest) + 2)
                self.take(*one)
        verdicts = self._verdicts(seeds, first_seed)
        self._note_stress(verdicts)
        return verdicts

    def _verdicts(self, seeds: int, first_seed: int) -> list[TensorVerdict]:
        verdicts = self._decide()
        if any(one.verdict == "precision" for one in verdicts):
            return self._look_again(verdicts, seeds, first_seed)
        return verdicts

    def _run_large(
        self, held: tuple[str, int, int, int], own: tuple[str, int, int, int], seeds: int, first_seed: int
    ) -> list[TensorVerdict]:
        """Judge drawn weights in full; held ones need float64 only if the sides are further apart on them."""
        comparison = self.comparison
        self._take_large(own)
        self.seeds = 1
        comparison.progress(f"comparing in {self.dtype}", 1, 2)
        needed = not comparison.can_run or bool(comparison.lacks) or not comparison.transfer
        if needed or not self._agrees(*held):
            self.take(*held)
        return self._verdicts(seeds, first_seed)

    def _take_large(self, one: tuple[str, int, int, int]) -> None:
        """Take a sample; if that leaves precision in doubt, redraw the roundings of the side that is the measure.

        That costs a few runs of one side; fresh seeds cost more, and float64 once more.
        """
        taken = self.take(*one)
        doubted = [one for one in self._decide() if one.verdict == "precision"]
        if not doubted or taken is None or not self.comparison.can_run:
            return
        sample, low = taken
        for side in SIDES:
            others = [found.flax_used if side == "torch" else found.torch_used for found in doubted]
            if max(other or 0.0 for other in others) > 1.0:
                self.comparison.progress(f"redrawing the roundings of {side}", 0, 1)
                self._redraw_side(side, 0, sample, low[side, self.modes[0]], {found.name for found in doubted})

    def _agrees(self, kind: str, group: int, copy: int, seed: int) -> bool:
        """Run one sample without float64, and say whether the sides are as close there as in the samples so far."""
        comparison = self.comparison
        sample = comparison.sample(kind, group, copy, seed)
        cotangents = numbers.cotangents(comparison.outputs, sample.seed, self.cast)
        runs = {side: comparison.run(side, sample, cotangents, self.cast, self.modes[0]) for side in SIDES}
        comparison.before = {side: run.outputs for side, run in runs.items()}
        tensors = comparison.tensors(runs["torch"], runs["flax"])
        scales: dict[str, float] = {}
        for one in tensors.values():
            scales[one.kind] = max(scales.get(one.kind, 0.0), scale_of([one.torch]))
        for name, one in tensors.items():
            known = self.measures.get((name, self.modes[0]), [])
            if not is_float(one.torch) or not is_float(one.flax):
                self._compare_exactly(name, one.torch, one.flax)
            elif not known or not agree(one.torch, one.flax, self.dtype, scales[one.kind], known):
                return False
        self.count += 1
        return True

    def _note_stress(self, verdicts: list[TensorVerdict]) -> None:
        """Tell of a side that loses much precision on hard inputs only; that is no fault, and worth knowing."""
        largest: tuple[float, Side, str] = (2.0, "torch", "")
        for one in verdicts:
            hard = [found for found in self.measures.get((one.name, self.modes[0]), []) if found.stress]
            if one.verdict == "equal" and hard:
                for side, used in zip(SIDES, precision_used(hard), strict=True):
                    largest = max(largest, (used, side, one.name))
        used, side, name = largest
        if name:
            self.comparison.notes.append(
                f"on hard inputs (vectors nearly constant and far from zero, or very small) the {side} side loses "
                f"{used:.0f} times its share of precision, most in {name}; on inputs like the given ones it does not"
            )

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

    def take(self, kind: str, group: int, copy: int, seed: int) -> tuple[Sample, Low] | None:
        """Run one sample on both sides and measure it; return it with its runs in the precision that is judged."""
        comparison = self.comparison
        sample = comparison.sample(kind, group, copy, seed)
        cotangents = numbers.cotangents(comparison.outputs, sample.seed, self.cast)
        oracles: dict[Side, Run] = {}
        low: Low = {
            (side, mode): comparison.run(side, sample, cotangents, self.cast, mode)
            for mode in self.modes
            for side in SIDES
        }
        rounded = numbers.rounded(sample, self.cast)
        for side in SIDES:
            if side not in comparison.lacks:
                try:
                    oracles[side] = comparison.run(side, rounded, cotangents, "float64")
                except CannotLiftError as error:
                    comparison.lacks[side] = str(error)
        if comparison.large and sample.kind == "held":
            comparison.before = {side: low[side, self.modes[0]].outputs for side in SIDES}
        for mode in self.modes:
            self._measure(sample, mode, low["torch", mode], low["flax", mode], oracles)
        self.count += 1
        return sample, low

    def _measure(self, sample: Sample, mode: str, torch: Run, flax: Run, oracles: Mapping[Side, Run]) -> None:
        comparison = self.comparison
        low = comparison.tensors(torch, flax)
        truths = {side: comparison.named(side, run) for side, run in oracles.items()}
        scales: dict[str, float] = {}
        for named in truths.values() or [comparison.named("torch", torch)]:
            for kind, array in named.values():
                scales[kind] = max(scales.get(kind, 0.0), scale_of([wide(array)]))
        for name, tensor in low.items():
            self.about[name] = (tensor.kind, tensor.flax_name, tensor.torch.shape)
            if not is_float(tensor.torch) or not is_float(tensor.flax):
                exact = {side: named[name][1] for side, named in truths.items()}
                self._compare_exactly(name, exact.get("torch", tensor.torch), exact.get("flax", tensor.flax))
                continue
            oracle, other = (truths[side][name][1] if side in truths else None for side in SIDES)
            found = measure(
                tensor.torch,
                tensor.flax,
                oracle,
                other,
                kind_scale=scales[tensor.kind],
                dtype=self.dtype,
                group=sample.group,
                weights=sample.kind,
                sample=self.count,
                stress=sample.stress,
            )
            self.measures.setdefault((name, mode), []).append(found)
            distance = (found.meaning or 0.0) * 1e6 + max(found.torch_max, found.flax_max) * 1e-9
            if distance > self._furthest:
                self._furthest, self.furthest = distance, sample
            if (
                not self.count
                and mode == self.modes[0]
                and tensor.torch.size <= PICTURE_SIZE
                and len(self.pictures) < 64
            ):
                self.pictures.append(Picture(name, tensor.torch, tensor.flax, oracle))

    def _compare_exactly(self, name: str, torch: Array, flax: Array) -> None:
        differing = int((torch != flax).sum())
        if differing and not self.exact.get(name):
            self.exact[name] = f"{differing} of {torch.size} elements are not the same"
        self.exact.setdefault(name, "")

    def _measure_noise(self) -> None:
        """Measure what each side does to itself: run to run, one batch or two, eager or compiled."""
        comparison = self.comparison
        sample = comparison.sample("held", 0, 0, -1)
        cotangents = numbers.cotangents(comparison.outputs, sample.seed, self.cast)
        for side in SIDES:
            runs = [comparison.run(side, sample, cotangents, self.cast, self.modes[0]) for _ in range(2)]
            once, again = (comparison.named(side, run) for run in runs)
            self._note_noise(f"{side}, run to run", once, again)
            if len(self.modes) > 1:
                other = comparison.run(side, sample, cotangents, self.cast, self.modes[1])
                self._relative(f"{side}, eager or compiled", once, comparison.named(side, other))
        self._split_batch(sample)
        if len(comparison.lacks) == len(SIDES):
            self._perturb(sample, cotangents)

    def _note_noise(self, what: str, one: Named, two: Named) -> None:
        """Write noise down, and allow it: no comparison can be finer than a side agrees with itself."""
        self._relative(what, one, two)
        eps = unit_of(self.dtype)
        for name, (_, first) in one.items():
            if is_float(first):
                apart = float(np.nanmax(np.abs(wide(first) - wide(two[name][1])), initial=0.0))
                ulps = apart / (eps * (scale_of([wide(first)]) or 1.0))
                self.floors[name] = max(self.floors.get(name, 0.0), ulps if np.isfinite(ulps) else 0.0)

    def _relative(self, what: str, one: Named, two: Named) -> None:
        largest = 0.0
        for name, (_, first) in one.items():
            second = two[name][1]
            if is_float(first) and first.shape == second.shape:
                apart = float(np.nanmax(np.abs(wide(first) - wide(second)), initial=0.0))
                largest = max(largest, apart / (scale_of([wide(first)]) or 1.0))
        self.noise[f"{self.dtype}, {what}"] = largest

    def _split_batch(self, sample: Sample) -> None:
        """Run the torch side on each half of the batch, where all inputs share a first axis."""
        if self.comparison.train:
            return  # a half would draw other masks
        leaves = sample.torch.leaves
        sizes = {leaf.shape[0] if leaf.ndim > 1 else 0 for leaf in leaves}
        if len(sizes) != 1 or not (size := sizes.pop()) or size < 2 or any(leaf.size > PICTURE_SIZE for leaf in leaves):
            return
        whole = self.comparison.run("torch", sample, None, self.cast)
        halves = []
        for part in (slice(0, size // 2), slice(size // 2, None)):
            half = dataclasses.replace(sample, torch=sample.torch.with_leaves([leaf[part] for leaf in leaves]))
            try:
                halves.append(self.comparison.run("torch", half, None, self.cast))
            except ModuleFailedError:
                return
        joined = {}
        for i, output in enumerate(whole.outputs):
            pieces = [half.outputs[i] for half in halves]
            if is_float(output) and output.ndim and sum(len(piece) for piece in pieces if piece.ndim) == len(output):
                joined[str(i)] = (output, np.concatenate(pieces))
        if joined:
            first, second = ({name: ("output", pair[k]) for name, pair in joined.items()} for k in (0, 1))
            self._relative("torch, whole batch or halves", first, second)

    def _perturb(self, sample: Sample, cotangents: list[Array]) -> None:
        """Without float64: allow what moving weights and inputs by one ulp does to the results."""
        eps = unit_of(self.dtype)
        base = self.comparison.run("torch", sample, cotangents, self.cast)
        before = self.comparison.named("torch", base)
        for seed in range(ULP_SEEDS):
            weights = numbers.moved(sample.weights, (seed, 99), eps)
            arguments = numbers.moved_inputs(sample.torch, (seed, 99), eps)
            run = self.comparison.run(
                "torch", dataclasses.replace(sample, weights=weights, torch=arguments), cotangents, self.cast
            )
            for name, (_, array) in self.comparison.named("torch", run).items():
                if is_float(array):
                    one, two = wide(before[name][1]), wide(array)
                    ulps = 3.0 * float(np.nanmax(np.abs(one - two), initial=0.0)) / (eps * (scale_of([one]) or 1.0))
                    self.floors[name] = max(self.floors.get(name, 0.0), ulps if np.isfinite(ulps) else 0.0)
        self.comparison.notes.append(
            f"neither side has float64: judged by how far {ULP_SEEDS} perturbations of one ulp move the results"
        )

    def _decide(self) -> list[TensorVerdict]:
        found = []
        for name, (kind, flax_name, shape) in self.about.items():
            if name in self.exact:
                verdict: Verdict = "different" if self.exact[name] else "equal"
                found.append(TensorVerdict(name, flax_name, kind, shape, self.dtype, verdict, self.exact[name]))
                continue
            by_mode = []
            for mode in self.modes:
                decide_on = functools.partial(
                    decide,
                    name,
                    flax_name,
                    kind,
                    shape,
                    self.dtype,
                    mode=mode,
                    noise=self.floors.get(name, 0.0) + self._growth(kind),
                )
                one = decide_on(self.measures.get((name, mode), []))
                if one.verdict == "precision" and self.redrawn:
                    # Each side by what the other one loses when its operations round at random: where softmax
                    # saturates, one may be exact by luck of its roundings, and the other is not to blame then.
                    one = max(
                        (
                            decide_on(self._redrawn_of(other, name, mode), sides=(side,))
                            for side, other in (SIDES, SIDES[::-1])
                        ),
                        key=_badness,
                    )
                by_mode.append(one)
            found.append(max(by_mode, key=_badness))
        return found

    def _growth(self, kind: str) -> float:
        """Return what a parameter's gradient, which is a sum over the rows of the input, is allowed for being one."""
        if not kind.endswith(("matrix gradient", "vector gradient")):
            return 0.0
        rows = max((int(np.prod(leaf.shape[:-1])) for leaf in self.comparison.arguments.leaves if leaf.ndim), default=1)
        return sum_floor(self.dtype, rows)

    def _redrawn_of(self, side: Side, name: str, mode: str) -> list[Measure]:
        """Return the measures of a tensor, those of samples whose roundings were redrawn instead of the plain ones."""
        changed = self.redrawn.get(side, {}).get((name, mode), [])
        return changed + self.measures[name, mode][len(changed) :]

    def _redraw(self, plan: list[tuple[str, int, int, int]]) -> None:
        """Measure again what each side loses, with every operation of that side rounding at random."""
        comparison = self.comparison
        if not comparison.can_run:
            return
        for side in SIDES:
            for position, one in enumerate(plan):
                comparison.progress(f"redrawing the roundings of {side}", position, len(plan))
                sample = comparison.sample(*one)
                cotangents = numbers.cotangents(comparison.outputs, sample.seed, self.cast)
                plain = comparison.run(side, sample, cotangents, self.cast)
                self._redraw_side(side, position, sample, plain, set(self.about))

    def _redraw_side(self, side: Side, position: int, sample: Sample, plain: Run, names: set[str]) -> None:
        """Measure what one side loses in some tensors of one sample, with its operations rounding at random."""
        comparison = self.comparison
        cotangents = numbers.cotangents(comparison.outputs, sample.seed, self.cast)
        run = comparison.run(side, sample, cotangents, self.cast, "jitter", position)
        before, after = comparison.named(side, plain), comparison.named(side, run)
        redrawn = self.redrawn.setdefault(side, {})
        for key, measures in self.measures.items():
            name, _ = key
            if name in names:
                changed = redrawn.setdefault(key, measures[:position])
                one, two = wide(before[name][1]), wide(after[name][1])
                changed.append(with_error(measures[position], side, one, two, self.dtype))

    def _look_again(self, verdicts: list[TensorVerdict], seeds: int, first_seed: int) -> list[TensorVerdict]:
        """Judge precision again on fresh seeds, which alone decide; chance does not repeat."""
        comparison = self.comparison
        fresh = comparison.judgement(self.dtype, self.modes)
        fresh.floors, fresh.quick = dict(self.floors), self.quick
        many, copies = (AGAIN * seeds, COPIES) if self.quick else (4, 1)
        if comparison.large and comparison.can_run:
            many = 1  # every one of them has its roundings redrawn
        plan = [
            ("held" if n % 4 == 3 and comparison.transfer else "own", 2000 + n, copy, first_seed + 10_000 + n)
            for n in range(many)
            for copy in range(copies)
        ]
        for done, one in enumerate(plan):
            comparison.progress("looking again at what is in doubt", done, len(plan))
            if comparison.large:
                fresh._take_large(one)
            else:
                fresh.take(*one)
        self.count += fresh.count
        self.seeds += many
        decided = fresh._decide()
        if not comparison.large and any(one.verdict == "precision" for one in decided):
            fresh._redraw(plan)
            decided = fresh._decide()
        second = {one.name: one for one in decided}
        return [second[one.name] if one.verdict == "precision" else one for one in verdicts]


def _badness(one: TensorVerdict) -> tuple[int, float]:
    return SEVERITY.index(one.verdict), max(one.meaning_used or 0.0, one.torch_used or 0.0, one.flax_used or 0.0)
