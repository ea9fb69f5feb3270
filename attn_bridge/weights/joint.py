"""Rules between a single tensor and several: parts, stacks, and drops, converted both ways by one placement.

A joint rule is a row of a layout: the single tensor is "theirs", the parts are "ours", and every element's position in
the single tensor follows from shapes (`rows`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .index import Index
from .placements import Placement
from .rows import Row
from .templates import fill, placeholders

if TYPE_CHECKING:
    from .rule import Rule, Side

Arrays = Mapping[str, np.ndarray]
Parts = dict[tuple[int, int], str]


class Sized(Protocol):
    """An array in memory, or a `LazyArray`: planning reads its shape and dtype alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""

    @property
    def dtype(self) -> np.dtype:
        """Type of its elements."""


@dataclasses.dataclass(frozen=True)
class Made:
    """An array on the target side of a joint rule, planned from shapes.

    Attributes:
        shape: sizes of its axes.
        dtype: type of its elements.
        is_part: whether it is a part of its one source; otherwise its sources are its parts.
        placements: name of a source -> the part's placement in the single tensor.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_part: bool
    placements: Mapping[str, Placement]

    def build(self, arrays: Arrays) -> np.ndarray:
        """Return the array in fresh memory, computed from whole source arrays."""
        if self.is_part:
            [(name, placement)] = self.placements.items()
            return strided(np.ascontiguousarray(arrays[name]), placement).reshape(self.shape).copy()
        whole = np.empty(self.shape, self.dtype)
        for name, placement in self.placements.items():
            sizes = [size for axis in placement.axes for size, _ in axis]
            strided(whole, placement)[...] = arrays[name].reshape(sizes)
        return whole


@dataclasses.dataclass
class JointPlan:
    """The arrays that joint rules make, before any data is read.

    Attributes:
        made: target name -> its array.
        used: source names that the rules cover.
        missing: source names that the rules need and the source lacks.
        misshapen: one line per tensor that does not fit.
    """

    made: dict[str, Made] = dataclasses.field(default_factory=dict)
    used: set[str] = dataclasses.field(default_factory=set)
    missing: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[str] = dataclasses.field(default_factory=list)


def row_of(rule: Rule) -> Row:
    """Return a joint rule as a row, whose parts are on the side that has several names or the stack's number.

    Raises:
        ValueError: (a `LayoutError`) it is not a bijection; one line.
    """
    single, parts = (rule.flax_names, rule.torch_names)
    pattern = rule.pattern
    if parts_side(rule) == "flax":
        single, parts = parts, single
        left, _, right = pattern.partition("->")
        pattern = f"{right.strip()} -> {left.strip()}"
    if len(single) != 1:
        raise ValueError("one of torch and flax must be a single name")
    return Row(single[0], parts, pattern, rule.part, rule.along, rule.split, rule.stack, dict(rule.sizes))


def parts_side(rule: Rule) -> Side:
    """Return the side on which a joint rule has the parts."""
    if len(rule.flax_names) > 1:
        return "flax"
    if len(rule.torch_names) > 1 or not rule.stack:
        return "torch"
    # A stack has the block's number as an axis, so its name has a placeholder less than those of the parts.
    fewer = placeholders(rule.flax_names[0]) > placeholders(rule.torch_names[0])
    return "flax" if fewer else "torch"


def covered(rules: Iterable[Rule], names: Iterable[str], side: Side) -> list[tuple[Rule, list[str]]]:
    """Return the joint ones among rules, each with the names of that side that it may cover."""
    pairs: list[tuple[Rule, list[str]]] = [(rule, []) for rule in rules if rule.is_joint]
    index = Index[tuple["Rule", list[str]]](
        (template, pair)
        for pair in pairs
        for template in (pair[0].torch_names if side == "torch" else pair[0].flax_names)
    )
    for name in names if pairs else ():
        for _, names_of in index.find(name):
            names_of.append(name)
    return pairs


def placed(
    rule: Rule, row: Row, wholes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, dict[str, Placement]], list[str]]:
    """Return single tensor -> (part -> its placement) for all tensors that a rule covers, and messages on misfits.

    Args:
        rule: the rule, for messages.
        row: the same as a row.
        wholes: name -> shape of the tensors on the side of the single one.
    """
    placements, wrong = {}, []
    for name, shape in wholes.items():
        values = row.match_theirs(name, ("",))
        if values is None:
            continue
        try:
            placements[name] = row.decode(name, shape, values, {})
        except ValueError as error:
            wrong.append(f"{rule.where}{error}")
            placements[name] = {}
    return placements, wrong


def grouped(row: Row, names: Iterable[str]) -> tuple[dict[str, Parts], list[str]]:
    """Return name of the single tensor -> (part number, stack position) -> name, and the missing parts."""
    wholes: dict[str, Parts] = collections.defaultdict(dict)
    bound: dict[str, dict[str, str]] = {}
    for name in names:
        hit = row.match_ours(name)
        if hit is None:
            continue
        number, values = hit
        whole = fill(row.theirs, values)
        wholes[whole][number, int(values[row.counter]) if row.stack else 0] = name
        bound[whole] = dict(values)
    missing = []
    for whole, parts in wholes.items():
        # The largest number says how many are stacked: a gap below it is a missing part, not a shorter stack.
        count = 1 + max(position for _, position in parts)
        for number, template in enumerate(row.ours):
            for position in range(count):
                if (number, position) not in parts:
                    values = bound[whole] | ({row.counter: str(position)} if row.stack else {})
                    missing.append(fill(template, values))
    return dict(wholes), missing


def plan(rule: Rule, arrays: Mapping[str, Sized], source: Side) -> JointPlan:
    """Plan the arrays that a joint rule makes of those of the `source` side that it covers."""
    if rule.drop:
        return JointPlan(used=set(dropped([rule], arrays, source)))
    row = row_of(rule)
    return _merged(rule, row, arrays) if source == parts_side(rule) else _split(rule, row, arrays)


def dropped(rules: Iterable[Rule], names: Iterable[str], side: Side) -> list[str]:
    """Return the names of a side that rules leave out."""
    pairs = [(rule, names_of) for rule, names_of in covered(rules, names, side) if rule.drop]
    templates = [(rule.torch_names if side == "torch" else rule.flax_names, names_of) for rule, names_of in pairs]
    return [name for some, names_of in templates for name in names_of if any(matches(one, name) for one in some)]


def _split(rule: Rule, row: Row, arrays: Mapping[str, Sized]) -> JointPlan:
    """Plan the parts of single tensors."""
    wholes, wrong = placed(rule, row, {name: array.shape for name, array in arrays.items()})
    made = {
        name: Made(placement.shape, arrays[whole].dtype, True, {whole: placement})
        for whole, parts in wholes.items()
        for name, placement in parts.items()
    }
    return JointPlan(made, set(wholes), [] if wholes else [row.theirs], wrong)


def _merged(rule: Rule, row: Row, arrays: Mapping[str, Sized]) -> JointPlan:
    """Plan single tensors from their parts."""
    groups, missing = grouped(row, arrays)
    result = JointPlan(missing=missing if groups else [*row.ours])
    result.used = {name for parts in groups.values() for name in parts.values()}
    for whole, parts in groups.items() if not missing else ():
        try:
            shapes = {key: arrays[name].shape for key, name in sorted(parts.items())}
            shape, placements = row.encode(whole, shapes, parts, {})
        except ValueError as error:
            result.misshapen.append(f"{rule.where}{error}")
            continue
        dtypes = {arrays[name].dtype for name in parts.values()}
        if len(dtypes) > 1:
            listing = ", ".join(sorted(map(str, dtypes)))
            result.misshapen.append(f"{rule.where}{whole}: its parts are of several dtypes, {listing}")
            continue
        result.made[whole] = Made(shape, dtypes.pop(), False, placements)
    return result


def matches(template: str, name: str) -> bool:
    """Return whether a name matches a template."""
    return Row(template, reason="asked").match_theirs(name, ("",)) is not None


def strided(array: np.ndarray, placement: Placement) -> np.ndarray:
    """Return a view of the elements of a part, with an axis for each of its placement."""
    atoms = [atom for axis in placement.axes for atom in axis]
    strides = [stride * array.itemsize for _, stride in atoms]
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[placement.offset :], [size for size, _ in atoms], strides)
