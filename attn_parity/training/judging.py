"""The judgement of single steps: both sides take each from the same numbers, and have to come to the same result.

In float64 the results have to agree, and no side may lose more precision than the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attn_bridge.printable import listed

from ..pairing import Pairing
from ..results.findings import TensorVerdict
from ..sides.arrays import is_float, unit_of, wide
from ..sides.subject import Array, Arrays
from ..verdict.criterion import decide
from ..verdict.measures import Measure, measure, scale_of
from .report import FirstDifference
from .stepping import SIDE_OF, State, Step

Key = tuple[str, bool]
"""Framework, and whether it ran in float64."""

FROM_WEIGHTS = ("loss", "matrix gradient", "vector gradient", "statistic")
"""The kinds of tensors that a batch and the weights make; every other kind is made by the optimizer."""

UPDATE_LIMIT = 1e-3
"""Part of the largest update that an optimizer may lose in low precision; optax computes ``1 - beta ** t`` in float32,
which is wrong by 3e-5 at the first step."""

UPDATE_ULPS = 4.0
"""The same for its weights and its state, in units of the last place: one for each term."""

NOISE_ULPS = 4.0
"""Allowed beyond the floor to loss and gradients: consecutive steps redraw few of their roundings."""


class Judge:
    """The measures of all steps so far, and the first difference that they show.

    Attributes:
        first: the first difference; None as long as the two agree.
        synchronised: tensor kind -> largest difference per step; see `TrainingReport`.
        notes: remarks for the reader of the report.
    """

    def __init__(self, pairing: Pairing, dtype: str, notes: list[str]):
        self.pairing, self.dtype, self.notes = pairing, dtype, notes
        self.first: FirstDifference | None = None
        self.synchronised: dict[str, list[float]] = {}
        self._measures: dict[str, list[Measure]] = {}
        self._about: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self._weight_scales: dict[str, float] = {}

    def gradients(self, step: int, runs: Mapping[Key, Step]) -> None:
        """Judge loss, gradients and state that is not trained, all from the same weights and masks."""
        self._judge(step, {key: self._named(key[0], one) for key, one in runs.items()})

    def update(self, step: int, before: Mapping[str, Arrays], runs: Mapping[Key, tuple[Arrays, State]]) -> None:
        """Judge weights and optimizer state after an update, all made of the same gradients from the weights before."""
        self._judge(step, {key: self._named_update(key[0], before[key[0]], *one) for key, one in runs.items()})

    @property
    def divergence(self) -> dict[str, list[float]]:
        """Tensor -> difference per step; see `TrainingReport`."""
        return {name: [one.meaning or 0.0 for one in found] for name, found in self._measures.items()}

    def verdicts(self) -> list[TensorVerdict]:
        """Return the verdict on every tensor over all steps."""
        return [self._decide(name, found) for name, found in self._measures.items()]

    def _named(self, side: str, step: Step) -> dict[str, tuple[str, Array]]:
        named = {"loss": ("loss", step.loss)}
        for name, array in self.pairing.aligned(step.gradients, SIDE_OF[side]).items():
            named[f"grad {name}"] = ("matrix gradient" if array.ndim > 1 else "vector gradient", array)
        for name, array in self.pairing.aligned(step.statistics, SIDE_OF[side]).items():
            named[f"statistic {name}"] = ("statistic", array if is_float(array) else array.astype(np.float64))
        return named

    def _named_update(self, side: str, before: Arrays, after: Arrays, state: State) -> dict[str, tuple[str, Array]]:
        named = {}
        for slot, arrays in sorted(state.slots.items()):
            for name, array in self.pairing.aligned(arrays, SIDE_OF[side]).items():
                named[f"{slot} {name}"] = (f"{slot}", array)
        old = self.pairing.aligned(before, SIDE_OF[side])
        for name, array in self.pairing.aligned(after, SIDE_OF[side]).items():
            if self._about.get(f"grad {name}"):
                named[f"update {name}"] = ("update", wide(array) - wide(old[name]))
                self._weight_scales[f"update {name}"] = scale_of([wide(array)])
        return named

    def _judge(self, step: int, runs: Mapping[Key, Mapping[str, tuple[str, Array]]]) -> None:
        flax_names = {match.first.name: match.second.name for match in self.pairing.matches}
        ours, theirs = runs["torch", False], runs["flax", False]
        exact = (runs["torch", True], runs["flax", True])
        scales: dict[str, float] = {}
        for kind, array in exact[0].values():
            scales[kind] = max(scales.get(kind, 0.0), scale_of([wide(array)]))
        largest: dict[str, float] = {}
        for name, (kind, array) in ours.items():
            if any(name not in found for found in (theirs, *exact)):
                continue
            measured = measure(
                array,
                theirs[name][1],
                exact[0][name][1],
                exact[1][name][1],
                # An update is judged by its own size: a bias that decays moves little.
                kind_scale=scales[kind] if kind in FROM_WEIGHTS else 0.0,
                dtype=self.dtype,
                group=step,
                weights="held",
                sample=step,
            )
            what, _, of = name.partition(" ")
            flax_name = f"{what} {flax_names.get(of, of)}".strip()
            self._about.setdefault(name, (kind, flax_name, array.shape))
            self._measures.setdefault(name, []).append(measured)
            largest[kind] = max(largest.get(kind, 0.0), measured.meaning or 0.0)
            if self.first is None:
                verdict = self._decide(name, [measured])
                if verdict.verdict == "different":
                    self.first = FirstDifference(step + 1, name, flax_name, verdict.message)
        missing = sorted(ours.keys() ^ theirs.keys())
        if missing and step == 0:
            self.notes.append(f"held by one side only, not compared: {listed(missing, 5)}")
        for kind, value in largest.items():
            self.synchronised.setdefault(kind, []).append(value)

    def _decide(self, name: str, measures: Sequence[Measure]) -> TensorVerdict:
        kind, flax_name, shape = self._about[name]
        eps = unit_of(self.dtype)
        noise = NOISE_ULPS
        if kind not in FROM_WEIGHTS and self.dtype != "float64":
            # An update is the difference of two rounded weights: it can't be finer than these.
            weights = self._weight_scales.get(name, 0.0)
            noise = max(UPDATE_LIMIT / eps, *(UPDATE_ULPS * weights / one.scale for one in measures if one.scale), 0.0)
        return decide(name, flax_name, kind, shape, self.dtype, measures, noise=noise)
