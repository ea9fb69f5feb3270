"""The indexer, whose scores choose the keys of a query (DeepSeek-V3.2, arXiv 2512.02556).

Twins: `jax_attn.lightning_indexer`, `torch_attn.lightning_indexer`. Letters: b batch, t query position, s key position,
h head of the indexer, c channel of a head.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.types import Device

from attn_bridge.masks import Mask
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import Indexer

from . import functional
from .implementations.sizes import is_open, is_true
from .initial_weights import linear
from .layer import Layer
from .layer_norm import LayerNorm
from .operations.autocast import without_autocast
from .positions import apply_rotary
from .random import JaxRngs


class LightningIndexer(Layer):
    """Choice of the keys that a query attends to; no gradient flows through it.

    Args:
        config: sizes and the number of keys.
        d_in: width of the attention's input.
        query_dim: width of the features that queries are made of.
        rngs: source of the initial weights (stream ``params``).
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    def __init__(
        self,
        config: Indexer,
        d_in: int,
        query_dim: int,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config = Indexer.check(config)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        self.W_index_query = linear(query_dim, config.num_heads * config.head_dim, bias=False, **options)
        self.W_index_key = linear(d_in, config.head_dim, bias=False, **options)
        self.key_norm = LayerNorm(config.head_dim, config.norm_eps, **options)
        self.W_index_weights = linear(d_in, config.num_heads, bias=False, **options)

    def keys(
        self, x: Float[Tensor, "b t d"], tables: tuple[Float[Tensor, "... t i"], Float[Tensor, "... t i"]] | None
    ) -> Float[Tensor, "b t 1 c"]:
        """Return the key of each token of `x`, which all heads share and a cache holds."""
        key = rearrange(self.key_norm(self.W_index_key(x)), "b t c -> b t 1 c")
        return key if tables is None else apply_rotary(key, *tables, self.config.pairing)

    def forward(
        self,
        asking: Float[Tensor, "b t q"],
        x: Float[Tensor, "b t d"],
        key: Float[Tensor, "b s 1 c"],
        tables: tuple[Float[Tensor, "... t i"], Float[Tensor, "... t i"]] | None,
        *,
        mask: Mask | Bool[Tensor, "..."],
        num_heads: int,
    ) -> Mask | Bool[Tensor, "b n t s"]:
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
        with without_autocast(query):
            scores = einsum(query, key[:, :, 0], "b t h c, b s c -> b t h s") * config.head_dim**-0.5
            scores = einsum(torch.relu(scores), weights * config.num_heads**-0.5, "b t h s, b t h -> b t s")
        visible = functional.visible_keys(mask, (x.shape[0], num_heads, queries, keys), scores)
        # Hidden keys are -inf first, so that they take none of the places; and hidden again, as a query that sees few
        # keys has places left.
        return visible & largest(torch.where(visible, scores[:, None], -torch.inf), config.top_k)


def is_at_most(size: int, limit: int) -> bool:
    """Return whether a size is at most a limit; of a program that is exported, whether all its sizes are."""
    return is_true(size <= limit)


def largest(scores: Float[Tensor, "... s"], number: int) -> Bool[Tensor, "... s"]:
    """Return the places of the `number` largest scores of each row; of equal ones those in front, and NaN first."""
    scores, size = torch.where(torch.isnan(scores), torch.inf, scores), scores.shape[-1]
    if is_open(size):  # `topk` must know that there are as many
        scores = torch.cat([scores, scores.new_full((*scores.shape[:-1], number), -torch.inf)], -1)
    least = torch.topk(scores, number, -1).values.amin(-1, keepdim=True)
    # `topk` breaks ties as it likes: all above the least chosen score are taken, and of the equal ones the first that
    # have room.
    is_above, is_least = scores > least, scores == least
    room = number - is_above.sum(-1, keepdim=True)
    return (is_above | (is_least & (is_least.cumsum(-1) <= room)))[..., :size]
