"""Rules between one tensor and several: parts, stacks, and what is left out, converted both ways by one placement.

A joint rule is a row of a layout: the single tensor is "theirs", the parts are "ours", and every element's place in the
single tensor follows from shapes (`rows`).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .index import Index
from .rows import Placement, Row
from .templates import fill, placeholders

if TYPE_CHECKING:
    from .rule import Rule, Side

Arrays = dict[str, np.ndarray[Any, Any]]
Parts = dict[tuple[int, int], str]


def row_of(rule: Rule) -> Row:
    """Return a joint rule as a row, whose parts are on the side that has several names or the stack's number.

    Raises:
        ValueError: (a `LayoutError`) it is no bijection; one line.
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
    """Return name of the single tensor -> (name of a part -> where it lies), and what does not fit, for all it covers.

    Args:
        rule: the rule, for messages.
        row: the same as a row.
        wholes: name -> shape of the tensors on the side of the single one.
    """
    found, wrong = {}, []
    for name, shape in wholes.items():
        values = row.match_theirs(name, ("",))
        if values is None:
            continue
        try:
            found[name] = row.decode(name, shape, values, {})
        except ValueError as error:
            wrong.append(f"{rule.where}{error}")
            found[name] = {}
    return found, wrong


def grouped(row: Row, names: Iterable[str]) -> tuple[dict[str, Parts], list[str]]:
    """Return name of the single tensor -> (number of the part, place in the stack) -> name, and the parts that lack."""
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
        count = 1 + max(position for _, position in parts)
        for number, template in enumerate(row.ours):
            for position in range(count):
                if (number, position) not in parts:
                    values = bound[whole] | ({row.counter: str(position)} if row.stack else {})
                    missing.append(fill(template, values))
    return dict(wholes), missing


def convert(
    rule: Rule, arrays: Mapping[str, np.ndarray[Any, Any]], source: Side
) -> tuple[Arrays, set[str], list[str], list[str]]:
    """Convert what a joint rule covers, into fresh memory.

    Returns:
        The arrays, the names that were used, those that lack, and what does not fit.
    """
    if rule.drop:
        names = rule.torch_names if source == "torch" else rule.flax_names
        used = {name for name in arrays if any(matches(template, name) for template in names)}
        return {}, used, [], []
    row = row_of(rule)
    if source != parts_side(rule):
        shapes = {name: array.shape for name, array in arrays.items()}
        wholes, wrong = placed(rule, row, shapes)
        made = {
            name: strided(np.ascontiguousarray(arrays[whole]), place).reshape(place.shape).copy()
            for whole, parts in wholes.items()
            for name, place in parts.items()
        }
        return made, set(wholes), [] if wholes else [row.theirs], wrong
    groups, missing = grouped(row, arrays)
    made, wrong = {}, []
    for whole, parts in groups.items() if not missing else ():
        try:
            shape, places = row.encode(whole, {key: arrays[name].shape for key, name in parts.items()}, parts, {})
        except ValueError as error:
            wrong.append(f"{rule.where}{error}")
            continue
        dtypes = {arrays[name].dtype for name in parts.values()}
        if len(dtypes) > 1:
            wrong.append(f"{rule.where}{whole}: its parts are of several dtypes, {', '.join(sorted(map(str, dtypes)))}")
            continue
        made[whole] = np.empty(shape, dtypes.pop())
        for name, place in places.items():
            strided(made[whole], place)[...] = arrays[name].reshape([size for axis in place.axes for size, _ in axis])
    used = {name for parts in groups.values() for name in parts.values()}
    return made, used, missing if groups else [*row.ours], wrong


def matches(template: str, name: str) -> bool:
    """Tell whether a name falls under a template."""
    return Row(template, reason="asked").match_theirs(name, ("",)) is not None


def strided(array: np.ndarray[Any, Any], place: Placement) -> np.ndarray[Any, Any]:
    """Return a view of the elements of a part, with an axis for each of its placement."""
    atoms = [atom for axis in place.axes for atom in axis]
    strides = [stride * array.itemsize for _, stride in atoms]
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[place.offset :], [size for size, _ in atoms], strides)
