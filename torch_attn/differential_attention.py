"""Differential attention: one softmax minus a part of another, which cancels noise (arXiv 2410.05258).

Twins: `jax_attn.differential_attention`, `torch_attn.differential_attention`. Letters: b batch, t query position, s key
position, n one of the two softmaxes, p key/value head of each, g query heads per key/value head, h all heads, c channel
of a head.
"""

from __future__ import annotations

from typing import Never

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.types import Device

from attn_bridge.masks import Mask, as_mask
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import DifferentialAttentionConfig

from . import functional
from .decoding.cache import KeyValueCache
from .decoding.token_positions import last_of_rows, positions_of
from .initial_weights import linear, normal, parameter
from .layer import Layer
from .operations.arrays import as_tensor
from .positions import apply_rotary, rotary_tables
from .random import JaxRngs
from .signatures import DType, typed_as
from .signatures.attention import AttentionMask, CachedAttentionCall, CachedOutput


class DifferentialAttention(Layer):
    """Pairs of heads that share their values: a share of the second head's output is subtracted from the first's.

    Args:
        config: sizes, position, mask, biases, and the initial share of the second softmax.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    @DifferentialAttentionConfig.takes
    def __init__(
        self,
        config: DifferentialAttentionConfig,
        *,
        rngs: JaxRngs | None = None,
        implementation: str | None = None,
        device: Device = None,
        dtype: DType | None = None,
    ):
        super().__init__()
        self.config = config = DifferentialAttentionConfig.check(config)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.W_query = linear(config.d_in, query_width, config.qkv_bias, **options)
        self.W_key = linear(config.d_in, key_width, config.qkv_bias, **options)
        self.W_value = linear(config.d_in, key_width, config.qkv_bias, **options)
        self.out_proj = linear(query_width, config.d_out, config.out_bias, **options)
        # The published start: normal numbers with a deviation of 0.1 (arXiv 2410.05258, and `lambda_std_dev` of
        # DiffLlama).
        self.lambda_q1 = parameter(0.1 * normal((config.head_dim,), **options))
        self.lambda_k1 = parameter(0.1 * normal((config.head_dim,), **options))
        self.lambda_q2 = parameter(0.1 * normal((config.head_dim,), **options))
        self.lambda_k2 = parameter(0.1 * normal((config.head_dim,), **options))

    @torch.no_grad()
    def _reset_own(self) -> None:
        for part in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            part.normal_(std=0.1)

    __call__: CachedAttentionCall

    @typed_as(CachedAttentionCall)
    def forward(
        self,
        x: Float[Tensor, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        positions: Int[Tensor, "... t"] | None = None,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
    ) -> CachedOutput[KeyValueCache]:
        """Attend from every token to those that the config's mask shows it.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)``, or broadcastable to ``(B, H, T, S)``; the
                config's mask applies in addition. S counts the cached tokens, too.
            positions: integers ``(T,)`` or ``(B, T)``; a `Rotary` with axes also takes ``(rows, B, T)``, and others for
                all rows. By default each sequence counts its tokens, without padding on the left, from 0 or from the
                end of the cache.
            cache: of `init_cache`; `x` follows the tokens in it.
            return_weights: also return both softmaxes ``(B, H, T, S)``, without ``B`` for 2-D `x`, those of the first
                half of the heads first.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``; then the weights if asked for; then the cache if given.

        Raises:
            ValueError: shapes that do not fit, or more tokens than the cache has room for.
            TypeError: an input that is not floating point, a mask that is not bool, positions that are not integers.
        """
        config = self.config
        batch = functional.as_batch(x, self.W_query, d_in=config.d_in, cache=cache, misplaced=_misplaced)
        query, key, value = self.W_query(batch), self.W_key(batch), self.W_value(batch)
        # Pairs of heads are half of all heads apart, so that a part of them holds no pairs.
        for name, array, heads in (
            ("W_query", query, config.num_heads),
            ("W_key", key, config.num_kv_heads),
            ("W_value", value, config.num_kv_heads),
        ):
            check_width(name, array.shape[-1], heads * config.head_dim)
        query = rearrange(query, "b t (h c) -> b t h c", h=config.num_heads)
        key = rearrange(key, "b t (h c) -> b t h c", h=config.num_kv_heads)
        at = positions_of(batch, positions, cache, attention_mask, config.position)
        if config.position is not None:
            width = config.position.width(config.head_dim)
            cos, sin = rotary_tables(config.position, at, width, functional.wide_dtype(batch))
            query = apply_rotary(query, cos, sin, config.position.pairing)
            key = apply_rotary(key, cos, sin, config.position.pairing)
        # The keys of a pair of heads lie side by side, and so do their values: half the heads, twice as wide. A query
        # is zero beside the other's key, so that one pass over keys and values, as a cache holds them, makes both maps.
        key = rearrange(key, "b t (n p) c -> b t p (n c)", n=2)
        value = rearrange(value, "b t (n p c) -> b t p (n c)", n=2, c=config.head_dim)
        query = _beside_zeros(rearrange(query, "b t (n p g) c -> n b t p g c", n=2, p=key.shape[2]))
        attention_mask = self._by_pairs(attention_mask)
        mask = config.mask.restrict(attention_mask)
        if cache is not None:
            arguments = {"mask": config.mask, "attention_mask": attention_mask, "positions": last_of_rows(at)}
            cache, view = cache.append(key, value, **arguments, num_heads=config.num_heads)
            key, value, mask = view.key, view.value, view.mask
        arguments = {"scale": config.scale, "return_weights": return_weights, **functional.attention_arguments(self)}
        result = functional.dot_product_attention(query, key, value, mask=mask, **arguments)
        context, weights = functional.as_pair(result)
        context = self._subtract(rearrange(context, "b t (p n g) c -> n b t (p g) c", n=2, p=key.shape[2]))
        if weights is not None:
            weights = rearrange(weights, "b (p n g) t s -> b (n p g) t s", n=2, p=key.shape[2])
        output = self.out_proj(rearrange(context, "b t h c -> b t (h c)"))
        return functional.with_cache(functional.as_given(x, output, weights), cache)

    def _subtract(self, contexts: Float[Tensor, "n b t h c"]) -> Float[Tensor, "b t h c"]:
        """Return the first softmax's context minus a share of the second's, normed pair by pair."""
        wide, start = functional.wide_dtype(contexts), self.config.lambda_init
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            check_width(name, getattr(self, name).shape[0], self.config.head_dim)
        first = (self.lambda_q1.to(wide) * self.lambda_k1.to(wide)).sum()
        second = (self.lambda_q2.to(wide) * self.lambda_k2.to(wide)).sum()
        # lambda = exp(q1 k1) - exp(q2 k2) + lambda_init: learned as a difference, it may also fall below its start.
        part = torch.exp(first) - torch.exp(second) + start
        difference = contexts[0].to(wide) - part * contexts[1].to(wide)
        mean_square = (difference * difference).mean(-1, keepdim=True)
        # The paper's fixed factor 1 - lambda_init: it aligns gradients with those of a plain transformer.
        return ((1.0 - start) * difference * torch.rsqrt(mean_square + self.config.norm_eps)).to(contexts.dtype)

    def _by_pairs(self, attention_mask: AttentionMask | None) -> Mask | None:
        """Return a mask whose heads, if it has several, are in the order of the pairs of keys."""
        if attention_mask is None:
            return None
        heads, pairs = self.config.num_heads, self.config.num_kv_heads // 2

        def order(array: Tensor) -> Tensor:
            if array.ndim != 4 or array.shape[1] != heads:
                return array
            return rearrange(array, "b (n p g) t s -> b (p n g) t s", n=2, p=pairs)

        return as_mask(attention_mask).with_arrays(lambda array: order(as_tensor(array)))

    def init_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        heads, width = self.config.num_kv_heads // 2, 2 * self.config.head_dim
        return KeyValueCache.empty(batch_size, capacity, heads, width, **functional.cache_options(self.W_key))


def _beside_zeros(query: Float[Tensor, "n b t p g c"]) -> Float[Tensor, "b t h e"]:
    """Give the queries of both maps the width of two keys, with zeros in the other's place."""
    zeros = torch.zeros_like(query[0])
    # Scores over both keys at once: zeros in the place of the other key leave each query its own. So one call of
    # attention computes both softmaxes, and values are read once.
    padded = torch.stack([functional.joined([query[0], zeros]), functional.joined([zeros, query[1]])], 3)
    return rearrange(padded, "b t p n g c -> b t (p n g) c")
