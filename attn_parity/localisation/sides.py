"""The interface of localisation to a pair: two subjects, their weights and inputs on a sample, and how to run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..pair import SIDES, Pair
from ..pairing import Pairing
from ..results.findings import Side, shown
from ..samples.sampling import Sample
from ..sides.arrays import is_float, is_large
from ..sides.subject import (
    Arguments,
    Array,
    Arrays,
    Call,
    CannotPromoteError,
    ModuleFailedError,
    Run,
    Subject,
    Substitute,
)

FAILURES = (CannotPromoteError, ModuleFailedError)
"""Errors of a subject whose submodule cannot run alone."""


@dataclasses.dataclass(frozen=True)
class Sides:
    """Two subjects, paired, and one sample of numbers.

    Attributes:
        subjects: side -> subject or dump, with ``modules()`` and ``settings()``; live ones also have ``run()`` and
        ``substituted()``.
        pairing: the paired parameters.
        arguments: side -> the call of the whole module.
        weights: side -> weights by name, in the working precision.
        dtype: the working precision.
        lacks: side -> why it has no float64.
        labels: side -> its name in messages.
        progress: callback with the current stage, the work done and the total.
        tables: side -> positions of the arrays of the whole call that only this side is given.
        judged: sides whose loss of precision is looked for.
        fresh: draws another sample, on which a hint has to hold as well; None where no sample can be drawn.
    """

    subjects: Mapping[Side, Subject]
    pairing: Pairing
    arguments: Mapping[Side, Arguments]
    weights: Mapping[Side, Arrays]
    dtype: str = "float32"
    lacks: Mapping[Side, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[Side, str] = dataclasses.field(default_factory=lambda: {side: side for side in SIDES})
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    tables: Mapping[Side, Sequence[int]] = dataclasses.field(default_factory=dict)
    judged: Sequence[Side] = SIDES
    fresh: Callable[[], Sides] | None = None


class SubmoduleRunner:
    """Runs the submodules of two subjects.

    Args:
        sides: the pair.
    """

    def __init__(self, sides: Sides):
        self._sides = sides
        self.dtype = None if sides.lacks else "float64"
        self._weights = {side: widened(sides.weights[side], self.dtype) for side in SIDES}

    def run(
        self,
        side: Side,
        path: str,
        arguments: Arguments,
        cotangents: Sequence[Array | None] | None = None,
        *,
        low: bool = False,
        weights: Arrays | None = None,
    ) -> Run:
        """Run one submodule in float64 (where both sides have it), or in the working precision; with other weights."""
        if weights is None:
            weights = self._sides.weights[side] if low else self._weights[side]
        dtype = None if low else "float64" if side not in self._sides.lacks else None
        run: Run = self._sides.subjects[side].run(weights, arguments, cotangents, dtype=dtype, path=path)
        return run

    @property
    def argument_names(self) -> list[str]:
        """Names of the positional arguments of the first side's whole call."""
        return self._sides.subjects["first"].argument_names

    def weights(self, side: Side) -> Arrays:
        """Return one side's weights as they are run in float64."""
        return self._weights[side]

    def run_moved(
        self,
        side: Side,
        path: str,
        arguments: Arguments,
        cotangents: Sequence[Array | None],
        seed: int,
        kind: str = "tables",
    ) -> Run:
        """Run one submodule in float64 with its tables moved at random, or its literals, as `verdict.probes` does."""
        tables = () if path else self._sides.tables.get(side, ())
        run: Run = self._sides.subjects[side].run(
            self._weights[side], arguments, cotangents, mode=kind, seed=seed, path=path, tables=tables
        )
        return run

    def record(self, side: Side, path: str, arguments: Arguments, cotangents: Sequence[Array | None]) -> list[Call]:
        """Return the calls inside one call of a submodule."""
        subject = self._sides.subjects[side]
        weights, more = self._weights[side], {} if self.dtype is not None else {"dtype": None}
        calls: list[Call] = subject.substituted(weights, arguments, cotangents, {}, path=path, **more)[1]
        return calls

    def substituted(
        self,
        side: Side,
        path: str,
        arguments: Arguments,
        substitutes: Mapping[str, Sequence[Substitute]],
        *,
        low: bool = False,
    ) -> tuple[list[Array], Sequence[Call]]:
        """Run one submodule with the results of calls inside it replaced; return outputs and calls."""
        subject = self._sides.subjects[side]
        weights = self._sides.weights[side] if low else self._weights[side]
        dtype = None if low or side in self._sides.lacks else "float64"
        run, calls = subject.substituted(weights, arguments, None, substitutes, path=path, dtype=dtype)
        return run.outputs, calls


def calls_of(sides: Sides, runner: SubmoduleRunner) -> tuple[dict[Side, list[Call]], list[str]]:
    """Run both sides freely; return every call, the whole's first, and messages on calls that could not be recorded."""
    outputs: dict[Side, list[Array]] = {}
    problems = []
    for side in SIDES:
        outputs[side] = runner.run(side, "", sides.arguments[side]).outputs
    random = np.random.default_rng(11)
    cotangents = [np.asarray(random.normal(size=one.shape)) for one in outputs["first"]]
    calls: dict[Side, list[Call]] = {}
    for side in SIDES:
        arguments = sides.arguments[side]
        calls[side] = [Call("", 0, -1, arguments, outputs[side], list(cotangents))]
        try:
            inner = runner.record(side, "", arguments, cotangents)
        except FAILURES as error:
            problems.append(f"the {shown(sides.labels[side])} side's submodules could not be recorded: {error}")
        else:
            calls[side] += inner or []
    return calls, problems


@dataclasses.dataclass(frozen=True)
class FreshRuns:
    """Both sides on a sample, with all their calls."""

    sides: Sides
    runner: SubmoduleRunner
    calls: Mapping[Side, Sequence[Call]]

    def like(self, calls: Mapping[Side, Call]) -> dict[Side, Call] | None:
        """Return the calls of the same submodule with the same numbers; None if a side lacks its call."""
        places = {side: (call.path, call.number) for side, call in calls.items()}
        same = {
            side: next((one for one in self.calls[side] if (one.path, one.number) == places[side]), None)
            for side in SIDES
        }
        return {side: call for side, call in same.items() if call is not None} if None not in same.values() else None


def recorded_again(sides: Sides) -> FreshRuns | None:
    """Run both sides on a fresh sample; None without one, or if a side refuses it."""
    if sides.fresh is None:
        return None
    try:
        fresh = sides.fresh()
        runner = SubmoduleRunner(fresh)
        return FreshRuns(fresh, runner, calls_of(fresh, runner)[0])
    except FAILURES:
        return None


def widened(arrays: Mapping[str, Array], dtype: str | None) -> Arrays:
    """Return weights with the floating-point ones in another precision; None leaves them, and runs lift large ones."""
    if dtype is None:
        return dict(arrays)
    return {
        name: array.astype(dtype) if is_float(array) and not is_large(array) else array
        for name, array in arrays.items()
    }


def sides_of(pair: Pair, sample: Sample | None = None) -> Sides:
    """Return a pair with a sample, or with its own weights and arguments, as `Sides`."""
    arguments = pair.arguments if sample is None else sample.arguments
    weights = pair.own_weights if sample is None else {side: pair.weights(sample, side) for side in SIDES}
    subjects = {side: pair.subject(side) for side in SIDES}
    tables = {side: pair.tables(side) for side in SIDES}
    return Sides(
        subjects,
        pair.pairing,
        arguments,
        weights,
        pair.dtype,
        pair.lacks,
        pair.labels,
        pair.progress,
        tables,
        pair.judged,
    )
