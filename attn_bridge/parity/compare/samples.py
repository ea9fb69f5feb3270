"""The numbers that two modules are compared on: the user's own, and drawn ones that are not degenerate."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..check.cases import numpy_dtype
from .subject import Arguments, Array, Arrays, ModuleFailedError, Parameter, is_float

Outputs = list[tuple[str, tuple[int, ...], str]]
"""Place, shape and dtype of every output."""

MOVE = 2.0**-10
"""By how much of itself every number of a copy is moved: enough to redraw every rounding, too little to change more."""

MOST_AXES = 6
"""Most axes of an input that is looked for with its axes in another order."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One set of numbers for both modules: torch weights, arguments of both calls, and what tells samples apart.

    Samples of one `group` differ by tiny moves only. `stress` says that the inputs were drawn to be hard: they are for
    the meaning of the two sides, whose precision may well differ there.
    """

    weights: Arrays
    torch: Arguments
    flax: Arguments
    kind: str
    group: int
    seed: tuple[int, ...]
    stress: bool = False


def as_arguments(inputs: Any) -> Arguments:
    """Return inputs (one array, a tuple of positional ones, a dict of keyword ones) as a call on NumPy arrays.

    Raises:
        ModuleFailedError: there is no array in them.
    """
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, Mapping):
        found = Arguments((), {str(name): _to_numpy(value) for name, value in inputs.items()})
    elif isinstance(inputs, (tuple, list)):
        found = Arguments(tuple(_to_numpy(value) for value in inputs))
    else:
        found = Arguments((_to_numpy(inputs),))
    if not found.leaves:
        raise ModuleFailedError(
            "inputs must be an array, a tuple of positional ones or a dict of keyword ones, "
            f"got {type(inputs).__name__}"
        )
    for leaf in found.leaves:
        if not is_float(leaf) and leaf.dtype.kind not in "biu":
            hint = "; give real and imaginary parts as two" if leaf.dtype.kind == "c" else ""
            raise ModuleFailedError(f"inputs must hold numbers or bools, one has dtype {leaf.dtype}{hint}")
    return found


def _to_numpy(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and not _is_foreign(value):
        return (
            type(value)(map(_to_numpy, value)) if not hasattr(value, "_fields") else type(value)(*map(_to_numpy, value))
        )
    if isinstance(value, Mapping):
        return {key: _to_numpy(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return value
    if _is_foreign(value):
        if hasattr(value, "detach"):
            from ... import backends

            return backends.load("torch").to_numpy(value)
        return np.asarray(value)
    if isinstance(value, np.generic):
        return np.asarray(value)
    return value


def _is_foreign(value: Any) -> bool:
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
    """A Flax array that holds a torch array's numbers in another shape: its axes in another order, or merged or split.

    Attributes:
        index: position of the torch array.
        axes: the order of its axes.
        torch_shape: its shape.
        shape: the shape that its numbers then take.
    """

    index: int
    axes: tuple[int, ...]
    torch_shape: tuple[int, ...]
    shape: tuple[int, ...]

    def to_flax(self, array: Array) -> Array:
        """Bring a torch array into the Flax shape."""
        return np.ascontiguousarray(array.transpose(self.axes)).reshape(self.shape)

    def to_torch(self, array: Array) -> Array:
        """Bring a Flax array into the torch shape."""
        moved = array.reshape(tuple(self.torch_shape[axis] for axis in self.axes))
        return np.ascontiguousarray(moved.transpose(np.argsort(self.axes)))


Place = int | Rearranged | None
"""The torch array whose numbers a Flax array holds, rearranged or not; None where there is none."""


def place_index(place: Place) -> int | None:
    """Return the position of the torch array that a Flax array holds."""
    return place.index if isinstance(place, Rearranged) else place


def alike(torch: Arguments, flax: Arguments) -> list[Place]:
    """Return, per Flax array, the torch array that holds the same numbers; None for one of its own.

    Numbers are the same if they are once both are rounded to the coarser of the two dtypes. One that stands in the same
    place goes before others, one of the same shape before one that is rearranged.
    """
    ours, theirs = torch.leaves, flax.leaves
    found: list[Place] = [None] * len(theirs)
    free = list(range(len(ours)))
    own_paths, paths = torch.paths, flax.paths
    for j, leaf in enumerate(theirs):
        if paths[j] in own_paths and _same(ours[i := own_paths.index(paths[j])], leaf):
            found[j] = i
            free.remove(i)
    for look in (_in_place, _rearranged):
        for j, leaf in enumerate(theirs):
            if found[j] is None:
                place = next((place for i in free if (place := look(i, ours[i], leaf)) is not None), None)
                found[j], index = place, place_index(place)
                if index is not None:
                    free.remove(index)
    return found


def _in_place(index: int, torch: Array, flax: Array) -> Place:
    return index if _same(torch, flax) else None


def _rearranged(index: int, torch: Array, flax: Array) -> Place:
    if torch.size != flax.size or torch.size < 2 or _class_of(torch) != _class_of(flax):
        return None
    orders = [tuple(range(torch.ndim))]
    if torch.ndim <= MOST_AXES:
        wanted = [size for size in flax.shape if size != 1]
        orders += [
            order
            for order in itertools.permutations(range(torch.ndim))
            if [torch.shape[axis] for axis in order if torch.shape[axis] != 1] == wanted
        ]
    places = [Rearranged(index, order, torch.shape, flax.shape) for order in orders]
    found = [place for place in places if _same(place.to_flax(torch), flax)]
    if len(found) > 1:
        positions = np.arange(torch.size).reshape(torch.shape)
        first = found[0].to_flax(positions)
        if any(not np.array_equal(first, one.to_flax(positions)) for one in found[1:]):
            return None  # numbers that repeat: it can't be told which way it is turned
    return found[0] if found else None


def _same(one: Array, two: Array) -> bool:
    if one.shape != two.shape or _class_of(one) != _class_of(two):
        return False
    if not is_float(one):
        return bool(np.array_equal(one, two))
    for dtype in dict.fromkeys((one.dtype, two.dtype)):
        # the coarser dtype is the one in which both agree
        if np.array_equal(one.astype(dtype).astype(np.float64), two.astype(dtype).astype(np.float64), equal_nan=True):
            return True
    return False


def _class_of(array: Array) -> str:
    return "float" if is_float(array) else "whole" if array.dtype.kind in "iu" else array.dtype.kind


def draw_inputs(arguments: Arguments, seed: tuple[int, ...], *, stress: bool = False) -> Arguments:
    """Draw other numbers of the same shapes.

    Floating-point arrays keep their mean and spread; under `stress` their vectors (along the last axis) differ in size
    by two orders of magnitude and some are nearly constant with a mean far from zero. What was nowhere negative stays
    so. Integers are shuffled unless they are in order (as positions are). Masks (see `masks`) stay as they are.
    """
    random = np.random.default_rng([*seed, 7])
    pairs = zip(arguments.leaves, masks(arguments), strict=True)
    return arguments.with_leaves([leaf if mask else _draw_like(leaf, random, stress) for leaf, mask in pairs])


def masks(arguments: Arguments) -> list[bool]:
    """Tell which arrays are masks; where nothing else is given, floating-point zeros and ones are plain inputs."""
    leaves = arguments.leaves
    found = [is_mask(leaf) for leaf in leaves]
    if all(found):
        return [not is_float(leaf) or bool((leaf.astype(np.float64) < 0).any()) for leaf in leaves]
    return found


def is_mask(leaf: Array) -> bool:
    """Tell whether an array is a mask: bool, or numbers that are all 0, 1, or hugely negative."""
    if leaf.dtype == np.bool_:
        return True
    if not is_float(leaf):
        return False
    values = leaf.astype(np.float64)
    return bool(np.all((values == 0.0) | (values == 1.0) | (values <= -1e4)))


def _draw_like(leaf: Array, random: np.random.Generator, stress: bool) -> Array:
    if leaf.size == 0:
        return leaf
    if not is_float(leaf):
        in_order = leaf.ndim == 0 or bool(np.all(np.diff(leaf, axis=-1) >= 0))
        return leaf if in_order or leaf.dtype.kind not in "iu" else random.permutation(leaf.ravel()).reshape(leaf.shape)
    given = leaf.astype(np.float64)
    finite = given[np.isfinite(given)]
    mean, spread = (float(finite.mean()), float(finite.std())) if finite.size else (0.0, 1.0)
    spread = spread or abs(mean) or 1.0
    drawn: Array = np.asarray(random.normal(size=leaf.shape))
    if stress:
        leading = (*leaf.shape[:-1], 1) if leaf.ndim else ()
        drawn = drawn * random.choice([0.03, 0.3, 1.0, 1.0, 2.0], size=leading)
        drawn += random.choice([0.0, 0.0, 0.0, 1.0, -1.5], size=leading)
    drawn = drawn * spread + mean
    return np.asarray(drawn if bool((finite < 0).any()) else np.abs(drawn)).astype(leaf.dtype)


def draw_weights(parameters: Mapping[str, Parameter], held: Mapping[str, Array], seed: tuple[int, ...]) -> Arrays:
    """Draw weights that are not degenerate: biases and scales are neither 0 nor 1, no two tensors are alike."""
    drawn = {}
    for name, parameter in parameters.items():
        random = np.random.default_rng([*seed, zlib.crc32(name.encode())])
        array = held[name]
        drawn[name] = _draw_weight(random, name, parameter).astype(array.dtype) if is_float(array) else array
    return drawn


def _draw_weight(random: np.random.Generator, name: str, parameter: Parameter) -> Array:
    shape = parameter.shape
    if parameter.role == "statistic":
        is_mean = name.rpartition(".")[2].endswith("mean")
        return np.asarray(0.5 * random.normal(size=shape) if is_mean else random.uniform(0.5, 2.0, size=shape))
    if len(shape) == 0:
        return np.asarray(random.uniform(0.5, 1.5))
    if len(shape) == 1:
        return random.choice([-1.0, 1.0], size=shape) * random.uniform(0.2, 1.6, size=shape)
    if "Embed" in parameter.owner:
        return np.asarray(random.normal(size=shape))
    is_known = parameter.owner not in ("", "Module") and name.rpartition(".")[2] in ("weight", "in_proj_weight")
    inner = float(np.prod(shape[1:])) if is_known else float(np.prod(shape)) ** (1.0 / len(shape))
    drawn = random.standard_normal(shape, dtype=np.float32)  # a float32 draw takes a third of the time
    drawn *= np.float32(1.0 / np.sqrt(max(inner, 1.0)))
    return drawn


def moved(arrays: Mapping[str, Array], seed: tuple[int, ...], by: float = MOVE) -> Arrays:
    """Return weights with every number moved at random by a small part of itself."""
    found = {}
    for name, array in arrays.items():
        random = np.random.default_rng([*seed, zlib.crc32(name.encode()), 1])
        found[name] = _moved(array, random, by)
    return found


def moved_inputs(arguments: Arguments, seed: tuple[int, ...], by: float = MOVE) -> Arguments:
    """Return the arguments with every floating-point number that is in no mask moved by a small part of itself."""
    random = np.random.default_rng([*seed, 2])
    pairs = zip(arguments.leaves, masks(arguments), strict=True)
    return arguments.with_leaves([leaf if mask else _moved(leaf, random, by) for leaf, mask in pairs])


def _moved(array: Array, random: np.random.Generator, by: float) -> Array:
    if not is_float(array):
        return array
    noise = random.standard_normal(array.shape, dtype=np.float32)
    result: Array = np.asarray(array * (1.0 + by * noise)).astype(array.dtype)
    return result


def like(arguments: Arguments, source: Arguments, matches: Sequence[Place]) -> Arguments:
    """Return the arguments with the arrays that `source` has, too, taken from there."""
    leaves = source.leaves
    found = []
    for leaf, place in zip(arguments.leaves, matches, strict=True):
        if place is None:
            found.append(leaf)
        else:
            found.append(place.to_flax(leaves[place.index]) if isinstance(place, Rearranged) else leaves[place])
    return arguments.with_leaves(found)


def common_dtype(arrays: Arrays) -> str | None:
    """Return the floating-point dtype that most elements have; None where there are none."""
    sizes: dict[str, int] = {}
    for array in arrays.values():
        if is_float(array):
            sizes[array.dtype.name] = sizes.get(array.dtype.name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def cotangents(outputs: Outputs, seed: tuple[int, ...], dtype: str | None) -> list[Array]:
    """Draw a gradient of the loss for every output, as the precision of the run holds it."""
    random = np.random.default_rng([*(abs(one) for one in seed), 3])
    found = []
    for _, shape, own in outputs:
        drawn = random.normal(size=shape)
        wanted = numpy_dtype(own)
        found.append(drawn.astype(numpy_dtype(dtype) if dtype else wanted) if is_float(np.empty(0, wanted)) else drawn)
    return found


def rounded(sample: Sample, dtype: str | None) -> Sample:
    """Return the sample as the low precision holds it."""
    if dtype is None:
        return sample

    def cast(array: Array) -> Array:
        return array.astype(numpy_dtype(dtype)) if is_float(array) else array

    return dataclasses.replace(
        sample,
        weights={name: cast(array) for name, array in sample.weights.items()},
        torch=sample.torch.with_leaves([cast(leaf) for leaf in sample.torch.leaves]),
        flax=sample.flax.with_leaves([cast(leaf) for leaf in sample.flax.leaves]),
    )
