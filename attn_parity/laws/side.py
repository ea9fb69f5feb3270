"""One side under its laws: its weights, its call, how it runs, and how far two runs are apart.

A side runs in float64, where a law that holds shows differences of 1e-15 and a broken one of 1e-3 or more; a side
without float64 runs in its own precision. The limit follows from the rounding of the side's own operations.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..samples import calls
from ..samples.sampling import draw_inputs, draw_weights
from ..sides.arrays import is_float, unit_of, wide
from ..sides.function import Function
from ..sides.subject import (
    Arguments,
    Array,
    Arrays,
    CannotPromoteError,
    ModuleFailedError,
    Run,
    Subject,
    load_adapter,
    signature_of,
)
from ..verdict.measures import MEANING_LIMIT, ROUNDING_FACTOR
from .report import Witness

SEEDS = (0, 1)
"""Seeds of the frameworks' random numbers: code that draws none gives the same for both."""

SEED_STATE = "seed_generator_state"
"""Variable of Keras's random numbers, whole numbers among its weights."""

JITTERED = 8.0
"""Runs without float64 may differ by this many times the largest of two differences under random rounding."""


MAX_TEXT = 200
"""Characters of a refusal that a report shows."""


class NotTriedError(Exception):
    """The law does not apply to this side, or its arguments do not allow to try it; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Gap:
    """The largest difference between two runs of one side.

    Attributes:
        size: relative to the largest value of the tensor.
        tensor: name of the output.
        index: position in it.
        expected: the first run's value.
        got: the second run's value.
    """

    size: float
    tensor: str
    index: tuple[int, ...]
    expected: float
    got: float

    def witness(self, change: str) -> Witness:
        """Return the witness for a change between the two runs."""
        return Witness(self.tensor, self.index, self.expected, self.got, change)

    def placed(self, names: Sequence[str], axes: Sequence[Collection[int]], positions: Sequence[int]) -> Gap:
        """Return the gap of some positions that were taken out of outputs, with its index in the whole output.

        Args:
            names: names of the outputs.
            axes: the axes per output on which positions were taken.
            positions: those positions.
        """
        if not self.index:
            return self
        own = axes[list(names).index(self.tensor)]
        index = tuple(positions[place] if axis in own else place for axis, place in enumerate(self.index))
        return dataclasses.replace(self, index=index)


SAME = Gap(0.0, "", (), 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class LawResult:
    """Result of a law that was tried.

    Attributes:
        gap: the largest difference.
        why: how the law was tried.
        change: the change between the two runs, for the witness.
        is_broken: whether the law is broken; None decides by the limit.
        limit: largest difference that is allowed; None is the side's.
    """

    gap: Gap
    why: str
    change: str = ""
    is_broken: bool | None = None
    limit: float | None = None


class OneSide:
    """A side with its call in one precision.

    Args:
        value: the side, as `subject_of` takes it.
        subject: its subject.
        call: the call, in eval mode.
        seed: of drawn weights and inputs.
        asserted: names of laws that the caller asked for.
    """

    def __init__(self, value: object, subject: Subject, call: Arguments, seed: int, asserted: Collection[str] = ()):
        self.value, self.subject, self.seed = value, subject, seed
        self.asserted = frozenset(asserted)
        self.held: Arrays = subject.weights()
        self.weights = self.drawn(subject, self.held)
        self.dtype: str | None = "float64"
        self.lack = ""
        self.is_causal: bool | None = None
        self.call = call
        try:
            outputs = self.run(call).outputs
        except CannotPromoteError as error:
            self.dtype, self.lack = None, str(error)
            outputs = self.run(call).outputs
        if not _has_finite(outputs):
            self.weights = self.held  # drawn weights overflow in a few modules: exponents of exponents
            if not _has_finite(self.run(call).outputs):  # NaN equals NaN: every law would hold
                raise ValueError("the outputs hold no finite number, so no law can be tried")
        self.limit = self._limit()

    @property
    def name(self) -> str:
        """Class of the module, or name of the function."""
        return str(self.subject.name)

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """Path -> submodule, the module itself first; empty for a function."""
        return dict(load_adapter(self.subject.framework, "programs").submodules(self.value))

    @functools.cached_property
    def root(self) -> Any:
        """The module, without its variables; the function itself for a function."""
        if isinstance(self.value, Function):
            return self.value.call
        return self.value[0] if isinstance(self.value, tuple) else self.value

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Name -> default of the arguments of a call; `inspect.Parameter.empty` without a default."""
        root = self.root
        target = root if isinstance(self.value, Function) else getattr(root, "forward", None) or root.__call__
        try:
            parameters = list(inspect.signature(target).parameters.values())
        except (TypeError, ValueError):
            return {}
        parameters = parameters[1:] if isinstance(self.value, Function) else parameters
        return {one.name: one.default for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}

    @property
    def names(self) -> list[str]:
        """Names of the positional arguments."""
        return [name for name, positional in self._positional.items() if positional]

    @functools.cached_property
    def _positional(self) -> dict[str, bool]:
        root = self.root
        if isinstance(self.value, Function):
            return dict(list(signature_of(root).items())[1:])
        return signature_of(getattr(root, "forward", None) or root.__call__)

    @functools.cached_property
    def given(self) -> dict[str, Any]:
        """Name -> value of the arguments of the call."""
        return self.given_in(self.call)

    def given_in(self, call: Arguments) -> dict[str, object]:
        """Return name -> value of the arguments of a call."""
        return dict(zip(self.names, call.args, strict=False)) | dict(call.kwargs)

    def called_with(self, values: dict[str, object], call: Arguments | None = None) -> Arguments:
        """Return the call with other values of some arguments, by position where they are given by position."""
        call = self.call if call is None else call
        names = self.names[: len(call.args)]
        args = tuple(values.get(name, one) for name, one in zip(names, call.args, strict=False))
        rest = {name: value for name, value in values.items() if name not in names}
        return Arguments((*args, *call.args[len(args) :]), {**call.kwargs, **rest})

    @functools.cached_property
    def words(self) -> str:
        """Names of the side, of its classes and of its arguments in lower case, to look for the field's terms."""
        types = [one.type for one in self.subject.modules()]
        return " ".join([self.name, *types, *self.arguments]).lower()

    def drawn(self, subject: Subject, weights: Arrays) -> Arrays:
        """Return drawn weights that are not degenerate; frozen ones keep their numbers."""
        parameters = subject.parameters()
        kept = [name for name, one in parameters.items() if one.frozen]
        return draw_weights(parameters, weights, (self.seed, 1, 0), kept)

    def run(self, call: Arguments, *, seed: int = 0, cotangents: Sequence[Array] | None = None, **more: Any) -> Run:
        """Run the side with its drawn weights."""
        weights = more.pop("weights", self.weights)
        results: Run = self.subject.run(weights, call, cotangents, dtype=self.dtype, seed=seed, **more)
        return results

    def outputs(self, call: Arguments, **more: Any) -> list[Array]:
        """Return the outputs of a call."""
        return self.run(call, **more).outputs

    @functools.cached_property
    def base(self) -> list[Array]:
        """Outputs of the call as given."""
        return self.outputs(self.call)

    @functools.cached_property
    def drawn_apart(self) -> Gap:
        """Difference between two calls with other random numbers of the framework."""
        other = {name: array ^ 1 if name.endswith(SEED_STATE) else array for name, array in self.weights.items()}
        first = self.outputs(self.call, seed=SEEDS[0])
        return self.gap(first, self.outputs(self.call, seed=SEEDS[1], weights=other))

    @functools.cached_property
    def structure(self) -> list[str]:
        """Name of each output."""
        results = self.run(self.call).structure
        return ["output" if len(results) == 1 and not place else f"output{place}" for place in results]

    def programmed(self, program: Any) -> Any:
        """Return the subject of a program over this side."""
        adapter = load_adapter(self.subject.framework, "programs")
        return load_adapter(self.subject.framework).subject_of(adapter.programmed(self.value, program))

    def weights_of(self, subject: Subject) -> Arrays:
        """Return the drawn weights for a program's subject; a module's names then begin with ``inner.``."""
        return {name: self.weights.get(name.removeprefix("inner."), held) for name, held in subject.weights().items()}

    def redrawn(self, call: Arguments, seed: int) -> Arguments:
        """Return the call with other content: floats are drawn, whole numbers are taken from those given."""
        # Each law draws with its own `seed` (20 and up for rows of a batch, 31, 41, 71), so that no two draws are
        # alike.
        random = np.random.default_rng([self.seed, seed, 11])
        masks = calls.masks(call)
        drawn = draw_inputs(call, (self.seed, seed))
        pairs = zip(call.leaves, drawn.leaves, masks, strict=True)
        return call.with_leaves(
            [leaf if mask else new if is_float(leaf) else _reordered(leaf, random) for leaf, new, mask in pairs]
        )

    def gap(self, first: Sequence[Array], second: Sequence[Array], names: Sequence[str] | None = None) -> Gap:
        """Return the largest difference between outputs, relative to the largest value of each."""
        names = self.structure if names is None else names
        results = [_gap(one, two, name) for one, two, name in zip(first, second, names, strict=True)]
        return max(results, key=lambda gap: gap.size, default=SAME)

    def _limit(self) -> float:
        """Return the largest relative difference between runs that rounding explains."""
        base = self.outputs(self.call)
        names = [str(place) for place in range(len(base))]
        if self.dtype is None:
            moved = [self.gap(base, self.outputs(self.call, seed=seed, mode="jitter"), names).size for seed in (1, 2)]
            units = [unit_of(one.dtype.name) for one in base if is_float(one)]
            return JITTERED * max(*moved, *units)
        own = calls.common_dtype(self.held) or "float32"
        if own == "float64":
            return MEANING_LIMIT
        low = self.subject.run(self.weights, self.call, None).outputs
        lost = self.gap(base, low, names).size / unit_of(own) if len(low) == len(base) else 1.0
        # 2e-8 at most: a broken law shows 1e-3 and more, whatever the module loses in its own precision.
        return max(MEANING_LIMIT, ROUNDING_FACTOR * min(lost, 1e6) * unit_of("float64"))


def _has_finite(outputs: Sequence[Array]) -> bool:
    """Return whether outputs hold a finite number, or no floats."""
    floats = [output for output in outputs if is_float(output)]
    return not floats or any(np.isfinite(wide(output)).any() for output in floats)


def _reordered(leaf: Array, random: np.random.Generator) -> Array:
    """Return whole numbers drawn from those of an array; a bool array is kept."""
    if leaf.dtype == np.bool_ or leaf.size == 0:
        return leaf
    values = np.unique(leaf)
    return np.asarray(random.choice(values, size=leaf.shape).astype(leaf.dtype))


def _gap(first: Array, second: Array, name: str) -> Gap:
    if first.shape != second.shape:
        return Gap(float("inf"), f"shape of {name}", (), float(first.size), float(second.size))
    if first.size == 0:
        return SAME
    left, right = (np.asarray(wide(array), dtype=np.float64) for array in (first, second))
    finite = np.isfinite(left) & np.isfinite(right)
    alike = (left == right) | (np.isnan(left) & np.isnan(right))
    scale = float(np.abs(left[finite]).max(initial=0.0)) or float(np.abs(right[finite]).max(initial=0.0)) or 1.0
    with np.errstate(all="ignore"):
        apart = np.where(alike, 0.0, np.where(finite, np.abs(left - right) / scale, np.inf))
    at = np.unravel_index(int(apart.argmax()), apart.shape) if apart.ndim else ()
    index = tuple(int(place) for place in at)
    return Gap(float(apart[index]), name, index, float(left[index]), float(right[index]))


def failed(error: Exception) -> NotTriedError:
    """Return the reason for a law that needs a call which the side refuses."""
    text = " ".join(str(error).split())
    return NotTriedError(text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ...")


REFUSALS = (ModuleFailedError, CannotPromoteError)
"""Errors of a side that does not take a call."""
