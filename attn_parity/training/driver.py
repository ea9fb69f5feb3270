"""Compare the training of a torch and a Flax module: loss, gradients, optimizer state and weights, step by step.

Two questions are asked. **Does a step mean the same?** Each step is taken again from the weights and the optimizer
state that the torch side has reached, and the Flax optimizer is given the torch side's gradients, so that no earlier
difference is charged to a later tensor; in float64 the results have to agree, and no side may lose more precision than
the other.
**Do they drift apart like rounding?** Both also run freely, in their own precision and in float64; the distance that
grows between them is compared with the growth of one unit in the last place of the first weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_bridge import whole_files as files
from attn_bridge.backends import FRAMEWORKS
from attn_bridge.weights import Rule, Rules

from ..compare.prepare import prepare
from ..hints import of_statistic
from ..interrupts import orderly_interrupts
from ..matching.submodule_pairs import differing_settings
from ..pair import SIDES, Pair, Progress, few_threads
from ..results.findings import shown, worst
from ..samples import calls
from ..settings.precision import record
from ..settings.precision import strict as pinned
from ..sides.arrays import is_float, numpy_dtype, wide
from ..sides.dropout_masks import Masks, differences
from ..sides.subject import Arguments, Arrays, CannotPromoteError, ModuleFailedError, load_adapter
from . import arguments, free_runs
from .free_runs import cast
from .judging import Judge
from .live import LivePage
from .optimizers import optimizers_of
from .report import FirstDifference, TrainingReport
from .stepping import SIDE_OF, State, Step


def train(
    torch_module: object,
    flax_module: object,
    data: Iterable[tuple[object, object]],
    *,
    steps: int = 20,
    optimizer: str | tuple[object, object] = "adamw",
    dropout: bool | float = True,
    loss: str | tuple[Callable[..., object], Callable[..., object]] = "mse",
    lr: float = 1e-3,
    seed: int | None = None,
    dtype: str | None = None,
    rules: Rules | Iterable[Rule] | None = None,
    strict: bool = True,
    progress: Progress | None = None,
    html: str | Path | None = None,
) -> TrainingReport:
    """Train a torch and a Flax module on the same data with the same dropout masks, and judge whether they train alike.

    Both start from the torch module's weights, or from those of a seed. The modules are left as they were.

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
            functions, torch's and JAX's, of the module's output and the targets.
        lr: learning rate of a named optimizer.
        seed: of the first weights of both sides, the order of the data and the dropout masks; None leaves the weights
            to the torch module, and is 0 for the rest.
        dtype: ``float64`` trains both in float64; None in the modules' own precision.
        rules: pairing of the parameters; by default proposed from names, classes and shapes.
        strict: pin every precision switch for the time of the training.
        progress: callback with the current stage, the work done and the total.
        html: file for a page that shows losses and the difference of each tensor; it is rewritten during training
            and reloads in a browser. The last version is the report's.

    Returns:
        The report; ``report.raise_for_mismatch()`` raises unless the verdict is ``equal``.

    Raises:
        TypeError: not one module of each framework.
        ValueError: an argument is wrong, the modules cannot be run or paired, or the page cannot be written.
    """
    started = time.perf_counter()
    live = LivePage(files.checked(html))
    arguments.check_modules(torch_module, flax_module)
    batches = arguments.batches_of(data, loss)
    arguments.check(steps, optimizer, loss, lr, seed, dropout, dtype)
    lr = float(lr)  # a number of NumPy would be promoted in one way by torch and in another by JAX
    with orderly_interrupts(), np.errstate(all="ignore"), pinned() if strict else contextlib.nullcontext():
        training = _Training(
            torch_module, flax_module, batches, steps, optimizer, dropout, loss, lr, seed, dtype, rules, progress, live
        )
        with few_threads(training.pair):
            report = training.run()
    report = dataclasses.replace(report, seconds=time.perf_counter() - started)
    live.end(report)
    return report


class _Training:
    def __init__(
        self,
        torch_module: object,
        flax_module: object,
        batches: list[tuple[object, object]],
        steps: int,
        optimizer: str | tuple[Any, Any],
        dropout: bool | float,
        loss: Any,
        lr: float,
        seed: int | None,
        dtype: str | None,
        rules: Any,
        progress: Progress | None,
        live: LivePage,
    ):
        self.pair: Pair = prepare(torch_module, flax_module, batches[0][0], rules=rules)
        self.pairing = self.pair.pairing
        self.batches, self.steps, self.seed = batches, steps, seed or 0
        self.progress = progress or (lambda what, done, total: None)
        self.dtype = dtype or str(self.pair.dtype)
        self.precise = self.dtype == "float64"
        self.settings: list[str] = []
        self.first_weights = self.pair.own_weights["first"]
        if seed is not None:
            self.first_weights = self.pair.draw((seed, 0))
        self.settings.append(
            "first weights: those of the torch module" if seed is None else f"first weights: drawn from seed {seed}"
        )
        optimizers, settings = optimizers_of(optimizer, lr, self.pairing.matches)
        self.settings += settings
        losses = (loss, loss) if isinstance(loss, str) else loss
        modules = (torch_module, flax_module)
        carried = [self.pair.subject(side).state().keys() & self.pair.own_weights[side].keys() for side in SIDES]

        def trainers(wanted: str | None) -> list[Any]:
            settings: dict[str, object] = {"dtype": wanted, "dropout": dropout}
            return [
                load_adapter(side, "training").Trainer(module, one, how, carried=names, **settings)
                for side, module, one, how, names in zip(FRAMEWORKS, modules, losses, optimizers, carried, strict=True)
            ]

        self.exact = trainers("float64")
        self.low = self.exact if self.precise else trainers(None)
        self.random = np.random.default_rng(self.seed)
        self.judge = Judge(self.pairing, self.dtype, [*self.pair.notes, *differing_settings(self.pair)])
        if isinstance(optimizer, str):  # an optimizer of the user may leave out what the other side does not train
            self.judge.first = self._trained_once()
        self.dropped = dropout is not False
        self.foreign = ""
        self.unclear = ""
        self.live = live

    def _trained_once(self) -> FirstDifference | None:
        """Return the first weight that one side trains and the other does not."""
        first, second = (one.trainable for one in self.low)
        for match in self.pairing.matches:
            is_first, is_second = match.first.source in first, match.second.source in second
            if is_first != is_second:
                trained, other = ("torch", "Flax") if is_first else ("Flax", "torch")
                names = f"grad {match.first.name}", f"grad {match.second.name}"
                return FirstDifference(1, *names, f"{trained} trains it and {other} does not")
        return None

    # ---- running

    def run(self) -> TrainingReport:
        """Take all steps and return the report."""
        weights = self.first_weights
        weights = cast(weights, "float64") if self.precise else weights
        runs = self.runs = free_runs.start(self.pair, self.low, self.exact, weights, self.seed)
        growth: dict[str, list[float]] = {}
        order: list[int] = []
        for step in range(self.steps):
            self.progress("training", step, self.steps)
            if not order:
                order = list(map(int, self.random.permutation(len(self.batches))))
            inputs, targets = self.batches[order.pop(0)]
            arguments = calls.in_dtype(calls.as_arguments(inputs), str(self.pair.dtype))
            if isinstance(targets, np.ndarray) and is_float(targets):
                targets = targets.astype(wide(targets).dtype if self.precise else numpy_dtype(self.dtype))
            try:
                self._step(step, arguments, targets)
            except CannotPromoteError as error:
                raise ModuleFailedError(str(error)) from error
            for run, other_run in free_runs.pairs_of(runs):
                apart = free_runs.distance(self.pairing, runs[run], runs[other_run])
                growth.setdefault(f"{run} and {other_run}", []).append(apart)
            self.live.show(lambda: self._so_far(growth))
        return self._report(growth)

    def _step(self, step: int, arguments: Arguments, targets: object) -> None:
        ours = self.runs["torch"]
        weights, state = ours.weights, ours.state
        masks = {name: Masks(self.seed, step) for name in self.runs}
        steps = {name: one.step(arguments, targets, masks[name]) for name, one in self.runs.items()}
        self.foreign = self.foreign or next((run.side for name, run in self.runs.items() if steps[name].foreign), "")
        apart = differences(masks["torch"].draws, masks["flax"].draws, ("torch", "Flax"))
        self.unclear = self.unclear or next((one.message for one in apart if one.verdict == "inconclusive"), "")
        worst_of = next((one for one in apart if one.verdict == "different"), None)
        if worst_of is not None and self.judge.first is None:
            self.judge.first = FirstDifference(step + 1, *worst_of.names(), message=worst_of.message)
        self._measure_step(step, weights, state, steps["torch"], arguments, targets)

    def _measure_step(
        self, step: int, weights: Arrays, state: State, torch: Step, arguments: Arguments, targets: object
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
            start = cast(starts[key[0]], "float64") if precise else starts[key[0]]
            runs[key] = trainer.gradients(start, arguments, targets, Masks(self.seed, step))
        if self.precise:
            runs |= {(side, True): runs[side, False] for side in ("torch", "flax")}
        first_difference = self.judge.first
        self.judge.gradients(step, runs)
        if first_difference is None and self.judge.first is not None:
            self.judge.first = self._explained(self.judge.first, weights, runs, arguments)

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
                start, change = cast(start, "float64"), cast(change, "float64")
                mine = State({name: cast(one, "float64") for name, one in mine.slots.items()}, mine.count, mine.own)
            updates[side, precise] = trainer.update(start, change, mine)
        if self.precise:
            updates |= {(side, True): updates[side, False] for side in ("torch", "flax")}
        self.judge.update(step, before, updates)

    def _explained(
        self, first: FirstDifference, before: Arrays, runs: Mapping[tuple[str, bool], Step], arguments: Arguments
    ) -> FirstDifference:
        """Return a first difference; for a running statistic, with a cause that its numbers are consistent with."""
        kind, _, name = first.tensor.partition(" ")
        if kind != "statistic":
            return first
        old = self.pairing.aligned(cast(before, "float64"), "first")
        new = [self.pairing.aligned(runs[side, True].statistics, SIDE_OF[side]) for side in ("torch", "flax")]
        rows = max((len(leaf) for leaf in arguments.leaves if leaf.ndim), default=1)
        hint = of_statistic(name, old[name], new[0][name], new[1][name], rows) if name in old else ""
        return dataclasses.replace(first, message=f"{first.message}; {hint}") if hint else first

    def _to_flax(self, weights: Arrays) -> Arrays:
        converted = self.pairing.to_second(weights)
        flax_weights = self.runs["flax"].weights
        return {name: converted.get(name, one) for name, one in flax_weights.items()}

    def _gradients_to_flax(self, arrays: Arrays) -> Arrays:
        """Convert what belongs to trainable parameters; frozen ones have none."""
        sources = {match.first.source for match in self.pairing.matches}
        zeros = {name: np.zeros_like(one) for name, one in self.runs["torch"].weights.items() if name in sources}
        gradients = self.pairing.to_second({**zeros, **arrays})
        trained = self.runs["flax"].trainer.trainable
        return {name: one for name, one in gradients.items() if name in trained}

    def _so_far(self, growth: dict[str, list[float]]) -> TrainingReport:
        """Return an intermediate report, with the verdict ``inconclusive`` because the training is not finished."""
        return TrainingReport(
            verdict="inconclusive",
            first_difference=self.judge.first,
            tensors=[],
            losses={name: run.losses for name, run in self.runs.items()},
            growth=growth,
            synchronised=self.judge.synchronised,
            settings=self.settings,
            notes=self.judge.notes,
            message="",
            steps=self.steps,
            dtype=self.dtype,
            divergence=self.judge.divergence,
            torch_name=self.pair.first.name,
            flax_name=self.pair.second.name,
        )

    def _report(self, growth: dict[str, list[float]]) -> TrainingReport:
        tensors, first = self.judge.verdicts(), self.judge.first
        losses = {name: run.losses for name, run in self.runs.items()}
        drift, at, message = free_runs.drift(losses, growth, self.dtype)
        verdict = worst([drift, *(one.verdict for one in tensors)])
        if first is not None:
            verdict, message = "different", ""
        elif drift == "different":
            first, message = FirstDifference(at, "free run", "free run", message), ""
        if self.foreign and verdict != "equal":
            verdict, first = "inconclusive", None
            message = (
                f"the {shown(self.foreign)} module draws random numbers that are no dropout masks, so the sides "
                "can't be compared"
            )
        elif self.unclear and verdict != "equal":
            verdict, first, message = "inconclusive", None, self.unclear
        not_finite = next((i + 1 for i, loss in enumerate(losses["torch"]) if not math.isfinite(loss)), 0)
        if verdict == "equal" and not_finite:
            verdict, message = "inconclusive", f"the losses are not finite from step {not_finite} on"
        if self.dropped:
            self.settings.append(
                "dropout: masks of both sides from one threefry stream, those of one shape in the order of the calls; "
                "an element is kept if a uniform draw is below 1 - rate"
            )
        return dataclasses.replace(
            self._so_far(growth),
            verdict=verdict,
            first_difference=first,
            tensors=tensors,
            message=message,
            pairing=self.pairing.rows(),
            environment=record(),
        )
