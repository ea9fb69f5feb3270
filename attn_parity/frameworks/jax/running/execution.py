"""Runs traced programs operation by operation: as they are, moved at random, or compiled as one with barriers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import Array

from ....sides.large import Lent
from ..probes.numpy_interpreter import bind, inline, last_uses

_MOVES = (
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims"),
    *("slice", "concatenate", "iota", "copy", "top_k"),
)
"""Operations that round nothing, so that it does not matter what they are fused with.

For `top_k` it must not: XLA ends the process where a barrier follows it."""

_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")

UNTRACEABLE = (jax.errors.TracerBoolConversionError, jax.errors.ConcretizationTypeError)
"""What JAX raises where a program looks at values."""


_QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class After(Protocol):
    """Gets what each operation returns, and gives what takes its place."""

    def moved(self, name: str, results: Sequence[Any]) -> list[Any]:
        """Return what takes the place of the results of the operation `name`."""


def quick_options() -> dict[str, Any] | None:
    """Return options that compile a program ten times as fast; how fast it runs matters to no one.

    They change what LLVM makes of the program (it rounds more often, as no two operations become one), not what XLA
    makes of the code before.
    """
    return _known_options() if jax.default_backend() == "cpu" else None


@functools.cache
def _known_options() -> dict[str, Any]:
    """Return those of `_QUICK_TO_COMPILE` that this XLA knows; they come and go between its versions."""
    known: dict[str, Any] = {}
    for name, value in _QUICK_TO_COMPILE.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value})()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def trace(function: Callable[..., Any], operands: Any) -> tuple[Any, Any]:
    """Return the jaxpr of a function and the structure of its result."""
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype) if _is_lent(one) else one, operands)
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return closed, jax.tree.structure(shape)


def read(operands: Any) -> Any:
    """Return operands with the weights promoted that are lent."""
    return jax.tree.map(lambda one: one.promoted() if _is_lent(one) else one, operands)


def _is_lent(value: Any) -> bool:
    return isinstance(value, Lent)


def op_by_op(closed: Any) -> Callable[..., list[Any]]:
    """Return a function that runs each operation by itself, unfused.

    Compiling one program per operation costs 50 ms each, compiling all of them as one, with barriers in between,
    4 ms each: whichever is less.
    """
    equations, distinct = _count(closed.jaxpr)

    def run(*args: Any) -> list[Any]:
        return walk(closed.jaxpr, closed.consts, args)

    return run if 50 * len(distinct) < 200 + 4 * equations else jax.jit(barred(closed))


def barred(closed: Any) -> Callable[..., list[Any]]:
    """Return a function that runs a program with barriers between its operations, to be compiled as one."""

    def run(*args: Any) -> list[Any]:
        return walk(closed.jaxpr, closed.consts, args, _Barrier())

    return run


class _Barrier:
    """Keeps the compiler from fusing one operation with the next.

    Products pass a barrier flat: it hands the layout that what follows wants on to what comes before, and XLA ends
    the process where that is a batched product that can't have it.
    """

    def moved(self, name: str, results: Sequence[Any]) -> list[Any]:
        """Return the results of the operation `name`, as they are."""
        if name in _MOVES or not all(isinstance(one, Array) for one in results):
            return list(results)
        if name not in _PRODUCTS:
            return list(jax.lax.optimization_barrier(tuple(results)))
        flat = jax.lax.optimization_barrier(tuple(one.reshape(-1) for one in results))
        return [one.reshape(shaped.shape) for one, shaped in zip(flat, results, strict=True)]


def walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], after: After | None = None) -> list[Any]:
    """Run a jaxpr operation by operation; `after` gets what each returns."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    last = last_uses(jaxpr)
    for position, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        called = inline(equation)
        if called is not None:
            results = walk(called.jaxpr, called.consts, operands, after)
        else:
            results = bind(equation, operands)
            if after is not None:
                results = after.moved(equation.primitive.name, results)
        values.update(zip(equation.outvars, results, strict=True))
        for variable in last.get(position, ()):
            values.pop(variable, None)
    return [read(atom) for atom in jaxpr.outvars]


def _count(jaxpr: Any) -> tuple[int, set[Any]]:
    """Return how many operations there are, and the distinct ones."""
    total, distinct = 0, set()
    for equation in jaxpr.eqns:
        called = inline(equation)
        if called is None:
            total += 1
            distinct.add((equation.primitive.name, str(equation.params), str([one.aval for one in equation.invars])))
        else:
            more, found = _count(called.jaxpr)
            total += more
            distinct |= found
    return total, distinct
