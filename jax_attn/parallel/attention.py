"""Attention over the devices of a mesh: global arguments, of which each device computes its part.

Outside everything is about whole arrays, which XLA shares out (GSPMD); the attention itself is told what to do on each
device (`jax.shard_map`). Sequences are cut by fsdp, heads by tensor, tokens by context.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_bridge.masks import ArrayMask, Mask
from attn_bridge.sharding import Plan

from ..implementations import Call, reference
from . import all_gather
from .part import Part


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The axes of the mesh that cut the axes of a call; None where each device holds the whole axis."""

    batch: str | None
    heads: str | None
    key_heads: str | None
    queries: str | None
    keys: str | None

    @classmethod
    def of(cls, plan: Plan, call: Call) -> Cuts:
        """Return what a plan cuts: whatever divides."""
        batch, heads, queries, keys = call.scores_shape

        def cut(role: Any, size: int) -> str | None:
            devices = plan.size(role)
            return getattr(plan, role) if devices > 1 and size % devices == 0 else None

        heads_by, queries_by = cut("tensor", heads), cut("context", queries)
        return cls(
            cut("fsdp", batch),
            heads_by,
            heads_by and cut("tensor", call.key.shape[2]),
            queries_by,
            queries_by and cut("context", keys),
        )

    def of_scores(self, shape: tuple[int, ...]) -> P:
        """Return the cuts of an array that broadcasts to the scores ``(B, H, T, S)``; keys are left whole."""
        cuts = (self.batch, self.heads, self.queries, None)
        return P(*(by if size > 1 else None for by, size in zip(cuts, shape, strict=True)))


def attend(mesh: Mesh, plan: Plan, call: Call, implementation: str | None) -> Any:
    """Return what `implementations` return for a call, computed by all devices of a mesh."""
    cuts = Cuts.of(plan, call)
    mask, arrays = (None, ()) if call.mask is None else call.mask.separate()
    arrays = tuple(map(_as_scores, arrays))
    bias = None if call.bias is None else jnp.array(call.bias, ndmin=4, copy=False)
    keep = _draw(call, NamedSharding(mesh, cuts.of_scores(call.scores_shape))) if call.dropout else None
    shared = call.value is call.key

    def run(query: Array, key: Array, value: Any, arrays: Any, bias: Any, keep: Any, sinks: Any) -> Any:
        heads = _picked_heads(call, cuts, plan)
        key = heads(key)
        part = Part(
            query,
            key,
            key if shared else heads(value),
            None if mask is None else mask.with_arrays(lambda place: arrays[place.number]),
            bias,
            keep,
            sinks,
            call.scale,
            call.softcap,
            call.dropout,
            call.return_weights,
            implementation,
            cuts.queries,
            cuts.keys is not None,
        )
        return all_gather.attend(part)

    keys = P(cuts.batch, cuts.keys, cuts.key_heads, None)
    queries = P(cuts.batch, cuts.queries, cuts.heads, None)
    operands = (call.query, call.key, None if shared else call.value, arrays, bias, keep, call.sinks)
    specs = (
        queries,
        keys,
        None if shared else keys,
        tuple(cuts.of_scores(array.shape) for array in arrays),
        None if bias is None else cuts.of_scores(bias.shape),
        None if keep is None else cuts.of_scores(keep.shape),
        None if call.sinks is None else P(cuts.heads),
    )
    weights = P(cuts.batch, cuts.heads, cuts.queries, None)
    out_specs = (queries, weights) if call.return_weights else queries
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs)(*operands)


def _picked_heads(call: Call, cuts: Cuts, plan: Plan) -> Callable[[Array], Array]:
    """Return what picks the key heads that a device's query heads read, where it holds those of all devices."""
    if cuts.heads is None or cuts.key_heads is not None:
        return lambda array: array
    heads, key_heads, devices = call.query.shape[2], call.key.shape[2], plan.size("tensor")
    read = np.arange(heads).reshape(devices, -1) // (heads // key_heads)
    # A device whose query heads are whole groups, or part of one, holds each key head once.
    counts = {len(set(row)) for row in read.tolist()}
    count = counts.pop() if len(counts) == 1 else read.shape[1]
    grouped = read.shape[1] % count == 0 and all(
        (row.reshape(count, -1) == row.reshape(count, -1)[:, :1]).all() for row in read
    )
    table = jnp.asarray(read[:, :: read.shape[1] // count] if grouped else read)
    return lambda array: jnp.take(array, table[lax.axis_index(cuts.heads)], axis=2)


def _as_scores(array: Array) -> Array:
    """Return the array of a mask as ``(B, H, T, S)``, each the whole axis or 1; two axes are ``(B, S)``."""
    if array.dtype == bool and array.ndim == 2:
        return array[:, None, None, :]
    return jnp.array(array, ndmin=4, copy=False)


def _draw(call: Call, sharding: NamedSharding) -> Array:
    """Return the dropout mask of all devices, each of which draws the numbers of its own places in it."""
    rng = reference.source_of(call.dropout, call.rng)
    if isinstance(rng, Array):
        return _draw_shards(rng, 1.0 - call.dropout, call.scores_shape, sharding)
    return reference.draw(call.scores_shape, call.dropout, rng)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_shards(key: Array, probability: float, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(jax.random.bernoulli(key, probability, shape), sharding)
