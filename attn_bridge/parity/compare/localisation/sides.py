"""What localisation asks of a pair: two subjects, their weights and inputs on one sample, and how to run them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ..report import Divergence
from ..subject import Arguments, Array, Arrays, Call, CannotLiftError, ModuleFailedError, Run, is_float

if TYPE_CHECKING:
    from ..pair import Comparison
    from ..samples import Sample

Side = Literal["first", "second"]
SIDES: tuple[Side, Side] = ("first", "second")

FAILURES = (CannotLiftError, ModuleFailedError)
"""What a subject raises when a submodule can't be run by itself."""


def other(side: Side) -> Side:
    """Return the other side."""
    return "second" if side == "first" else "first"


class Pairing(Protocol):
    """Which parameter is which."""

    @property
    def matches(self) -> Sequence[Any]:
        """The pairs, each with a ``first`` and a ``second`` tensor."""

    def aligned(self, arrays: Mapping[str, Array], side: Side) -> Arrays:
        """Return arrays of one side per pair, under first names and with the first side's axes."""


@dataclasses.dataclass(frozen=True)
class Sides:
    """Two subjects, paired, and one sample of numbers.

    Attributes:
        subjects: side -> what has ``modules()`` and ``settings()``, and for a live pair ``run()`` and ``record()``.
        pairing: which parameter is which.
        arguments: side -> the call of the whole module.
        weights: side -> weights by name, in the working precision.
        dtype: the working precision.
        lacks: side -> why it has no float64.
        labels: side -> what people call it.
        progress: called with what is done, how much of it, and how much there is.
    """

    subjects: Mapping[Side, Any]
    pairing: Pairing
    arguments: Mapping[Side, Arguments]
    weights: Mapping[Side, Arrays]
    dtype: str = "float32"
    lacks: Mapping[Side, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[Side, str] = dataclasses.field(default_factory=lambda: {side: side for side in SIDES})
    progress: Callable[[str, int, int], None] = lambda what, done, total: None


class Runner(Protocol):
    """Runs submodules by themselves; recorded results have none."""

    def run(
        self,
        side: Side,
        path: str,
        arguments: Arguments,
        cotangents: Sequence[Array | None] | None = None,
        *,
        low: bool = False,
    ) -> Run:
        """Run one submodule in float64, or in the working precision."""

    def record(
        self, side: Side, path: str, arguments: Arguments, cotangents: Sequence[Array | None]
    ) -> list[Call] | None:
        """Return the calls inside one call of a submodule, under their whole paths; None if that can't be recorded."""


class Live:
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
    ) -> Run:
        """Run one submodule in float64 (where both sides have it), or in the working precision."""
        weights = self._sides.weights[side] if low else self._weights[side]
        dtype = None if low else "float64" if side not in self._sides.lacks else None
        found: Run = self._sides.subjects[side].run(weights, arguments, cotangents, dtype=dtype, path=path)
        return found

    def record(
        self, side: Side, path: str, arguments: Arguments, cotangents: Sequence[Array | None]
    ) -> list[Call] | None:
        """Return the calls inside one call of a submodule; None where the subject records only whole calls."""
        subject = self._sides.subjects[side]
        known = inspect.signature(subject.record).parameters
        more: dict[str, Any] = {}
        if path:
            more["path"] = path
        if self.dtype is None:
            more["dtype"] = None
        if not more.keys() <= known.keys():
            return None
        found: list[Call] = subject.record(self._weights[side], arguments, cotangents, **more)
        return found


def calls_of(sides: Sides, runner: Live) -> tuple[dict[Side, list[Call]], list[str]]:
    """Run both sides freely and return every call, the whole's first, and what could not be recorded."""
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
            problems.append(f"the {sides.labels[side]} side's submodules could not be recorded: {error}")
        else:
            calls[side] += inner or []
    return calls, problems


def widened(arrays: Mapping[str, Array], dtype: str | None) -> Arrays:
    """Return weights with the floating-point ones in another precision; None leaves them."""
    if dtype is None:
        return dict(arrays)
    return {name: array.astype(dtype) if is_float(array) else array for name, array in arrays.items()}


# ---- a pair as it is today


def sides_of(pair: Comparison, sample: Sample | None = None) -> Sides:
    """Return a pair and one sample of it as localisation takes them."""
    arguments: dict[Side, Arguments] = {"first": pair.arguments, "second": pair.flax_arguments}
    weights: dict[Side, Arrays] = {"first": pair.held, "second": pair.held_flax}
    if sample is not None:
        arguments = {"first": sample.torch, "second": sample.flax}
        weights = {"first": sample.weights, "second": pair.flax_weights(sample)}
    return Sides(
        {"first": pair.torch, "second": pair.flax},
        _Pairing(pair.pairing),
        arguments,
        weights,
        pair.dtype or "float32",
        {"first" if side == "torch" else "second": reason for side, reason in pair.lacks.items()},
        {"first": "torch", "second": "flax"},
        pair.progress,
    )


class _Pairing:
    """Today's pairing, whose sides are called torch and flax."""

    def __init__(self, pairing: Any):
        self._pairing = pairing
        self.matches = [SimpleNamespace(first=one.torch, second=one.flax) for one in pairing.matches]

    def aligned(self, arrays: Mapping[str, Array], side: Side) -> Arrays:
        """Return arrays of one side per pair, under first names and with the first side's axes."""
        found: Arrays = self._pairing.aligned(arrays, "torch" if side == "first" else "flax")
        return found


@dataclasses.dataclass(frozen=True)
class _Place(Divergence):
    """Today's divergence with the code between two submodules."""

    between: tuple[str, str] | None = None
    hint: str = ""

    @property
    def second_path(self) -> str:
        """Dotted path on the second side."""
        return self.flax_path


def divergence_of(
    path: str,
    second_path: str,
    direction: Literal["forward", "backward"],
    message: str,
    between: tuple[str, str] | None,
) -> Divergence:
    """Return the first divergence for a report."""
    return _Place(path, second_path, direction, message, between)
