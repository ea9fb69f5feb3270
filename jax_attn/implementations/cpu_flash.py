"""Attention on processors by kernels that are compiled for the present one (`attn_kernels`).

To JAX they are two operations (`flash_primitives`), which XLA calls as functions of its FFI (`jax.ffi`). If a program
is not for this processor, because it is exported or runs elsewhere, `blocked` is compiled instead. The twin is
`torch_attn.implementations.cpu_flash`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from attn_bridge.backends import usable_cores
from attn_bridge.masks import ArrayMask, Mask, as_pieces
from attn_kernels import words
from attn_kernels.description import intervals

from . import blocked, few_queries
from .block_plan import BlockPlan, Shape, block_sizes
from .call import KernelCall
from .derivatives.differentiation import attention
from .flash_primitives import PASSES, register

__all__ = ["PASSES", "attend", "attend_with_lse", "register", "unavailable", "unprofitable", "unsupported"]


MIN_BYTES = 2**20
"""Bytes of keys and values from which it is picked for up to `words.FEW` queries: other calls begin faster."""


def unavailable() -> str | None:
    """Return why this machine can't run it, None if it can; loads the kernels, which takes a second or two."""
    return _lacks() or _fails_to_load()


@functools.cache
def _lacks() -> str | None:
    """Return why this machine cannot load the kernels, None if no reason is known."""
    if jax.default_backend() != "cpu":
        return f"it is for processors, and JAX runs on {jax.default_backend()}"
    if sys.platform == "win32":
        return "its kernels share threads as POSIX has them"
    return (
        None
        if importlib.util.find_spec("llvmlite")
        else "llvmlite, which compiles it, is not installed (pip install 'attn-bridge[cpu]')"
    )


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can."""
    reason = _lacks()
    if reason is not None:
        return reason
    dtypes = [array.dtype.name for array in (call.query, call.key, call.value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in words.KINDS:
        return f"query, key and value must all be one of {', '.join(words.KINDS)}, got {', '.join(dtypes)}"
    if call.return_weights:
        return "it never holds the attention weights (return_weights=True)"
    if 0 in call.query.shape or 0 in call.value.shape:
        return f"there is nothing in the query {call.query.shape} or the value {call.value.shape}"
    if call.bias is not None and (1, *call.bias.shape)[-1] < call.key.shape[1]:
        return f"the bias {call.bias.shape} is the same for all keys"
    if call.mask is not None:
        pieces = as_pieces(call.mask)
        if pieces is None:
            return "the mask joins arrays or paddings by |, or has documents twice, or moves keys under a padding"
        if intervals(pieces.plain, call.query.shape[1]) is None:
            return "the keys that a query sees are no interval, or the intervals go back"
        shapes = [_array_of(call, one).shape for one in pieces.arrays]
        if shapes and jnp.broadcast_shapes(*shapes) not in shapes:
            return f"the arrays {', '.join(map(str, shapes))} of the mask would make a larger one together"
        ids = () if pieces.documents is None else pieces.documents.arrays()
        if any(one.dtype.itemsize > 4 for one in ids):
            return "documents must be numbered with 32 bits at most"
    if any(blocked.is_sharded(array) for array in (call.query, call.key, call.value)):
        return "it can't cut axes that are sharded explicitly; call it inside jax.shard_map"
    return blocked.refuses_dropout(call)


def unprofitable(call: KernelCall) -> str | None:
    """Return why it isn't picked: few scores, an exported program, or devices that JAX shares a batch out to."""
    if few_queries.is_open(call):
        return "a program with open sizes (jax.export) is for any processor, and would have `blocked` in its place"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return f"there are {jax.device_count()} devices, and JAX would not share it out; call it inside jax.shard_map"
    reason = too_small(call)
    if reason is not None:
        return reason
    tasks, cores = call.key.shape[0] * call.key.shape[2], usable_cores()
    if call.query.shape[1] > words.FEW and 2 * tasks < cores:
        return f"{tasks} key heads in all for {cores} cores: backward, each is one core's"
    return _fails_to_load()


def too_small(call: KernelCall) -> str | None:
    """Return why the sizes of a call alone make others faster, None if they don't."""
    if call.query.shape[1] > words.FEW:
        return blocked.unprofitable(call)
    if (call.key.size + call.value.size) * call.key.dtype.itemsize < MIN_BYTES:  # it reads keys and values once
        return f"less than {MIN_BYTES} bytes of keys and values"
    return None


def attend(call: KernelCall) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    return attend_with_lse(call)[0]


def attend_with_lse(call: KernelCall) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """Return the context and, per row, the logarithm of the sum of ``exp(scores)``, as `blocked.attend_with_lse`.

    Raises:
        NotImplementedError: the kernels don't load; gives the reason.
    """
    reason = _fails_to_load()
    if reason is not None:
        raise NotImplementedError(f"implementation 'cpu_flash' does not run here: {reason}")
    batch, heads, queries, keys = call.scores_shape
    shape = Shape(batch, heads, call.key.shape[2], queries, keys)
    mask, arrays = _described(call)
    bias = call.bias if call.bias is None else jnp.array(call.bias, ndmin=4, copy=False)
    seed = blocked.key_words(call.rng) if call.dropout else None
    softcap = None if call.softcap is None else float(call.softcap)
    sizes = block_sizes(shape, bias is not None)
    plan = BlockPlan(shape, mask, float(call.scale), softcap, float(call.dropout), **sizes)
    return attention(PASSES, plan, call.query, call.key, call.value, bias, call.sinks, arrays, seed)


@functools.cache
def _fails_to_load() -> str | None:
    """Return why the kernels can't be had although llvmlite is installed, None if they can."""
    try:
        importlib.import_module("attn_kernels.xla.calls").forward()
    except Exception as error:  # an XLA or a processor that they do not know, an LLVM that does not take them
        return f"its kernels do not load: {error}"
    return None


def _described(call: KernelCall) -> tuple[Mask | None, tuple[Array, ...]]:
    """Return the mask as intervals, one array and documents, apart from each other as `Mask.separate` does it."""
    pieces = None if call.mask is None else as_pieces(call.mask)
    if pieces is None:
        return None, ()
    parts = [pieces.plain] if pieces.plain is not None else []
    if pieces.arrays:
        parts.append(ArrayMask(functools.reduce(jnp.logical_and, (_array_of(call, one) for one in pieces.arrays))))
    if pieces.documents is not None:
        parts.append(pieces.documents.with_arrays(lambda ids: jnp.asarray(ids).astype(jnp.int32)))
    return functools.reduce(Mask.restrict, parts).separate() if parts else (None, ())


def _array_of(call: KernelCall, mask: Mask) -> Array:
    """Return an array or a padding as ``(B, H, T, S)``, each the whole axis or 1."""
    return jnp.array(mask.allowed(np.zeros((1, 1), int), np.arange(call.key.shape[1])[None]), ndmin=4, copy=False)
