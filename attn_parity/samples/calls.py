"""The arguments of both sides' calls: read into NumPy, matched with each other, and which of them can be drawn."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..sides.arrays import is_float, numpy_dtype
from ..sides.subject import Arguments, Array, Arrays, ModuleFailedError

MAX_AXES = 6
"""Most axes of an input that is looked for with its axes in another order."""


def as_arguments(inputs: object) -> Arguments:
    """Return inputs (one array, a tuple of positional ones, a dict of keyword ones) as a call on NumPy arrays.

    Raises:
        ModuleFailedError: the inputs contain no array, or an array of another kind than numbers or bools.
    """
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, Mapping):
        arguments = Arguments((), {str(name): to_numpy(value) for name, value in inputs.items()})
    elif isinstance(inputs, (tuple, list)):
        arguments = Arguments(tuple(to_numpy(value) for value in inputs))
    else:
        arguments = Arguments((to_numpy(inputs),))
    if not arguments.leaves:
        raise ModuleFailedError(
            "inputs must be an array, a tuple of positional ones or a dict of keyword ones, "
            f"got {type(inputs).__name__}"
        )
    for leaf in arguments.leaves:
        if not is_float(leaf) and leaf.dtype.kind not in "biu":
            hint = "; give real and imaginary parts as two" if leaf.dtype.kind == "c" else ""
            raise ModuleFailedError(f"inputs must hold numbers or bools, one has dtype {leaf.dtype}{hint}")
    return arguments


def to_numpy(value: object) -> Any:
    """Return arrays of any framework, at any depth, as NumPy's, and NumPy's bools as Python's; the rest as it is."""
    if isinstance(value, (tuple, list)) and not _is_foreign(value):
        return (
            type(value)(map(to_numpy, value)) if not hasattr(value, "_fields") else type(value)(*map(to_numpy, value))
        )
    if isinstance(value, Mapping):
        return {key: to_numpy(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.bool_):
        return bool(value)  # a switch: code branches on it, which no traced array allows
    if _is_foreign(value):
        if hasattr(value, "detach"):
            from attn_bridge import backends

            return backends.load("torch").to_numpy(value)
        return np.asarray(value)
    return value


def _is_foreign(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def in_dtype(arguments: Arguments, dtype: str | None) -> Arguments:
    """Return the arguments with floating-point arrays in `dtype`; None makes float64 float32, as no module holds it."""

    def cast(leaf: Array) -> Array:
        if not is_float(leaf):
            return leaf
        wanted = dtype or ("float32" if leaf.dtype.name == "float64" else leaf.dtype.name)
        return leaf.astype(numpy_dtype(wanted))

    return arguments.with_leaves([cast(leaf) for leaf in arguments.leaves])


@dataclasses.dataclass(frozen=True)
class Rearranged:
    """An array of the second side that holds one of the first in another shape: axes in another order, merged or split.

    Attributes:
        index: position of the first side's array.
        axes: the order of its axes.
        first_shape: its shape.
        shape: the shape that its numbers then take.
    """

    index: int
    axes: tuple[int, ...]
    first_shape: tuple[int, ...]
    shape: tuple[int, ...]

    def to_second(self, array: Array) -> Array:
        """Bring an array of the first side into the second side's shape."""
        return np.ascontiguousarray(array.transpose(self.axes)).reshape(self.shape)

    def to_first(self, array: Array) -> Array:
        """Bring an array of the second side into the first side's shape."""
        moved = array.reshape(tuple(self.first_shape[axis] for axis in self.axes))
        return np.ascontiguousarray(moved.transpose(np.argsort(self.axes)))


Counterpart = int | Rearranged | None
"""The first side's array with the numbers of one of the second's, rearranged or not; None without one."""


def place_index(counterpart: Counterpart) -> int | None:
    """Return the position of the first side's array that one of the second holds."""
    return counterpart.index if isinstance(counterpart, Rearranged) else counterpart


def alike(first: Arguments, second: Arguments) -> list[Counterpart]:
    """Return, per array of the second call, the counterpart with the same numbers in the first; None without one."""
    ours, theirs = first.leaves, second.leaves
    counterparts: list[Counterpart] = [None] * len(theirs)
    free = list(range(len(ours)))
    own_paths, paths = first.paths, second.paths
    for j, leaf in enumerate(theirs):
        if paths[j] in own_paths and _same(ours[i := own_paths.index(paths[j])], leaf):
            counterparts[j] = i
            free.remove(i)
    for look in (_in_place, _rearranged):
        for j, leaf in enumerate(theirs):
            if counterparts[j] is None:
                counterpart = next(
                    (counterpart for i in free if (counterpart := look(i, ours[i], leaf)) is not None), None
                )
                counterparts[j], index = counterpart, place_index(counterpart)
                if index is not None:
                    free.remove(index)
    return counterparts


def _in_place(index: int, first: Array, second: Array) -> Counterpart:
    return index if _same(first, second) else None


def _rearranged(index: int, first: Array, second: Array) -> Counterpart:
    if first.size != second.size or first.size < 2 or _class_of(first) != _class_of(second):
        return None
    orders = [tuple(range(first.ndim))]
    if first.ndim <= MAX_AXES:
        wanted = [size for size in second.shape if size != 1]
        orders += [
            order
            for order in itertools.permutations(range(first.ndim))
            if [first.shape[axis] for axis in order if first.shape[axis] != 1] == wanted
        ]
    places = [Rearranged(index, order, first.shape, second.shape) for order in orders]
    orders_that_fit = [place for place in places if _same(place.to_second(first), second)]
    if len(orders_that_fit) > 1:
        positions = np.arange(first.size).reshape(first.shape)
        plain = orders_that_fit[0].to_second(positions)
        if any(not np.array_equal(plain, place.to_second(positions)) for place in orders_that_fit[1:]):
            return None  # numbers that repeat: it can't be told which way it is turned
    return orders_that_fit[0] if orders_that_fit else None


def _same(first: Array, second: Array) -> bool:
    if first.shape != second.shape or _class_of(first) != _class_of(second):
        return False
    if not is_float(first):
        return bool(np.array_equal(first, second))
    for dtype in dict.fromkeys((first.dtype, second.dtype)):
        # the coarser dtype is the one in which both agree
        if np.array_equal(
            first.astype(dtype).astype(np.float64), second.astype(dtype).astype(np.float64), equal_nan=True
        ):
            return True
    return False


def _class_of(array: Array) -> str:
    return "float" if is_float(array) else "whole" if array.dtype.kind in "iu" else array.dtype.kind


def masks(arguments: Arguments) -> list[bool]:
    """Return which arrays are masks; if all inputs look like masks, floating-point zeros and ones are plain inputs."""
    leaves = arguments.leaves
    are_masks = [is_mask(leaf) for leaf in leaves]
    if all(are_masks):
        return [not is_float(leaf) or bool((leaf.astype(np.float64) < 0).any()) for leaf in leaves]
    return are_masks


def is_constant(leaf: Array) -> bool:
    """Return whether an array of whole numbers or truth values has one of them alone, so that a side may ignore it."""
    return leaf.size > 1 and not is_float(leaf) and bool((leaf == leaf.flat[0]).all())


def is_mask(leaf: Array) -> bool:
    """Return whether an array is a mask: bool, or numbers that are all 0, 1, or hugely negative."""
    if leaf.dtype == np.bool_:
        return True
    if not is_float(leaf):
        return False
    values = leaf.astype(np.float64)
    return bool(np.all((values == 0.0) | (values == 1.0) | (values <= -1e4)))


def like(arguments: Arguments, source: Arguments, matches: Sequence[Counterpart]) -> Arguments:
    """Return the arguments with the arrays that `source` has, too, taken from there."""
    leaves = source.leaves
    replaced = []
    for leaf, counterpart in zip(arguments.leaves, matches, strict=True):
        if counterpart is None:
            replaced.append(leaf)
        else:
            replaced.append(
                counterpart.to_second(leaves[counterpart.index])
                if isinstance(counterpart, Rearranged)
                else leaves[counterpart]
            )
    return arguments.with_leaves(replaced)


def common_dtype(arrays: Arrays) -> str | None:
    """Return the floating-point dtype that most elements have; None without floating-point arrays."""
    sizes: dict[str, int] = {}
    for array in arrays.values():
        if is_float(array):
            sizes[array.dtype.name] = sizes.get(array.dtype.name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def named_leaves(
    what: str, names: Iterable[int | str] | int | str, arguments: Arguments, argument_names: Sequence[str]
) -> set[int]:
    """Return the positions, among all arrays of a call, of those that belong to some arguments.

    Args:
        what: name of the option, for messages.
        names: positions (0 is the first argument) or names of arguments, as the call or its signature has them.
        arguments: the call.
        argument_names: names of its positional arguments.

    Raises:
        TypeError: a name is neither a position nor a text.
        ValueError: the call has no such argument.
    """
    homes: list[Collection[int | str]] = []
    for path, label in zip(arguments.paths, arguments.named(argument_names), strict=True):
        key = path[1:].partition("]")[0]
        if key.isdigit():
            position = int(key)
            homes.append({label, position, key, *argument_names[position : position + 1]})
        else:
            homes.append({label, key.strip("'\"")})
    positions = set()
    if not isinstance(names, Iterable) and not isinstance(names, int):
        raise TypeError(f"{what} must hold positions or names of arguments, got {type(names).__name__}")
    for name in [names] if isinstance(names, (int, str)) else names:
        if isinstance(name, bool) or not isinstance(name, (int, str)):
            raise TypeError(f"{what} must hold positions or names of arguments, got {type(name).__name__}")
        hits = {leaf for leaf, keys in enumerate(homes) if name in keys}
        if not hits:
            every = ", ".join(dict.fromkeys(arguments.named(argument_names)))
            raise ValueError(f"{what} ({name}) must name one of the call's arrays: {every}")
        positions |= hits
    return positions
