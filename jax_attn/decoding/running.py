"""Checks of numbers that a compiled function knows only when it runs.

A check calls Python, which an exported program can't: there it is left out, and the NaN that callers give for numbers
that do not fit are all that it leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from attn_bridge import cache_validation

from .. import functional


def is_known(*values: object) -> bool:
    """Return whether none of the values is one that waits for a compiled function to run."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def least_size(size: int) -> int:
    """Return a size; 1 for one that `jax.export` leaves open, with which no number can be compared."""
    return 1 if jax.export.is_symbolic_dim(size) else size


def raise_unless(holds: Bool[Array, ""], check: Callable[..., None], *values: ArrayLike) -> Bool[Array, ""]:
    """Return `holds`, and have `check` raise, with the numbers of the values, while a compiled function runs.

    The error may come after the results, or never if the caller does not wait for them: give NaN where the returned
    array is False. A result that does not depend on it may leave out the check.

    Args:
        holds: whether the check passes, so that `check` need not be called.
        check: called with Python's numbers, or lists of them.
        values: its arguments.
    """
    checked: Array = _CHECKED.bind(jnp.asarray(holds), *map(jnp.asarray, values), check=check)
    return checked


def _call_back(holds: Array, *values: Array, check: Callable[..., None]) -> Array:
    """Check by a callback; leading axes of `holds` are those of `vmap`, which all operands have."""

    def refuse(*numbers: object) -> None:
        check(*(np.asarray(number).tolist() for number in numbers))

    def checked(holds: Array, *values: Array) -> Array:
        jax.lax.cond(holds, lambda: None, functools.partial(jax.debug.callback, refuse, *values))
        return holds

    for _ in range(jnp.ndim(holds)):
        checked = jax.vmap(checked)
    return checked(holds, *values)


def _operation() -> Primitive:
    """Return the operation of a check: a callback, nothing in a program that is exported."""
    operation = Primitive("attn_bridge_checked")
    lower_callback = mlir.lower_fun(_call_back, multiple_results=False)

    def lower(
        context: mlir.LoweringRuleContext, holds: mlir.ir.Value, *values: mlir.ir.Value, check: Callable[..., None]
    ) -> Sequence[mlir.ir.Value]:
        if context.module_context.lowering_parameters.for_export:
            return [holds]
        return lower_callback(context, holds, *values, check=check)

    def batch(arrays: Sequence[Array], axes: Sequence[int | None], *, check: Callable[..., None]) -> Any:
        size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
        fronted = [batching.bdim_at_front(array, axis, size) for array, axis in zip(arrays, axes, strict=True)]
        return operation.bind(*fronted, check=check), 0

    # Without the effect of its callback: JAX serializes no program with that effect. The result keeps the check.
    operation.def_abstract_eval(lambda holds, *values, check: holds)
    operation.def_impl(_call_back)
    mlir.register_lowering(operation, lower)
    batching.primitive_batchers[operation] = batch
    return operation


_CHECKED = _operation()


def known_rows(indices: Int[Array, "B"], rows: int) -> Int[Array, "B"]:
    """Return the indices of rows, checked; ``jnp.take(array, ..., 0, mode="fill")`` gives NaN for no row.

    Raises:
        TypeError: indices that are not integers.
        ValueError: not one index per row, or one of no row, if they are known; else while a compiled function runs.
    """
    shape, dtype = tuple(indices.shape), functional.dtype_name(indices, "indices")
    if is_known(indices):
        cache_validation.check_reorder(shape, dtype, rows, np.asarray(indices).tolist())
        return jnp.asarray(indices)
    cache_validation.check_reorder(shape, dtype, rows)
    inside = (indices >= 0) & (indices < rows)
    check = functools.partial(cache_validation.check_reorder, shape, dtype, rows)
    fits = raise_unless(inside.all(), check, indices)
    # A negative one would count from the end. `fits` changes nothing; without it, nothing would need the check.
    return jnp.where(inside & (fits | ~inside.all()), indices, rows)
