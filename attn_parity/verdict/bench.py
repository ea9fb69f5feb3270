"""The measures of all samples taken so far in one precision, and the verdicts that they lead to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ..pair import SIDES, Pair
from ..results.findings import SEVERITY, Picture, Side, TensorVerdict, Verdict
from ..samples.sampling import Planned, Sample
from ..sides.dtypes import is_float
from ..sides.subject import Array, CannotPromoteError, Run
from . import notes
from .criterion import agree, allowed_meaning, decide, precision_used
from .measures import (
    FLASH_LIMIT,
    LITERAL_LIMIT,
    TABLE_LIMIT,
    Key,
    Measure,
    measure,
    scale_of,
    sum_floor,
    with_error,
    with_flash_loss,
    with_literal_error,
    with_table_error,
)
from .noise import Noise
from .notes import Reached
from .probes import Probing, moved_by
from .runner import Runner

PICTURE_SIZE = 1 << 18
"""Most elements of a tensor that are kept for pictures."""

HOPELESS = 30.0
"""Share of precision on one sample, other roundings counted, beyond which no further sample is asked."""

MAX_PICTURES = 64


@dataclasses.dataclass
class Taken:
    """The runs of one sample: low precision per side and mode, float64 per side that has it."""

    sample: Sample
    low: dict[tuple[Side, str], Run]
    exact: dict[Side, Run]


@dataclasses.dataclass
class Findings:
    """What is known about a pair in one precision.

    Attributes:
        verdicts: one per tensor.
        seeds: how many times numbers were drawn.
        samples: how many samples were taken.
        noise: variation -> relative difference.
        zero: parameters whose gradient is zero in every sample.
        pictures: tensors of the first sample.
        furthest: the sample on which the sides are furthest apart.
        held: outputs of each side on the pair's own weights, where a large pair was run on them.
        tables: part of the largest value that tables in float32 explain, where that was needed.
        notes: what a reader has to know.
        unreached: rows and columns of matrices that no gradient reached, in words.
        compared: names of the tensors that were compared.
        apart: side and name of a result -> how the copies of it that devices hold differ.
        mesh: how many devices each axis has that cuts a result.
        literals: largest difference, as a part of the largest value, that no float32 run can show and that was allowed.
        unseen: the sample that showed it.
    """

    verdicts: list[TensorVerdict]
    seeds: int
    samples: int
    noise: dict[str, float]
    zero: list[str]
    pictures: list[Picture]
    furthest: Sample | None
    held: dict[Side, list[Array]]
    tables: float
    notes: list[str]
    unreached: list[str]
    compared: frozenset[str]
    apart: dict[tuple[Side, str], str] = dataclasses.field(default_factory=dict)
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    literals: float = 0.0
    unseen: Sample | None = None


class Bench:
    """The measures of all samples taken so far in one precision."""

    def __init__(self, runner: Runner, dtype: str, modes: tuple[str, ...]):
        self.runner, self.dtype, self.modes = runner, dtype, modes
        self.pair: Pair = runner.pair
        self.noise = Noise()
        self.measures: dict[Key, list[Measure]] = {}
        self.planned: list[Planned] = []
        self.about: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self.exactly: dict[str, str] = {}
        self.probed: dict[Side, dict[Key, list[Measure]]] = {}
        self.pictures: list[Picture] = []
        self.held: dict[Side, list[Array]] = {}
        self.furthest: Sample | None = None
        self._furthest = -1.0
        self.count = 0
        self.drawn: set[int] = set()
        self.tables = 0.0
        self.flash = 0.0
        self.literals = 0.0
        self.unseen: Sample | None = None
        self.reached = Reached()
        self._probing = Probing(runner, dtype)
        self.notes: list[str] = []
        self.apart: dict[tuple[Side, str], str] = {}
        self.mesh: dict[str, int] = {}

    def findings(self, verdicts: list[TensorVerdict]) -> Findings:
        """Return what is known."""
        if self.tables:
            self.notes.append(
                "tables in float32 (constants, buffers, positions): what a few units of their last place do to the "
                f"float64 results is allowed, here up to {self.tables:.1g} of the largest value"
            )
        if self.flash:
            self.notes.append(notes.on_flash(self.flash))
        return Findings(
            verdicts,
            max(len(self.drawn), 1),
            self.count,
            self.noise.shown,
            self.zero,
            self.pictures,
            self.furthest,
            self.held,
            self.tables,
            [*self.noise.notes, *self.notes],
            [*self.reached.unreached(), *notes.on_flushed(self.measures, self.dtype)],
            frozenset(self.about),
            self.apart,
            self.mesh,
            self.literals,
            self.unseen,
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
        taken = self._run(sample)
        if self.pair.effort.large and sample.kind == "held":
            self.held = {side: taken.low[side, self.modes[0]].outputs for side in SIDES}
        for mode in self.modes:
            self._measure(taken, mode)
        self._note_copies(taken)
        self.planned.append(planned)
        self._allow_tables(taken)
        self._allow_literals(taken)
        self._allow_flash(taken)
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

    def _note_copies(self, taken: Taken) -> None:
        """Note where devices hold other copies of one result than others do."""
        runs = [(side, run) for (side, _), run in taken.low.items()] + list(taken.exact.items())
        for side, run in runs:
            self.mesh |= run.shares.sizes
            for line in run.shares.apart:
                what, _, how = line.partition(": ")
                self.apart.setdefault((side, what), how)

    def agrees(self, planned: Planned) -> bool:
        """Run one sample without float64, and say whether the sides are as close there as in the samples so far."""
        sample = self.runner.sample(planned)
        if sample is None:
            return True
        runs = {side: self.runner.run(side, sample, self.dtype, self.modes[0]) for side in SIDES}
        self.held = {side: run.outputs for side, run in runs.items()}
        tensors = self.pair.aligned(runs["first"], runs["second"])
        scales: dict[str, float] = {}
        for one in tensors.values():
            scales[one.kind] = max(scales.get(one.kind, 0.0), scale_of([one.first]))
        for name, one in tensors.items():
            known = self.measures.get((name, self.modes[0]), [])
            if not is_float(one.first) or not is_float(one.second):
                self._compare_exactly(name, one.first, one.second)
            elif not known or not agree(one.first, one.second, self.dtype, scales[one.kind], known):
                return False
        self.count += 1
        return True

    def _measure(self, taken: Taken, mode: str) -> None:
        pair, sample = self.pair, taken.sample
        low = pair.aligned(taken.low["first", mode], taken.low["second", mode])
        truths = {side: pair.named(side, run) for side, run in taken.exact.items()}
        scales: dict[str, float] = {}
        for named in truths.values() or [pair.named("first", taken.low["first", mode])]:
            for kind, array in named.values():
                scales[kind] = max(scales.get(kind, 0.0), scale_of([array]))
        for name, tensor in low.items():
            self.about[name] = (tensor.kind, tensor.second_name, tensor.first.shape)
            if not is_float(tensor.first) or not is_float(tensor.second):
                exact = {side: named[name][1] for side, named in truths.items()}
                self._compare_exactly(name, exact.get("first", tensor.first), exact.get("second", tensor.second))
                continue
            oracle, other = (truths[side][name][1] if side in truths else None for side in SIDES)
            found = measure(
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
            )
            self.measures.setdefault((name, mode), []).append(found)
            if tensor.kind.endswith("matrix gradient") and mode == self.modes[0]:
                self.reached.note(name, tensor.first if oracle is None else oracle)
            if not self.count and mode == self.modes[0]:
                self._keep_picture(name, tensor.first, tensor.second, oracle)

    def _keep_picture(self, name: str, first: Array, second: Array, oracle: Array | None) -> None:
        if first.size <= PICTURE_SIZE and len(self.pictures) < MAX_PICTURES:
            self.pictures.append(Picture(name, first, second, oracle))

    def _compare_exactly(self, name: str, first: Array, second: Array) -> None:
        differing = int((first != second).sum())
        if differing and not self.exactly.get(name):
            self.exactly[name] = f"{differing} of {first.size} elements are not the same"
        self.exactly.setdefault(name, "")

    def _remember(self, sample: Sample) -> None:
        """Remember the sample on which the sides are furthest apart."""
        for measures in self.measures.values():
            one = measures[-1]
            distance = max((one.meaning or 0.0) - one.given, 0.0) * 1e6 + max(one.first_max, one.second_max) * 1e-9
            if len(measures) == len(self.planned) and distance > self._furthest:
                self._furthest, self.furthest = distance, sample

    # ---- tables in float32

    def _allow_tables(self, taken: Taken) -> None:
        """Measure what tables in float32 explain of a difference in meaning that only they might explain."""
        doubted = self._beyond()
        worst = max((self.measures[key][-1].meaning or 0.0 for key in doubted), default=0.0)
        if not doubted or worst > TABLE_LIMIT or len(taken.exact) < len(SIDES):
            return
        moved = self._probing.table_moves(taken.sample)
        for name in {name for name, _ in doubted} & moved.keys():
            for mode in self.modes:
                measures = self.measures[name, mode]
                measures[-1] = with_table_error(measures[-1], moved[name])
                self.tables = max(self.tables, min(measures[-1].given, measures[-1].meaning or 0.0))

    def _beyond(self) -> dict[Key, float]:
        """Return by how much the float64 results of the last sample differ by more than they may."""
        last = {key: measures[-1] for key, measures in self.measures.items() if len(measures) == len(self.planned)}
        excess = {key: (one.meaning or 0.0) - allowed_meaning(one, self.dtype) for key, one in last.items()}
        return {key: beyond for key, beyond in excess.items() if beyond > 0.0}

    # ---- literals and branches that float32 can't tell from others

    def _allow_literals(self, taken: Taken) -> None:
        """Measure what literals of float32 accuracy and branches closer than float32 tells apart explain."""
        doubted = self._beyond()
        worst = max((self.measures[key][-1].meaning or 0.0 for key in doubted), default=0.0)
        is_seen = self.dtype == "float64" or worst > LITERAL_LIMIT
        if not doubted or is_seen or len(taken.exact) < len(SIDES) or self.pair.effort.large:
            return
        moves = self._probing.literal_moves(taken.sample)
        for key in [key for key in doubted if key[0] in moves]:
            allowed = with_literal_error(self.measures[key][-1], moves[key[0]])
            if (allowed.meaning or 0.0) <= allowed_meaning(allowed, self.dtype):
                self.measures[key][-1] = allowed
                self.literals = max(self.literals, allowed.meaning or 0.0)
                self.unseen = taken.sample

    # ---- fused attention

    def _allow_flash(self, taken: Taken) -> None:
        """Measure what the formula of fused attention explains of gradients that differ in meaning, and of no output.

        With softmax itself in place of the fused attention they have to agree as any others: what is allowed is allowed
        to the kernel alone.
        """
        doubted = self._beyond()
        if not doubted or max(doubted.values()) > FLASH_LIMIT or len(taken.exact) < len(SIDES):
            return
        if any(self.about[name][0] == "output" for name, _ in doubted):
            return
        unfused = self._probing.unfused(taken.sample)
        if not unfused:
            return
        plain = {side: self.pair.named(side, unfused.get(side, taken.exact[side])) for side in SIDES}
        lost = self._probing.flash_losses(taken.sample, unfused)
        for key in [key for key in doubted if key[0] in lost]:
            one = self.measures[key][-1]
            apart = moved_by(*(plain[side][key[0]][1] for side in SIDES)).largest
            if apart <= allowed_meaning(one, self.dtype) * one.meaning_scale:
                one = self.measures[key][-1] = with_flash_loss(one, lost[key[0]])
                if (one.meaning or 0.0) <= allowed_meaning(one, self.dtype):
                    self.flash = max(self.flash, one.meaning or 0.0)

    # ---- verdicts

    def verdicts(self) -> list[TensorVerdict]:
        """Return the verdict on every tensor."""
        found = []
        for name, (kind, second_name, shape) in self.about.items():
            if name in self.exactly:
                verdict: Verdict = "different" if self.exactly[name] else "equal"
                found.append(TensorVerdict(name, second_name, kind, shape, self.dtype, verdict, self.exactly[name]))
            else:
                found.append(max((self._decide(name, mode) for mode in self.modes), key=_badness))
        return found

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
        one: TensorVerdict = decided(self.measures.get((name, mode), []), sides=judged)
        if one.verdict != "precision" or not self.probed:
            return one
        # Each side by what the other one loses when its roundings are drawn again: where softmax saturates, one may be
        # exact by luck of its roundings, and the other is not to blame then.
        ways = ((side, other) for side, other in (SIDES, SIDES[::-1]) if side in judged)
        return max((decided(self._probed(other, name, mode), sides=(side,)) for side, other in ways), key=_badness)

    def _growth(self, kind: str) -> float:
        """Return what a parameter's gradient, which is a sum over the rows of the input, is allowed for being one."""
        if not kind.endswith(("matrix gradient", "vector gradient")):
            return 0.0
        leaves = self.pair.arguments["first"].leaves
        rows = max((int(np.prod(leaf.shape[:-1])) for leaf in leaves if leaf.ndim), default=1)
        return sum_floor(self.dtype, rows)

    def note(self, verdicts: Sequence[TensorVerdict]) -> None:
        """Note what a reader has to know of the measures beside the verdicts."""
        mode, kinds = self.modes[0], {name: kind for name, (kind, _, _) in self.about.items()}
        self.notes += notes.on_stress(self.measures, mode, verdicts, self.pair.labels)
        self.notes += notes.on_nonfinite(self.measures, mode)
        if "first" not in self.pair.judged:
            self.notes += notes.on_reference(verdicts, self.pair.shown)
        self.notes += notes.on_small(self.measures, mode, kinds)

    # ---- probes of precision

    def probe_doubted(self) -> list[TensorVerdict]:
        """Where precision is still in doubt, measure what other roundings would cost the side that is the measure.

        Returns what was in doubt.
        """
        doubted = [one for one in self.verdicts() if one.verdict == "precision"]
        names = {one.name for one in doubted}
        for measured, other in (SIDES, SIDES[::-1]):
            shares = [one.first_used if other == "first" else one.second_used for one in doubted]
            if max((share or 0.0 for share in shares), default=0.0) > 1.0:
                self._probe(measured, names)
        return doubted

    def _probe(self, side: Side, names: set[str]) -> None:
        """Raise the errors of one side to what it loses under other roundings, in every sample taken."""
        found: dict[Key, list[Measure]] = {}
        for position, planned in enumerate(self.planned):
            self.pair.progress(f"redrawing the roundings of {self.pair.shown[side]}", position, len(self.planned))
            sample = self.runner.sample(planned)
            assert sample is not None, "it was taken"
            probes = list(self._probing.roundings(side, sample, position))
            for (name, mode), measures in self.measures.items():
                if name in names:
                    one = measures[position]
                    for moved in [probe[name] for probe in probes if name in probe]:
                        one = with_error(one, side, moved.rms, moved.largest, self.dtype)
                    found.setdefault((name, mode), []).append(one)
            if not position and self._is_hopeless(side, found):
                break
        self.probed[side] = found

    def _is_hopeless(self, side: Side, found: Mapping[Key, Sequence[Measure]]) -> bool:
        """Tell whether the first sample says that other roundings of one side can't explain what the other loses."""
        accused = 1 if side == "first" else 0
        shares = [
            precision_used(measures, self.noise.floors.get(key[0], 0.0))[accused] for key, measures in found.items()
        ]
        return min(shares, default=0.0) > HOPELESS

    def _probed(self, side: Side, name: str, mode: str) -> list[Measure]:
        """Return the measures of a tensor with the errors of one side raised where that was probed."""
        probed = self.probed.get(side, {}).get((name, mode), [])
        return probed + self.measures[name, mode][len(probed) :]


def _badness(one: TensorVerdict) -> tuple[int, float]:
    return SEVERITY.index(one.verdict), max(one.meaning_used or 0.0, one.first_used or 0.0, one.second_used or 0.0)
