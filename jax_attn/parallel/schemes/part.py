"""One device's part of a call of attention, as a call on that device alone.

Letters: b batch, t query position, s key position, h query head, k key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from attn_bridge.masks import ArrayMask, Mask

from ... import implementations
from ...implementations import KernelCall
from ...implementations.block_plan import SMALL_BLOCK
from ...implementations.reference import Drawn
from ...signatures.attention import Output
from .ring import Ring
from .ring import attend as attend_to_blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The operands of `functional.dot_product_attention` that a device holds, inside `jax.shard_map`.

    Attributes:
        query: ``(b, t, h, c)``, the device's own.
        key: ``(b, s, k, c)``; query head ``i`` of the device reads its key head ``i // (h // k)``.
        value: ``(b, s, k, c)``.
        bias: ``(b, h, t, s)``: each axis the device's, all keys, or 1.
        sinks: ``(h,)``.
        arrays: those of the mask, like `bias`.
        keep: dropout mask like `bias`, None without dropout.
        mask: description, in positions of the whole sequence, with numbered places for its arrays.
        scale: factor of the scores.
        softcap: as `functional.dot_product_attention` has it.
        dropout: rate.
        return_weights: whether the weights are asked for.
        implementation: which one is asked for, None for the fastest.
    """

    query: Float[Array, "b t h c"]
    key: Float[Array, "b s k c"]
    value: Float[Array, "b s k c"]
    bias: Float[Array, "..."] | None
    sinks: Float[Array, "h"] | None
    arrays: tuple[Array, ...]
    keep: Bool[Array, "..."] | None
    mask: Mask | None
    scale: float
    softcap: float | None
    dropout: float
    return_weights: bool
    implementation: str | None

    def attend(self, axis: str | None = None, starts: tuple[tuple[int, ...], ...] = ((0,),)) -> Output:
        """Return the context, and the weights if asked for, of the queries to all keys, which the device holds.

        Args:
            axis: axis of the mesh that cuts the queries, None where the device holds all of them.
            starts: for each piece of the queries where it starts, on each device of that axis.
        """
        if axis is not None and self.mask is not None:
            if len(starts) > 1 or self._deserves_own_program():
                return self.in_blocks(axis, starts, starts_of_keys=((0,) * len(starts[0]),))
            return self._at(lax.axis_index(axis) * self.query.shape[1])
        mask = None if self.mask is None else self.mask.with_arrays(lambda slot: self.arrays[slot.number])
        return self._run(mask)

    def in_blocks(
        self, axis: str, starts: tuple[tuple[int, ...], ...], starts_of_keys: tuple[tuple[int, ...], ...], hops: int = 1
    ) -> Array:
        """Return the context of the queries to keys of which the device holds those of these places at first.

        Args:
            axis: axis of the mesh that the devices are on.
            starts: for each piece of the queries where it starts, on each device.
            starts_of_keys: the same of the keys.
            hops: how many devices the keys go to.
        """
        devices, options = len(starts[0]), (self.scale, self.softcap, self.dropout, self.implementation)
        ring = Ring(
            axis, devices, hops, starts, starts_of_keys, self.mask, *options, is_rolled=self._deserves_own_program()
        )
        operands = (self.query, self.key, self.value, self.bias, self.sinks, self.arrays, self.keep)
        return attend_to_blocks(ring, *operands)

    def _deserves_own_program(self) -> bool:
        """Return whether enough scores justify a separate program for each device's view."""
        named = None if self.implementation is None else implementations.IMPLEMENTATIONS[self.implementation]
        many = self.query.shape[1] * self.key.shape[1] >= SMALL_BLOCK * SMALL_BLOCK
        return many and not self.return_weights and (named is None or hasattr(named, "attend_with_lse"))

    def _at(self, start: Array | int) -> Output:
        """Like `attend`, for queries whose first position is known only at run time."""
        assert self.mask is not None
        rows = start + jnp.arange(self.query.shape[1])[:, None]
        mask = self.mask.with_arrays(lambda slot: self.arrays[slot.number])
        allowed = mask.allowed(rows, jnp.arange(self.key.shape[1])[None, :])
        return self._run(ArrayMask(jnp.array(allowed, ndmin=4, copy=False)))

    def _run(self, mask: Mask | None) -> Output:
        rng = None if self.keep is None else Drawn(self.keep)
        call = KernelCall(
            self.query,
            self.key,
            self.value,
            mask,
            self.bias,
            self.scale,
            self.softcap,
            self.sinks,
            self.dropout,
            rng,
            self.return_weights,
        )
        return implementations.choose(call, self.implementation).attend(call)
