"""The pair under judgement, as data: two subjects, their calls, and the matching of parameters and inputs.

`prepare` makes one from two live sides, `dumps` from recordings. This module runs no samples; `runner` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .pairing import Pairing
from .results.findings import Side, shown
from .samples import calls
from .samples.sampling import Effort, OutputStructure, Sample, draw_weights
from .sides.arrays import is_float, wide
from .sides.dropout_masks import Difference
from .sides.subject import Arguments, Array, Arrays, ModuleFailedError, Run, Subject

SIDES: tuple[Side, Side] = ("first", "second")

MIN_ROWS = 128
"""Rows of input that a parameter's share of a comparison is counted with at least."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Aligned:
    """One tensor of one sample on both sides, with the first side's axes."""

    kind: str
    second_name: str
    first: Array
    second: Array


@dataclasses.dataclass
class Pair:
    """Two subjects, their calls, and the matching of their parameters and inputs.

    Attributes:
        first: the first side's subject.
        second: the second side's.
        arguments: each side's call, as given, in the side's dtype.
        same_inputs: per array of the second call, the array of the first with the same numbers.
        fixed: arrays of the first call that every sample takes as given.
        vary: arrays of whole numbers of the first call that samples shuffle.
        own_weights: the weights of each side, as given.
        dtype: precision of the pair.
        outputs: path, shape and dtype of every output of the first side.
        pairing: the matching of parameters.
        kept: weights of the first side whose numbers every sample keeps: frozen ones, and those that rules drop.
        transfer: whether the second side receives the first side's weights.
        train: whether both run in train mode, with given dropout masks.
        reference: whether the first side is the reference, whose loss of precision is not judged.
        lacks: side without float64 -> the reason.
        masks: dropout masks that only one side has, in train mode.
        foreign: sides that draw random numbers other than dropout masks, in train mode.
        notes: notes for the reader.
        progress: called with a stage, the work done and the total.
    """

    first: Any
    second: Any
    arguments: dict[Side, Arguments]
    same_inputs: list[calls.Counterpart]
    fixed: frozenset[int]
    vary: frozenset[int]
    own_weights: dict[Side, Arrays]
    dtype: str
    outputs: OutputStructure
    pairing: Pairing
    kept: frozenset[str] = frozenset()
    transfer: bool = True
    train: bool = False
    reference: bool = False
    lacks: dict[Side, str] = dataclasses.field(default_factory=dict)
    masks: Sequence[Difference] = ()
    foreign: Sequence[Side] = ()
    notes: list[str] = dataclasses.field(default_factory=list)
    progress: Progress = lambda what, done, total: None
    _converted: tuple[Arrays, Arrays] | None = None

    @property
    def labels(self) -> dict[Side, str]:
        """Names of the sides: their frameworks if those differ."""
        return labels_of(self.first.framework, self.second.framework)

    @property
    def shown(self) -> dict[Side, str]:
        """Names of the sides in sentences: ``torch`` and ``Flax``, or by their order."""
        return {side: shown(label) for side, label in self.labels.items()}

    @property
    def judged(self) -> tuple[Side, ...]:
        """The sides whose loss of precision is a finding; both without float64, as no side can be blamed then."""
        return ("second",) if self.reference and not self.lacks else SIDES

    @property
    def effort(self) -> Effort:
        """How many samples the pair is worth."""
        return Effort(work_of(self.own_weights["first"], self.arguments["first"]))

    @property
    def structure(self) -> list[str]:
        """The path of each output in the return value."""
        return [place for place, _, _ in self.outputs]

    def subject(self, side: Side) -> Any:
        """Return the subject of one side."""
        return self.first if side == "first" else self.second

    def draw(self, seed: tuple[int, ...]) -> Arrays:
        """Draw weights of the first side."""
        return draw_weights(self.pairing.drawn_as(self.first.parameters()), self.own_weights["first"], seed, self.kept)

    def weights(self, sample: Sample, side: Side) -> Arrays:
        """Return the weights of a sample for one side."""
        if side == "first":
            return sample.weights
        if sample.kind == "held" and not self.transfer:
            return self.own_weights["second"]
        if self._converted is None or self._converted[0] is not sample.weights:
            converted = self.pairing.to_second(sample.weights)
            self._converted = (
                sample.weights,
                {name: converted.get(name, array) for name, array in self.own_weights["second"].items()},
            )
        return self._converted[1]

    def tables(self, side: Side) -> list[int]:
        """Return the floating-point arrays of one side's call that the other does not hold: tables that are given."""
        leaves = self.arguments[side].leaves
        if side == "second":
            return [j for j, place in enumerate(self.same_inputs) if place is None and is_float(leaves[j])]
        shared = set(map(calls.place_index, self.same_inputs))
        return [i for i, leaf in enumerate(leaves) if i not in shared and is_float(leaf)]

    @functools.cached_property
    def discrete(self) -> frozenset[int]:
        """Arrays of the first call that are masks or targets of 0 and 1: no caller takes their gradients."""
        return frozenset(i for i, is_mask in enumerate(calls.masks(self.arguments["first"])) if is_mask)

    # ---- results by name

    def named(self, side: Side, run: Run) -> dict[str, tuple[str, Array]]:
        """Return the results of one side as the first side's name -> (kind, array with the first side's axes)."""
        named_results: dict[str, tuple[str, Array]] = {}
        for path, output in zip(self.structure, run.outputs, strict=True):
            named_results["output" if len(self.outputs) == 1 else f"output{path}"] = ("output", output)
        names = self._input_names("first")
        for j, same in enumerate(self.same_inputs):
            i = calls.place_index(same)
            if i is None or i in self.discrete or not run.input_gradients:
                continue
            gradient = run.input_gradients[i if side == "first" else j]
            if gradient is not None:
                if side == "second" and isinstance(same, calls.Rearranged):
                    gradient = same.to_first(gradient)
                named_results[f"grad {names[i]}"] = ("input gradient", gradient)
        for name, gradient in self.pairing.aligned(run.parameter_gradients, side).items():
            named_results[f"grad {name}"] = ("matrix gradient" if gradient.ndim > 1 else "vector gradient", gradient)
        return named_results

    def second_names(self) -> dict[str, str]:
        """Return name -> the second side's name of inputs and parameters, as in results."""
        names, others = self._input_names("first"), self._input_names("second")
        second_names = {
            f"grad {names[i]}": f"grad {others[j]}"
            for j, place in enumerate(self.same_inputs)
            if (i := calls.place_index(place)) is not None
        }
        return second_names | {
            f"grad {match.first.name}": f"grad {match.second.name}" for match in self.pairing.matches
        }

    def aligned(self, first: Run, second: Run) -> dict[str, Aligned]:
        """Align the results of both sides by name, with the first side's axes."""
        ours, theirs, names = self.named("first", first), self.named("second", second), self.second_names()
        return {
            name: Aligned(kind, names.get(name, name), array, theirs[name][1])
            for name, (kind, array) in ours.items()
            if name in theirs
        }

    def _input_names(self, side: Side) -> list[str]:
        """Return a name for each input array, with the suffix ``(input)`` if a parameter has the same name."""
        names = self.arguments[side].named(self.subject(side).argument_names)
        parameter_names = {(match.first if side == "first" else match.second).name for match in self.pairing.matches}
        return [f"{name} (input)" if name in parameter_names else name for name in names]


def labels_of(first: str, second: str) -> dict[Side, str]:
    """Return the names of two sides in messages: ``torch`` and ``flax``, or by their order if these are equal."""
    return {"first": "first", "second": "second"} if first == second else {"first": first, "second": second}


@contextlib.contextmanager
def few_threads(pair: Pair) -> Iterator[None]:
    """Hold torch to one thread where a pair is small: on a busy machine several wait for each other."""
    with contextlib.ExitStack() as stack:
        if pair.effort.quick:
            for subject in (pair.first, pair.second):
                stack.enter_context(subject.few_threads())
        yield


def work_of(weights: Mapping[str, Array], arguments: Arguments) -> float:
    """Return the approximate number of operations of one side's forward and backward pass.

    Drawing, converting and measuring a parameter takes as long as a run on `MIN_ROWS` rows, hence at least that many.
    """
    size = sum(array.size for array in weights.values())
    return 6.0 * size * max(MIN_ROWS, *(_rows(leaf) for leaf in arguments.leaves))


def _rows(leaf: Array) -> int:
    """Return the number of vectors in an input: its rows, the elements of integers, one for a mask of any dtype."""
    is_whole = leaf.dtype.kind in "iu"
    if leaf.dtype == bool or (is_whole and np.isin(leaf, (0, 1)).all()):
        return 1
    return max(1, leaf.size if is_whole else math.prod(leaf.shape[:-1]))


def weights_held(subject: Subject, label: str) -> Arrays:
    """Return the weights that a subject holds.

    Raises:
        ModuleFailedError: they can't be read, or hold no numbers.
    """
    try:
        weights: Arrays = subject.weights()
    except ModuleFailedError:
        raise
    except Exception as error:  # uninitialised, abstract, on the meta device
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModuleFailedError(f"the weights of the {label} module {subject.name} cannot be read: {reason}") from error
    for name, array in weights.items():
        if array.dtype == np.object_:
            raise ModuleFailedError(
                f"{name} of the {label} module {subject.name} holds no numbers; initialise it first"
            )
    return weights


def widened(weights: Arrays, subject: Subject, other: str | None) -> Arrays:
    """Return the weights of a subject, in float64 if JAX made them float32 and the other side's are float64.

    Only a side whose framework is set up without float64 is widened: any other float32 module is float32 by choice, and
    answers for its loss against a float64 one. Weights that need no widening are returned as the same object.

    Args:
        weights: its weights by name.
        subject: the side.
        other: dtype of the other side's weights.
    """
    if other != "float64" or calls.common_dtype(weights) != "float32" or subject.holds_float64:
        return weights
    return {name: wide(array) for name, array in weights.items()}


def narrowed(label: str) -> str:
    """Return the note on a side that `widened` changed."""
    return f"the {label} side holds float32, as jax_enable_x64 is off; both sides are judged in float64"


def input_notes(pair: Pair) -> Iterator[str]:
    """Yield notes on floating-point inputs that every sample takes as given, and on inputs with NaN.

    Raises:
        ModuleFailedError: an input holds nothing but NaN.
    """
    labels = pair.shown
    own = []
    for side in SIDES:
        names = pair.arguments[side].named(pair.subject(side).argument_names)
        leaves = pair.arguments[side].leaves
        own += [f"{names[i]} of {labels[side]}" for i in pair.tables(side) if not calls.is_mask(leaves[i])]
    if own:
        yield (
            f"inputs that the other side does not hold, too: {', '.join(own)}; taken as given in every sample, and "
            "their gradients are not compared"
        )
    arguments = pair.arguments["first"]
    names = arguments.named(pair.first.argument_names)
    for name, leaf, mask in zip(names, arguments.leaves, calls.masks(arguments), strict=True):
        unknown = int(np.isnan(wide(leaf)).sum()) if is_float(leaf) else 0
        if unknown and unknown == leaf.size:
            raise ModuleFailedError(f"input {name} holds nothing but NaN")
        if unknown:
            yield f"input {name}: {unknown} of {leaf.size} elements are NaN; drawn inputs hold none"
        if mask and is_float(leaf) and leaf.size > 1 and bool((leaf == leaf.flat[0]).all()):
            yield (
                f"input {name} is {float(leaf.flat[0]):g} everywhere: taken for a mask and so as given in every "
                "sample; give other numbers if it is none, or one that masks something"
            )


def unlike_inputs(pair: Pair) -> str:
    """Return which inputs of the two sides are as large and hold different numbers, "" for none; masks may differ."""
    shared = {place for place in map(calls.place_index, pair.same_inputs) if place is not None}
    lone: dict[Side, dict[str, Array]] = {}
    own = {j for j, place in enumerate(pair.same_inputs) if place is not None}
    matches: dict[Side, set[int]] = {"first": shared, "second": own}
    for side, matched in matches.items():
        call, names = pair.arguments[side], pair.subject(side).argument_names
        named = zip(call.named(names), call.leaves, strict=True)
        lone[side] = {
            name: leaf for place, (name, leaf) in enumerate(named) if place not in matched and not _may_be_mask(leaf)
        }
    for name, first_leaf in lone["first"].items():
        for other, second_leaf in lone["second"].items():
            if first_leaf.size == second_leaf.size and is_float(first_leaf) == is_float(second_leaf):
                labels = pair.shown
                return f"the inputs hold different numbers: {name} of {labels['first']}, {other} of {labels['second']}"
    return ""


def _may_be_mask(leaf: Array) -> bool:
    return calls.is_mask(leaf) or (not is_float(leaf) and bool(np.isin(leaf, (0, 1)).all()))
