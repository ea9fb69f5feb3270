"""Changes of operations on single elements: other functions, branches, bounds and numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from jax.extend import core

from ....hints.changes import (
    COMPARISONS,
    EXCHANGED,
    ROUNDINGS,
    binaries,
    comparisons,
    functions,
    logsumexps,
    softmaxes,
)
from ....hints.layers import ACTIVATIONS
from ....sides.subject import Array
from .program import Atom, Operation, Program, ProgramChange, Read, Results, Value, Ways, literals, sampled

UNARY = (
    *("tanh", "logistic", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "square", "neg", "abs", "erf", "integer_pow"),
    *ROUNDINGS,
)

POWERS = (1, 2, 3)
"""Exponents that are tried for one another, before functions that are the same where the operand is positive."""

_ARITHMETIC = ("add", "sub", "mul", "div", "dot_general")


_MISSING = ("ReLU", "SiLU", "GELU by erf", "GELU by tanh", "tanh", "sigmoid")

TRIANGLES = ("tril", "triu", "tri")

MOST_NUMBERS = 6
"""Most numbers of one line that are exchanged."""


def of_call(program: Program, name: str, at: int, source: Atom, made: int) -> Iterator[ProgramChange]:
    """Yield other functions for one that is called, such as an activation of `jax.nn`."""
    if program.makes.get(made) != at:
        return

    def ways(x: Array) -> Ways:
        return functions(name, x, np.full(x.shape, np.nan))

    operation = program.operations[at]
    shape = operation.shape.shape
    before = program.operations[program.makes[source]].equation.outvars if source in program.makes else None
    is_same = before is None or any(item.aval.shape == shape for item in before)
    if is_same and operation.shape.dtype == np.float64:
        yield from operation.named(sampled(ways, [np.ones(shape)]), lambda read: ways(read(source)))


def of_unary(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other functions of the operand, and the same of the negated operand."""
    name = operation.name
    if operation.shape.dtype != np.float64:
        return
    power = operation.params["y"] if name == "integer_pow" else 0
    powers = {f"the power {y} for {power}": y for y in POWERS if power and y != power}

    def ways(x: Array) -> Ways:
        for text, y in powers.items():
            yield text, x**y
        yield from functions(name, x, np.full(x.shape, np.nan))
        yield f"{name} of the negated operand", operation.run.apply(operation.equation, [-x])[0]

    names = [*sampled(lambda x: functions(name, x, np.full(x.shape, np.nan)), [operation.shape])]
    names = [*powers, *names, f"{name} of the negated operand"]
    yield from operation.named(names, lambda read: ways(read(operation.operands[0])))


def of_binary(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other results of two operands; those of whole numbers begin elsewhere."""
    plain = operation.shape
    if plain.dtype != np.float64:
        yield from of_positions(program, operation)
        return
    is_by_number = operation.name == "div" and isinstance(operation.operands[1], core.Literal)
    total = program.maker(operation.operands[0], "reduce_sum") if is_by_number else None
    if total is not None:
        yield operation.computed("a sum for the mean", lambda left, right: left)
        yield ProgramChange("a maximum for the mean", operation.at, {operation.at: _maximum(total, plain.shape)})
    if operation.name in ("sub", "div"):
        yield from _of_softmax(program, operation)
    if operation.name == "add":
        yield from _of_logsumexp(program, operation)
        yield from _of_products(program, operation)
    if operation.name == "sub" and not plain.shape and operation.called[-1:] in (("_var",), ("_std",)):
        yield operation.computed("the biased variance for the unbiased", lambda left, right: left)

    has_number = any(isinstance(item, core.Literal) for item in operation.operands)

    def ways(left: Array, right: Array) -> Ways:
        return binaries(operation.name, left, right, np.broadcast_to(np.nan, plain.shape), has_number=has_number)

    names = sampled(ways, operation.shapes)
    yield from operation.named(names, lambda read: ways(*(np.asarray(read(item)) for item in operation.operands)))


def _maximum(total: Operation, shape: tuple[int, ...]) -> Results:
    """Return the largest elements for their sum."""
    return lambda read: [np.asarray(read(total.operands[0])).max(total.params["axes"]).reshape(shape)]


def of_complex(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the imaginary part for the real one, or the other way round, and the absolute value."""
    parts: dict[str, Callable[[Array], Array]] = {"real": np.real, "imag": np.imag, "abs": np.abs}
    for name, part in parts.items():
        if name != operation.name:
            yield operation.computed(f"{name} for {operation.name}", part)


def _of_softmax(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield softmaxes over other axes for exp(x) / sum(exp(x)), or x - log(sum(exp(x)))."""
    is_log = operation.name == "sub"
    total = program.maker(operation.operands[1], "log" if is_log else "reduce_sum")
    total = program.maker(total.operands[0], "reduce_sum") if is_log and total is not None else total
    exponential = None if total is None else program.maker(total.operands[0], "exp")
    shifted = None if exponential is None else program.maker(exponential.operands[0], "sub")
    if total is None or exponential is None:
        return
    logits = exponential.operands[0] if shifted is None else shifted.operands[0]
    ways = functools.partial(softmaxes, axes=total.params["axes"], is_log=is_log)
    yield from operation.named(sampled(ways, total.shapes), lambda read: ways(np.asarray(read(logits))))


def _of_products(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield a * d + c * b and a * c + b * d for a * b + c * d, as a gate that takes the other part does."""
    products = [program.maker(operand, "mul") for operand in operation.operands]
    shapes = {item.shape for product in products if product is not None for item in product.shapes}
    if None in products or len(shapes) != 1:
        return
    a, b, c, d = (operand for product in products if product is not None for operand in product.operands)
    for which, (second, third, fourth) in {"last": (d, c, b), "inner": (c, b, d)}.items():

        def crossed(read: Read, others: tuple[Atom, ...] = (second, third, fourth)) -> list[Value]:
            second, third, fourth = map(read, others)
            return [np.asarray(read(a) * second + third * fourth)]

        text = f"the {which} factors of a sum of two products exchanged"
        yield ProgramChange(text, operation.at, {operation.at: crossed})


def _of_logsumexp(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the maximum, and logsumexps over other axes, for log(sum(exp(x - m))) + m."""
    log = next((item for operand in operation.operands if (item := program.maker(operand, "log")) is not None), None)
    total = None if log is None else program.maker(log.operands[0], "reduce_sum", "abs")
    total = program.maker(total.operands[0], "reduce_sum") if total is not None and total.name == "abs" else total
    exponential = None if total is None else program.maker(total.operands[0], "exp")
    shifted = None if exponential is None else program.maker(exponential.operands[0], "sub")
    if total is None or shifted is None:
        return
    logits, axes = shifted.operands[0], total.params["axes"]
    keeps = operation.shape.ndim == total.shapes[0].ndim

    def ways(read: Read) -> Ways:
        for text, value in logsumexps(np.asarray(read(logits)), axes):
            yield text, np.expand_dims(value, axes) if keeps else value

    yield from operation.named(sampled(lambda x: logsumexps(x, axes), total.shapes), ways)


def of_comparison(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield other comparisons."""
    if all(hasattr(item, "dtype") and item.dtype.kind in "iuf" for item in operation.shapes):
        name = next((name for name in operation.library_calls if name in TRIANGLES), "")
        if name:  # their comparison is not in the user's code; a bound that is higher is a diagonal that is lower
            for text, shift in ((f"a diagonal 1 higher in {name}", -1), (f"a diagonal 1 lower in {name}", 1)):
                compare = COMPARISONS[operation.name][0]
                yield operation.computed(
                    text, lambda left, right, shift=shift, compare=compare: compare(left, right + shift)
                )
            return
        ways = functools.partial(comparisons, operation.name)
        names = sampled(ways, operation.shapes)
        yield from operation.named(names, lambda read: ways(*(np.asarray(read(item)) for item in operation.operands)))


def of_select(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield the other branch of a choice, and a branch that is filled with another number."""
    if len(operation.operands) != 3:
        return
    results = operation.taking(lambda which, no, yes: [which, yes, no])
    yield ProgramChange("the branches of a choice exchanged", operation.at, {operation.at: results})
    for index in (1, 2):
        number = _constant(program, operation.operands[index])
        if number is None or operation.shape.dtype != np.float64:
            continue
        yield operation.computed(f"no choice of {number:g}", functools.partial(_branch, 3 - index))
        for filled in (0.0, -np.inf):
            if filled != number:
                chosen = functools.partial(_filled, index, filled)
                yield ProgramChange(
                    f"{filled:g} for {number:g}", operation.at, {operation.at: operation.taking(chosen)}
                )


def _constant(program: Program, atom: Atom) -> float | None:
    """Return the number in code that an operand repeats; None for computed operands."""
    while isinstance(atom, int) and atom in program.makes:
        maker = program.operations[program.makes[atom]]
        if maker.name not in ("broadcast_in_dim", "convert_element_type"):
            return None
        atom = maker.operands[0]
    is_number = isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
    return float(atom.val) if is_number else None


def _branch(index: int, *operands: Array) -> Array:
    return operands[index]


def _filled(index: int, number: float, *operands: Array) -> list[Array]:
    """Return the operands of a choice, one of its branches filled with a number."""
    return [np.full(item.shape, number) if at == index else item for at, item in enumerate(operands)]


def of_positions(program: Program, operation: Operation) -> Iterator[ProgramChange]:
    """Yield positions that begin elsewhere, and other whole numbers that are made of them, such as exponents."""
    shape = operation.shape
    is_counted = getattr(shape, "dtype", np.dtype(bool)).kind in "iu" and shape.shape
    if not is_counted or not {*operation.library_calls}.isdisjoint(TRIANGLES):
        return
    counted = {"iota": "numbers of arange", "cumsum": "numbers of cumsum"}
    what = counted.get(operation.name, "whole numbers")
    yield operation.followed(f"{what} 1 higher", lambda item: item + np.asarray(1, item.dtype))
    yield operation.followed(f"{what} 1 lower", lambda item: item + np.asarray(-1, item.dtype))
    if operation.name == "sub":
        yield operation.computed(EXCHANGED, lambda left, right: right - left)
    if operation.name == "iota":
        yield operation.followed("positions in reverse", np.flip)


def of_missing(program: Program) -> Iterator[ProgramChange]:
    """Yield functions of results that code leaves as they are, and other counts of whole numbers that it returns."""
    returned = {item for item in program.outputs if isinstance(item, int)}
    for operation in reversed(program.operations):
        if returned.intersection(operation.results) and operation.shape.dtype.kind in "iu":
            for text, step in (("1 added to", 1), ("1 taken from", -1)):
                text = f"{text} the result of {operation.called_name}"
                yield operation.followed(text, lambda item, step=step: item + np.asarray(step, item.dtype))
        if operation.name in _ARITHMETIC and operation.shape.dtype == np.float64:
            for name in _MISSING:
                yield operation.followed(f"{name} of the result of {operation.called_name}", ACTIVATIONS[name])


def of_exchanged_numbers(program: Program) -> Iterator[ProgramChange]:
    """Yield two numbers of one line exchanged."""
    lines: dict[str, list[tuple[Operation, int, float]]] = {}
    for operation in program.operations:
        for index, number in literals(operation):
            if program.is_written(operation.operands[index]):
                lines.setdefault(operation.where, []).append((operation, index, number))
    for numbers in lines.values():
        for (mine, index, number), (other, other_index, another) in itertools.combinations(numbers[:MOST_NUMBERS], 2):
            if number != another and mine is not other:
                results = {mine.at: mine.with_number(index, another), other.at: other.with_number(other_index, number)}
                yield ProgramChange(f"{number:.6g} and {another:.6g} exchanged", mine.at, results)
