"""The data of a pairing: tensors (parameters or slices of them), matches of two tensors, and bijections of matches.

A slice of a parameter records the position of its elements: an offset and strides. So parts of a fused weight, layers
of a stack and flipped kernels are read and written through one kind of view. A stack of layers that the other side
numbers is taken apart before pairing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from attn_bridge.weights import Rule

from ..results.findings import PairedParameter
from ..sides.arrays import is_large
from ..sides.subject import Array, Arrays, SideWeight

Which = Literal["first", "second", "torch", "flax"]
"""A side; torch and flax are other names of the first and the second."""

_PARAMETRIZED = re.compile(r"\bparametrizations\.(\w+)\.(?:\d+\.)?_?")
"""Path of a tensor of torch's parametrizations, numbered per parameter; spectral norm calls its vectors ``_u`` and
``_v``."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a tensor's elements lie in the parameter it is cut out of, counted in elements of its C order."""

    offset: int
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter, or a slice of one under its own name.

    Attributes:
        name: its name in reports; a slice is named ``c_attn.weight[query]``.
        source: name of the parameter.
        shape: its shape.
        parameter: the side's record of the parameter.
        cut: its offset and strides in the parameter; None for the whole.
        alias: the name to parse, if it is not `source`.
        framework: ``torch`` or ``flax``.
        layers: paths of the other side's layers that this slice of a stack may be of; empty for other tensors.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    parameter: SideWeight
    cut: Cut | None = None
    alias: str = ""
    framework: str = ""
    layers: tuple[str, ...] = ()

    @property
    def spelled(self) -> str:
        """The name that its words are read from."""
        return self.alias or self.source

    @property
    def strides(self) -> tuple[int, ...]:
        """Step of each axis in elements of the parameter."""
        return self.cut.strides if self.cut else c_strides(self.shape)

    def take(self, arrays: Mapping[str, Array], side: object = None) -> Array:
        """Return its elements from arrays by parameter name, as a view wherever the array is contiguous."""
        del side
        return self.view(arrays[self.source])

    def view(self, array: Array) -> Array:
        """Return its elements in the array of its parameter."""
        if self.cut is None:
            return array
        # NumPy refuses a view behind the end of an array, where an empty slice begins.
        if not math.prod(self.shape):
            return np.empty(self.shape, array.dtype)
        flat = np.ascontiguousarray(array).reshape(-1)
        strides = [step * flat.itemsize for step in self.cut.strides]
        return np.lib.stride_tricks.as_strided(flat[self.cut.offset :], self.shape, strides)

    def slice(self, axis: int, start: int, stop: int, name: str, alias: str = "") -> Tensor:
        """Return the part between two positions of an axis."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        offset = (self.cut.offset if self.cut else 0) + start * self.strides[axis]
        return dataclasses.replace(self, name=name, alias=alias, shape=shape, cut=Cut(offset, self.strides))

    def at(self, axis: int, position: int, name: str, alias: str = "") -> Tensor:
        """Return the slice at one position of an axis, without that axis."""
        part = self.slice(axis, position, position + 1, name, alias)
        assert part.cut is not None
        rest = (*part.cut.strides[:axis], *part.cut.strides[axis + 1 :])
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return dataclasses.replace(part, shape=shape, cut=Cut(part.cut.offset, rest))

    def unfolded(self, axis: int, sizes: Sequence[int]) -> Tensor:
        """Return it with one axis taken apart into several, outermost first."""
        inner = [self.strides[axis] * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        strides = (*self.strides[:axis], *inner, *self.strides[axis + 1 :])
        shape = (*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        return dataclasses.replace(self, shape=shape, cut=Cut(self.cut.offset if self.cut else 0, strides))

    def flipped(self, axes: Sequence[int]) -> Tensor:
        """Return it with some axes read backwards."""
        offset, strides = self.cut.offset if self.cut else 0, list(self.strides)
        for axis in axes:
            # Backwards from the last element: as_strided takes negative strides.
            offset += (self.shape[axis] - 1) * strides[axis]
            strides[axis] = -strides[axis]
        return dataclasses.replace(self, cut=Cut(offset, tuple(strides)))


@dataclasses.dataclass(frozen=True)
class Match:
    """One tensor on both sides.

    Attributes:
        first: the tensor of the first side.
        second: the tensor of the second side.
        rule: from the first side's axes to the second side's; ``convert(array, "torch")`` goes that way, ``"flax"``
            back.
        how: the evidence: ``rule``, ``name``, ``order`` (of use on both sides) or ``probe``.
        text: the pattern for reports, where it is more than the rule's.
    """

    first: Tensor
    second: Tensor
    rule: Rule
    how: str
    text: str = ""

    @property
    def pattern(self) -> str:
        """The pattern as people read it."""
        return self.text or self.rule.pattern

    def tensor(self, side: Which) -> Tensor:
        """Return the tensor of one side."""
        return self.first if is_first(side) else self.second

    def carry(self, array: Array, source: Which) -> Array:
        """Rearrange an array of this tensor from one side's axes to the other's; a view where there can be one."""
        return self.rule.convert(array, "torch" if is_first(source) else "flax")


@dataclasses.dataclass(frozen=True)
class Pairing:
    """A bijection between the parameters of both sides.

    Attributes:
        matches: the pairs.
        dropped: (side, parameter, reason) of those that rules exclude.
        doubt: why another pairing may be meant, and the candidates, if neither names nor runs settled it; else "".
    """

    matches: tuple[Match, ...]
    dropped: tuple[tuple[str, str, str], ...] = ()
    doubt: str = ""

    def to_second(self, arrays: Mapping[str, Array]) -> Arrays:
        """Convert the first side's weights by parameter name to the second side's."""
        return self._convert(arrays, "first")

    def to_first(self, arrays: Mapping[str, Array]) -> Arrays:
        """Convert the second side's weights by parameter name to the first side's."""
        return self._convert(arrays, "second")

    def aligned(self, arrays: Mapping[str, Array], side: Which) -> dict[str, Array]:
        """Return arrays of one side (weights or gradients) per pair, under the first side's names and with its axes."""
        aligned = {}
        for match in self.matches:
            tensor = match.tensor(side)
            if tensor.source in arrays:
                array = tensor.take(arrays)
                aligned[match.first.name] = array if is_first(side) else match.carry(array, "second")
        return aligned

    def drawn_as(self, parameters: Mapping[str, SideWeight]) -> dict[str, SideWeight]:
        """Return the first side's parameters, as the statistic or state that either side takes them for."""
        others = {match.first.source: match.second.parameter.role for match in self.matches}
        rank = ("parameter", "state", "statistic").index
        return {
            name: dataclasses.replace(one, role=max(one.role, others.get(name, one.role), key=rank))
            for name, one in parameters.items()
        }

    def rows(self) -> list[PairedParameter]:
        """Return the pairs for a report."""
        return [
            PairedParameter(match.first.name, match.second.name, match.pattern, match.how) for match in self.matches
        ]

    def _convert(self, arrays: Mapping[str, Array], source: Which) -> Arrays:
        target: Which = "second" if is_first(source) else "first"
        arrays_of_target: Arrays = {}
        for match in self.matches:
            source_tensor, target_tensor = match.tensor(source), match.tensor(target)
            moved = match.carry(source_tensor.take(arrays), source)
            if target_tensor.cut is None:
                arrays_of_target[target_tensor.source] = moved if is_large(moved) else np.asarray(moved, order="C")
                continue
            if target_tensor.source not in arrays_of_target:
                arrays_of_target[target_tensor.source] = np.empty(target_tensor.parameter.shape, moved.dtype)
            target_tensor.view(arrays_of_target[target_tensor.source])[...] = moved
        return arrays_of_target


def is_first(side: str) -> bool:
    """Return whether the first side is meant, by any of its names."""
    return side in ("first", "torch")


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the step of each axis, in elements, of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def whole(name: str, parameter: SideWeight, framework: str = "") -> Tensor:
    """Return the tensor that is a whole parameter.

    Args:
        name: the parameter's name.
        parameter: its record.
        framework: used if the parameter does not name its own.
    """
    own = getattr(parameter, "framework", "") or framework
    # Haiku and Keras write the path of a module with slashes, inside a key of the tree.
    spelled = name.replace("/~/", ".").replace("/", ".")
    if own == "torch":
        spelled = _PARAMETRIZED.sub(r"\1.", spelled)
    alias = spelled if spelled != name else ""
    return Tensor(name, name, parameter.shape, parameter, alias=alias, framework=own)


def lies_within(tensor: Tensor, size: int) -> bool:
    """Return whether every element of a tensor lies within a parameter of that many elements."""
    if not math.prod(tensor.shape):
        return True
    offset = tensor.cut.offset if tensor.cut else 0
    spans = [(length - 1) * step for length, step in zip(tensor.shape, tensor.strides, strict=True)]
    least = offset + sum(span for span in spans if span < 0)
    return least >= 0 and offset + sum(span for span in spans if span > 0) < size


def uncovered(tensors: Sequence[Tensor]) -> list[str]:
    """Return the parameters of which some element is in no tensor, or in two."""
    by_source: dict[str, list[Tensor]] = collections.defaultdict(list)
    for tensor in tensors:
        by_source[tensor.source].append(tensor)
    wrong = []
    for name, parts in by_source.items():
        if [part.cut for part in parts] == [None]:
            continue
        seen = np.zeros(parts[0].parameter.shape, np.uint8)
        if sum(math.prod(part.shape) for part in parts) != seen.size:
            wrong.append(name)
            continue
        for part in parts:
            part.view(seen)[...] += 1
        if not (seen == 1).all():
            wrong.append(name)
    return wrong


# ---- stacks


def unstacked(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return one side's tensors with those taken apart that hold all of the other side's numbered layers in one.

    Where both sides have the same shapes, every tensor has a counterpart as it is: a matrix of width 5 is then no stack
    of five norms.
    """
    if collections.Counter(map(_sizes, tensors)) == collections.Counter(map(_sizes, others)):
        return list(tensors)
    result = list(tensors)
    for _ in range(4):  # layers, experts inside them, and so on
        stacks = {name: stack for stack in _stacks(result, others) for name in stack.names}
        if not stacks:
            break
        parts = []
        for tensor in result:
            stack = stacks.get(tensor.name)
            if stack is None:
                parts.append(tensor)
                continue
            rest = tensor.spelled[len(stack.path) :].lstrip(".")
            lists = [path for path in stack.lists if not tensor.layers or path.startswith(tensor.layers)]
            for position, number in enumerate(stack.numbers):
                # Without a path of its own the stack is named as the list that it is alone to suit.
                path = f"{lists[0]}{number}" if len(lists) == 1 and not stack.path else f"{stack.path}.{position}"
                part = tensor.at(stack.axis, position, f"{tensor.name}[{position}]", f"{path}.{rest}".strip("."))
                parts.append(
                    dataclasses.replace(part, layers=tuple(f"{name}{number}" for name in lists) or part.layers)
                )
        result = parts
    return result


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Tensors below a path whose axis counts layers.

    Attributes:
        path: the path.
        names: the tensors.
        axis: the axis that counts layers.
        numbers: the numbers of the other side's layers, in the order of the axis.
        lists: paths of the other side's lists of layers that the stack may be.
    """

    path: str
    names: frozenset[str]
    axis: int
    numbers: tuple[int, ...]
    lists: tuple[str, ...]


def _stacks(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[LayerStack]:
    """Yield the stacks of one side whose layers the other side numbers, each tensor in one at most."""
    mine, theirs = _families(tensors), _families(others)
    numbered = collections.Counter((len(numbers), total) for numbers, total in mine.values())
    # Lists that this side numbers as well have a counterpart as they are, and need no stack.
    wanted = collections.Counter((len(numbers), total) for numbers, total in theirs.values()) - numbered
    stacked: set[str] = set()
    for prefix, (numbers, total) in sorted(theirs.items(), key=lambda item: (item[0].count("."), item[0])):
        count = len(numbers)
        if count < 2 or not wanted[count, total]:
            continue
        lists = tuple(path for path, (some, size) in theirs.items() if (some, size) == (numbers, total))
        counted = tuple(sorted(numbers)), lists
        below = next((some for some in _below(tensors, count, total) if not some[1] & stacked), None)
        stack = LayerStack(*below, *counted) if below else None
        if stack is None:
            free = [one for one in tensors if one.name not in stacked]
            alone = _stacked_by_shape(free, others, prefix, count)
            stack = LayerStack("", frozenset(alone), 0, *counted) if alone else None
        if stack is not None:
            wanted[count, total] -= 1
            stacked |= stack.names
            yield stack


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))


def _below(tensors: Sequence[Tensor], count: int, total: int) -> Iterator[tuple[str, frozenset[str], int]]:
    """Yield path, names and axis of stacks that hold everything below a path: `count` layers, `total` elements."""
    for path, below in _paths(tensors).items():
        if sum(math.prod(tensor.shape) for tensor in below) != total:
            continue
        axes = range(min(len(tensor.shape) for tensor in below))
        axis = next((axis for axis in axes if all(one.shape[axis] == count for one in below)), None)
        if axis is not None:
            yield path, frozenset(tensor.name for tensor in below), axis


def _stacked_by_shape(tensors: Sequence[Tensor], others: Sequence[Tensor], prefix: str, count: int) -> set[str]:
    """Return the stacked tensors in a mixed list: those whose first axis counts the layers and whose sizes fit.

    Of more that fit, those come last that have a counterpart as they are, by name or by shape.

    Args:
        tensors: the tensors of the side with stacks.
        others: the other side's tensors.
        prefix: path of its numbered layers.
        count: number of layers.
    """
    layers = [one for one in others if one.spelled.startswith(prefix)]
    rest = [one for one in others if not one.spelled.startswith(prefix)]
    wholes = {(_word(one), math.prod(one.shape)) for one in rest}
    shapes = {_sizes(one) for one in rest}
    first = [tensor for tensor in tensors if tensor.shape[:1] == (count,) and len(tensor.shape) > 1]
    if sum(math.prod(one.shape) for one in first) == sum(math.prod(one.shape) for one in layers):
        return {tensor.name for tensor in first}
    sizes = collections.Counter(math.prod(one.shape) for one in layers)
    each = {size: number // count for size, number in sizes.items()}
    chosen: set[str] = set()
    by_name = {tensor.name for tensor in first if (_word(tensor), math.prod(tensor.shape)) in wholes}
    for tensor in sorted(first, key=lambda tensor: (tensor.name in by_name, _sizes(tensor) in shapes)):
        size = math.prod(tensor.shape) // count
        if each.get(size, 0):
            each[size] -= 1
            chosen.add(tensor.name)
    return chosen if chosen and not any(each.values()) else set()


def _word(tensor: Tensor) -> str:
    """Return the last part of a tensor's name."""
    return tensor.spelled.rpartition(".")[2].lower()


def _families(tensors: Sequence[Tensor]) -> dict[str, tuple[set[int], int]]:
    """Return the path of each numbered list of similar layers -> its numbers, and their number of common elements.

    Layers are similar if most of their elements are in tensors that all of them have: only T5's first layer has the
    table of relative positions.
    """
    layers: dict[str, dict[int, set[tuple[str, tuple[int, ...]]]]] = collections.defaultdict(
        lambda: collections.defaultdict(set)
    )
    for tensor in tensors:
        for number in re.finditer(r"[0-9]+(?=\.|$)", tensor.spelled):
            rest = tensor.spelled[number.end() :]
            layers[tensor.spelled[: number.start()]][int(number[0])].add((rest, tensor.shape))
    families = {}
    for prefix, some in layers.items():
        common = set.intersection(*some.values())
        if 2 * _elements(common) > max(map(_elements, some.values())):
            families[prefix] = (set(some), len(some) * _elements(common))
    return families


def _elements(layer: Collection[tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) for _, shape in layer)


def _paths(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return every path -> the tensors below it, deepest first; "" is the root."""
    tensors_below: dict[str, list[Tensor]] = collections.defaultdict(list)
    for tensor in tensors:
        words = tensor.spelled.split(".")
        for length in range(len(words)):
            tensors_below[".".join(words[:length])].append(tensor)
    return dict(sorted(tensors_below.items(), key=lambda item: (-item[0].count(".") - bool(item[0]), item[0])))
