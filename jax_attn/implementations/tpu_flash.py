"""Attention by the splash kernel that JAX ships for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`).

Sequences are padded to whole blocks and heads to whole lanes. Without a TPU, `interpreted` has JAX interpret the
kernel's program on any device, slowly, as `check` and the tests run it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array
from jaxtyping import Float, Int

from attn_bridge.masks import Band, Mask, as_band, as_pieces

from . import blocked
from .call import KernelCall
from .derivatives.backward_only import with_gradients_alone

LANES = 128
"""Lengths of blocks and widths of heads are multiples of it."""

LARGE_BLOCK = 512
"""Queries and keys of a block where they are many; forward and backward."""

_INTERPRETED: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernel's program, traced in this context, on whatever device JAX has (Pallas' interpret mode)."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def unavailable() -> str | None:
    """Return why this machine can't run it, None if it can."""
    if jax.default_backend() == "tpu" or _INTERPRETED.get():
        return None
    return f"it needs a TPU, and JAX runs on {jax.default_backend()}"


def unsupported(call: KernelCall) -> str | None:
    """Return why it can't serve a call, None if it can."""
    pieces = None if call.mask is None else as_pieces(call.mask)
    dtypes = {array.dtype.name for array in (call.query, call.key, call.value)}
    reasons = {
        "it never holds the attention weights (return_weights=True)": call.return_weights,
        "it has no dropout": call.dropout > 0,
        "it takes no bias": call.bias is not None,
        f"query, key and value must all be float32 or bfloat16, got {', '.join(sorted(dtypes))}": (
            len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}
        ),
        f"there is nothing in the query {call.query.shape} or the value {call.value.shape}": (
            0 in call.query.shape or 0 in call.value.shape
        ),
        "the mask joins arrays or paddings by |, or has documents twice, or moves keys under a padding": (
            call.mask is not None and pieces is None
        ),
        "it takes arrays of a mask for keys alone, (B, S)": (
            pieces is not None and any(_keys_of(call, one).shape[1:3] != (1, 1) for one in pieces.arrays)
        ),
        "it can't cut axes that are sharded explicitly; call it inside jax.shard_map": any(
            blocked.is_sharded(array) for array in (call.query, call.key, call.value)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or unavailable()


def unprofitable(call: KernelCall) -> str | None:
    """Return why it isn't picked: interpreted, or with several devices, over which XLA can't share out a kernel."""
    if _INTERPRETED.get():
        return "it is interpreted, which is for checks"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return f"there are {jax.device_count()} devices, and JAX would not share it out; call it inside jax.shard_map"
    return None


def attend(call: KernelCall) -> Float[Array, "B T H Dv"]:
    """Return the context ``(B, T, H, Dv)``."""
    call = with_gradients_alone("tpu_flash", call)
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    _, heads, queries, keys = call.scores_shape
    rows, columns = _padded(queries), _padded(keys)
    # The kernel takes no scale.
    query = (call.query * call.scale).astype(call.query.dtype)
    operands = [
        _fill(rearrange(array, "b t h c -> b h t c"), (length, _whole(array.shape[-1])))
        for array, length in ((query, rows), (call.key, columns), (call.value, columns))
    ]
    ids = _segments(call, rows, columns)
    kernel = _kernel(call.mask, heads, (rows, columns), call.softcap)
    segments = None if ids is None else SegmentIds(*ids)
    context = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(*operands, segments, call.sinks)
    context = rearrange(context[:, :, :queries, : call.value.shape[-1]], "b h t c -> b t h c")
    allowed = call.allowed()
    if allowed is None:
        return context
    sees = jnp.array(allowed, ndmin=4, copy=False).any(-1)  # a row without keys gets zeros, and none of their mean
    return jnp.where(jnp.swapaxes(sees, 1, 2)[..., None], context, jnp.zeros((), context.dtype))


def _kernel(mask: Mask | None, heads: int, shape: tuple[int, int], softcap: float | None) -> Any:
    """Return the kernel for one sequence: of queries ``(H, T, D)``, keys and values ``(K, S, D)``."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    pieces = None if mask is None else as_pieces(mask)
    of_head = _of_head(None if pieces is None else pieces.plain, shape)
    block_q, block_kv = (
        max(size for size in (LANES, 2 * LANES, LARGE_BLOCK) if length % size == 0) for length in shape
    )
    sizes = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv,
        block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            splash.MultiHeadMask([of_head] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=None if softcap is None else float(softcap),
            interpret=_INTERPRETED.get(),
        )


def _of_head(mask: Mask | None, shape: tuple[int, int]) -> Any:
    """Return a mask without arrays as the kernel takes it: bands as it knows them, any other by its blocks."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if mask is None:
        return splash.FullMask(shape)
    bands = as_band(mask)
    if bands is None:
        return _described_class()(mask, shape)
    band: Band = bands[0]
    if band.size is None:
        return splash.CausalMask(shape, band.offset)
    return splash.LocalMask(shape, (band.size - 1, 0), band.offset)


@functools.cache
def _described_class() -> type:
    """Return the class of masks that are computed block by block from their description."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

    class Described(splash_masks.Mask):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, mask: Mask, shape: tuple[int, int]):
            self.mask, self._shape = mask, shape

        @property
        def shape(self) -> tuple[int, int]:
            return self._shape

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            queries, keys = (np.arange(size)[part] for size, part in zip(self._shape, index, strict=True))
            allowed = np.asarray(self.mask.allowed(queries[:, None], keys[None]))
            return np.broadcast_to(allowed, (len(queries), len(keys)))

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    return Described


def _segments(call: KernelCall, rows: int, columns: int) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
    """Return segment numbers of queries and keys; a query sees the keys with its number. None where it sees all.

    Numbers encode documents, and padding among the keys, the user's or ours: those have 0, which no query has.
    """
    batch, _, queries, keys = call.scores_shape
    pieces = None if call.mask is None else as_pieces(call.mask)
    seen = [] if pieces is None else [_keys_of(call, piece)[:, 0, 0] for piece in pieces.arrays]
    documents = () if pieces is None or pieces.documents is None else tuple(pieces.documents.arrays())
    if not documents and not seen and columns == keys:
        return None
    of_queries, of_keys = (jnp.ones((batch, size), jnp.int32) for size in (queries, keys))
    if documents:
        ids = [
            jnp.broadcast_to(jnp.asarray(piece).reshape(-1, size), (batch, size))
            for piece, size in zip(documents, (queries, keys), strict=True)
        ]
        of_queries, of_keys = jax.vmap(_ranked)(*ids)
    for piece in seen:
        of_keys = jnp.where(piece, of_keys, 0)
    return _fill(of_queries, (rows,), 1), _fill(of_keys, (columns,))


def _ranked(queries: Int[Array, "T"], keys: Int[Array, "S"]) -> tuple[Int[Array, "T"], Int[Array, "S"]]:
    """Return documents of any numbers by ranks from 1 on; those of queries that no key has are -1."""
    ordered = jnp.sort(keys)
    ranks = jnp.minimum(jnp.searchsorted(ordered, queries), ordered.size - 1)
    of_queries = jnp.where(ordered[ranks] == queries, ranks + 1, -1)
    return of_queries.astype(jnp.int32), (jnp.searchsorted(ordered, keys) + 1).astype(jnp.int32)


def _keys_of(call: KernelCall, mask: Mask) -> Array:
    """Return an array or a padding as ``(B, H, T, S)``, each the whole axis or 1."""
    keys = call.key.shape[1]
    allowed = jnp.array(mask.allowed(np.zeros((1, 1), int), np.arange(keys)[None]), ndmin=4, copy=False)
    return jnp.broadcast_to(allowed, (*allowed.shape[:3], keys))


def _padded(length: int) -> int:
    """Return the length of whole blocks: large ones for long sequences."""
    block = LARGE_BLOCK if length > 2 * LARGE_BLOCK else LANES
    return -(-length // block) * block


def _whole(width: int) -> int:
    return -(-width // LANES) * LANES


def _fill(array: Array, sizes: tuple[int, ...], value: int = 0) -> Array:
    """Return an array with its last axes padded to these sizes."""
    missing = [(0, size - own) for size, own in zip(sizes, array.shape[-len(sizes) :], strict=True)]
    return jnp.pad(array, [(0, 0)] * (array.ndim - len(sizes)) + missing, constant_values=value)
