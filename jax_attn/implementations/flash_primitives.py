"""The kernels of `attn_kernels` as two primitives of JAX, forward and backward; blocks where a program travels."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from attn_bridge.backends import usable_cores
from attn_bridge.masks import as_pieces
from attn_kernels import words
from attn_kernels.description import describe, intervals

from . import blocked
from .block_plan import BlockPlan
from .derivatives.differentiation import Passes, gradient_of_sinks


def forward(plan: BlockPlan, query: Array, key: Array, value: Array, *others: Array) -> tuple[Array, Array, Array]:
    """Return the context and, per row, the largest score and the sum of ``exp(scores - largest)``."""
    bias, sinks, masks, seed = others
    if _adds_too_much(plan, bias):
        return blocked.PASSES.forward(plan, query, key, value, *others)
    sinks = None if sinks is None else _per_sequence(sinks, query)
    names, optional = _given(plan, sinks, masks, bias, seed)
    context, top, total = _FORWARD.bind(query, key, value, *optional, plan=plan, names=names)
    return context, top, total


def backward(plan: BlockPlan, query: Array, key: Array, value: Array, *others: Array) -> tuple[Array | None, ...]:
    """Return the gradients of query, key, value, bias, if it is asked for, and sinks."""
    bias, sinks, masks, seed, context, top, total, d_context, d_total = others
    if _adds_too_much(plan, bias):
        return blocked.PASSES.backward(plan, query, key, value, *others)
    names, optional = _given(plan, None, masks, bias, seed)
    operands = (query, key, value, context, top, total, d_context.astype(query.dtype), d_total)
    d_query, d_key, d_value, slope, *rest = _BACKWARD.bind(*operands, *optional, plan=plan, names=names)
    d_sinks = None if sinks is None else gradient_of_sinks(sinks, top, total, slope)
    d_bias = None
    for of_heads in rest:
        axes = [axis for axis in range(4) if bias.shape[axis] < of_heads.shape[axis]]
        d_bias = of_heads.sum(axes, keepdims=True).astype(bias.dtype)
    return d_query, d_key, d_value, d_bias, d_sinks


def _adds_too_much(plan: BlockPlan, bias: Array | None) -> bool:
    """Return whether too few tasks could share the requested gradient of a bias; `blocked` runs then.

    If heads or sequences share a bias of queries and keys, one task sums its gradient. The forward pass then runs in
    `blocked`, too, as a backward pass cancels only the rounding of the scores it recomputes.
    """
    if bias is None or not plan.differentiates_bias or bias.shape[2] == 1:
        return False
    tasks = plan.shape.key_heads * bias.shape[0]
    return bias.shape[1] < plan.shape.heads or 2 * tasks < usable_cores()


def _given(
    plan: BlockPlan, sinks: Array | None, masks: Sequence[Array], bias: Array | None, seed: Array | None
) -> tuple[tuple[str, ...], list[Array]]:
    """Return the names and arrays of an operation's optional last arguments, in the order of `words.OPTIONAL`."""
    pieces = None if plan.mask is None else as_pieces(plan.mask)
    of_mask = ("mask",) if pieces is not None and pieces.arrays else ()
    of_documents = ("query_ids", "key_ids") if pieces is not None and pieces.documents is not None else ()
    arrays = dict(zip((*of_mask, *of_documents), masks, strict=True))
    arrays |= {"sinks": sinks, "bias": bias if bias is None else bias.astype(jnp.float32), "seed": seed}
    names = tuple(name for name in words.OPTIONAL if arrays.get(name) is not None)
    return names, [arrays[name] for name in names]


def _per_sequence(sinks: Array, query: Array) -> Array:
    """Return the sinks ``(B, H)``, which `jax.vmap` may put an axis before."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.broadcast_to(sinks.astype(dtype), (query.shape[0], query.shape[2]))


PASSES = Passes(forward, backward, blocked.at_once)
"""For `differentiation.attention`."""


def _apart(arrays: Sequence[object], names: tuple[str, ...]) -> tuple[list[Array], dict[str, Array]]:
    """Return the operands that an operation always takes, and the others by their names."""
    always = len(arrays) - len(names)
    return list(arrays[:always]), dict(zip(names, arrays[always:], strict=True))


def _as_blocks_take(optional: dict[str, Array]) -> tuple[Array | tuple[Array, ...] | None, ...]:
    """Return bias, sinks, masks and seed; sinks are those of any sequence, as all are the same."""
    sinks = optional["sinks"][0] if "sinks" in optional else None
    masks = tuple(optional[name] for name in ("mask", "query_ids", "key_ids") if name in optional)
    return optional.get("bias"), sinks, masks, optional.get("seed")


def _forward_by_blocks(plan: BlockPlan, names: tuple[str, ...], *arrays: Array) -> tuple[Array, ...]:
    """Compute the forward operation by `blocked`."""
    inputs, optional = _apart(arrays, names)
    context, top, total = blocked.PASSES.forward(plan, *inputs, *_as_blocks_take(optional))
    return context.astype(inputs[0].dtype), top, total


def _backward_by_blocks(plan: BlockPlan, names: tuple[str, ...], *arrays: Array) -> tuple[Array, ...]:
    """Compute the backward operation by `blocked`."""
    (query, key, value, context, top, total, d_context, d_total), optional = _apart(arrays, names)
    others = _as_blocks_take(optional)
    if context.dtype != top.dtype:
        # Rounded, its errors would not cancel in what all keys have in common. This one is without sinks.
        context, own_top, own_total = blocked.PASSES.forward(plan, query, key, value, *others)
        share = jnp.where(total != 0.0, own_total * jnp.exp(own_top - top) / jnp.where(total != 0.0, total, 1.0), 0.0)
        context = context * jnp.swapaxes(share, 1, 2)[..., None]
    d_context = d_context.astype(top.dtype)
    operands = (query, key, value, *others, context, top, total, d_context, d_total)
    d_query, d_key, d_value, d_bias, _ = blocked.PASSES.backward(plan, *operands)
    products = jnp.swapaxes((context * d_context).sum(-1), 1, 2)
    slope = jnp.where(total != 0.0, products / jnp.where(total != 0.0, total, 1.0) - d_total, 0.0)
    if d_bias is None:
        return d_query, d_key, d_value, slope
    shape = _shape_of_gradient(plan, d_bias.shape)
    first = jnp.zeros(shape, d_bias.dtype).at[: d_bias.shape[0], : d_bias.shape[1]].set(d_bias)
    return d_query, d_key, d_value, slope, first


def _shape_of_gradient(plan: BlockPlan, bias: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the gradient of a bias, for each head, and if queries share a row, for each sequence."""
    *outer, sequences, _, queries, keys = bias
    return (*outer, plan.shape.batch if queries == 1 else sequences, plan.shape.heads, queries, keys)


def _forward_results(
    query: jax.core.ShapedArray,
    key: jax.core.ShapedArray,
    value: jax.core.ShapedArray,
    *others: jax.core.ShapedArray,
    plan: BlockPlan,
    names: tuple[str, ...],
) -> list[jax.core.ShapedArray]:
    *before, queries, heads, _ = query.shape
    per_row = query.update(shape=(*before, heads, queries), dtype=jnp.promote_types(query.dtype, jnp.float32))
    return [query.update(shape=(*query.shape[:-1], value.shape[-1])), per_row, per_row]


def _backward_results(*arrays: object, plan: BlockPlan, names: tuple[str, ...]) -> list[jax.core.ShapedArray]:
    (query, key, value, _, per_row, *_), optional = _apart(arrays, names)
    bias = [optional["bias"]] if "bias" in optional and plan.differentiates_bias else []
    return [query, key, value, per_row, *(one.update(shape=_shape_of_gradient(plan, one.shape)) for one in bias)]


def _operation(
    kind: str, results: Callable[..., list[jax.core.ShapedArray]], by_blocks: Callable[..., tuple[Array, ...]]
) -> Primitive:
    """Return an operation of JAX: a kernel on this processor, blocks elsewhere and wherever a program is to travel."""
    name = f"attn_bridge_flash_{kind}"
    operation = Primitive(name)
    operation.multiple_results = True
    operation.def_abstract_eval(results)

    @functools.cache
    def jitted(**parameters: object) -> Callable[..., list[Array]]:
        return jax.jit(functools.partial(operation.bind, **parameters))

    def run(*arrays: Array, **parameters: object) -> list[Array]:
        with jax.disable_jit(False):  # else it would call itself
            return jitted(**parameters)(*arrays)

    operation.def_impl(run)

    def over_axes(*arrays: Array, plan: BlockPlan, names: tuple[str, ...]) -> tuple[Array, ...]:
        blocks = functools.partial(by_blocks, plan, names)
        for _ in range(arrays[0].ndim - 4):
            blocks = jax.vmap(blocks)
        with jax.default_matmul_precision(plan.precision):
            return blocks(*arrays)

    lower_blocks = mlir.lower_fun(over_axes, multiple_results=True)

    def lower(context: mlir.LoweringRuleContext, *arrays: object, **parameters: Any) -> object:
        query = context.avals_in[0]
        if context.module_context.lowering_parameters.for_export or query.dtype.name not in words.KINDS:
            return lower_blocks(context, *arrays, **parameters)
        target = _name(name, query.dtype.name)
        # That kernel rounds scores in another order than the one backward, which cancels its own rounding alone.
        decodes = query.shape[-3] <= words.FEW and not parameters["plan"].is_differentiated
        if kind == "forward" and decodes and "seed" not in parameters["names"]:
            target = _decode_name(query.dtype.name)
        register_target(target, _kernels()[target])
        return jax.ffi.ffi_lowering(target)(context, *arrays, shape=_words(kind, context.avals_in, **parameters))

    def batch(
        arrays: Sequence[Array], axes: Sequence[int | None], **parameters: object
    ) -> tuple[list[Array], list[int]]:
        size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
        fronted = [batching.bdim_at_front(array, axis, size) for array, axis in zip(arrays, axes, strict=True)]
        results = operation.bind(*fronted, **parameters)
        return results, [0] * len(results)

    mlir.register_lowering(operation, lower, platform="cpu")
    mlir.register_lowering(operation, lower_blocks)
    batching.primitive_batchers[operation] = batch
    return operation


_FORWARD = _operation("forward", _forward_results, _forward_by_blocks)
_BACKWARD = _operation("backward", _backward_results, _backward_by_blocks)


def _decode_name(dtype: str) -> str:
    return f"attn_bridge_flash_decode_{dtype}"


def _name(operation: str, dtype: str) -> str:
    """Return XLA's name of the kernel for an operation on arrays of a dtype; some dtypes have a separate kernel."""
    instructions = _calls().instructions(dtype)
    return operation if instructions is None else f"{operation}_{dtype}_{instructions}"


def _calls() -> ModuleType:
    """Return `attn_kernels.xla.calls`, which is not to be had everywhere."""
    return importlib.import_module("attn_kernels.xla.calls")


def _kernels() -> dict[str, Callable[[], object]]:
    """Return XLA's names of the kernels -> functions that compile them."""
    calls = _calls()
    return {
        _FORWARD.name: calls.forward,
        _BACKWARD.name: calls.backward,
        **{_decode_name(dtype): functools.partial(calls.decode, dtype) for dtype in words.KINDS},
        **{
            _name(operation.name, dtype): functools.partial(compiled, dtype)
            for operation, compiled in ((_FORWARD, calls.forward), (_BACKWARD, calls.backward))
            for dtype in words.KINDS
            if calls.instructions(dtype)
        },
    }


def register() -> None:
    """Register the kernels with XLA, for executables that are loaded; otherwise compiling a call registers them."""
    for name, compiled in _kernels().items():
        register_target(name, compiled)


_REGISTERED: set[str] = set()
_REGISTERING = threading.Lock()  # XLA takes a name once, and programs may be compiled side by side


def register_target(name: str, compiled: Callable[[], object]) -> None:
    """Compile a kernel, and register it with XLA."""
    with _REGISTERING:
        if name not in _REGISTERED:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(compiled()), platform="cpu")
            _REGISTERED.add(name)


def _words(kind: str, operands: Sequence[object], plan: BlockPlan, names: tuple[str, ...]) -> np.ndarray:
    """Return the description of a call that a kernel receives, as words."""
    (query, key, value, *_), optional = _apart(operands, names)
    pieces = None if plan.mask is None else as_pieces(plan.mask)
    bounds = intervals(pieces and pieces.plain, plan.shape.queries)
    assert bounds is not None, "`unsupported` saw to it"
    description = describe(
        query.dtype.name,
        query.shape,
        key.shape,
        value.shape,
        {name: array.shape for name, array in optional.items()},
        scale=plan.scale,
        softcap=plan.softcap,
        dropout=plan.dropout,
        batch=plan.shape.batch,
        bounded=bounds.size > 0,
        differentiates_bias=kind == "backward" and plan.differentiates_bias,
    )
    return np.concatenate([description, *bounds]).astype(np.int64)
