"""Changes of operations on single elements: other functions, branches, bounds and numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from jax.extend import core

from .....hints.changes import binaries, comparisons, functions, logsumexps, softmaxes
from .....hints.layers import ACTIVATIONS
from .....sides.subject import Array
from ..numpy_interpreter import Interpreter
from .operands import lazily, sampled, with_number
from .program import Atom, Operation, Program, ProgramChange, Read, Value, literals, plain

UNARY = ("tanh", "logistic", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "square", "neg", "abs", "erf", "integer_pow")

_ARITHMETIC = ("add", "sub", "mul", "div", "dot_general")


_MISSING = ("ReLU", "SiLU", "GELU by erf", "tanh", "sigmoid")

MOST_NUMBERS = 6
"""Most numbers of one line that are exchanged."""


def of_call(program: Program, name: str, at: int, source: Atom, made: int) -> Iterator[ProgramChange]:
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
        yield from lazily(at, ways, sampled(lambda x: functions(name, x, np.full(x.shape, np.nan)), [np.ones(shape)]))


def of_unary(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other functions of the operand, and the same of the negated operand."""
    aval = operation.equation.outvars[0].aval
    if aval.dtype != np.float64:
        return

    def ways(read: Read) -> Iterator[tuple[str, Value]]:
        operand = read(operation.operands[0])
        yield from functions(operation.name, operand, np.full(operand.shape, np.nan))
        yield f"{operation.name} of the negated operand", run.apply(operation.equation, [-operand])[0]

    names = sampled(lambda x: functions(operation.name, x, np.full(x.shape, np.nan)), [aval])
    yield from lazily(at, ways, [*names, f"{operation.name} of the negated operand"])


def of_binary(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other results of two operands; those of whole numbers begin elsewhere."""
    avals = [item.aval for item in operation.equation.invars]
    plain = operation.equation.outvars[0].aval
    if plain.dtype != np.float64:
        yield from of_positions(run, program, at, operation)
        return
    is_by_number = operation.name == "div" and isinstance(operation.operands[1], core.Literal)
    if is_by_number and program.maker(operation.operands[0], "reduce_sum") is not None:
        yield ProgramChange("a sum for the mean", at, {at: lambda read: [read(operation.operands[0])]})
    if operation.name in ("sub", "div"):
        yield from _of_softmax(program, at, operation)
    if operation.name == "add":
        yield from _of_logsumexp(program, at, operation)
    if operation.name == "sub" and not plain.shape and operation.called[-1:] in (("_var",), ("_std",)):
        yield ProgramChange(
            "the biased variance for the unbiased", at, {at: lambda read: [read(operation.operands[0])]}
        )

    def ways(left: Array, right: Array) -> Iterator[tuple[str, Value]]:
        return binaries(operation.name, left, right, np.broadcast_to(np.nan, plain.shape))

    names = sampled(ways, avals)
    yield from lazily(at, lambda read: ways(*(np.asarray(read(item)) for item in operation.operands)), names)


def of_complex(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the imaginary part for the real one, or the other way round, and the absolute value."""
    parts: dict[str, Callable[[Array], Array]] = {"real": np.real, "imag": np.imag, "abs": np.abs}
    for name, part in parts.items():
        if name != operation.name:

            def results(read: Read, part: Callable[[Array], Array] = part) -> list[Value]:
                return [part(read(operation.operands[0]))]

            yield ProgramChange(f"{name} for {operation.name}", at, {at: results})


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

    names = sampled(lambda x: softmaxes(x, axes, is_log=is_log), [total.equation.invars[0].aval])
    yield from lazily(at, ways, names)


def _of_logsumexp(program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the maximum, and logsumexps over other axes, for log(sum(exp(x - m))) + m."""
    log = next((item for operand in operation.operands if (item := program.maker(operand, "log")) is not None), None)
    total = None if log is None else program.maker(log.operands[0], "reduce_sum", "abs")
    total = program.maker(total.operands[0], "reduce_sum") if total is not None and total.name == "abs" else total
    exponential = None if total is None else program.maker(total.operands[0], "exp")
    shifted = None if exponential is None else program.maker(exponential.operands[0], "sub")
    if total is None or shifted is None:
        return
    logits, axes = shifted.operands[0], total.params["axes"]
    keeps = operation.equation.outvars[0].aval.ndim == total.equation.invars[0].aval.ndim

    def ways(read: Read) -> Iterator[tuple[str, Value]]:
        for text, value in logsumexps(np.asarray(read(logits)), axes):
            yield text, np.expand_dims(value, axes) if keeps else value

    yield from lazily(at, ways, sampled(lambda x: logsumexps(x, axes), [total.equation.invars[0].aval]))


def of_comparison(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other comparisons."""
    avals = [item.aval for item in operation.equation.invars]
    if all(hasattr(item, "dtype") and item.dtype.kind in "iuf" for item in avals):
        names = sampled(lambda left, right: comparisons(operation.name, left, right), avals)

        def ways(read: Read) -> Iterator[tuple[str, Value]]:
            return comparisons(operation.name, *(np.asarray(read(item)) for item in operation.operands))

        yield from lazily(at, ways, names)


def of_select(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the other branch of a choice."""
    if len(operation.operands) == 3:

        def results(read: Read) -> list[Value]:
            which, no, yes = (read(item) for item in operation.operands)
            return run.apply(operation.equation, [which, yes, no])

        yield ProgramChange("the branches of a choice exchanged", at, {at: results})


def of_positions(run: Interpreter, program: Program, at: int, operation: Operation) -> Iterator[ProgramChange]:
    """Yield positions that begin elsewhere."""
    aval = operation.equation.outvars[0].aval
    if getattr(aval, "dtype", np.dtype(bool)).kind not in "iu" or not aval.shape:
        return
    for shift in (1, -1):

        def results(read: Read, shift: int = shift) -> list[Value]:
            return [item + np.asarray(shift, item.dtype) for item in plain(run, operation, read)]

        yield ProgramChange(f"positions {abs(shift)} {'higher' if shift > 0 else 'lower'}", at, {at: results})
    if operation.name == "iota":
        yield ProgramChange("positions in reverse", at, {at: lambda read: [np.flip(plain(run, operation, read)[0])]})


def of_missing(run: Interpreter, program: Program) -> Iterator[ProgramChange]:
    """Yield functions of results that code leaves as they are."""
    for at in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[at]
        if operation.name in _ARITHMETIC and operation.equation.outvars[0].aval.dtype == np.float64:
            for name in _MISSING:
                function = ACTIVATIONS[name]

                def results(
                    read: Read, operation: Operation = operation, function: Callable[[Array], Array] = function
                ) -> list[Value]:
                    return [function(item) for item in plain(run, operation, read)]

                yield ProgramChange(f"{name} of the result of {operation.name}", at, {at: results})


def of_exchanged_numbers(run: Interpreter, program: Program) -> Iterator[ProgramChange]:
    """Yield two numbers of one line exchanged."""
    lines: dict[str, list[tuple[int, int, float]]] = {}
    for at, operation in enumerate(program.operations):
        for index, number in literals(operation):
            lines.setdefault(operation.where, []).append((at, index, number))
    for numbers in lines.values():
        for (at, index, number), (other, elsewhere, another) in itertools.combinations(numbers[:MOST_NUMBERS], 2):
            if number != another and at != other:
                yield ProgramChange(
                    f"{number:.6g} and {another:.6g} exchanged",
                    at,
                    {
                        at: with_number(run, program.operations[at], index, another),
                        other: with_number(run, program.operations[other], elsewhere, number),
                    },
                )
