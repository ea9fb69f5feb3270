"""Attention whose keys and values are made of one small latent per token (DeepSeek-V2, arXiv 2405.04434).

Twins: `jax_attn.multi_head_latent_attention`, `torch_attn.multi_head_latent_attention`. Letters: b batch, t query
position, s key position, h head, c channel of a head, l channel of the latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import jax.numpy as jnp
from einops import einsum, rearrange, repeat
from jax import Array
from jaxtyping import Float, Int

from attn_bridge.sharding.heads import check_groups, check_width, split_heads
from attn_bridge.specs import MultiHeadLatentAttentionConfig

from . import functional
from .decoding.cache import KeyValueCache
from .decoding.token_positions import last_of_rows, positions_of
from .dropout import Dropout
from .initial_weights import linear
from .layer import Layer, LayerOptions, Unpack
from .positions import apply_rotary, rotary_tables
from .random import Rngs
from .rms_norm import RMSNorm
from .signatures import DType, typed_as
from .signatures.attention import AttentionMask, CachedOutput, LatentAttentionCall


class MultiHeadLatentAttention(Layer):
    """Attention in heads whose keys and values come from a latent, next to one shared key with a rotary position.

    Args:
        config: sizes, position, mask and biases.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @MultiHeadLatentAttentionConfig.takes
    def __init__(
        self,
        config: MultiHeadLatentAttentionConfig,
        *,
        rngs: Rngs,
        implementation: str | None = None,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = MultiHeadLatentAttentionConfig.check(config)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        heads, bias = config.num_heads, config.bias
        asking = config.d_in
        if config.query_dim is not None:
            self.W_query_latent = linear(config.d_in, config.query_dim, bias, **options)
            self.query_norm = RMSNorm(config.query_dim, config.norm_eps, **options)
            asking = config.query_dim
        self.W_query = linear(asking, heads * (config.nope_dim + config.rope_dim), bias=False, **options)
        self.W_latent = linear(config.d_in, config.latent_dim, bias, **options)
        self.W_key_rope = linear(config.d_in, config.rope_dim, bias, **options)
        self.latent_norm = RMSNorm(config.latent_dim, config.norm_eps, **options)
        self.W_key = linear(config.latent_dim, heads * config.nope_dim, bias=False, **options)
        self.W_value = linear(config.latent_dim, heads * config.value_dim, bias=False, **options)
        self.out_proj = linear(heads * config.value_dim, config.d_out, bias, **options)
        self.dropout = Dropout(config.dropout, rngs=rngs)

    @typed_as(LatentAttentionCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        positions: Int[Array, "... t"] | None = None,
        cache: KeyValueCache | None = None,
        absorbed: bool | None = None,
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
            absorbed: whether queries go to the latents and the context comes from them, instead of keys and values
                being made of all latents; the same numbers but for rounding. None: for one token with a cache,
                unless a layer that makes them was replaced.
            return_weights: also return the attention weights ``(B, H, T, S)``, without ``B`` for 2-D `x`, as they are
                before dropout.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``; then the weights if asked for; then the cache if given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache has room for, or `absorbed` by a layer that
                adds something to its product.
            TypeError: an input that is not floating point, a mask that is not bool, positions that are not integers.
        """
        config = self.config
        batch = functional.as_batch(x, self.W_latent, d_in=config.d_in, cache=cache, misplaced=_misplaced)
        asking = batch if config.query_dim is None else self.query_norm(self.W_query_latent(batch))
        query = split_heads(self.W_query(asking), config.nope_dim + config.rope_dim, "W_query")
        latent = rearrange(self.latent_norm(self.W_latent(batch)), "b t l -> b t 1 l")
        key_rope = rearrange(self.W_key_rope(batch), "b t c -> b t 1 c")
        check_width("W_key_rope", key_rope.shape[3], config.rope_dim)
        query_nope, query_rope = query[..., : config.nope_dim], query[..., config.nope_dim :]
        at, tables = positions_of(batch, positions, cache, attention_mask, config.position), None
        if config.position is not None:
            tables = rotary_tables(config.position, at, config.rope_dim, functional.wide_dtype(batch))
            query_rope = apply_rotary(query_rope, *tables, config.position.pairing)
            # Rotated before the cache holds it: positions of earlier tokens are not needed again.
            key_rope = apply_rotary(key_rope, *tables, config.position.pairing)
        latent, mask = functional.joined([latent, key_rope]), config.mask.restrict(attention_mask)
        index = self._index_keys(batch, tables, latent)
        if cache is not None:
            arguments = {"mask": config.mask, "attention_mask": attention_mask, "positions": last_of_rows(at)}
            cache, view = cache.append(latent, index, **arguments, num_heads=config.num_heads)
            latent, index, mask = view.key, view.value, view.mask
        mask = self._choose(asking, batch, index, tables, mask)
        options = {"mask": mask, "scale": config.scale, "return_weights": return_weights}
        options |= functional.attention_arguments(self)
        # For one token, making keys and values of all S cached latents takes S times the two projections; absorbed,
        # these apply once, to the query and to the context. For many tokens attention over latents is wider, and costs
        # more. Layers that were replaced or that have hooks need not be matrices.
        is_plain = functional.is_plain(self.W_key) and functional.is_plain(self.W_value)
        if absorbed or (absorbed is None and cache is not None and batch.shape[1] == 1 and is_plain):
            context, weights = self._absorbed(query_nope, query_rope, latent, options)
        else:
            context, weights = self._naive(query_nope, query_rope, latent, options)
        output = self.out_proj(rearrange(context, "b t h c -> b t (h c)"))
        return functional.with_cache(functional.as_given(x, output, weights), cache)

    def _index_keys(
        self, x: Float[Array, "b t d"], tables: tuple[Array, Array] | None, latent: Float[Array, "b t 1 l"]
    ) -> Float[Array, "b t 1 c"]:
        """Return the keys of an indexer, which a cache holds with the latents: without channels."""
        return latent[..., :0]

    def _choose(
        self,
        asking: Float[Array, "b t q"],
        x: Float[Array, "b t d"],
        index: Float[Array, "b s 1 c"],
        tables: tuple[Array, Array] | None,
        mask: AttentionMask,
    ) -> AttentionMask:
        """Return the mask of the keys to attend to, of those that a mask shows: all of them."""
        return mask

    def _naive(
        self,
        query_nope: Float[Array, "b t h c"],
        query_rope: Float[Array, "b t h r"],
        latent: Float[Array, "b s 1 l"],
        options: Mapping[str, Any],
    ) -> tuple[Array, Array | None]:
        """Make keys and values of the latents, and attend to them."""
        config = self.config
        plain = latent[:, :, 0, : config.latent_dim]
        key_nope = split_heads(self.W_key(plain), config.nope_dim, "W_key")
        value = split_heads(self.W_value(plain), config.value_dim, "W_value")
        check_groups(query_nope.shape[2], key_nope.shape[2])
        key_rope = repeat(latent[..., config.latent_dim :], "b s 1 c -> b s h c", h=key_nope.shape[2])
        query, key = functional.joined([query_nope, query_rope]), functional.joined([key_nope, key_rope])
        return functional.as_pair(functional.dot_product_attention(query, key, value, **options))

    def _absorbed(
        self,
        query_nope: Float[Array, "b t h c"],
        query_rope: Float[Array, "b t h r"],
        latent: Float[Array, "b s 1 l"],
        options: Mapping[str, Any],
    ) -> tuple[Array, Array | None]:
        """Project the queries to the latents, attend to those, and project their average to values (section 2.1.2).

        The latents serve at once as the one key and, in their first channels, as the one value of all heads; they are
        used as cached, without a copy.
        """
        config, width = self.config, self.config.latent_dim
        # q (W_k l) = (q W_k) l, and the average of W_v l is W_v times the average of l. Between query and rotary key
        # there is a rotation by position, so that part stays apart (section 2.1.3).
        to_key = split_heads(functional.matrix(self.W_key, latent, width), config.nope_dim, "W_key")
        to_value = split_heads(functional.matrix(self.W_value, latent, width), config.value_dim, "W_value")
        check_groups(query_nope.shape[2], to_key.shape[1])
        query = functional.joined([einsum(query_nope, to_key, "b t h c, l h c -> b t h l"), query_rope])
        result = functional.dot_product_attention(query, latent, latent, **options)
        context, weights = functional.as_pair(result)
        return einsum(context[..., :width], to_value, "b t h l, l h c -> b t h c"), weights

    def init_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        It holds the latent and the key with the position side by side as the key of one head, and no value.

        Raises:
            ValueError: a size below 1.
        """
        width = self.config.latent_dim + self.config.rope_dim
        return KeyValueCache.empty(batch_size, capacity, 1, width, 0, **functional.cache_options(self.W_latent))
