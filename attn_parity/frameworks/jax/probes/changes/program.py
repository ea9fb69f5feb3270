"""A traced program as flat operations, and changes of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jax.extend import core

from .....stack import StackLine, user_line, written_at
from ..numpy_interpreter import Interpreter, inline

Value = typing.Any
"""A value of a program: an array, or a key of random numbers."""

Atom = Value
"""The number of a variable, or a literal."""

Jaxpr = Value
"""A closed jaxpr, or a shape in it: JAX exports no types for these."""

Function = Callable[..., Value]


Read = Callable[[Atom], Value]

Results = Callable[[Read], list[Value]]
"""From a reader of the values of a program to the results of one of its operations."""


@dataclasses.dataclass(frozen=True)
class ProgramChange:
    """A change of a program.

    Attributes:
        text: its description.
        at: the position of the first operation that it changes.
        results: position of an operation -> its results.
    """

    text: str
    at: int
    results: Mapping[int, Results]


class Operation:
    """One operation of a flat program; variables are numbered, literals are themselves."""

    def __init__(self, equation: Jaxpr, operands: list[Value], results: list[int], called: tuple[str, ...]):
        self.equation, self.operands, self.results, self.called = equation, operands, results, called
        self.name, self.params = equation.primitive.name, equation.params

    @property
    def where(self) -> str:
        """``file:line`` in the user's code, "" if unknown."""
        return written_at(self._lines())

    @functools.cached_property
    def site(self) -> tuple[object, ...]:
        """Place in the user's code that calls for it: every run of this code has the same item."""
        lines = self._lines()
        line = user_line(lines, {})
        if line is None:
            return (id(self),)
        codes, instructions = self.equation.source_info.traceback.raw_frames()
        at = next(at for at, item in enumerate(lines) if item is line)
        return codes[at], instructions[at]

    def _lines(self) -> list[StackLine]:
        traceback = self.equation.source_info.traceback
        frames = [] if traceback is None else traceback.frames
        return [StackLine(item.file_name, item.line_num, item.function_name) for item in frames]


class Program:
    """A jaxpr with everything inlined that it only calls."""

    def __init__(self, closed: Jaxpr):
        self.operations: list[Operation] = []
        self.constants: dict[int, Value] = {}
        self.calls: list[tuple[str, int, Atom, int]] = []
        self._count = itertools.count()
        self.inputs = [next(self._count) for _ in closed.jaxpr.invars]
        self.outputs = self._add(closed, list(self.inputs), ())
        self.makes = {item: at for at, operation in enumerate(self.operations) for item in operation.results}
        self.takes: dict[int, list[int]] = {}
        for at, operation in enumerate(self.operations):
            for item in dict.fromkeys(item for item in operation.operands if isinstance(item, int)):
                self.takes.setdefault(item, []).append(at)

    def _add(self, closed: Jaxpr, operands: list[Value], called: tuple[str, ...]) -> list[Value]:
        jaxpr = closed.jaxpr
        numbers: dict[Jaxpr, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
            numbers[variable] = next(self._count)
            self.constants[numbers[variable]] = value

        def number(atom: Atom) -> Value:
            return atom if isinstance(atom, core.Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            source = [number(atom) for atom in equation.invars]
            inner = inline(equation)
            if inner is not None:
                name = str(equation.params.get("name") or "")
                made = self._add(inner, source, (*called, name))
                if len(made) == 1 and isinstance(made[0], int) and isinstance(source[0], int) and len(source) <= 2:
                    self.calls.append((name, len(self.operations) - 1, source[0], made[0]))
            else:
                made = [next(self._count) for _ in equation.outvars]
                self.operations.append(Operation(equation, source, made, called))
            numbers.update(zip(equation.outvars, made, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def maker(self, atom: Atom, *names: str) -> Operation | None:
        """Return the operation that made a value if it has one of these names, behind those that change nothing."""
        while isinstance(atom, int) and atom in self.makes:
            operation = self.operations[self.makes[atom]]
            if operation.name in names:
                return operation
            if operation.name not in ("stop_gradient", "copy", "convert_element_type", "broadcast_in_dim", "reshape"):
                return None
            atom = operation.operands[0]
        return None


def literals(operation: Operation) -> Iterator[tuple[int, float]]:
    """Yield position among its operands and value of the numbers in code that an operation takes."""
    if operation.name in ("select_n", "clamp"):
        return
    for index, atom in enumerate(operation.operands):
        is_number = isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
        if is_number and np.asarray(atom.val).dtype.kind == "f" and np.isfinite(atom.val):
            yield index, float(atom.val)


def plain(run: Interpreter, operation: Operation, read: Read) -> list[Value]:
    """Return the results of an operation without a change."""
    return run.apply(operation.equation, [read(item) for item in operation.operands])
