"""Changes of where elements go: other orders of axes and parts, other padding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ....hints.case import LARGEST, Array
from ....hints.changes import MOST_ORDERS, MOST_PARTS, axis_orders, orders, shifts
from ....hints.rearranged import orders_of, reshapes
from .program import Operation, Program, ProgramChange, Read, Results, Value, sampled


def of_transpose(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other orders of axes that give the same shape."""
    axes = [int(axis) for axis in operation.params["permutation"]]
    for order in itertools.islice(axis_orders(axes, operation.shapes[0].shape), MOST_ORDERS):
        text = f"axes in the order {order} for {tuple(axes)}"
        yield operation.computed(text, functools.partial(np.transpose, axes=order))


def of_reshape(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the axes that an axis is split into, or merged from, in other orders."""
    shape = operation.shape.shape
    names = sampled(lambda x: reshapes(x, shape), operation.shapes[:1])
    yield from operation.named(names, lambda read: reshapes(np.asarray(read(operation.operands[0])), shape))


def of_concatenation(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other orders of the joined parts, and other shifts where two parts of one value are exchanged."""
    axis = operation.params["dimension"]
    sizes = [item.shape[axis] for item in operation.shapes]
    rolls = _rolls(program, operation)
    if rolls:
        _, rolled, _, shift = rolls[0]
        names = sampled(lambda x: shifts(x, axis, shift), [operation.shape])
        yield from operation.named(names, lambda read: shifts(np.asarray(read(rolled)), axis, shift))
    if len(rolls) > 1:  # as one call shifts an image along its height and width
        source, axes, steps = rolls[-1][1], [axis for _, _, axis, _ in rolls], [-step for *_, step in rolls]
        before = {at: _of(source) for at, source, *_ in rolls[1:]}
        for text, by in (("the shift the other way", steps), ("no shift", [0] * len(steps))):
            results = {**before, operation.at: _of(source, tuple(by), tuple(axes))}
            yield ProgramChange(f"{text} along axes {sorted(axes)}", min(results), results)
    if len(sizes) <= MOST_PARTS:
        for text, order in orders(range(len(sizes)), len(sizes)):

            def joined(*parts: Value, order: Sequence[int] = order) -> Value:
                return np.concatenate([parts[part] for part in order], axis)

            yield operation.computed(f"a concatenation with {text}", joined)


def _rolls(program: Program, operation: Operation) -> list[tuple[int, Value, int, int]]:
    """Return position, source, axis and shift of each roll that made a value in a line, the last first."""
    rolls = []
    maker: Operation | None = operation
    while maker is not None and maker.name == "concatenate" and maker.where == operation.where:
        axis = maker.params["dimension"]
        sizes = [item.shape[axis] for item in maker.shapes]
        parts = [program.maker(item, "slice") for item in maker.operands]
        sources = {None if item is None else item.operands[0] for item in parts}
        if len(parts) != 2 or len(sources) != 1 or parts[0] is None or None in sources:
            break
        if parts[0].shapes[0].shape != maker.shape.shape or parts[0].params["start_indices"][axis] != sizes[1]:
            break
        (source,) = sources
        rolls.append((maker.at, source, int(axis), sizes[0]))
        maker = program.maker(source, "concatenate")
    return rolls


def _of(source: Value, by: tuple[int, ...] = (0,), axes: tuple[int, ...] = (0,)) -> Results:
    """Return a value, shifted along some axes, as the results of an operation."""
    return lambda read: [np.roll(np.asarray(read(source)), by, axes)]


def of_padding(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the padding of each axis on its other side."""
    config = operation.params["padding_config"]
    turned = tuple((high, low, inner) for low, high, inner in config)
    if turned != tuple(config):
        yield operation.computed(
            "padding on the other sides",
            lambda operand, value: np.pad(operand, [pads[:2] for pads in turned], constant_values=value),
        )


def of_constants(program: Program) -> Iterator[ProgramChange]:
    """Yield other constants of the program, such as tables and masks in NumPy: negated, transposed or reordered."""
    for number, constant in program.constants.items():
        takers = program.takes.get(number, [])
        if takers and np.ndim(constant) and np.size(constant) <= LARGEST:
            for text, other in _tables(np.asarray(constant)):
                results = {at: _with_value(program.operations[at], number, other) for at in takers}
                yield ProgramChange(text, takers[0], results)


def _tables(table: Array) -> Iterator[tuple[str, Array]]:
    """Yield a table negated, transposed and in other orders."""
    what = f"the constant of shape {table.shape}"
    if table.dtype.kind == "f":
        yield f"{what} negated", -table
    if table.ndim > 1 and table.shape[-1] == table.shape[-2]:
        yield f"{what} transposed", table.swapaxes(-1, -2)
    for axis, size in enumerate(table.shape):
        for text, order in orders_of(size):
            yield f"axis {axis} of {what} {text}", table.take(order, axis)


def of_reversal(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the value that is not reversed."""
    yield operation.computed("no reversal", lambda operand: operand)


def of_sort(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the results from the largest to the smallest."""
    axis = operation.params["dimension"]
    yield operation.followed("a sort in the other direction", lambda item: np.flip(item, axis))


_PARTS = ("slice", "squeeze", "dynamic_slice")
"""Operations that take a part of an array."""


def of_parts(program: Program) -> Iterator[ProgramChange]:
    """Yield other orders of the parts that one value is split into."""
    groups: dict[tuple[object, ...], list[tuple[Operation, int]]] = {}
    for at, operation in enumerate(program.operations):
        if operation.name == "split":
            for index, variable in enumerate(operation.equation.outvars):
                groups.setdefault((operation.operands[0], at, variable.aval.shape), []).append((operation, index))
        elif operation.name in _PARTS and isinstance(operation.operands[0], int):
            groups.setdefault((operation.operands[0], -1, operation.shape.shape), []).append((operation, 0))
    split = [members for members in groups.values() if members[0][0].name == "split"]
    for count in dict.fromkeys(map(len, split)):
        alike = [members for members in split if len(members) == count in range(2, MOST_PARTS + 1)]
        if len(alike) > 1:  # as the gates of the input and those of the state
            for text, order in orders(range(count), count):
                results = {at: made for members in alike for at, made in _exchanged(members, order).items()}
                yield ProgramChange(f"{text} wherever {count} are split", alike[0][0][0].at, results)
    for members in groups.values():
        if not 1 < len(members) <= 2 * MOST_PARTS:
            continue
        names, count = _numbered(program, members)
        for text, order in orders(names, count):
            yield ProgramChange(text, members[0][0].at, _exchanged(members, order))
        numbers = [operation.results[index] for operation, index in members]
        inside = {operation.at for operation, _ in members}
        for (mine, part), (other, number) in itertools.permutations(enumerate(numbers), 2):
            for takers in _by_call(program, [at for at in program.takes.get(part, ()) if at not in inside]):
                text = _overlap(members[mine][0], members[other][0]) or (
                    f"part {names[other]} of {count} for part {names[mine]}"
                )
                replaced = {at: _with_other(program.operations[at], part, number) for at in takers}
                yield ProgramChange(text, takers[0], replaced)


def _by_call(program: Program, positions: Sequence[int]) -> list[list[int]]:
    """Return the positions of operations, those that a line calls a function of a library for together."""
    groups: dict[object, list[int]] = {}
    for at in positions:
        operation = program.operations[at]
        called = operation.library_calls[:1]
        is_function = bool(called) and called[0].isidentifier()  # operators are called by functions inside of others
        groups.setdefault((operation.where, *called) if is_function else at, []).append(at)
    return list(groups.values())


def _overlap(mine: Operation, other: Operation) -> str:
    """Describe one slice for another if they have elements in common along one axis alone; "" if not."""
    if not mine.name == other.name == "slice":
        return ""
    starts, others = (one.params["start_indices"] for one in (mine, other))
    axes = [axis for axis, (one, two) in enumerate(zip(starts, others, strict=True)) if one != two]
    if len(axes) != 1 or abs(starts[axes[0]] - others[axes[0]]) >= mine.shape.shape[axes[0]]:
        return ""
    return f"the slice from {others[axes[0]]} for the one from {starts[axes[0]]} along axis {axes[0]}"


def _numbered(program: Program, members: Sequence[tuple[Operation, int]]) -> tuple[list[int], int]:
    """Return the numbers of parts of one shape among all parts of their value, and how many these are."""
    first, _ = members[0]
    if first.name == "split":
        return [index for _, index in members], len(first.results)
    takers = (program.operations[at] for at in program.takes[first.operands[0]])
    parts = [operation for operation in takers if operation.name in _PARTS]
    parts.sort(key=lambda operation: operation.params.get("start_indices", ()))  # as they lie, not as they run
    return [parts.index(operation) for operation, _ in members], len(parts)


def _exchanged(members: Sequence[tuple[Operation, int]], order: Sequence[int]) -> dict[int, Results]:
    """Return the results of splitting operations in another order."""
    changes: dict[int, Results] = {}
    for split in {operation.at: operation for operation, _ in members}.values():

        def results(read: Read, split: Operation = split) -> list[Value]:
            made = list(split.plain(read))
            for (operation, index), source in zip(members, order, strict=True):
                if operation is split:
                    other, position = members[source]
                    made[index] = other.plain(read)[position]
            return made

        changes[split.at] = results
    return changes


def _with_other(operation: Operation, part: int, number: int) -> Results:
    """Return the results of an operation with one of its operands replaced by another value."""
    operands = [number if isinstance(item, int) and item == part else item for item in operation.operands]
    return lambda read: operation.run.apply(operation.equation, [read(item) for item in operands])


def _with_value(operation: Operation, part: int, value: Value) -> Results:
    """Return the results of an operation with one of its operands replaced by an array."""

    def results(read: Read) -> list[Value]:
        operands = [value if isinstance(item, int) and item == part else read(item) for item in operation.operands]
        return operation.run.apply(operation.equation, operands)

    return results
