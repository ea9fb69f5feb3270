"""Attention over the devices of a mesh: global arguments, of which each device computes its part.

Callers see whole arrays, which XLA shares out (GSPMD); the attention itself is code per device (`jax.shard_map`).
Sequences are cut by fsdp, heads by tensor, tokens by context.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_bridge.masks import Mask
from attn_bridge.sharding import ShardingPlan
from attn_bridge.sharding.plan import Role

from ..implementations import KernelCall, reference
from ..signatures.attention import Output
from .block_masks import without_moved_arrays
from .heads import heads_to_hold
from .schemes import all_gather, balance, ulysses
from .schemes.part import Part

Rows = TypeVar("Rows", Array, Array | None)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The axes of the mesh that cut the axes of a call; None where each device holds the whole axis.

    Attributes:
        batch: cuts sequences.
        heads: cuts query heads.
        key_heads: cuts key heads.
        queries: cuts queries.
        keys: cuts keys.
        method: how queries meet keys of other devices; None where a device holds all keys.
    """

    batch: str | None
    heads: str | None
    key_heads: str | None
    queries: str | None
    keys: str | None
    method: str | None

    @classmethod
    def of(cls, plan: ShardingPlan, call: KernelCall) -> Cuts:
        """Return the cuts of a call by a plan: every size that divides."""
        batch, heads, queries, keys = call.scores_shape

        def cut(role: Role, size: int) -> str | None:
            devices = plan.size(role)
            name: str | None = getattr(plan, role)
            return name if devices > 1 and size % devices == 0 else None

        heads_by, queries_by = cut("tensor", heads), cut("context", queries)
        keys_by = queries_by and cut("context", keys)
        method: str | None = plan.method
        if call.return_weights or (method == "ulysses" and heads // plan.size("tensor") % plan.size("context")):
            method = "all_gather"
        return cls(
            cut("fsdp", batch),
            heads_by,
            heads_by and cut("tensor", call.key.shape[2]),
            queries_by,
            keys_by,
            None if keys_by is None else method,
        )

    @property
    def query(self) -> P:
        """Cuts of the queries ``(B, T, H, D)``."""
        return P(self.batch, self.queries, self.heads, None)

    @property
    def key(self) -> P:
        """Cuts of keys and values ``(B, S, K, D)``."""
        return P(self.batch, self.keys, self.key_heads, None)

    @property
    def sinks(self) -> P:
        """Cuts of the sinks ``(H,)``: those of the heads whose scores a device computes."""
        return P(self.of_scores[1])

    @property
    def of_scores(self) -> tuple[str | tuple[str | None, ...] | None, ...]:
        """The axes that cut a device's scores ``(B, H, T, S)``; it meets all keys."""
        if self.method == "ulysses":
            return (self.batch, self.queries if self.heads is None else (self.heads, self.queries), None, None)
        return (self.batch, self.heads, self.queries, None)

    def of_array(self, array: Array | None) -> P | None:
        """Return the cuts of an array that broadcasts to the scores."""
        if array is None:
            return None
        return P(*(by if size > 1 else None for by, size in zip(self.of_scores, array.shape, strict=True)))


@dataclasses.dataclass(frozen=True)
class SharedCall:
    """The static part of a call over devices.

    Attributes:
        mesh: the devices.
        plan: the roles of the mesh's axes.
        cuts: the cuts of the call.
        mask: description with numbered places for arrays.
        heads: numbers of query heads and of key heads, over all devices.
        scale: factor of the scores.
        softcap: as in `functional.dot_product_attention`.
        dropout: rate.
        return_weights: whether the weights are asked for.
        implementation: the requested one, None for the fastest.
    """

    mesh: Mesh
    plan: ShardingPlan
    cuts: Cuts
    mask: Mask | None
    heads: tuple[int, int]
    scale: float
    softcap: float | None
    dropout: float
    return_weights: bool
    implementation: str | None


def attend(mesh: Mesh, plan: ShardingPlan, call: KernelCall, implementation: str | None) -> Output:
    """Like the `implementations`, computed by all devices of a mesh."""
    cuts = Cuts.of(plan, call)
    whole = None if call.mask is None else without_moved_arrays(call.mask)
    mask, arrays = (None, ()) if whole is None else whole.separate()
    bias = None if call.bias is None else jnp.array(call.bias, ndmin=4, copy=False)
    keep = _draw(call, NamedSharding(mesh, P(*cuts.of_scores))) if call.dropout else None
    softcap = None if call.softcap is None else float(call.softcap)
    heads = (call.query.shape[2], call.key.shape[2])
    options = (float(call.scale), softcap, float(call.dropout), call.return_weights, implementation)
    shared = SharedCall(mesh, plan, cuts, mask, heads, *options)
    value = None if call.value is call.key else call.value
    return _attend(shared, call.query, call.key, value, bias, call.sinks, tuple(map(_as_scores, arrays)), keep)


# Known by its name alone, so that modules that are called one operation at a time compile it once.
@functools.partial(jax.jit, static_argnums=0)
def _attend(
    shared: SharedCall,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    sinks: Array | None,
    arrays: tuple[Array, ...],
    keep: Array | None,
) -> Output:
    cuts = shared.cuts

    def run(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        sinks: Array | None,
        arrays: tuple[Array, ...],
        keep: Array | None,
    ) -> Output:
        key = _pick_heads(shared, key)
        value = key if value is None else _pick_heads(shared, value)
        part = Part(
            query,
            key,
            value,
            bias,
            sinks,
            arrays,
            keep,
            shared.mask,
            shared.scale,
            shared.softcap,
            shared.dropout,
            shared.return_weights,
            shared.implementation,
        )
        return _run(part, cuts, shared.plan)

    specs = (
        cuts.query,
        cuts.key,
        None if value is None else cuts.key,
        cuts.of_array(bias),
        None if sinks is None else cuts.sinks,
        tuple(map(cuts.of_array, arrays)),
        cuts.of_array(keep),
    )
    out_specs = (cuts.query, P(*cuts.of_scores)) if shared.return_weights else cuts.query
    sharded = jax.shard_map(run, mesh=shared.mesh, in_specs=specs, out_specs=out_specs)
    return sharded(query, key, value, bias, sinks, arrays, keep)


def _run(part: Part, cuts: Cuts, plan: ShardingPlan) -> Output:
    """Compute a device's part, by the method."""
    axis, devices = cuts.queries, plan.size("context")
    if axis is None:
        return part.attend()
    tokens = devices * part.query.shape[1]
    if cuts.method == "ulysses":
        return ulysses.attend(part, axis, devices)
    in_order = balance.starts_of(tokens, devices, balanced=False)
    if cuts.method is None:
        return part.attend(axis, in_order)
    is_balanced = not part.return_weights and part.key.shape[1] == part.query.shape[1]
    is_balanced = is_balanced and balance.pays(part.mask, tokens, devices)
    starts = balance.starts_of(tokens, devices, balanced=is_balanced)
    if is_balanced:
        part = _exchange(part, axis, devices)
    if cuts.method == "ring":
        keys = starts
        if is_balanced:
            key = balance.to_balanced(part.key, 1, axis, devices)
            value = key if part.value is part.key else balance.to_balanced(part.value, 1, axis, devices)
            part = dataclasses.replace(part, key=key, value=value)
        elif part.key.shape[1] != part.query.shape[1]:
            keys = balance.starts_of(devices * part.key.shape[1], devices, balanced=False)
        result = part.in_blocks(axis, starts, keys, devices)
    else:
        result = all_gather.attend(part, axis, starts)
    return balance.in_order(result, 1, axis, devices) if is_balanced else result


def _exchange(part: Part, axis: str, devices: int) -> Part:
    """Return a part whose queries, and whatever has rows, are the device's early and late piece."""

    def rows(array: Rows) -> Rows:
        whole = array is None or array.shape[2] == 1
        return array if whole else balance.to_balanced(array, 2, axis, devices)

    query = balance.to_balanced(part.query, 1, axis, devices)
    return dataclasses.replace(
        part, query=query, bias=rows(part.bias), arrays=tuple(map(rows, part.arrays)), keep=rows(part.keep)
    )


def _pick_heads(shared: SharedCall, array: Array) -> Array:
    """Return the key heads that a device's query heads read, where it holds those of all devices."""
    if shared.cuts.heads is None or shared.cuts.key_heads is not None:
        return array
    table = heads_to_hold(*shared.heads, shared.plan.size("tensor"))
    return jnp.take(array, jnp.asarray(table)[lax.axis_index(shared.cuts.heads)], axis=2)


def _as_scores(array: Array) -> Array:
    """Return the array of a mask as ``(B, H, T, S)``, each the whole axis or 1; two axes are ``(B, S)``."""
    if array.dtype == bool and array.ndim == 2:
        return array[:, None, None, :]
    return jnp.array(array, ndmin=4, copy=False)


def _draw(call: KernelCall, sharding: NamedSharding) -> Array:
    """Return the dropout mask of all devices, each of which draws its part of the numbers."""
    rng = reference.source_of(call.dropout, call.rng)
    if isinstance(rng, Array):
        return _draw_shards(rng, 1.0 - call.dropout, call.scores_shape, sharding)
    return reference.draw(call.scores_shape, call.dropout, rng)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_shards(key: Array, probability: float, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(jax.random.bernoulli(key, probability, shape), sharding)
