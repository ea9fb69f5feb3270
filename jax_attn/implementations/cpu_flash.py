"""Attention on processors by kernels that are compiled for the one at hand (`jax_attn.cpu_kernels`).

To JAX they are two operations, which XLA calls as functions of its own (`jax.ffi`). Where a program is not for this
processor, because it is exported or runs elsewhere, `blocked` is compiled in their place.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Float

from attn_bridge.masks import ArrayMask, Mask, as_band_and_arrays

from ..cpu_kernels import words
from . import blocked
from .block_plan import Plan, Shape, block_sizes, count_cores
from .call import Call
from .differentiation import Passes, attention, gradient_of_sinks


@functools.cache
def unavailable() -> str | None:
    """Return why this machine can't run it, None if it can."""
    if jax.default_backend() != "cpu":
        return f"it is for processors, and JAX runs on {jax.default_backend()}"
    if sys.platform == "win32":
        return "its kernels share threads as POSIX has them"
    return None if importlib.util.find_spec("llvmlite") else "llvmlite, which compiles it, is not installed"


def unsupported(call: Call) -> str | None:
    """Return why it can't serve a call, None if it can."""
    reason = unavailable()
    if reason is not None:
        return reason
    dtypes = [array.dtype.name for array in (call.query, call.key, call.value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in words.KINDS:
        return f"query, key and value must all be one of {', '.join(words.KINDS)}, got {', '.join(dtypes)}"
    if call.return_weights:
        return "it never holds the attention weights (return_weights=True)"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {call.query.shape} or the value {call.value.shape}"
    for name in ("bias", "softcap"):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout > 0:
        return "it has no dropout"
    if call.mask is not None:
        found = as_band_and_arrays(call.mask)
        if found is None:
            return "the mask is more than a window, paddings and arrays"
        shapes = [_array_of(call, one).shape for one in found[1]]
        if shapes and np.broadcast_shapes(*shapes) not in shapes:
            return f"the arrays {', '.join(map(str, shapes))} of the mask would make a larger one together"
    if any(blocked.is_sharded(array) for array in (call.query, call.key, call.value)):
        return "it can't cut axes that are sharded explicitly; call it inside jax.shard_map"
    return None


def unprofitable(call: Call) -> str | None:
    """Return why it isn't picked: few scores, or several devices that JAX shares a batch out to."""
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return f"there are {jax.device_count()} devices, and JAX would not share it out; call it inside jax.shard_map"
    tasks, cores = call.key.shape[0] * call.key.shape[2], count_cores()
    if 2 * tasks < cores:
        return f"{tasks} key heads in all for {cores} cores: backward, each is one core's"
    return blocked.unprofitable(call) or _fails_to_load()


def attend(call: Call) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    return attend_with_lse(call)[0]


def attend_with_lse(call: Call) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, as `blocked.attend_with_lse`.

    Raises:
        NotImplementedError: the kernels don't load; says why.
    """
    reason = _fails_to_load()
    if reason is not None:
        raise NotImplementedError(f"implementation 'cpu_flash' does not run here: {reason}")
    batch, heads, queries, keys = call.scores_shape
    shape = Shape(batch, heads, call.key.shape[2], queries, keys)
    mask, arrays = _described(call)
    plan = Plan(shape, mask, float(call.scale), None, 0.0, **block_sizes(shape, has_bias=False))
    return attention(PASSES, plan, call.query, call.key, call.value, None, call.sinks, arrays, None)


@functools.cache
def _fails_to_load() -> str | None:
    """Return why the kernels can't be had although llvmlite is installed, None if they can."""
    try:
        importlib.import_module("jax_attn.cpu_kernels.xla").forward()
    except Exception as error:  # an XLA or a processor that they do not know, an LLVM that does not take them
        return f"its kernels do not load: {error}"
    return None


def _described(call: Call) -> tuple[Mask | None, tuple[Array, ...]]:
    """Return the mask as a window and one array, apart from each other as `Mask.separate` does it."""
    if call.mask is None:
        return None, ()
    band, arrays = as_band_and_arrays(call.mask) or (None, ())
    window = None if band is None else band.as_mask()
    if not arrays:
        return window, ()
    array = ArrayMask(functools.reduce(jnp.logical_and, (_array_of(call, one) for one in arrays)))
    return (array if window is None else window.restrict(array)).separate()


def _array_of(call: Call, mask: Mask) -> Any:
    """Return an array or a padding as ``(B, H, T, S)``, each the whole axis or 1."""
    return jnp.array(mask.allowed(None, np.arange(call.key.shape[1])[None]), ndmin=4, copy=False)


# ---- the two operations


def forward(plan: Plan, query: Array, key: Array, value: Array, *others: Any) -> tuple[Array, Array, Array]:
    """Return the context and, per row, the largest score and the sum of ``exp(scores - largest)``."""
    _, sinks, masks, _ = others
    given = [] if sinks is None else [_per_sequence(sinks, query)]
    context, top, total = _FORWARD.bind(query, key, value, *given, *masks, plan=plan)
    return context, top, total


def backward(plan: Plan, query: Array, key: Array, value: Array, *others: Any) -> tuple[Any, ...]:
    """Return the gradients of query, key, value, bias (None) and sinks."""
    _, sinks, masks, _, context, top, total, d_context, d_total = others
    operands = (query, key, value, context, top, total, d_context.astype(query.dtype), d_total, *masks)
    d_query, d_key, d_value, slope = _BACKWARD.bind(*operands, plan=plan)
    d_sinks = None if sinks is None else gradient_of_sinks(sinks, top, total, slope)
    return d_query, d_key, d_value, None, d_sinks


def _per_sequence(sinks: Array, query: Array) -> Array:
    """Return the sinks ``(B, H)``, which `jax.vmap` may put an axis before."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.broadcast_to(sinks.astype(dtype), (query.shape[0], query.shape[2]))


PASSES = Passes(forward, backward, blocked.at_once)
"""For `differentiation.attention`."""


def _masked(plan: Plan) -> int:
    """Return how many arrays the operations take for the mask: none or one, their last."""
    return 0 if plan.mask is None else len(tuple(plan.mask.arrays()))


def _forward_by_blocks(plan: Plan, query: Array, key: Array, value: Array, *others: Array) -> tuple[Array, ...]:
    """Return what the forward operation does, by `blocked`; sinks are those of any sequence, as all are the same."""
    sinks, masks = others[: len(others) - _masked(plan)], others[len(others) - _masked(plan) :]
    of_heads = sinks[0][0] if sinks else None
    context, top, total = blocked.PASSES.forward(plan, query, key, value, None, of_heads, masks, None)
    return context.astype(query.dtype), top, total


def _backward_by_blocks(plan: Plan, query: Array, key: Array, value: Array, *others: Array) -> tuple[Array, ...]:
    """Return what the backward operation does, by `blocked`."""
    context, top, total, d_context, d_total, *masks = others
    context, d_context = (array.astype(top.dtype) for array in (context, d_context))
    results = (query, key, value, None, None, tuple(masks), None, context, top, total, d_context, d_total)
    d_query, d_key, d_value, _, _ = blocked.PASSES.backward(plan, *results)
    products = jnp.swapaxes((context * d_context).sum(-1), 1, 2)
    slope = jnp.where(total != 0.0, products / jnp.where(total != 0.0, total, 1.0) - d_total, 0.0)
    return d_query, d_key, d_value, slope


def _forward_results(query: Any, key: Any, value: Any, *others: Any, plan: Plan) -> list[Any]:
    *before, queries, heads, _ = query.shape
    per_row = query.update(shape=(*before, heads, queries), dtype=jnp.promote_types(query.dtype, jnp.float32))
    return [query.update(shape=(*query.shape[:-1], value.shape[-1])), per_row, per_row]


def _backward_results(query: Any, key: Any, value: Any, *others: Any, plan: Plan) -> list[Any]:
    return [query, key, value, others[1]]


def _operation(kind: str, results: Callable[..., list[Any]], by_blocks: Callable[..., tuple[Array, ...]]) -> Primitive:
    """Return an operation of JAX: a kernel on this processor, blocks elsewhere and wherever a program is to travel."""
    name = f"attn_bridge_flash_{kind}"
    operation = Primitive(name)
    operation.multiple_results = True
    operation.def_abstract_eval(results)

    @functools.cache
    def jitted(plan: Plan) -> Any:
        return jax.jit(functools.partial(operation.bind, plan=plan))

    def run(*arrays: Array, plan: Plan) -> Any:
        with jax.disable_jit(False):  # else it would call itself
            return jitted(plan)(*arrays)

    operation.def_impl(run)

    def over_axes(*arrays: Array, plan: Plan) -> tuple[Array, ...]:
        blocks = functools.partial(by_blocks, plan)
        for _ in range(arrays[0].ndim - 4):
            blocks = jax.vmap(blocks)
        return blocks(*arrays)

    lower_blocks = mlir.lower_fun(over_axes, multiple_results=True)

    def lower(context: Any, *arrays: Any, plan: Plan) -> Any:
        query = context.avals_in[0]
        if context.module_context.lowering_parameters.for_export or query.dtype.name not in words.KINDS:
            return lower_blocks(context, *arrays, plan=plan)
        _register(kind, name)
        has_sinks = kind == "forward" and len(arrays) > 3 + _masked(plan)
        return jax.ffi.ffi_lowering(name)(context, *arrays, shape=_words(plan, context.avals_in, has_sinks))

    def batch(arrays: Any, axes: Any, *, plan: Plan) -> Any:
        size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
        fronted = [batching.bdim_at_front(array, axis, size) for array, axis in zip(arrays, axes, strict=True)]
        if _masked(plan):  # as sequences are counted through all axes before the last three
            mask = fronted[-1]
            fronted[-1] = jnp.broadcast_to(mask, (*mask.shape[:-4], plan.shape.batch, *mask.shape[-3:]))
        results = operation.bind(*fronted, plan=plan)
        return results, [0] * len(results)

    mlir.register_lowering(operation, lower, platform="cpu")
    mlir.register_lowering(operation, lower_blocks)
    batching.primitive_batchers[operation] = batch
    return operation


_FORWARD = _operation("forward", _forward_results, _forward_by_blocks)
_BACKWARD = _operation("backward", _backward_results, _backward_by_blocks)


def register() -> None:
    """Tell XLA of the kernels, which it else hears of when it compiles a call: for executables that are loaded."""
    for kind, operation in (("forward", _FORWARD), ("backward", _BACKWARD)):
        _register(kind, operation.name)


_REGISTERED: set[str] = set()
_REGISTERING = threading.Lock()  # XLA takes a name once, and programs may be compiled side by side


def _register(kind: str, name: str) -> None:
    """Compile a kernel, and tell XLA of it."""
    from ..cpu_kernels import xla

    with _REGISTERING:
        if name not in _REGISTERED:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(xla, kind)()), platform="cpu")
            _REGISTERED.add(name)


def _words(plan: Plan, operands: Any, has_sinks: bool) -> np.ndarray[Any, Any]:
    """Return what a kernel is told of a call."""
    query, _, value, *_ = operands
    told = {
        words.KIND: words.KINDS[query.dtype.name],
        words.HEADS: plan.shape.heads,
        words.KEY_HEADS: plan.shape.key_heads,
        words.QUERIES: plan.shape.queries,
        words.KEYS: plan.shape.keys,
        words.DEPTH: query.shape[-1],
        words.VALUE_DEPTH: value.shape[-1],
        words.SCALE: np.float64(plan.scale).view(np.int64),
        words.SINKS: has_sinks,
        words.MASKED: _masked(plan),
    }
    band, _ = (None if plan.mask is None else as_band_and_arrays(plan.mask)) or (None, ())
    if band is not None:
        told |= {words.BANDED: 1, words.OFFSET: band.offset, words.SIZE: band.size or 0}
    if _masked(plan):
        *sequences, heads, queries, keys = operands[-1].shape
        sizes = {
            words.MASK_BATCH: math.prod(sequences),
            words.MASK_HEAD: heads,
            words.MASK_QUERY: queries,
            words.MASK_KEY: keys,
        }
        far = math.prod(operands[-1].shape)
        for word, count in sizes.items():
            far //= count
            told[word] = far if count > 1 else 0
    return np.array([told.get(word, 0) for word in range(words.SHAPE_END)], np.int64)
