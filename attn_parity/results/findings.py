"""The contents of a `Report`: verdicts of tensors, pairs, the module tree, divergences. Plain data only."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

Array = np.ndarray
Verdict = Literal["equal", "precision", "different", "inconclusive"]
Side = Literal["first", "second"]
"""The two sides, in the order in which they were given."""

SEVERITY: tuple[Verdict, ...] = ("equal", "inconclusive", "precision", "different")
"""Verdicts from harmless to worst; a whole is as bad as its worst part."""

SCHEMA = 1
"""Version of the JSON; it changes when a key is renamed or removed."""


SHOWN = {"flax": "Flax"}
"""Labels of sides -> how they are written, where that is another way."""


def shown(label: str) -> str:
    """Return the label of a side as people read it: ``torch``, ``Flax``, ``first``, ``second``."""
    return SHOWN.get(label, label)


def former(name: str) -> Any:
    """Return a property that is the former name of an attribute."""
    return property(operator.attrgetter(name), doc=f"Former name of `{name}`.")


def worst(verdicts: Iterator[Verdict] | list[Verdict]) -> Verdict:
    """Return the worst of some verdicts; of none, ``equal``."""
    return max(verdicts, key=SEVERITY.index, default="equal")


@dataclasses.dataclass(frozen=True)
class Worst:
    """The element that is furthest off: sample, index, both values, and the float64 value (None without float64)."""

    sample: int
    index: tuple[int, ...]
    first: float
    second: float
    oracle: float | None

    torch = former("first")
    flax = former("second")


@dataclasses.dataclass(frozen=True)
class TensorVerdict:
    """Judgement of one tensor over all samples.

    Attributes:
        name: ``output``, ``output[1]``, ``grad x`` (an input), ``grad fc.weight``, ``weight ...``;
            names of the first side.
        second_name: name of the same tensor on the second side.
        kind: ``output``, ``input gradient``, ``matrix gradient``, ``vector gradient`` or ``weight``.
        shape: its shape, the first side's axes.
        dtype: dtype in which precision was judged.
        verdict: the verdict.
        message: the reason in one line, empty when equal.
        side: label of the side that loses too much precision, for ``precision``.
        weights: ``held`` or ``own``: the weights that showed the worst.
        mode: ``eager`` or ``jit``: the run that showed the worst.
        relative: largest float64 difference, relative to the largest value of the kind; None without float64.
        meaning_used: share of the float64 allowance that the difference took.
        first_used: share of the precision allowance that the first side took.
        second_used: the same of the second side.
        first_ulps: root mean square error of the first side, in units of the last place of the largest value.
        second_ulps: the same of the second side.
        bad: number of elements beyond the allowance that failed.
        count: number of elements over all samples.
        worst: the element that is furthest off.
        sample: the sample with the worst element, in words: ``your weights``, ``random weights, seed 1``.
        allowed: path of the allowance that covers the difference; such a tensor does not fail.
        shards: the shards that differ, in words, unless all do.
    """

    name: str
    second_name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    verdict: Verdict
    message: str = ""
    side: str | None = None
    weights: str = "held"
    mode: str = "eager"
    relative: float | None = None
    meaning_used: float | None = None
    first_used: float | None = None
    second_used: float | None = None
    first_ulps: float | None = None
    second_ulps: float | None = None
    bad: int = 0
    count: int = 0
    worst: Worst | None = None
    sample: str = ""
    allowed: str = ""
    shards: str = ""

    @property
    def used(self) -> float | None:
        """Largest share of the allowed error that either side, or the difference in float64, took; 1 fails.

        An equal tensor may have larger shares, of a side that is not judged; they are left out.
        """
        shares = (self.meaning_used, self.first_used, self.second_used)
        is_equal = self.verdict == "equal"
        return max((one for one in shares if one is not None and (one <= 1 or not is_equal)), default=None)

    @property
    def on(self) -> str:
        """The sample that the numbers are of, in words."""
        return self.sample or {"held": "your weights", "own": "random weights"}.get(self.weights, self.weights)

    flax_name = former("second_name")
    torch_used = former("first_used")
    flax_used = former("second_used")
    torch_ulps = former("first_ulps")
    flax_ulps = former("second_ulps")

    def __str__(self) -> str:
        line = f"{self.name}: {self.verdict}"
        return f"{line}: {self.message}" if self.message else line


@dataclasses.dataclass(frozen=True)
class PairedParameter:
    """One parameter on both sides.

    Attributes:
        first: its name on the first side.
        second: its name on the second side.
        pattern: einops pattern from the first side's axes to the second's.
        how: basis: ``rule``; ``name`` (with class and shape); ``order`` (of use on both sides); ``probe``
            (the outputs agree under it).
    """

    first: str
    second: str
    pattern: str
    how: str

    torch = former("first")
    flax = former("second")


@dataclasses.dataclass(frozen=True)
class ModuleNode:
    """One submodule of the first side and its counterpart; the localisation searches the tree of them.

    Errors are relative to the largest value and None without a comparison.

    Attributes:
        path: dotted path on the first side, "" for the module itself; None for a submodule that only the second has.
        second_path: dotted path on the second side; None for a module without a counterpart.
        first_type: class on the first side, "" without one.
        second_type: class on the second side, "" without one.
        verdict: of the module fed with the other side's activations; None if it was not run alone.
        error_in: difference of the inputs as the two sides ran freely.
        error_out: difference of the outputs as the two sides ran freely.
        forward_error: difference of the outputs when both are fed the same inputs.
        backward_error: difference of the gradients when both are fed the same inputs and cotangents.
        message: the difference, or why it was not run alone.
        first: whether this is the first divergence.
        children: the submodules, in order of execution.
    """

    path: str | None
    second_path: str | None
    first_type: str = ""
    second_type: str = ""
    verdict: Verdict | None = None
    error_in: float | None = None
    error_out: float | None = None
    forward_error: float | None = None
    backward_error: float | None = None
    message: str = ""
    first: bool = False
    children: tuple[ModuleNode, ...] = ()

    flax_path = former("second_path")
    torch_type = former("first_type")
    flax_type = former("second_type")

    @property
    def amplification(self) -> float | None:
        """How much larger the difference is behind the module than before it."""
        if self.error_in is None or self.error_out is None or self.error_in == 0:
            return None
        return self.error_out / self.error_in

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and all below it, in order of execution."""
        yield self
        for child in self.children:
            yield from child.walk()


def itself(name: str) -> str:
    """Return the words for the code of a whole module outside its submodules.

    Args:
        name: its class; "" where it is not known.
    """
    return f"{name or 'the module'} itself"


def between_words(path: str, between: Sequence[str]) -> str:
    """Describe the calls inside a module between which code runs; the module's path means its inputs or its outputs."""
    first, second = between
    return f"between {'the inputs' if first == path else first} and {'the outputs' if second == path else second}"


@dataclasses.dataclass(frozen=True)
class DtypeLeak:
    """A place where a side widens floating-point numbers, without casting them back before they are used.

    Attributes:
        label: label of the side: ``torch`` or ``flax`` where the frameworks differ, else ``first`` or ``second``.
        path: dotted path of the deepest submodule whose output is wider than all of its inputs and weights.
        before: the submodule of `path` in front of which its code widens; "" if an output of `path` itself is wide.
        own: the widest dtype of its inputs and weights.
        returned: the dtype of its wide output, or of what `before` returns.
    """

    label: str
    path: str
    before: str
    own: str
    returned: str

    def __str__(self) -> str:
        where = self.path or "the module itself, outside its submodules"
        where = f"{where}, in front of {self.before}" if self.before else where
        return (
            f"{shown(self.label)} computes in {self.returned} from {where} on, where inputs and weights are "
            f"{self.own}: a constant or a cast widens the numbers, and nothing casts them back"
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A part of the code that the search for the first divergence did not exclude.

    Attributes:
        path: dotted path of the submodule on the first side.
        second_path: dotted path on the second side.
        between: the two submodules of `path` between which the code lies; None is the submodule itself.
    """

    path: str
    second_path: str
    between: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        """Where it is, in words."""
        if self.between is None:
            return f"in {self.path}" if self.path else "in the module itself, outside its submodules"
        return between_words(self.path, self.between) + (f", in {self.path}" if self.path else "")


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The submodule, or the code between two, that differs on equal inputs.

    Attributes:
        path: dotted path on the first side; "" is the module itself, outside its submodules.
        second_path: dotted path on the second side.
        direction: ``forward`` or ``backward``.
        message: the difference, in one line.
        between: the two submodules of `path` around the fault, if it is in the code between them.
        hint: a change with which the sides agree at the place, or a relation of their numbers, in one line.
        second_label: label of the second side.
        candidates: the locations that were not excluded, this one first.
        first_name: class of the whole first side.
        second_name: class of the whole second side.
        witness: the element there that is furthest off, both numbers and the input, in one line; "" if unknown.
    """

    path: str
    second_path: str
    direction: Literal["forward", "backward"]
    message: str = ""
    between: tuple[str, str] | None = None
    hint: str = ""
    second_label: str = "flax"
    first_name: str = ""
    second_name: str = ""
    candidates: tuple[Candidate, ...] = ()
    witness: str = ""

    def __post_init__(self) -> None:
        own = Candidate(self.path, self.second_path, self.between)
        rest = (one for one in self.candidates if one != own)
        object.__setattr__(self, "candidates", (own, *rest))

    flax_path = former("second_path")

    @property
    def others(self) -> str:
        """The other candidates in words, "" without any."""
        return "; ".join(one.words for one in self.candidates[1:])

    @property
    def place(self) -> str:
        """Where it is, in words."""
        where = self.path or itself(self.first_name)
        if self.between is not None:
            where = between_words(self.path, self.between) + (f", in {self.path}" if self.path else "")
        if self.second_path != self.path:
            where += f" ({shown(self.second_label)}: {self.second_path or itself(self.second_name)})"
        return where

    def __str__(self) -> str:
        inside = "" if self.between is not None else "in "
        others = f"; not excluded: {self.others}" if self.others else ""
        message = f": {self.message}" if self.message else ""
        return f"first divergence ({self.direction}) {inside}{self.place}{message}{others}"


@dataclasses.dataclass(frozen=True)
class Picture:
    """One tensor of the first sample for pictures, as the two sides computed it in their own precision."""

    name: str
    first: Array
    second: Array
    oracle: Array | None = None

    torch = former("first")
    flax = former("second")


@dataclasses.dataclass(frozen=True)
class Allowance:
    """A difference that is known and accepted.

    Attributes:
        path: submodule, parameter or tensor that may differ.
        reason: why.
        covers: names of the tensors whose difference it accepts, and of submodules ``in blocks.3.norm``.
        known: whether the report has anything of that name.
    """

    path: str
    reason: str
    covers: tuple[str, ...] = ()
    known: bool = True

    def __str__(self) -> str:
        why = "nothing there differs" if self.known else "nothing has that name"
        return f"allowed: {self.path}: {self.reason}" + ("" if self.covers else f" ({why})")
