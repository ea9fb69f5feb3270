"""What one device holds of a call of attention, and the calls that it is made of.

Letters: b batch, t query position, s key position, h query head, k key/value head, c channel of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from attn_bridge.masks import ArrayMask, Mask

from .. import implementations
from ..implementations import Call
from ..implementations.reference import Drawn


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The operands of `functional.dot_product_attention` that a device holds, inside `jax.shard_map`.

    Attributes:
        query: ``(b, t, h, c)``, the device's own.
        key: ``(b, s, k, c)``; query head ``i`` of the device reads its key head ``i // (h // k)``.
        value: ``(b, s, k, c)``.
        mask: description, in positions of the whole sequence; its arrays ``(b, h, t, s)``, each axis the device's
            queries and all keys, or 1.
        bias: like an array of the mask.
        keep: dropout mask of the device's queries and all keys, None without dropout.
        sinks: ``(h,)``.
        scale: factor of the scores.
        softcap: as `functional.dot_product_attention` has it.
        dropout: rate.
        return_weights: whether the weights are asked for.
        implementation: which one is asked for, None for the fastest.
        axis: axis of the mesh that cuts the queries, None where all devices hold all of them.
        keys_are_cut: whether it cuts the keys, too.
    """

    query: Float[Array, "b t h c"]
    key: Float[Array, "b s k c"]
    value: Float[Array, "b s k c"]
    mask: Mask | None
    bias: Float[Array, "..."] | None
    keep: Bool[Array, "..."] | None
    sinks: Float[Array, "h"] | None
    scale: float
    softcap: float | None
    dropout: float
    return_weights: bool
    implementation: str | None
    axis: str | None
    keys_are_cut: bool

    @property
    def start(self) -> Int[Array, ""] | int:
        """Position of the first query of the device."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * self.query.shape[1]

    def call(self, *, queries: Any = None, keys: Any = 0) -> Call:
        """Return the call of these queries and keys, which stand at these positions and those after them."""
        queries = self.start if queries is None else queries
        mask = self.mask
        if mask is not None:
            rows = queries + jnp.arange(self.query.shape[1])[:, None]
            allowed = mask.allowed(rows, keys + jnp.arange(self.key.shape[1])[None, :])
            mask = ArrayMask(jnp.array(allowed, ndmin=4, copy=False))
        rng = None if self.keep is None else Drawn(self.keep)
        return Call(
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

    def attend(self) -> Any:
        """Return the context, and the weights if asked for, of the queries to all keys, which the device holds."""
        call = self.call()
        return implementations.choose(call, self.implementation).attend(call)

    def replace(self, **changes: Any) -> Part:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
