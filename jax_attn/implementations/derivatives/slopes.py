"""Derivatives of a function in both directions: backward by code written by hand, forward by code that JAX takes apart.

`jax.custom_vjp` has gradients alone: what `jax.jit` has compiled with one then fails under `jax.jvp`. Here a function
has a rule for tangents, which are one operation of JAX, linear in them; transposed it is the code written by hand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

INPUTS = 5
"""Operands with derivatives: query, key, value, bias and sinks come first."""

Axes = tuple[int | None, ...]

Operands = tuple[Array | None, ...]
"""Arrays of a call, its results or their derivatives; None for an optional array that is missing."""


@dataclasses.dataclass(frozen=True)
class Slopes:
    """The functions that compute the derivatives of a function; equal by value, as it keys compiled programs."""

    plain: Callable[..., tuple[Array | None, ...]]
    """Takes `fixed` and the operands; returns the results by code that JAX can differentiate, also twice.

    None is a result that no derivative flows through.
    """

    backward: Callable[..., Operands]
    """Takes `fixed`, operands, results and the cotangents of results; returns the gradients of the inputs."""

    fixed: tuple[object, ...]
    """First arguments of both."""

    precision: str | None
    """Of their products: ``jax_default_matmul_precision`` of the call, which may have ended when JAX traces them."""


def tangents_of(
    slopes: Slopes, operands: Sequence[object], results: tuple[Array, ...], tangents: Sequence[object]
) -> tuple[Array, ...]:
    """Return the tangents of the results of a function.

    Args:
        slopes: the derivatives of the function.
        operands: its arguments, trees of arrays.
        results: its results for them.
        tangents: of the operands, as a rule of `jax.custom_jvp` with symbolic zeros gets them.
    """
    moving = tuple(place for place in range(INPUTS) if _moves(tangents[place]))
    arrays, tree = jax.tree.flatten((tuple(operands), results))
    moving_tangents = [tangents[place] for place in moving]
    tangents_of_results = _TANGENTS.bind(*arrays, *moving_tangents, slopes=slopes, tree=tree, moving=moving, levels=())
    return tuple(tangents_of_results)


def _moves(tangent: object) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


def _forward(
    *arrays: Array, slopes: Slopes, tree: jax.tree_util.PyTreeDef, moving: tuple[int, ...], levels: tuple[Axes, ...]
) -> list[Array]:
    """Return the tangents of the results: those of the plain code at the operands."""

    def forward(*arrays: Array) -> list[Array]:
        operands, results = tree.unflatten(arrays[: tree.num_leaves])

        def plain(*moved: Array) -> tuple[Array, ...]:
            moved_operands = dict(zip(moving, moved, strict=True))
            return slopes.plain(*slopes.fixed, *(moved_operands.get(place, one) for place, one in enumerate(operands)))

        primals = tuple(operands[place] for place in moving)
        tangents_of_results = jax.jvp(plain, primals, tuple(arrays[tree.num_leaves :]))[1]
        return [
            jax.numpy.zeros_like(result) if one is None else one.astype(result.dtype)
            for one, result in zip(tangents_of_results, results, strict=True)
        ]

    # The innermost `jax.vmap` first: `_batch` adds each further one at the end.
    for axes in levels:
        forward = jax.vmap(forward, axes)
    with jax.default_matmul_precision(slopes.precision):
        return forward(*arrays)


def _backward(
    arrays: Sequence[Array],
    cotangents: Sequence[Array],
    slopes: Slopes,
    tree: jax.tree_util.PyTreeDef,
    moving: tuple[int, ...],
    levels: tuple[Axes, ...],
) -> Sequence[Array]:
    """Return the cotangents of the tangents that were given."""
    count = len(arrays)

    def backward(*arrays: Array) -> tuple[Array, ...]:
        operands, results = tree.unflatten(arrays[:count])
        cotangents_of_operands = slopes.backward(*slopes.fixed, operands, results, tuple(arrays[count:]))
        return tuple(cotangents_of_operands[place] for place in moving)

    for axes in levels:
        backward = _over(backward, (*axes[:count], *(0 for _ in cotangents)), axes[count:])
    with jax.default_matmul_precision(slopes.precision):
        return backward(*arrays, *cotangents)


def _over(function: Callable[..., object], axes: Axes, of_results: Axes) -> Callable[..., tuple[Array, ...]]:
    """Map a function over an axis; a result without the axis belongs to an unmapped argument, and is summed."""
    mapped = jax.vmap(function, axes, tuple(0 if axis is None else axis for axis in of_results))

    def run(*arrays: Array) -> tuple[Array, ...]:
        pairs = zip(mapped(*arrays), of_results, strict=True)
        return tuple(result.sum(0) if axis is None else result for result, axis in pairs)

    return run


def _results(
    *arrays: jax.core.ShapedArray, tree: jax.tree_util.PyTreeDef, **options: Any
) -> list[jax.core.ShapedArray]:
    """Return the shapes of the tangents: those of the results, which are the last leaves of the tree."""
    results = tree.children()[1].num_leaves
    return [one.update(weak_type=False) for one in arrays[tree.num_leaves - results : tree.num_leaves]]


def _differentiate(
    arrays: Sequence[Array], tangents: Sequence[Array | ad.Zero], **options: Any
) -> tuple[Sequence[Array], Sequence[Array]]:
    places = [place for place, one in enumerate(tangents) if type(one) is not ad.Zero]

    def of_some(*some: Array) -> Sequence[Array]:
        moved_arrays = dict(zip(places, some, strict=True))
        return _forward(*(moved_arrays.get(place, one) for place, one in enumerate(arrays)), **options)

    return jax.jvp(of_some, *(tuple(one[place] for place in places) for one in (arrays, tangents)))


def _transpose(
    cotangents: Sequence[Array | ad.Zero],
    *arrays: Array | ad.UndefinedPrimal,
    tree: jax.tree_util.PyTreeDef,
    **options: Any,
) -> list[Array | None]:
    fixed, linear = arrays[: tree.num_leaves], arrays[tree.num_leaves :]
    cotangents_of_operands = _backward(fixed, [ad.instantiate_zeros(one) for one in cotangents], tree=tree, **options)
    asked = [
        one if ad.is_undefined_primal(place) else None
        for one, place in zip(cotangents_of_operands, linear, strict=True)
    ]
    return [None] * len(fixed) + asked


def _batch(
    arrays: Sequence[Array],
    axes: Sequence[int | None],
    *,
    tree: jax.tree_util.PyTreeDef,
    levels: tuple[Axes, ...],
    **options: Any,
) -> tuple[Sequence[Array], list[int]]:
    """Bind the same with one more level; results get the axis in front, as tangents have it."""
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    fronted, at = list(arrays), [None if axis is None else int(axis) for axis in axes]
    for index in range(tree.num_leaves - tree.children()[1].num_leaves, tree.num_leaves):
        fronted[index], at[index] = batching.bdim_at_front(fronted[index], at[index], size), 0
    results = _TANGENTS.bind(*fronted, tree=tree, levels=(*levels, tuple(at)), **options)
    return results, [0] * len(results)


def _operation() -> Primitive:
    operation = Primitive("attn_bridge_tangents")
    operation.multiple_results = True
    operation.def_abstract_eval(_results)

    @functools.cache
    # An eager call compiles once per function and operands; uncached, `jax.jit` would trace each call again.
    def jitted(**options: Any) -> Callable[..., list[Array]]:
        return jax.jit(functools.partial(_forward, **options))

    operation.def_impl(lambda *arrays, **options: jitted(**options)(*arrays))
    mlir.register_lowering(operation, mlir.lower_fun(_forward, multiple_results=True))
    ad.primitive_jvps[operation] = _differentiate
    ad.primitive_transposes[operation] = _transpose
    batching.primitive_batchers[operation] = _batch
    return operation


_TANGENTS = _operation()
