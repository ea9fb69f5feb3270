"""The indexer, whose scores choose the keys of a query (DeepSeek-V3.2, arXiv 2512.02556).

Twins: `jax_attn.lightning_indexer`, `torch_attn.lightning_indexer`. Letters: b batch, t query position, s key position,
h head of the indexer, c channel of a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import einsum, rearrange
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attn_bridge.masks import Mask
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import Indexer

from . import functional
from .initial_weights import linear
from .layer_norm import LayerNorm
from .positions import apply_rotary
from .random import Rngs


class LightningIndexer(nnx.Module):
    """Choice of the keys that a query attends to; no gradient flows through it.

    Args:
        config: sizes and the number of keys.
        d_in: width of the attention's input.
        query_dim: width of the features that queries are made of.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """

    def __init__(
        self,
        config: Indexer,
        d_in: int,
        query_dim: int,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        self.config = config = Indexer.check(config)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.W_index_query = linear(query_dim, config.num_heads * config.head_dim, bias=False, **options)
        self.W_index_key = linear(d_in, config.head_dim, bias=False, **options)
        self.key_norm = LayerNorm(config.head_dim, config.norm_eps, **options)
        self.W_index_weights = linear(d_in, config.num_heads, bias=False, **options)

    def keys(
        self, x: Float[Array, "b t d"], tables: tuple[Float[Array, "... t i"], Float[Array, "... t i"]] | None
    ) -> Float[Array, "b t 1 c"]:
        """Return the key of each token of `x`, which all heads share and a cache holds."""
        key = rearrange(self.key_norm(self.W_index_key(x)), "b t c -> b t 1 c")
        return key if tables is None else apply_rotary(key, *tables, self.config.pairing)

    def __call__(
        self,
        asking: Float[Array, "b t q"],
        x: Float[Array, "b t d"],
        key: Float[Array, "b s 1 c"],
        tables: tuple[Float[Array, "... t i"], Float[Array, "... t i"]] | None,
        *,
        mask: Mask | Bool[Array, "..."],
        num_heads: int,
    ) -> Mask | Bool[Array, "b n t s"]:
        """Restrict `mask` to the keys with the highest scores; of equal ones the first.

        Args:
            asking: input of the projection to queries.
            x: input of the attention, which also gives the weights of the heads.
            key: of `keys`, of all tokens so far.
            tables: cosines and sines of the positions of `x`; None does not turn anything.
            mask: which query sees which of the keys.
            num_heads: heads of the attention; `mask` may differ per head.
        """
        config = self.config
        queries, keys = x.shape[1], key.shape[1]
        # As many keys as may be chosen: all of them are, and the scores need not be computed.
        if is_at_most(keys, config.top_k):
            return mask
        query, weights = self.W_index_query(asking), self.W_index_weights(x)
        check_width("W_index_query", query.shape[-1], config.num_heads * config.head_dim)
        check_width("W_index_weights", weights.shape[-1], config.num_heads)
        query = rearrange(query, "b t (h c) -> b t h c", h=config.num_heads)
        query = query if tables is None else apply_rotary(query, *tables, config.pairing)
        wide = functional.wide_dtype(x)
        query, key, weights = (functional.constant(part, wide) for part in (query, key, weights))
        # I(t, s) = sum over heads of w(t, h) relu(q(t, h) k(s)), the paper's equation 1. The two factors, those of the
        # published code, are equal for all keys and change no choice.
        scores = einsum(query, key[:, :, 0], "b t h c, b s c -> b t h s") * config.head_dim**-0.5
        scores = einsum(jax.nn.relu(scores), weights * config.num_heads**-0.5, "b t h s, b t h -> b t s")
        visible = functional.visible_keys(mask, (x.shape[0], num_heads, queries, keys), scores)
        # Hidden keys are -inf first, so that they take none of the places; and hidden again, as a query that sees few
        # keys has places left.
        return visible & largest(jnp.where(visible, scores[:, None], -jnp.inf), config.top_k)


def is_at_most(size: int, limit: int) -> bool:
    """Return whether a size is at most a limit; False for an open size of a program that is exported."""
    return not jax.export.is_symbolic_dim(size) and size <= limit


def largest(scores: Float[Array, "... s"], number: int) -> Bool[Array, "... s"]:
    """Return the places of the `number` largest scores of each row; of equal ones those in front, and NaN first."""
    scores, size = jnp.where(jnp.isnan(scores), jnp.inf, scores), scores.shape[-1]
    if jax.export.is_symbolic_dim(size):  # `top_k` must know that there are as many
        fill = jnp.full((*scores.shape[:-1], number), -jnp.inf, scores.dtype)
        scores = jnp.concatenate([scores, fill], -1)
    least = jax.lax.top_k(scores, number)[0].min(-1, keepdims=True)
    # `topk` breaks ties as it likes: all above the least chosen score are taken, and of the equal ones the first that
    # have room.
    is_above, is_least = scores > least, scores == least
    room = number - is_above.sum(-1, keepdims=True)
    return (is_above | (is_least & (is_least.cumsum(-1) <= room)))[..., :size]
