"""Changes of where elements go: other orders of axes and parts, other padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from .....hints.changes import MOST_ORDERS, MOST_PARTS, axis_orders, orders, shifts
from ..numpy_interpreter import Interpreter
from .operands import lazily, sampled, with_other
from .program import Operation, Program, ProgramChange, Read, Results, Value, plain


def of_transpose(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other orders of axes that give the same shape."""
    axes = [int(axis) for axis in operation.params["permutation"]]
    shape = operation.equation.invars[0].aval.shape
    for order in itertools.islice(axis_orders(axes, shape), MOST_ORDERS):

        def results(read: Read, order: tuple[int, ...] = order) -> list[Value]:
            return [read(operation.operands[0]).transpose(order)]

        yield ProgramChange(f"axes in the order {order} for {tuple(axes)}", at, {at: results})


def of_concatenation(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other orders of the joined parts, and other shifts where two parts of one value are exchanged."""
    axis = operation.params["dimension"]
    sizes = [item.aval.shape[axis] for item in operation.equation.invars]
    makers = [program.maker(item, "slice") for item in operation.operands]
    sources = {None if item is None else item.operands[0] for item in makers}
    if len(makers) == 2 and len(sources) == 1 and None not in sources and makers[0] is not None:
        (source,) = sources
        whole = makers[0].equation.invars[0].aval.shape
        if whole == operation.equation.outvars[0].aval.shape and makers[0].params["start_indices"][axis] == sizes[1]:
            names = sampled(lambda x: shifts(x, axis, sizes[0]), [makers[0].equation.invars[0].aval])
            yield from lazily(at, lambda read: shifts(np.asarray(read(source)), axis, sizes[0]), names)
    if len(sizes) <= MOST_PARTS:
        for text, order in orders(len(sizes)):

            def results(read: Read, order: Sequence[int] = order) -> list[Value]:
                parts = [read(operation.operands[part]) for part in order]
                return [np.concatenate(parts, axis)]

            yield ProgramChange(f"a concatenation with {text}", at, {at: results})


def of_padding(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the padding of each axis on its other side."""
    config = operation.params["padding_config"]
    turned = tuple((high, low, inner) for low, high, inner in config)
    if turned != tuple(config):

        def results(read: Read) -> list[Value]:
            operand, value = (read(item) for item in operation.operands)
            return [np.pad(operand, [(low, high) for low, high, _ in turned], constant_values=value)]

        yield ProgramChange("padding on the other sides", at, {at: results})


def of_reversal(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the value that is not reversed."""
    yield ProgramChange("no reversal", at, {at: lambda read: [read(operation.operands[0])]})


def of_sort(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the results from the largest to the smallest."""
    axis = operation.params["dimension"]
    yield ProgramChange(
        "a sort in the other direction",
        at,
        {at: lambda read: [np.flip(item, axis) for item in plain(run, operation, read)]},
    )


def of_parts(run: Interpreter, program: Program) -> Iterator[ProgramChange]:
    """Yield other orders of the parts that one value is split into."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for at, operation in enumerate(program.operations):
        if operation.name == "split":
            for index, variable in enumerate(operation.equation.outvars):
                groups.setdefault((operation.operands[0], at, variable.aval.shape), []).append((at, index))
        elif operation.name in ("slice", "squeeze", "dynamic_slice") and isinstance(operation.operands[0], int):
            groups.setdefault((operation.operands[0], -1, operation.equation.outvars[0].aval.shape), []).append((at, 0))
    split = [members for members in groups.values() if program.operations[members[0][0]].name == "split"]
    for count in dict.fromkeys(map(len, split)):
        alike = [members for members in split if len(members) == count in range(2, MOST_PARTS + 1)]
        if len(alike) > 1:  # as the gates of the input and those of the state
            for text, order in orders(count):
                results = {
                    at: made for members in alike for at, made in _exchanged(run, program, members, order).items()
                }
                yield ProgramChange(f"{text} wherever {count} are split", alike[0][0][0], results)
    for members in groups.values():
        if not 1 < len(members) <= 2 * MOST_PARTS:
            continue
        for text, order in orders(len(members)):
            yield ProgramChange(text, members[0][0], _exchanged(run, program, members, order))
        numbers = [program.operations[at].results[index] for at, index in members]
        for (mine, part), (other, number) in itertools.permutations(enumerate(numbers), 2):
            for at in program.takes.get(part, ()):
                if at not in {at for at, _ in members}:
                    replaced = {at: with_other(run, program.operations[at], part, number)}
                    yield ProgramChange(f"part {other} of {len(numbers)} for part {mine}", at, replaced)


def _exchanged(
    run: Interpreter, program: Program, members: Sequence[tuple[int, int]], order: Sequence[int]
) -> dict[int, Results]:
    """Return the results of splitting operations in another order."""
    changes: dict[int, Results] = {}
    for at in {at for at, _ in members}:

        def results(read: Read, at: int = at) -> list[Value]:
            operation = program.operations[at]
            made = list(plain(run, operation, read))
            for (mine, index), source in zip(members, order, strict=True):
                if mine == at:
                    other, position = members[source]
                    made[index] = plain(run, program.operations[other], read)[position]
            return made

        changes[at] = results
    return changes
