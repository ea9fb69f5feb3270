"""Recurrent attention over the devices of a mesh: heads by tensor, and the state goes from device to device.

A token's result is linear in the initial state of its device. So every device starts at once, from no state, and also
computes the effect of each state: the identity is passed as a further state. Then states go along the ring, a small
matrix product at each device, and every token's context is combined.

Letters: b batch, t position, h head, c channel of query and key, v channel of value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import einsum
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from attn_bridge.sharding import ShardingPlan
from attn_bridge.sharding.plan import Role

from ...implementations.block_operands import false_of

Run = Callable[..., tuple[Array, Array]]
"""Reads query, key, value, whatever else has tokens and heads, a state and the tokens of a chunk; gives context and
state, both linear in value and state, channel by channel of them."""


@dataclasses.dataclass(frozen=True)
class SharedRecurrence:
    """The static part of a recurrence over devices.

    Attributes:
        run: computes it on one device.
        mesh: the devices.
        context: axis of the mesh that cuts the tokens, None where each device has all of them.
        devices: number of devices on that axis.
        tokens: cuts of ``(B, T, H)``.
        state: cuts of the state ``(B, H, D, Dv)``.
        chunk_size: tokens of a chunk.
    """

    run: Run
    mesh: Mesh
    context: str | None
    devices: int
    tokens: P
    state: P
    chunk_size: int


def recur(
    mesh: Mesh, plan: ShardingPlan, run: Run, sequences: tuple[Array, ...], state: Array, chunk_size: int
) -> tuple[Array, Array]:
    """Return context and state of a recurrence, computed by all devices.

    Args:
        mesh: the devices.
        plan: the roles of the mesh's axes.
        run: computes it on one device.
        sequences: query, key and value ``(B, T, H, D)``, and further inputs, ``(B, T, H)``.
        state: ``(B, H, D, Dv)`` that earlier tokens left.
        chunk_size: tokens of a chunk.
    """
    batch, tokens, heads = sequences[0].shape[:3]

    def cut(role: Role, size: int) -> str | None:
        devices = plan.size(role)
        name: str | None = getattr(plan, role)
        return name if devices > 1 and size % devices == 0 else None

    rows, context, by_head = cut("fsdp", batch), cut("context", tokens), cut("tensor", heads)
    devices = 1 if context is None else plan.size("context")
    shared = SharedRecurrence(run, mesh, context, devices, P(rows, context, by_head), P(rows, by_head), chunk_size)
    return _recur(shared, sequences, state)


@functools.partial(jax.jit, static_argnums=0)
def _recur(shared: SharedRecurrence, sequences: tuple[Array, ...], state: Array) -> tuple[Array, Array]:
    def run(sequences: tuple[Array, ...], state: Array) -> tuple[Array, Array]:
        if shared.context is None:
            return shared.run(*sequences, state, shared.chunk_size)
        return _along_the_ring(shared, shared.context, sequences, state)

    in_specs = (tuple(shared.tokens for _ in sequences), shared.state)
    out_specs = (shared.tokens, shared.state)
    return jax.shard_map(run, mesh=shared.mesh, in_specs=in_specs, out_specs=out_specs)(sequences, state)


def _along_the_ring(
    shared: SharedRecurrence, axis: str, sequences: tuple[Array, ...], state: Array
) -> tuple[Array, Array]:
    query, key, value, *others = sequences
    width = key.shape[3]
    beside = jnp.zeros((*value.shape[:3], width), value.dtype)
    unit = jnp.broadcast_to(jnp.eye(width, dtype=state.dtype), (*state.shape[:3], width))
    # The loop begins with what varies from device to device as the tokens do.
    unit = jnp.where(false_of(sequences), 0.0, unit)
    start = jnp.concatenate([jnp.zeros_like(unit, shape=state.shape), unit], -1)
    joint, left = shared.run(query, key, jnp.concatenate([value, beside], -1), *others, start, shared.chunk_size)
    context, reads = joint[..., : value.shape[3]], joint[..., value.shape[3] :]
    written, kept = left[..., : value.shape[3]], left[..., value.shape[3] :]
    device, pairs = lax.axis_index(axis), [(one, one + 1) for one in range(shared.devices - 1)]
    start_state = state
    for _ in range(shared.devices - 1):
        start_state = jnp.where(device == 0, state, lax.ppermute(kept @ start_state + written, axis, pairs))
    context = context + einsum(reads, start_state, "b t h c, b h c v -> b t h v")
    last = jnp.where(device == shared.devices - 1, kept @ start_state + written, 0.0)
    return context, lax.psum(last, axis)
