"""A traced program as flat operations, and changes of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.extend import core

from ....hints.changes import in_run
from ....stack import CallSite, StackLine, call_site, located, user_line
from ..probes.numpy_interpreter import Interpreter, inline, lines_of

_COUNTING = ("_mean", "_var", "_std", "_average")
"""Functions of `jax.numpy` that divide by a count."""

_ALGORITHMS = ("/linalg", "/scipy/", "/image/")
"""Parts of the paths of JAX's code that is more than an operation each."""

_AXES = re.compile(r"ax[ei]s [\[(]?\d")
"""The number of an axis in the description of a change."""

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


Ways = Iterator[tuple[str, Value]]
"""Descriptions of other results, and the results."""


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


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation of a flat program.

    Attributes:
        run: computes operations.
        at: its position in the program.
        equation: the equation of the jaxpr.
        operands: its operands: variables by number, and literals.
        results: the numbers of its results.
        callers: the equations that call the programs around it, the outermost first.
    """

    run: Interpreter
    at: int
    equation: Jaxpr
    operands: list[Value]
    results: list[int]
    callers: tuple[Jaxpr, ...]

    def __post_init__(self) -> None:
        self.name: str = self.equation.primitive.name
        self.params = self.equation.params
        self.called = tuple(str(caller.params.get("name") or "") for caller in self.callers)

    @property
    def shapes(self) -> list[Value]:
        """Shape and dtype of each operand."""
        return [item.aval for item in self.equation.invars]

    @property
    def shape(self) -> Value:
        """Shape and dtype of the first result."""
        return self.equation.outvars[0].aval

    # ---- changes of it

    def plain(self, read: Read) -> list[Value]:
        """Return its results without a change."""
        return self.run.apply(self.equation, [read(item) for item in self.operands])

    def computed(self, text: str, function: Function) -> ProgramChange:
        """Return the change that computes its only result from the operands by a function."""
        return ProgramChange(text, self.at, {self.at: lambda read: [function(*map(read, self.operands))]})

    def followed(self, text: str, function: Function) -> ProgramChange:
        """Return the change that applies a function to each of its results."""
        return ProgramChange(text, self.at, {self.at: lambda read: [function(item) for item in self.plain(read)]})

    def taking(self, function: Callable[..., list[Value]]) -> Results:
        """Return its results for other operands, made from its own by a function."""
        return lambda read: self.run.apply(self.equation, function(*map(read, self.operands)))

    def with_params(self, text: str, **params: Value) -> ProgramChange:
        """Return the change of some of its parameters."""
        other = self.equation.replace(params={**self.params, **params})
        return ProgramChange(
            text, self.at, {self.at: lambda read: self.run.apply(other, [read(item) for item in self.operands])}
        )

    def with_number(self, index: int, value: float) -> Results:
        """Return its results with another number in code at the operand `index`."""

        def function(*operands: Value) -> list[Value]:
            number = np.asarray(value, operands[index].dtype)
            return [*operands[:index], number, *operands[index + 1 :]]

        return self.taking(function)

    def named(self, names: Iterable[str], ways: Callable[[Read], Ways]) -> Iterator[ProgramChange]:
        """Yield a change for each name, whose result is that which `ways` yields under this name."""
        for name in names:

            def results(read: Read, name: str = name) -> list[Value]:
                return [next(value for text, value in ways(read) if text == name)]

            yield ProgramChange(name, self.at, {self.at: results})

    @property
    def where(self) -> str:
        """``file:line`` in the user's code, "" if unknown."""
        return "" if self.site is None else self.site.where

    @property
    def is_of_algorithm(self) -> bool:
        """Whether a library's algorithm calls for it, such as a factorisation: a user could not change it there."""
        inner = _inner(lines_of(self.equation))
        return any(part in line.file and line.function != "norm" for line in inner for part in _ALGORITHMS)

    @property
    def library_calls(self) -> list[str]:
        """Functions of libraries between it and the user's code, the outermost first."""
        lines = [line for one in (self.equation, *reversed(self.callers)) for line in lines_of(one)]
        return [line.function for line in reversed(_inner(lines))]

    @property
    def called_name(self) -> str:
        """Name of the function of `jax.numpy` or `jax.nn` that the user's code calls for it, else its own."""
        public = (name for name in self.library_calls if hasattr(jax.numpy, name) or hasattr(jax.nn, name))
        return next(public, self.name)

    def described(self, text: str) -> str:
        """Return the description of a change; it mentions the axis of `jax.vmap` where numbers of axes include it."""
        stacks = [str(equation.source_info.name_stack) for equation in (self.equation, *self.callers)]
        is_mapped = any("vmap" in stack for stack in stacks)
        return f"{text} (axes counted with the one of jax.vmap)" if is_mapped and _AXES.search(text) else text

    @functools.cached_property
    def site(self) -> CallSite | None:
        """Place in the user's code that calls for it."""
        # Programs that JAX traced once have the lines inside alone; the equation that calls one has those outside.
        return call_site([line for one in (self.equation, *reversed(self.callers)) for line in lines_of(one)])

    @property
    def code(self) -> object:
        """Identifies the code that calls for it: every run of it has the same one."""
        return self if self.site is None else self.site.below


class Program:
    """A jaxpr with everything inlined that it only calls.

    Args:
        closed: the jaxpr.
        run: computes its operations.
    """

    def __init__(self, closed: Jaxpr, run: Interpreter):
        self._run = run
        self.operations: list[Operation] = []
        self.constants: dict[int, Value] = {}
        self._holders: dict[int, Jaxpr] = {}
        self.calls: list[tuple[str, int, Atom, int]] = []
        self._count = itertools.count()
        self.inputs = [next(self._count) for _ in closed.jaxpr.invars]
        self.outputs = self._add(closed, list(self.inputs), ())
        self.makes = {item: at for at, operation in enumerate(self.operations) for item in operation.results}
        self.takes: dict[int, list[int]] = {}
        for at, operation in enumerate(self.operations):
            for item in dict.fromkeys(item for item in operation.operands if isinstance(item, int)):
                self.takes.setdefault(item, []).append(at)
        self.calls += self._library_calls()

    def _add(self, closed: Jaxpr, operands: list[Value], callers: tuple[Jaxpr, ...]) -> list[Value]:
        jaxpr = closed.jaxpr
        numbers: dict[Jaxpr, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
            numbers[variable] = next(self._count)
            self.constants[numbers[variable]] = value

        def number(atom: Atom) -> Value:
            return atom if isinstance(atom, core.Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            source = [number(atom) for atom in equation.invars]
            self._holders.update((id(atom), equation) for atom in equation.invars if isinstance(atom, core.Literal))
            inner = inline(equation)
            if inner is not None:
                name = str(equation.params.get("name") or "")
                made = self._add(inner, source, (*callers, equation))
                if len(made) == 1 and isinstance(made[0], int) and isinstance(source[0], int) and len(source) <= 2:
                    self.calls.append((name, len(self.operations) - 1, source[0], made[0]))
            else:
                made = [next(self._count) for _ in equation.outvars]
                self.operations.append(Operation(self._run, len(self.operations), equation, source, made, callers))
            numbers.update(zip(equation.outvars, made, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def _library_calls(self) -> Iterator[tuple[str, int, Atom, int]]:
        """Yield the calls of library functions without a program in JAX, of one value and to one value."""
        groups: dict[tuple[str, object], list[Operation]] = {}
        for operation in self.operations:
            if not operation.callers:
                lines = [*lines_of(operation.equation)]
                line, inner = user_line(lines, {}), _inner(lines)
                if line is not None and inner:
                    groups.setdefault((inner[-1].function, line.instruction or line.number), []).append(operation)
        for (name, _), members in groups.items():
            made = {item for operation in members for item in operation.results}
            used = {item for operation in members for item in operation.operands if isinstance(item, int)}
            inside = {operation.at for operation in members}
            leaving = {item for item in made if item in self.outputs or set(self.takes.get(item, ())) - inside}
            sources = [item for item in used - made if item not in self.constants]
            if len(members) > 1 and len(sources) == len(leaving) == 1:
                yield name, members[-1].at, sources[0], leaving.pop()

    def where(self, positions: Sequence[int]) -> str:
        """Return ``file:line`` of operations in the user's code; "" if unknown. See `located`."""
        sites = [site for at in positions if (site := self.operations[at].site) is not None]
        names = {self.operations[at].name for at in positions}
        alike = [item.site for item in self.operations if item.name in names and item.site is not None]
        return located(sites, alike) if sites else ""

    def in_run(self, positions: Sequence[int]) -> str:
        """Describe in which run of its code a changed operation is; "" for all runs, or if it runs once."""
        mine = self.operations[positions[0]] if len(set(positions)) == 1 else None
        if mine is None or mine.site is None:
            return ""
        runs = [item.at for item in self.operations if item.name == mine.name and item.site == mine.site]
        return in_run(runs.index(mine.at), len(runs))

    def is_written(self, literal: Atom) -> bool:
        """Return whether the user's code holds a number, and not a library that it calls, as that of a mean does."""
        lines = [*lines_of(self._holders[id(literal)])]
        line = user_line(lines, {})
        return line is not None and not any(inner.function in _COUNTING for inner in lines[: lines.index(line)])

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


def _inner(lines: Iterable[StackLine]) -> list[StackLine]:
    """Return the lines inside the user's innermost one, or all."""
    every = [*lines]
    line = user_line(every, {})
    return every if line is None else every[: every.index(line)]


def literals(operation: Operation) -> Iterator[tuple[int, float]]:
    """Yield position among its operands and value of the numbers in code that an operation takes."""
    if operation.name == "select_n":
        return
    for index, atom in enumerate(operation.operands):
        is_number = isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
        if is_number and np.asarray(atom.val).dtype.kind == "f" and np.isfinite(atom.val):
            yield index, float(atom.val)


def sampled(ways: Callable[..., Ways], shapes: Sequence[Value]) -> list[str]:
    """Return the names that a generator of results yields for operands of some shapes."""
    with np.errstate(all="ignore"):
        return [text for text, _ in ways(*(np.ones(item.shape, item.dtype) for item in shapes))]
