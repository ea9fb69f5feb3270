"""A table of vectors, looked up by id, that reports ids out of range.

The twin is `torch_attn.embedding`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs.model import check_range

from . import functional
from .linear import draw_normal
from .random import Rngs, TorchRngs, check_rngs


def _standard_normal(
    key: Array | TorchRngs, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, **unused: object
) -> Array:
    """Draw the rows; one function, so that two like modules share one jit cache."""
    return draw_normal(key, shape, dtype)


class Embedding(nnx.Embed):
    """`nnx.Embed`, whose rows start from a normal distribution of mean 0 and variance 1, as torch's do.

    Args:
        size: number of rows.
        emb_dim: width of a row.
        first: row of the id 0; rows before it are unused.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the returned rows; None keeps that of the table.
    """

    def __init__(
        self,
        size: int,
        emb_dim: int,
        first: int = 0,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        check_rngs(rngs)
        super().__init__(size, emb_dim, embedding_init=_standard_normal, rngs=rngs, param_dtype=param_dtype)
        self.first = first
        self.dtype = dtype  # nnx.Embed would keep the dtype it was made with, and round later weights to it

    def __call__(self, ids: Int[Array, "..."], name: str = "ids") -> Float[Array, "... d"]:
        """Look up ``ids`` of any shape ``(...)``; gives ``(..., emb_dim)``.

        Raises:
            ValueError: an id out of range; the message calls the ids `name`. Not inside ``jax.jit``, where ids have no
                values yet: the row of an id out of range is NaN there.
        """
        check_width("an embedding", self.embedding.shape[1], self.features)
        rows = self.num_embeddings - self.first
        if isinstance(ids, jax.core.Tracer) or not getattr(ids, "is_fully_addressable", True):
            ids = functional.signed(ids)
            is_known = (ids >= 0) & (ids < rows)
            return jnp.where(is_known[..., None], super().__call__(ids + self.first), jnp.nan)
        if np.size(ids):
            values = np.asarray(ids)
            check_range(name, int(values.min()), int(values.max()), rows)
        return super().__call__(functional.signed(ids) + self.first)
