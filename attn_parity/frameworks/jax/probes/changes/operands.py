"""Results of an operation with other operands, or with other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..numpy_interpreter import Interpreter
from .program import Jaxpr, Operation, ProgramChange, Read, Results, Value


def lazily(
    at: int, count: Callable[[Read], Iterator[tuple[str, Value]]], names: Sequence[str]
) -> Iterator[ProgramChange]:
    """Yield a change for each name, whose results are those that `count` yields under this name."""
    for name in names:

        def results(read: Read, name: str = name) -> list[Value]:
            return [next(value for text, value in count(read) if text == name)]

        yield ProgramChange(name, at, {at: results})


def sampled(count: Callable[..., Iterator[tuple[str, Value]]], shapes: Sequence[Value]) -> list[str]:
    """Return the names that a generator of results yields for operands of some shapes."""
    with np.errstate(all="ignore"):
        return [text for text, _ in count(*(np.ones(item.shape, item.dtype) for item in shapes))]


def with_number(run: Interpreter, operation: Operation, index: int, value: float) -> Results:
    """Return the results of an operation with another number in code."""

    def results(read: Read) -> list[Value]:
        operands = [read(item) for item in operation.operands]
        operands[index] = np.asarray(value, operands[index].dtype)
        return run.apply(operation.equation, operands)

    return results


def with_other(run: Interpreter, operation: Operation, part: int, number: int) -> Results:
    """Return the results of an operation with one of its operands replaced by another value."""

    def results(read: Read) -> list[Value]:
        operands = [number if isinstance(item, int) and item == part else item for item in operation.operands]
        return run.apply(operation.equation, [read(item) for item in operands])

    return results


def with_equation(run: Interpreter, operation: Operation, other: Jaxpr) -> Results:
    """Return the results of an operation with other parameters."""
    return lambda read: run.apply(other, [read(item) for item in operation.operands])
