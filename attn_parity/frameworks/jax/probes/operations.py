"""Change one operation of a program at a time, run on from it, and compare the results with the other side's.

The float64 program is run once in NumPy, with all its values kept. A change replaces the results of one operation, and
what depends on these is computed again. In loops every step has the change.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jax.extend import core

from ....hints.layers import ACTIVATIONS
from ....sides.changes import (
    BINARY,
    COMPARISONS,
    MOST_ORDERS,
    MOST_PARTS,
    MOST_VALUES,
    PER_OPERATION,
    Budget,
    agree,
    apart,
    axis_orders,
    binaries,
    comparisons,
    functions,
    orders,
    reductions,
    shifts,
    softmaxes,
    solved,
)
from ....sides.large import LargeWeight
from ....sides.subject import Array
from ....stack import StackLine, user_line, written_at
from .numpy_interpreter import Interpreter, inline

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

UNARY = ("tanh", "logistic", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "square", "neg", "abs", "erf", "integer_pow")


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


class ChangedPrograms(Interpreter):
    """Runs a program, keeps its values, and runs it again with changes.

    Args:
        closed: the program, in float64.
        args: its arguments.
    """

    def __init__(self, closed: Jaxpr, args: Sequence[Value]):
        super().__init__()
        self._programs: dict[int, tuple[Jaxpr, Program]] = {}
        self._changes: dict[int, Mapping[int, Results]] = {}
        self._elements: dict[int, int] = {}
        self.program = self._program(closed)
        self.values: dict[int, Value] = dict(zip(self.program.inputs, args, strict=True))
        self.values |= {number: self.constant(value) for number, value in self.program.constants.items()}
        self.budget = Budget()
        self.is_small = self._keep()

    def _program(self, closed: Jaxpr) -> Program:
        key = id(closed.jaxpr)
        if key not in self._programs:
            self._programs[key] = closed, Program(closed)
        return self._programs[key][1]

    def _keep(self) -> bool:
        """Run the program and keep its values; return False if they are too many."""
        kept = 0
        with np.errstate(all="ignore"):
            for operation in self.program.operations:
                results = self._apply(
                    operation.equation, [self._value(item, self.values) for item in operation.operands]
                )
                self.values.update(zip(operation.results, results, strict=True))
                kept += sum(np.size(item) for item in results)
                if kept > MOST_VALUES:
                    return False
        return not any(isinstance(item, LargeWeight) for item in self.values.values())

    def _value(self, atom: Atom, values: Mapping[int, Value]) -> Value:
        return values[atom] if isinstance(atom, int) else self.constant(atom.val)

    def _run(self, closed: Jaxpr, args: Sequence[Value], *, spills: bool = False) -> list[Value]:
        """Run the body of a loop, with its changes if it has some."""
        program = self._program(closed)
        changes = self._changes.get(id(program), {})
        values: dict[int, Value] = dict(zip(program.inputs, args, strict=True))
        values |= {number: self.constant(value) for number, value in program.constants.items()}

        def read(atom: Atom) -> Value:
            return self._value(atom, values)

        for at, operation in enumerate(program.operations):
            results = changes[at](read) if at in changes else self._plain(operation, read)
            values.update(zip(operation.results, results, strict=True))
        return [read(atom) for atom in program.outputs]

    def _plain(self, operation: Operation, read: Read) -> list[Value]:
        return self._apply(operation.equation, [read(item) for item in operation.operands])

    @property
    def outputs(self) -> list[Array]:
        """The results without a change."""
        return [np.asarray(self._value(item, self.values)) for item in self.program.outputs]

    def changed(self, results: Mapping[int, Results]) -> list[Array] | None:
        """Return the results of the program with a change; None if it fails, or changes nothing."""
        new: dict[int, Value] = {}

        def read(atom: Atom) -> Value:
            return new[atom] if isinstance(atom, int) and atom in new else self._value(atom, self.values)

        pending = set(results)
        operations = self.program.operations
        try:
            with np.errstate(all="ignore"):
                while pending:
                    at = min(pending)
                    pending.remove(at)
                    operation = operations[at]
                    made = results[at](read) if at in results else self._plain(operation, read)
                    work = PER_OPERATION + sum(np.size(item) for item in made)
                    if operation.name in ("scan", "while"):
                        work *= 10 * max(int(operation.params.get("length", 10)), 1)
                    if not self.budget.spend(work):
                        return None
                    for number, value in zip(operation.results, made, strict=True):
                        old = self.values[number]
                        if np.shape(old) != np.shape(value) or not np.array_equal(old, value):
                            new[number] = value
                            pending.update(self.program.takes.get(number, ()))
        except Exception:  # a change may make any operation fail
            return None
        made_outputs = [np.asarray(read(item)) for item in self.program.outputs]
        return made_outputs if new else None

    # ---- the search

    def found(self, wanted: Sequence[Sequence[Array]], others: Sequence[ChangedPrograms]) -> list[tuple[str, str]]:
        """Return the changes with which the results are those wanted: what changes, and ``file:line``.

        Numbers in code are solved for only where no other change fits.

        Args:
            wanted: the results wanted, of this run and of the others.
            others: runs of the same program on other arguments, on which a change has to fit as well.
        """
        runs = [self, *others]
        if not all(run.is_small for run in runs) or apart(self.outputs, wanted[0]) is None:
            return []

        def fits(results: Mapping[int, Results]) -> bool:
            made = (run.changed(results) for run in runs)
            return all(item is not None and agree(item, two) for item, two in zip(made, wanted, strict=True))

        hits: dict[str, str] = {}
        for results, change, program in self._all(_changes_of):
            if fits(results):
                hits.setdefault(program.operations[change.at].where, change.text)
            if len(hits) > 1 or self.budget.left < 0:
                break
        return [(text, where) for where, text in hits.items()] or self._numbers(wanted[0], fits)

    def _all(
        self, changes: Callable[..., Iterator[ProgramChange]]
    ) -> Iterator[tuple[Mapping[int, Results], ProgramChange, Program]]:
        """Yield the changes of the program and of the loops in it; for the latter, the operation that is the loop."""
        for change in changes(self, self.program):
            yield change.results, change, self.program
        for at, operation in enumerate(self.program.operations):
            for key in ("jaxpr", "body_jaxpr"):
                if operation.name in ("scan", "while") and key in operation.params:
                    body = self._program(operation.params[key])
                    for change in changes(self, body):
                        yield {at: self._in_loop(operation, body, change)}, change, body

    def _in_loop(self, operation: Operation, body: Program, change: ProgramChange) -> Results:
        def results(read: Read) -> list[Value]:
            self._changes = {id(body): change.results}
            try:
                return self._plain(operation, read)
            finally:
                self._changes = {}

        return results

    def _numbers(self, wanted: Sequence[Array], fits: Callable[[Mapping[int, Results]], bool]) -> list[tuple[str, str]]:
        """Return the number in the code with which the results are those wanted, by solving for each."""
        for at, operation in enumerate(self.program.operations):
            loops = [self._program(operation.params[key]) for key in ("jaxpr",) if operation.name == "scan"]
            for program, position in [
                (self.program, at),
                *((body, inner) for body in loops for inner in range(len(body.operations))),
            ]:
                item = program.operations[position]
                for index, number in _literals(item):

                    def changes(
                        value: float,
                        index: int = index,
                        program: Program = program,
                        position: int = position,
                        at: int = at,
                    ) -> Mapping[int, Results]:
                        results = {position: _with_number(self, program.operations[position], index, value)}
                        if program is self.program:
                            return results
                        return {
                            at: self._in_loop(
                                self.program.operations[at], program, ProgramChange("", position, results)
                            )
                        }

                    def rest(value: float, changes: Callable[..., Mapping[int, Results]] = changes) -> Array | None:
                        outputs = self.changed(changes(value))
                        return apart(self.outputs if outputs is None else outputs, wanted)

                    value = solved(number, rest)
                    if value is not None and value != number and fits(changes(value)):
                        return [(f"{value:.6g} for {number:.6g}", item.where)]
        return []


def _literals(operation: Operation) -> Iterator[tuple[int, float]]:
    """Yield position among its operands and value of the numbers in code that an operation takes."""
    if operation.name in ("select_n", "clamp"):
        return
    for index, atom in enumerate(operation.operands):
        is_number = isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
        if is_number and np.asarray(atom.val).dtype.kind == "f" and np.isfinite(atom.val):
            yield index, float(atom.val)


def _with_number(run: ChangedPrograms, operation: Operation, index: int, value: float) -> Results:
    def results(read: Read) -> list[Value]:
        operands = [read(item) for item in operation.operands]
        operands[index] = np.asarray(value, operands[index].dtype)
        return run._apply(operation.equation, operands)

    return results


def _changes_of(run: ChangedPrograms, program: Program) -> Iterator[ProgramChange]:
    """Yield the changes of a program, from its end: what comes last needs the fewest operations again.

    Code that runs several times, as that of a layer in every block, is changed everywhere.
    """
    repeated = _repeated(program)
    made: dict[tuple[int, str], ProgramChange] = {}
    for change in _single_changes(run, program):
        made.setdefault((change.at, change.text), change)
        if change.at not in repeated:
            yield change
    for change in list(made.values()):
        group = repeated.get(change.at, ())
        if group and change.at == group[0]:
            others = [made[at, change.text] for at in group if (at, change.text) in made]
            results = {at: result for other in others for at, result in other.results.items()}
            yield ProgramChange(change.text, change.at, results)
    yield from (change for change in made.values() if change.at in repeated)


def _repeated(program: Program) -> dict[int, tuple[int, ...]]:
    """Return position of an operation -> the positions of all that the same code calls for, if it runs repeatedly."""
    sites: dict[tuple[object, ...], list[int]] = {}
    for at, operation in enumerate(program.operations):
        sites.setdefault(operation.site, []).append(at)
    repeated: dict[int, tuple[int, ...]] = {}
    for positions in sites.values():
        names = [program.operations[at].name for at in positions]
        length = next(size for size in range(1, len(names) + 1) if names == (names[:size] * len(names))[: len(names)])
        if length < len(names) and len(names) % length == 0:
            groups = {first: tuple(positions[first::length]) for first in range(length)}
            repeated |= {at: group for group in groups.values() for at in group}
    return repeated


def _single_changes(run: ChangedPrograms, program: Program) -> Iterator[ProgramChange]:
    for name, at, source, made in reversed(program.calls):
        if name and not name.startswith("_"):
            yield from _of_call(program, name, at, source, made)
    for at in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[at]
        for kind, maker in _KINDS.items():
            if operation.name in kind:
                yield from maker(run, program, at, operation)
    yield from _of_parts(run, program)
    yield from _of_exchanged_numbers(run, program)
    yield from _of_missing(run, program)


def _of_missing(run: ChangedPrograms, program: Program) -> Iterator[ProgramChange]:
    """Yield functions of results that code leaves as they are."""
    for at in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[at]
        if operation.name in _ARITHMETIC and operation.equation.outvars[0].aval.dtype == np.float64:
            for name in _MISSING:
                function = ACTIVATIONS[name]

                def results(
                    read: Read, operation: Operation = operation, function: Callable[[Array], Array] = function
                ) -> list[Value]:
                    return [function(item) for item in run._plain(operation, read)]

                yield ProgramChange(f"{name} of the result of {operation.name}", at, {at: results})


_ARITHMETIC = ("add", "sub", "mul", "div", "dot_general")

_MISSING = ("ReLU", "SiLU", "GELU by erf", "tanh", "sigmoid")


def _of_exchanged_numbers(run: ChangedPrograms, program: Program) -> Iterator[ProgramChange]:
    """Yield two numbers of one line exchanged."""
    lines: dict[str, list[tuple[int, int, float]]] = {}
    for at, operation in enumerate(program.operations):
        for index, number in _literals(operation):
            lines.setdefault(operation.where, []).append((at, index, number))
    for numbers in lines.values():
        for (at, index, number), (other, elsewhere, another) in itertools.combinations(numbers[:MOST_NUMBERS], 2):
            if number != another and at != other:
                yield ProgramChange(
                    f"{number:.6g} and {another:.6g} exchanged",
                    at,
                    {
                        at: _with_number(run, program.operations[at], index, another),
                        other: _with_number(run, program.operations[other], elsewhere, number),
                    },
                )


MOST_NUMBERS = 6
"""Most numbers of one line that are exchanged."""


def _lazily(
    at: int, count: Callable[[Read], Iterator[tuple[str, Value]]], names: Sequence[str]
) -> Iterator[ProgramChange]:
    """Yield a change for each name, whose results are those that `count` yields under this name."""
    for name in names:

        def results(read: Read, name: str = name) -> list[Value]:
            return [next(value for text, value in count(read) if text == name)]

        yield ProgramChange(name, at, {at: results})


def _sampled(count: Callable[..., Iterator[tuple[str, Value]]], shapes: Sequence[Value]) -> list[str]:
    """Return the names that a generator of results yields for operands of some shapes."""
    with np.errstate(all="ignore"):
        return [text for text, _ in count(*(np.ones(item.shape, item.dtype) for item in shapes))]


def _of_call(program: Program, name: str, at: int, source: Atom, made: int) -> Iterator[ProgramChange]:
    """Yield other functions for one that is called, such as an activation of `jax.nn`."""
    maker = program.makes.get(made)
    if maker is None or maker != at:
        return

    def ways(read: Read) -> Iterator[tuple[str, Value]]:
        operand = read(source)
        return functions(name, operand, np.full(operand.shape, np.nan))

    operation = program.operations[at]
    shape = operation.equation.outvars[0].aval.shape
    before = program.operations[program.makes[source]].equation.outvars if source in program.makes else None
    is_same = before is None or any(item.aval.shape == shape for item in before)
    if is_same and operation.equation.outvars[0].aval.dtype == np.float64:
        yield from _lazily(at, ways, _sampled(lambda x: functions(name, x, np.full(x.shape, np.nan)), [np.ones(shape)]))


def _of_unary(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    aval = operation.equation.outvars[0].aval
    if aval.dtype != np.float64:
        return

    def ways(read: Read) -> Iterator[tuple[str, Value]]:
        operand = read(operation.operands[0])
        yield from functions(operation.name, operand, np.full(operand.shape, np.nan))
        yield f"{operation.name} of the negated operand", run._apply(operation.equation, [-operand])[0]

    names = _sampled(lambda x: functions(operation.name, x, np.full(x.shape, np.nan)), [aval])
    yield from _lazily(at, ways, [*names, f"{operation.name} of the negated operand"])


def _of_binary(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    avals = [item.aval for item in operation.equation.invars]
    plain = operation.equation.outvars[0].aval
    if plain.dtype != np.float64:
        yield from _of_positions(run, program, at, operation)
        return
    is_by_number = operation.name == "div" and isinstance(operation.operands[1], core.Literal)
    if is_by_number and program.maker(operation.operands[0], "reduce_sum") is not None:
        yield ProgramChange("a sum for the mean", at, {at: lambda read: [read(operation.operands[0])]})
    if operation.name in ("sub", "div"):
        yield from _of_softmax(program, at, operation)

    def ways(left: Array, right: Array) -> Iterator[tuple[str, Value]]:
        return binaries(operation.name, left, right, np.broadcast_to(np.nan, plain.shape))

    names = _sampled(ways, avals)
    yield from _lazily(at, lambda read: ways(*(np.asarray(read(item)) for item in operation.operands)), names)


def _of_softmax(program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield softmaxes over other axes for exp(x) / sum(exp(x)), or x - log(sum(exp(x)))."""
    is_log = operation.name == "sub"
    total = program.maker(operation.operands[1], "log" if is_log else "reduce_sum")
    total = program.maker(total.operands[0], "reduce_sum") if is_log and total is not None else total
    exponential = None if total is None else program.maker(total.operands[0], "exp")
    shifted = None if exponential is None else program.maker(exponential.operands[0], "sub")
    if total is None or exponential is None:
        return
    logits = exponential.operands[0] if shifted is None else shifted.operands[0]
    axes = total.params["axes"]

    def ways(read: Read) -> Iterator[tuple[str, Value]]:
        return softmaxes(np.asarray(read(logits)), axes, is_log=is_log)

    names = _sampled(lambda x: softmaxes(x, axes, is_log=is_log), [total.equation.invars[0].aval])
    yield from _lazily(at, ways, names)


def _of_comparison(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    avals = [item.aval for item in operation.equation.invars]
    if all(hasattr(item, "dtype") and item.dtype.kind in "iuf" for item in avals):
        names = _sampled(lambda left, right: comparisons(operation.name, left, right), avals)

        def ways(read: Read) -> Iterator[tuple[str, Value]]:
            return comparisons(operation.name, *(np.asarray(read(item)) for item in operation.operands))

        yield from _lazily(at, ways, names)


def _of_select(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    if len(operation.operands) == 3:

        def results(read: Read) -> list[Value]:
            which, no, yes = (read(item) for item in operation.operands)
            return run._apply(operation.equation, [which, yes, no])

        yield ProgramChange("the branches of a choice exchanged", at, {at: results})


def _of_positions(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield positions that begin elsewhere."""
    aval = operation.equation.outvars[0].aval
    if getattr(aval, "dtype", np.dtype(bool)).kind not in "iu" or not aval.shape:
        return
    for shift in (1, -1):

        def results(read: Read, shift: int = shift) -> list[Value]:
            return [item + np.asarray(shift, item.dtype) for item in run._plain(operation, read)]

        yield ProgramChange(f"positions {abs(shift)} {'higher' if shift > 0 else 'lower'}", at, {at: results})
    if operation.name == "iota":
        yield ProgramChange("positions in reverse", at, {at: lambda read: [np.flip(run._plain(operation, read)[0])]})


def _of_reduction(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other reductions: a mean for a sum, other axes whose sizes stay with the result as 1 where they did."""
    operand, axes = operation.equation.invars[0].aval, operation.params["axes"]
    if operand.dtype != np.float64:
        return
    size = int(np.prod([operand.shape[axis] for axis in axes]))
    source = operation.operands[0]

    kinds = {"reduce_sum": "sum", "reduce_max": "maximum", "reduce_min": "minimum"}
    own = kinds[operation.name]
    ways: tuple[tuple[str, Function, float], ...] = (
        ("sum", np.sum, 1.0),
        ("mean", np.sum, 1 / size),
        ("maximum", np.max, 1.0),
    )
    for name, function, times in ways:
        if name != own:
            made = _reduced(function, source, tuple(axes), times, keepdims=False)
            yield ProgramChange(f"a {name} for the {own}", at, {at: made})
    if own == "sum":
        yield ProgramChange(
            "a norm for the sum", at, {at: lambda read: [np.sqrt(np.square(read(source)).sum(tuple(axes)))]}
        )
    reducers: dict[str, Function] = {"sum": np.sum, "maximum": np.max, "minimum": np.min}
    same = reducers[own]
    keeps = [at for at in program.takes.get(operation.results[0], ()) if _keeps_axes(program.operations[at], operand)]
    for text, other in reductions(np.broadcast_to(0.0, operand.shape), axes):
        others = int(np.prod([operand.shape[axis] for axis in other]))
        for times in dict.fromkeys((1.0, size / others)):
            kept = _reduced(same, source, other, times, keepdims=True)
            if keeps:
                yield ProgramChange(text, at, dict.fromkeys(keeps, kept))
            else:
                yield ProgramChange(text, at, {at: _reduced(same, source, other, times, keepdims=False)})


def _reduced(function: Function, source: Atom, axes: tuple[int, ...], times: float, *, keepdims: bool) -> Results:
    """Return a reduction of a value as a change."""
    return lambda read: [function(read(source), axis=axes, keepdims=keepdims) * times]


def _keeps_axes(operation: Operation, operand: Jaxpr) -> bool:
    """Return whether an operation gives the result of a reduction the axes of its operand, with sizes of 1."""
    return operation.name == "broadcast_in_dim" and len(operation.params["shape"]) == len(operand.shape)


def _of_transpose(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    axes = [int(axis) for axis in operation.params["permutation"]]
    shape = operation.equation.invars[0].aval.shape
    for order in itertools.islice(axis_orders(axes, shape), MOST_ORDERS):

        def results(read: Read, order: tuple[int, ...] = order) -> list[Value]:
            return [read(operation.operands[0]).transpose(order)]

        yield ProgramChange(f"axes in the order {order} for {tuple(axes)}", at, {at: results})


def _of_product(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    for index, atom in enumerate(operation.equation.invars):
        shape = atom.aval.shape
        if len(shape) >= 2 and shape[-1] == shape[-2]:

            def results(read: Read, index: int = index) -> list[Value]:
                operands = [read(item) for item in operation.operands]
                operands[index] = operands[index].swapaxes(-1, -2)
                return run._apply(operation.equation, operands)

            yield ProgramChange(f"operand {index} of a product transposed", at, {at: results})


def _of_concatenation(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    axis = operation.params["dimension"]
    sizes = [item.aval.shape[axis] for item in operation.equation.invars]
    makers = [program.maker(item, "slice") for item in operation.operands]
    sources = {None if item is None else item.operands[0] for item in makers}
    if len(makers) == 2 and len(sources) == 1 and None not in sources and makers[0] is not None:
        (source,) = sources
        whole = makers[0].equation.invars[0].aval.shape
        if whole == operation.equation.outvars[0].aval.shape and makers[0].params["start_indices"][axis] == sizes[1]:
            names = _sampled(lambda x: shifts(x, axis, sizes[0]), [makers[0].equation.invars[0].aval])
            yield from _lazily(at, lambda read: shifts(np.asarray(read(source)), axis, sizes[0]), names)
    if len(sizes) <= MOST_PARTS:
        for text, order in orders(len(sizes)):

            def results(read: Read, order: Sequence[int] = order) -> list[Value]:
                parts = [read(operation.operands[part]) for part in order]
                return [np.concatenate(parts, axis)]

            yield ProgramChange(f"a concatenation with {text}", at, {at: results})


def _of_padding(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    config = operation.params["padding_config"]
    turned = tuple((high, low, inner) for low, high, inner in config)
    if turned != tuple(config):

        def results(read: Read) -> list[Value]:
            operand, value = (read(item) for item in operation.operands)
            return [np.pad(operand, [(low, high) for low, high, _ in turned], constant_values=value)]

        yield ProgramChange("padding on the other sides", at, {at: results})


def _of_convolution(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield convolutions with their padding shifted, and with a kernel that is flipped or transposed."""
    padding = operation.params["padding"]
    ways = [tuple((low + moved, high - moved) for low, high in padding) for moved in (1, -1)]
    ways += [tuple((low + high, 0) for low, high in padding), tuple((0, low + high) for low, high in padding)]
    for way in dict.fromkeys(ways):
        if way != tuple(padding) and min(map(min, way)) >= 0:
            other = operation.equation.replace(params={**operation.params, "padding": way})
            yield ProgramChange(
                f"padding {list(way)} for {list(padding)}", at, {at: _with_equation(run, operation, other)}
            )
    axes = tuple(operation.params["dimension_numbers"].rhs_spec[2:])
    if max((operation.equation.invars[1].aval.shape[axis] for axis in axes), default=1) > 1:
        yield ProgramChange(
            "the kernel flipped", at, {at: _with_kernel(run, operation, lambda item: np.flip(item, axes))}
        )
    if len(axes) == 2 and len({operation.equation.invars[1].aval.shape[axis] for axis in axes}) == 1:
        turned = _with_kernel(run, operation, lambda item: item.swapaxes(*axes))
        yield ProgramChange("the kernel with height and width exchanged", at, {at: turned})


def _with_equation(run: ChangedPrograms, operation: Operation, other: Jaxpr) -> Results:
    return lambda read: run._apply(other, [read(item) for item in operation.operands])


def _with_kernel(run: ChangedPrograms, operation: Operation, change: Callable[[Array], Array]) -> Results:
    def results(read: Read) -> list[Value]:
        image, kernel = (read(item) for item in operation.operands)
        return run._apply(operation.equation, [image, np.ascontiguousarray(change(kernel))])

    return results


def _of_cumulation(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    axis = operation.params["axis"]

    def results(read: Read) -> list[Value]:
        turned = np.flip(read(operation.operands[0]), axis)
        return [np.flip(run._apply(operation.equation, [turned])[0], axis)]

    yield ProgramChange(f"a {operation.name} from the other end", at, {at: results})
    if operation.name == "cumsum":
        yield ProgramChange(
            "a cumsum that leaves out its own element",
            at,
            {at: lambda read: [run._plain(operation, read)[0] - read(operation.operands[0])]},
        )


def _of_loop(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    params = {**operation.params, "reverse": not operation.params["reverse"]}
    turned = operation.equation.replace(params=params)
    yield ProgramChange("a loop from the other end", at, {at: _with_equation(run, operation, turned)})


def _of_reversal(run: ChangedPrograms, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    yield ProgramChange("no reversal", at, {at: lambda read: [read(operation.operands[0])]})


_KINDS: dict[tuple[str, ...], Callable[..., Iterator[ProgramChange]]] = {
    UNARY: _of_unary,
    tuple(BINARY): _of_binary,
    tuple(COMPARISONS): _of_comparison,
    ("select_n",): _of_select,
    ("iota",): _of_positions,
    ("reduce_sum", "reduce_max", "reduce_min"): _of_reduction,
    ("transpose",): _of_transpose,
    ("dot_general",): _of_product,
    ("concatenate",): _of_concatenation,
    ("pad",): _of_padding,
    ("conv_general_dilated",): _of_convolution,
    ("cumsum", "cumprod"): _of_cumulation,
    ("scan",): _of_loop,
    ("rev",): _of_reversal,
}
"""Names of operations -> their changes."""


def _of_parts(run: ChangedPrograms, program: Program) -> Iterator[ProgramChange]:
    """Yield other orders of the parts that one value is split into."""
    groups: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for at, operation in enumerate(program.operations):
        if operation.name == "split":
            for index, variable in enumerate(operation.equation.outvars):
                groups.setdefault((operation.operands[0], at, variable.aval.shape), []).append((at, index))
        elif operation.name in ("slice", "squeeze", "dynamic_slice") and isinstance(operation.operands[0], int):
            groups.setdefault((operation.operands[0], -1, operation.equation.outvars[0].aval.shape), []).append((at, 0))
    for members in groups.values():
        if not 1 < len(members) <= 2 * MOST_PARTS:
            continue
        for text, order in orders(len(members)):
            yield ProgramChange(text, members[0][0], _exchanged(run, program, members, order))
        numbers = [program.operations[at].results[index] for at, index in members]
        for (mine, part), (other, number) in itertools.permutations(enumerate(numbers), 2):
            for at in program.takes.get(part, ()):
                if at not in {at for at, _ in members}:
                    results = {at: _with_other(run, program.operations[at], part, number)}
                    yield ProgramChange(f"part {other} of {len(numbers)} for part {mine}", at, results)


def _with_other(run: ChangedPrograms, operation: Operation, part: int, number: int) -> Results:
    """Return the results of an operation with one of its operands replaced by another value."""

    def results(read: Read) -> list[Value]:
        operands = [number if isinstance(item, int) and item == part else item for item in operation.operands]
        return run._apply(operation.equation, [read(item) for item in operands])

    return results


def _exchanged(
    run: ChangedPrograms, program: Program, members: Sequence[tuple[int, int]], order: Sequence[int]
) -> dict[int, Results]:
    """Return the results of splitting operations in another order."""
    changes: dict[int, Results] = {}
    for at in {at for at, _ in members}:

        def results(read: Read, at: int = at) -> list[Value]:
            operation = program.operations[at]
            made = list(run._plain(operation, read))
            for (mine, index), source in zip(members, order, strict=True):
                if mine == at:
                    other, position = members[source]
                    made[index] = run._plain(program.operations[other], read)[position]
            return made

        changes[at] = results
    return changes
