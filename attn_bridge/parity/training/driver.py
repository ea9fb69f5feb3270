"""Whether a torch and a Flax module train alike: loss, gradients, optimizer state and weights, step by step.

Two questions are asked. **Does a step mean the same?** Each step is taken again from the weights and the optimizer
state that the torch side has reached, and the Flax optimizer is given the torch side's gradients, so that no earlier
difference is charged to a later tensor; in float64 the results have to agree, and no side may lose more precision than
the other.
**Do they drift apart like rounding?** Both also run freely, in their own precision and in float64; the distance that
grows between them is held against what one unit in the last place of the first weights grows to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import backends
from ...weights import Rule, Rules
from ..compare.pair import Pair as ComparedPair
from ..compare.pair import Progress, few_threads
from ..compare.prepare import prepare
from ..compare.results.findings import Pair, Side, TensorVerdict, Verdict, worst
from ..compare.results.report import ParityError
from ..compare.samples import inputs as calls
from ..compare.samples.sampling import draw_weights
from ..compare.sides.dropout_masks import Masks, differences
from ..compare.sides.dtypes import is_float, numpy_dtype, unit_of, wide
from ..compare.sides.subject import Arguments, Array, Arrays, CannotPromoteError, ModuleFailedError
from ..compare.verdict.criterion import Measure, decide, measure, scale_of
from ..interrupts import orderly_interrupts
from ..settings.precision import record
from ..settings.precision import strict as pinned
from .stepping import Hyperparameters, State, Step

SIDE_OF: dict[str, Side] = {"torch": "first", "flax": "second"}
"""Framework -> the side of the pair that it is."""

OPTIMIZERS = ("sgd", "momentum", "adamw")
LOSSES = ("mse", "cross_entropy")

LOSS_LIMIT = 1e-9
"""Relative difference of two float64 losses that is allowed, whatever one unit in the last place grows to."""

DRIFT_FACTOR = 100.0
"""Free float64 runs may drift apart by this many times what one unit in the last place grows to."""

GROWTH_FACTOR = 30.0
"""A free run may drift from its own float64 run by this many times what the other side drifts, or one unit grows to."""

UPDATE_LIMIT = 1e-3
"""Part of the largest update that an optimizer may lose in low precision; optax computes ``1 - beta ** t`` in float32,
which is wrong by 3e-5 at the first step."""

UPDATE_ULPS = 4.0
"""The same for its weights and its state, in units of the last place: one for each term."""

NOISE_ULPS = 4.0
"""Allowed beyond the floor to loss and gradients: consecutive steps redraw few of their roundings."""

DTYPES = (None, "float64")


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """Where two trainings first differ.

    Attributes:
        step: number of the step, from 1.
        tensor: ``dropout NAME`` (of the submodule that drops), ``loss``, ``grad NAME``, ``statistic NAME``,
            ``mu NAME`` (or ``nu``, ``trace``), or ``update NAME``, with torch names; ``free run`` where every step
            alone is equal.
        flax_tensor: the same with the Flax name.
        message: what differs, in one line.
    """

    step: int
    tensor: str
    flax_tensor: str
    message: str

    def __str__(self) -> str:
        flax = "" if self.flax_tensor == self.tensor else f" (Flax: {self.flax_tensor})"
        return f"first difference at step {self.step} in {self.tensor}{flax}: {self.message}"


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """Result of `attn_bridge.parity.train`.

    Attributes:
        verdict: ``equal``, ``precision``, ``different`` or ``inconclusive``.
        first_difference: where the two first differ; None unless they do.
        tensors: one judgement per tensor over all steps, each taken again from the same numbers.
        losses: run -> loss per step: ``torch``, ``flax``, ``torch float64``, ``flax float64``, and ``torch moved`` and
            ``torch float64 moved``, which start one unit in the last place off.
        growth: pair of runs -> distance of their weights after each step, relative to the weights.
        synchronised: tensor kind -> largest difference per step between the sides that start from the same numbers,
            relative to the largest value of the kind, in float64.
        settings: how optimizers and dropout of the two sides were reconciled.
        notes: what a reader has to know.
        message: what is missing, when the verdict is inconclusive; where drift is to blame, what drifts.
        steps: how many steps were taken.
        dtype: precision of the two sides.
        pairing: which parameter is which.
        environment: versions, devices and precision switches.
        seconds: how long it took.
        torch_name: class of the torch module.
        flax_name: class of the Flax module.
    """

    verdict: Verdict
    first_difference: FirstDifference | None
    tensors: list[TensorVerdict]
    losses: dict[str, list[float]]
    growth: dict[str, list[float]]
    synchronised: dict[str, list[float]]
    settings: list[str]
    notes: list[str]
    message: str
    steps: int
    dtype: str
    pairing: list[Pair] = dataclasses.field(default_factory=list)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    torch_name: str = ""
    flax_name: str = ""

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``equal``."""
        return self.verdict == "equal"

    @property
    def failures(self) -> list[TensorVerdict]:
        """The tensors that are not equal."""
        return [one for one in self.tensors if one.verdict != "equal"]

    def summary(self) -> str:
        """Return the verdict and its extent in one line."""
        line = (
            f"{self.verdict}: {self.steps} steps of {self.torch_name} (torch) and {self.flax_name} (Flax) "
            f"in {self.dtype}, {self.seconds:.1f} s"
        )
        return f"{line}: {self.message}" if self.message else line

    def explain(self, most: int = 10) -> str:
        """Return the summary, the first difference, losses, growth and settings as text."""
        lines = [self.summary()]
        if self.first_difference is not None:
            lines.append(str(self.first_difference))
        lines += [f"  {one}" for one in self.failures[:most]]
        if len(self.failures) > most:
            lines.append(f"  and {len(self.failures) - most} more")
        for name, losses in self.losses.items():
            if losses:
                lines.append(f"  loss of {name}: {losses[0]:.9g} at step 1, {losses[-1]:.9g} at step {len(losses)}")
        for name, apart in self.growth.items():
            if apart:
                lines.append(f"  weights apart, {name}: {apart[0]:.2g} after step 1, {apart[-1]:.2g} at the end")
        lines += [f"  {one}" for one in [*self.settings, *self.notes]]
        return "\n".join(lines)

    def raise_for_mismatch(self) -> TrainingReport:
        """Return the report if the verdict is ``equal``.

        Raises:
            ParityError: (an AssertionError) with the explanation.
        """
        if not self.passed:
            raise ParityError(self)
        return self

    def __str__(self) -> str:
        return self.explain()

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the report as JSON-ready data, and write it to `path` if one is given; infinities become null."""
        from ..rendering.json import as_json

        return as_json(self, path)


def train(
    torch_module: Any,
    flax_module: Any,
    data: Iterable[tuple[Any, Any]],
    *,
    steps: int = 20,
    optimizer: str | tuple[Any, Any] = "adamw",
    dropout: bool | float = True,
    loss: str | tuple[Callable[..., Any], Callable[..., Any]] = "mse",
    lr: float = 1e-3,
    seed: int | None = None,
    dtype: str | None = None,
    rules: Rules | Iterable[Rule] | None = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> TrainingReport:
    """Train a torch and a Flax module on the same data with the same dropout masks, and judge whether they train alike.

    Both start from the weights that the torch module holds, or from those of a seed. The modules are left as they were.

    Args:
        torch_module: a ``torch.nn.Module``.
        flax_module: a ``flax.nnx.Module``.
        data: pairs of inputs (an array, a tuple of positional ones, a dict of keyword ones) and targets (an array);
            gone through again and again, each time in an order drawn from the seed.
        steps: how many.
        optimizer: ``sgd``, ``momentum``, ``adamw``, or a pair: a function that takes torch's named parameters and
            returns a ``torch.optim.Optimizer``, and an optax transformation of a dict of arrays by dotted name.
        dropout: True drops at the modules' own rates, with masks of one stream for both; a number sets the rate of
            every dropout layer; False drops nothing.
        loss: ``mse``, ``cross_entropy`` (the last axis holds logits, targets are whole numbers), or a pair of
            functions, torch's and JAX's, of what the module returned and the targets.
        lr: learning rate of a named optimizer.
        seed: of the first weights of both sides, the order of the data and the dropout masks; None leaves the weights
            to the torch module, and is 0 for the rest.
        dtype: ``float64`` trains both in float64; None in the modules' own precision.
        rules: which parameter is which; by default it is proposed from names, classes and shapes.
        strict: pin every precision switch for the time of the training.
        progress: called with what is done, how much of it, and how much there is.

    Returns:
        The report; ``report.raise_for_mismatch()`` raises unless the verdict is ``equal``.

    Raises:
        TypeError: not one module of each framework.
        ValueError: an argument is wrong, or the modules can't be run or paired.
    """
    started = time.perf_counter()
    _check_modules(torch_module, flax_module)
    batches = _batches(data, loss)
    _check(steps, optimizer, loss, lr, seed, dropout, dtype)
    with orderly_interrupts(), np.errstate(all="ignore"), pinned() if strict else contextlib.nullcontext():
        training = _Training(
            torch_module, flax_module, batches, steps, optimizer, dropout, loss, lr, seed, dtype, rules, progress
        )
        with few_threads(training.pair):
            report = training.run()
    return dataclasses.replace(report, seconds=time.perf_counter() - started)


@dataclasses.dataclass
class _Runner:
    """One free run: its trainer, weights and optimizer state as they are now."""

    trainer: Any
    side: str
    weights: Arrays
    state: State
    losses: list[float] = dataclasses.field(default_factory=list)

    def step(self, arguments: Arguments, targets: Any, masks: Masks) -> Step:
        """Take a step."""
        found: Step = self.trainer.gradients(self.weights, arguments, targets, masks)
        self.weights, self.state = self.trainer.update(
            {**self.weights, **found.statistics}, found.gradients, self.state
        )
        self.losses.append(float(wide(found.loss)))
        return found


class _Training:
    def __init__(
        self,
        torch_module: Any,
        flax_module: Any,
        batches: list[tuple[Any, Any]],
        steps: int,
        optimizer: str | tuple[Any, Any],
        dropout: bool | float,
        loss: Any,
        lr: float,
        seed: int | None,
        dtype: str | None,
        rules: Any,
        progress: Progress | None,
    ):
        self.pair: ComparedPair = prepare(torch_module, flax_module, batches[0][0], rules=rules)
        self.pairing = self.pair.pairing
        self.batches, self.steps, self.seed = batches, steps, seed or 0
        self.progress = progress or (lambda what, done, total: None)
        self.dtype = dtype or str(self.pair.dtype)
        self.precise = self.dtype == "float64"
        self.notes = self.pair.notes
        self.settings: list[str] = []
        self.first_weights = self.pair.held["first"]
        if seed is not None:
            parameters = self.pair.first.parameters()
            self.first_weights = draw_weights(parameters, self.first_weights, (seed, 0))
        self.settings.append(
            "first weights: those of the torch module" if seed is None else f"first weights: drawn from seed {seed}"
        )
        optimizers = self._optimizers(optimizer, lr)
        losses = (loss, loss) if isinstance(loss, str) else loss
        modules = (torch_module, flax_module)

        def trainers(wanted: str | None) -> list[Any]:
            return [
                backends.load(side, "_parity.training").Trainer(module, one, how, dtype=wanted, dropout=dropout)  # type: ignore[arg-type]
                for side, module, one, how in zip(("torch", "flax"), modules, losses, optimizers, strict=True)
            ]

        self.exact = trainers("float64")
        self.low = self.exact if self.precise else trainers(None)
        self.random = np.random.default_rng(self.seed)
        self.measures: dict[str, list[Measure]] = {}
        self.about: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self.weight_scales: dict[str, float] = {}
        self.synchronised: dict[str, list[float]] = {}
        self.first: FirstDifference | None = None
        self.dropped = dropout is not False
        self.foreign: str = ""
        self.unclear = ""

    def _optimizers(self, optimizer: str | tuple[Any, Any], lr: float) -> tuple[Any, Any]:
        if not isinstance(optimizer, str):
            self.settings.append("optimizers: the pair that was given, as they are")
            return optimizer
        values = Hyperparameters(lr)
        matches = self.pairing.matches
        ours = [match for match in matches if len(match.first.parameter.shape) > 1]
        names = ([match.first.source for match in ours], [match.second.source for match in ours])
        if optimizer == "adamw":
            b1, b2 = values.betas
            self.settings += [
                f"adamw: lr {lr:g}, betas {b1:g} and {b2:g}; eps {values.eps:g} outside the square root, added to the "
                "bias-corrected moment (torch's place; optax: eps, with eps_root=0)",
                f"weight decay {values.weight_decay:g}, decoupled, times lr (defaults: torch 0.01, optax 0.0001); only "
                f"parameters that have two or more axes in torch decay, {len(ours)} of {len(matches)} (both's default: "
                "all)",
                "bias correction by 1 - beta ** t on both sides; torch computes it in float64, optax in float32",
            ]
        elif optimizer == "momentum":
            self.settings.append(
                f"momentum: lr {lr:g}; buffer = {values.momentum:g} * buffer + gradient, step = lr * buffer "
                "(torch: dampening=0, nesterov=False; optax: trace); no weight decay"
            )
        else:
            self.settings.append(f"sgd: lr {lr:g}; no momentum, no weight decay")
        return (
            backends.load("torch", "_parity.training").optimizer(optimizer, values, names[0]),
            backends.load("flax", "_parity.training").optimizer(optimizer, values, names[1]),
        )

    # ---- running

    def run(self) -> TrainingReport:
        """Take all steps and return the report."""
        held = self.first_weights
        held = _cast(held, "float64") if self.precise else held
        runs = self.runs = self._runners(held)
        growth: dict[str, list[float]] = {}
        order: list[int] = []
        for step in range(self.steps):
            self.progress("training", step, self.steps)
            if not order:
                order = list(map(int, self.random.permutation(len(self.batches))))
            inputs, targets = self.batches[order.pop(0)]
            given = calls.in_dtype(calls.as_arguments(inputs), str(self.pair.dtype))
            if isinstance(targets, np.ndarray) and is_float(targets):
                targets = targets.astype(wide(targets).dtype if self.precise else numpy_dtype(self.dtype))
            try:
                self._step(step, given, targets)
            except CannotPromoteError as error:
                raise ModuleFailedError(str(error)) from error
            for one, two in self._pairs():
                apart = self._apart(runs[one], runs[two])
                growth.setdefault(f"{one} and {two}", []).append(apart)
        return self._report(growth)

    def _runners(self, held: Arrays) -> dict[str, _Runner]:
        def runner(trainer: Any, weights: Arrays) -> _Runner:
            side = trainer.framework
            if side == "flax":
                converted = self.pairing.to_second(weights)
                weights = {name: converted.get(name, one) for name, one in self.pair.held["second"].items()}
            weights = _cast(weights, trainer.precision) if trainer.precision else weights
            return _Runner(trainer, side, weights, trainer.first_state())

        found = {"torch": runner(self.low[0], held), "flax": runner(self.low[1], held)}
        found["torch moved"] = runner(self.low[0], _one_ulp(held, self.seed))
        if not self.precise:
            found["torch float64"] = runner(self.exact[0], held)
            found["flax float64"] = runner(self.exact[1], held)
            found["torch float64 moved"] = runner(self.exact[0], _one_ulp(_cast(held, "float64"), self.seed))
        return found

    def _pairs(self) -> list[tuple[str, str]]:
        found = [("torch", "flax"), ("torch", "torch moved")]
        if not self.precise:
            found += [("torch", "torch float64"), ("flax", "flax float64")]
            found += [("torch float64", "flax float64"), ("torch float64", "torch float64 moved")]
        return found

    def _step(self, step: int, given: Arguments, targets: Any) -> None:
        ours = self.runs["torch"]
        weights, state = ours.weights, ours.state
        masks = {name: Masks(self.seed, step) for name in self.runs}
        steps = {name: one.step(given, targets, masks[name]) for name, one in self.runs.items()}
        self.foreign = self.foreign or next((run.side for name, run in self.runs.items() if steps[name].foreign), "")
        apart = differences(masks["torch"].draws, masks["flax"].draws, ("torch", "Flax"))
        self.unclear = self.unclear or next((one.message for one in apart if one.verdict == "inconclusive"), "")
        worst_of = next((one for one in apart if one.verdict == "different"), None)
        if worst_of is not None and self.first is None:
            self.first = FirstDifference(step + 1, *worst_of.names(), message=worst_of.message)
        self._measure_step(step, weights, state, steps["torch"], given, targets)

    def _measure_step(
        self, step: int, weights: Arrays, state: State, torch: Step, given: Arguments, targets: Any
    ) -> None:
        """Take the step again from the torch side's numbers: first the gradients, then the update they make."""
        ours = self.runs["torch"]
        theirs = self._to_flax(weights)
        starts = {"torch": weights, "flax": theirs}
        runs: dict[tuple[str, bool], Step] = {("torch", False): torch}
        for trainer, precise in [(self.low[1], False), *((one, True) for one in self.exact)]:
            key = (trainer.framework, precise)
            if self.precise and precise:
                continue
            start = _cast(starts[key[0]], "float64") if precise else starts[key[0]]
            runs[key] = trainer.gradients(start, given, targets, Masks(self.seed, step))
        if self.precise:
            runs |= {(side, True): runs[side, False] for side in ("torch", "flax")}
        self._judge(step, {key: self._named(key[0], one) for key, one in runs.items()})

        # The update is made of the same gradients on both sides.
        gradients = {"torch": torch.gradients, "flax": self._gradients_to_flax(torch.gradients)}
        before = {"torch": {**weights, **torch.statistics}, "flax": theirs}
        slots = {name: self._gradients_to_flax(arrays) for name, arrays in state.slots.items()}
        updates = {("torch", False): (ours.weights, ours.state)}
        for trainer, precise in [(self.low[1], False), *((one, True) for one in self.exact)]:
            side = trainer.framework
            if self.precise and precise:
                continue
            mine = state if side == "torch" else State(slots, state.count)
            start, change = before[side], gradients[side]
            if precise:
                start, change = _cast(start, "float64"), _cast(change, "float64")
                mine = State({name: _cast(one, "float64") for name, one in mine.slots.items()}, mine.count, mine.own)
            updates[side, precise] = trainer.update(start, change, mine)
        if self.precise:
            updates |= {(side, True): updates[side, False] for side in ("torch", "flax")}
        self._judge(step, {key: self._named_update(key[0], before[key[0]], *one) for key, one in updates.items()})

    def _to_flax(self, weights: Arrays) -> Arrays:
        converted = self.pairing.to_second(weights)
        held = self.runs["flax"].weights
        return {name: converted.get(name, one) for name, one in held.items()}

    def _gradients_to_flax(self, arrays: Arrays) -> Arrays:
        """Convert what belongs to trainable parameters; frozen ones have none."""
        known = {match.first.source for match in self.pairing.matches}
        zeros = {name: np.zeros_like(one) for name, one in self.runs["torch"].weights.items() if name in known}
        found = self.pairing.to_second({**zeros, **arrays})
        trained = self.runs["flax"].trainer.trainable
        return {name: one for name, one in found.items() if name in trained}

    def _named(self, side: Any, step: Step) -> dict[str, tuple[str, Array]]:
        found = {"loss": ("loss", step.loss)}
        for name, one in self.pairing.aligned(step.gradients, SIDE_OF[side]).items():
            found[f"grad {name}"] = ("matrix gradient" if one.ndim > 1 else "vector gradient", one)
        for name, one in self.pairing.aligned(step.statistics, SIDE_OF[side]).items():
            found[f"statistic {name}"] = ("statistic", one)
        return found

    def _named_update(self, side: Any, before: Arrays, after: Arrays, state: State) -> dict[str, tuple[str, Array]]:
        found = {}
        for slot, arrays in sorted(state.slots.items()):
            for name, one in self.pairing.aligned(arrays, SIDE_OF[side]).items():
                found[f"{slot} {name}"] = (f"{slot}", one)
        old = self.pairing.aligned(before, SIDE_OF[side])
        for name, one in self.pairing.aligned(after, SIDE_OF[side]).items():
            if self.about.get(f"grad {name}"):
                found[f"update {name}"] = ("update", wide(one) - wide(old[name]))
                self.weight_scales[f"update {name}"] = scale_of([wide(one)])
        return found

    # ---- judging

    def _judge(self, step: int, runs: dict[tuple[str, bool], dict[str, tuple[str, Array]]]) -> None:
        flax_names = {match.first.name: match.second.name for match in self.pairing.matches}
        ours, theirs = runs["torch", False], runs["flax", False]
        exact = (runs["torch", True], runs["flax", True])
        scales: dict[str, float] = {}
        for kind, one in exact[0].values():
            scales[kind] = max(scales.get(kind, 0.0), scale_of([wide(one)]))
        largest: dict[str, float] = {}
        for name, (kind, one) in ours.items():
            if any(name not in found for found in (theirs, *exact)):
                continue
            updated = kind not in ("loss", "matrix gradient", "vector gradient", "statistic")
            found = measure(
                one,
                theirs[name][1],
                exact[0][name][1],
                exact[1][name][1],
                # An update is judged by its own size: a bias that decays moves little.
                kind_scale=0.0 if updated else scales[kind],
                dtype=self.dtype,
                group=step,
                weights="held",
                sample=step,
            )
            what, _, of = name.partition(" ")
            flax_name = f"{what} {flax_names.get(of, of)}".strip()
            self.about.setdefault(name, (kind, flax_name, one.shape))
            self.measures.setdefault(name, []).append(found)
            largest[kind] = max(largest.get(kind, 0.0), found.meaning or 0.0)
            if self.first is None:
                verdict = self._decide(name, [found], updated)
                if verdict.verdict == "different":
                    self.first = FirstDifference(step + 1, name, flax_name, verdict.message)
        missing = sorted(ours.keys() ^ theirs.keys())
        if missing and step == 0:
            self.notes.append(f"held by one side only, not compared: {_listed(missing)}")
        for kind, value in largest.items():
            self.synchronised.setdefault(kind, []).append(value)

    def _decide(self, name: str, measures: Sequence[Measure], updated: bool) -> TensorVerdict:
        kind, flax_name, shape = self.about[name]
        eps = unit_of(self.dtype)
        noise = NOISE_ULPS
        if updated and not self.precise:
            # An update is the difference of two rounded weights: it can't be finer than these.
            weights = self.weight_scales.get(name, 0.0)
            noise = max(UPDATE_LIMIT / eps, *(UPDATE_ULPS * weights / one.scale for one in measures if one.scale), 0.0)
        return decide(name, flax_name, kind, shape, self.dtype, measures, noise=noise)

    def _apart(self, one: _Runner, two: _Runner) -> float:
        """Return the distance of the weights of two runs, relative to the weights."""
        first, second = (self.pairing.aligned(run.weights, SIDE_OF[run.side]) for run in (one, two))
        square = sum(float(np.square(wide(first[name]) - wide(second[name])).sum()) for name in first)
        whole = sum(float(np.square(wide(array)).sum()) for array in first.values())
        return math.sqrt(square / whole) if whole and math.isfinite(square / whole) else math.inf if square else 0.0

    def _drift(self, growth: dict[str, list[float]]) -> tuple[Verdict, int, str]:
        """Judge the free runs: verdict, number of the step, and what drifts."""
        one, two = ("torch", "flax") if self.precise else ("torch float64", "flax float64")
        moved = f"{one} moved"
        apart, noise = growth[f"{one} and {two}"], np.maximum.accumulate(growth[f"{one} and {moved}"])
        losses = [np.array(self.runs[name].losses) for name in (one, two, moved)]
        relative = _relative(losses[0], losses[1])
        of_noise = np.maximum.accumulate(_relative(losses[0], losses[2]))
        for step in range(self.steps):
            if not relative[step] <= max(LOSS_LIMIT, DRIFT_FACTOR * of_noise[step]):
                message = (
                    f"the float64 losses of free runs differ by {relative[step]:.2g}, one unit in the last place of "
                    f"the first weights makes {of_noise[step]:.2g}"
                )
                return "different", step + 1, message
            if not apart[step] <= DRIFT_FACTOR * max(noise[step], np.finfo(np.float64).eps):
                message = (
                    f"the float64 weights of free runs are {apart[step]:.2g} apart, one unit in the last place of the "
                    f"first weights makes {noise[step]:.2g}"
                )
                return "different", step + 1, message
        if self.precise:
            return "equal", 0, ""
        eps = unit_of(self.dtype)
        drifts = {side: np.array(growth[f"{side} and {side} float64"]) for side in ("torch", "flax")}
        common = np.maximum.accumulate(growth["torch and torch moved"])
        for side, other in (("torch", "flax"), ("flax", "torch")):
            allowed = GROWTH_FACTOR * np.maximum(np.maximum.accumulate(np.maximum(drifts[other], common)), eps)
            beyond = ~(drifts[side] <= allowed)
            if beyond.any():
                step = int(np.argmax(beyond))
                return (
                    "precision",
                    step + 1,
                    f"from step {step + 1} on {side} drifts from its float64 run by {drifts[side][step]:.2g}, "
                    f"{GROWTH_FACTOR:g} times the drift of the other side or of one unit in the last place is "
                    f"{allowed[step]:.2g}",
                )
        return "equal", 0, ""

    def _report(self, growth: dict[str, list[float]]) -> TrainingReport:
        tensors = [
            self._decide(name, found, self.about[name][0] in ("mu", "nu", "trace", "update"))
            for name, found in self.measures.items()
        ]
        drift, at, message = self._drift(growth)
        verdict = worst([drift, *(one.verdict for one in tensors)])
        if self.first is not None:
            verdict, message = "different", ""
        elif drift == "different":
            self.first, message = FirstDifference(at, "free run", "free run", message), ""
        if self.foreign and verdict != "equal":
            verdict, self.first = "inconclusive", None
            message = (
                f"the {self.foreign} module draws random numbers that are no dropout masks, so the sides can't be "
                "compared"
            )
        elif self.unclear and verdict != "equal":
            verdict, self.first, message = "inconclusive", None, self.unclear
        ours = self.runs["torch"].losses
        if verdict == "equal" and not all(map(math.isfinite, ours)):
            verdict, message = "inconclusive", f"the losses are not finite from step {_not_finite(ours)} on"
        if self.dropped:
            self.settings.append(
                "dropout: masks of both sides from one threefry stream, those of one shape in the order of the calls; "
                "an element is kept if a uniform draw is below 1 - rate"
            )
        return TrainingReport(
            verdict=verdict,
            first_difference=self.first,
            tensors=tensors,
            losses={name: run.losses for name, run in self.runs.items()},
            growth=growth,
            synchronised=self.synchronised,
            settings=self.settings,
            notes=self.notes,
            message=message,
            steps=self.steps,
            dtype=self.dtype,
            pairing=self.pairing.rows(),
            environment=record(),
            torch_name=self.pair.first.name,
            flax_name=self.pair.second.name,
        )


# ---- helpers


def _check(steps: Any, optimizer: Any, loss: Any, lr: Any, seed: Any, dropout: Any, dtype: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps ({steps}) must be a whole number of at least 1")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed ({seed}) must be a whole number of at least 0")
    for what, value, known in (("optimizer", optimizer, OPTIMIZERS), ("loss", loss, LOSSES)):
        if isinstance(value, str) and value not in known:
            raise ValueError(f"{what} ({value}) must be one of {', '.join(known)}, or a pair: torch's, JAX's")
        if not isinstance(value, str) and not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(f"{what} must be a name or a pair: torch's, JAX's; got {type(value).__name__}")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0.0 < lr < math.inf:
        raise ValueError(f"lr ({lr}) must be a positive number")
    if not isinstance(dropout, bool) and not (isinstance(dropout, (int, float)) and 0.0 <= dropout < 1.0):
        raise ValueError(f"dropout ({dropout}) must be True, False or a rate of at least 0 and below 1")
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype}) must be float64 or None")


def _check_modules(torch_module: Any, flax_module: Any) -> None:
    """Refuse what is not one module of each framework."""
    for module, wanted, what in ((torch_module, "torch", "torch.nn.Module"), (flax_module, "flax", "flax.nnx.Module")):
        if backends.framework_of(module) != wanted or isinstance(module, tuple):
            position = "first" if wanted == "torch" else "second"
            raise TypeError(f"train takes a {what} as its {position} argument, got {type(module).__name__}")


def _batches(data: Any, loss: Any) -> list[tuple[Any, Any]]:
    found = []
    for one in data:
        if not isinstance(one, (tuple, list)) or len(one) != 2:
            raise ValueError(f"data must hold pairs of inputs and targets, got {type(one).__name__}")
        targets = calls.to_numpy(one[1])
        if loss == "cross_entropy" and (targets.dtype.kind not in "iu" or int(targets.min(initial=0)) < 0):
            raise ValueError("targets of cross_entropy must be whole numbers of at least 0")
        found.append((one[0], targets))
    if not found:
        raise ValueError("data must hold at least one pair of inputs and targets")
    return found


def _cast(arrays: Mapping[str, Array], dtype: str) -> Arrays:
    return {name: one.astype(numpy_dtype(dtype)) if is_float(one) else one for name, one in arrays.items()}


def _one_ulp(arrays: Mapping[str, Array], seed: int) -> Arrays:
    """Return the weights moved by one unit in the last place, up or down at random."""
    random = np.random.default_rng((seed, 1))
    found = {}
    for name, one in arrays.items():
        found[name] = one
        if is_float(one):
            eps = unit_of(one.dtype.name)
            sign = random.integers(0, 2, one.shape) * 2 - 1
            found[name] = (wide(one) * (1.0 + eps * sign)).astype(one.dtype)
    return found


def _relative(one: Array, two: Array) -> Array:
    scale = np.maximum(np.abs(one), np.finfo(np.float64).tiny)
    apart: Array = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0.0, np.abs(one - two) / scale)
    return apart


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _not_finite(losses: Sequence[float]) -> int:
    return next(i + 1 for i, one in enumerate(losses) if not math.isfinite(one))
