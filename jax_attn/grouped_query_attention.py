"""Attention whose query heads share key/value heads in groups (arXiv 2305.13245), with what models add to it.

Twins: `jax_attn.grouped_query_attention`, `torch_attn.grouped_query_attention`. Letters: b batch, t query position, h
head, c channel of a head.
"""

from __future__ import annotations

from typing import Never

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jax import Array
from jaxtyping import Float, Int

from attn_bridge import validation
from attn_bridge.sharding.heads import check_groups, check_width, split_heads
from attn_bridge.specs import Alibi, GroupedQueryAttentionConfig, RelativeBias, Rotary

from . import functional
from .decoding.cache import KeyValueCache, SharedKeys, View
from .decoding.token_positions import last_of_rows, positions_of
from .dropout import Dropout
from .initial_weights import filled, linear
from .layer import Layer, LayerOptions, Unpack
from .layer_norm import LayerNorm
from .positions import alibi_bias, apply_rotary, apply_temperature, relative_bias, relative_buckets, rotary_tables
from .random import Rngs
from .rms_norm import RMSNorm
from .signatures import DType, typed_as
from .signatures.attention import AttentionMask, CachedOutput, GroupedAttentionCall, SharedOutput


class GroupedQueryAttention(Layer):
    """Multi-head, grouped-query or multi-query attention, as Llama, Qwen, Gemma, gpt-oss, OLMo, BLOOM and T5 run it.

    Args:
        config: sizes, and the pieces that a model adds: position, norms, mask, softcap, sinks, gate, biases.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @GroupedQueryAttentionConfig.takes
    def __init__(
        self,
        config: GroupedQueryAttentionConfig,
        *,
        rngs: Rngs,
        implementation: str | None = None,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = GroupedQueryAttentionConfig.check(config)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        context_width, value_width = (count * config.value_width for count in (config.num_heads, config.num_kv_heads))
        self.W_query = linear(config.d_in, width, config.qkv_bias, **options)
        if not config.shared:
            self.W_key = linear(config.d_in, key_width, config.key_bias, **options)
        if not (config.shared or config.key_is_value):
            self.W_value = linear(config.d_in, value_width, config.qkv_bias, **options)
        if config.gate and config.gate_scope == "channel":
            self.W_gate = linear(config.d_in, context_width, config.qkv_bias, **options)
        elif config.gate:
            self.W_head_gate = linear(config.d_in, config.num_heads, config.qkv_bias, **options)
        self.out_proj = linear(context_width, config.d_out, config.out_bias, **options)
        if config.qk_norm is not None:
            norm = LayerNorm if config.has_layer_norms else RMSNorm
            self.q_norm = norm(**config.norm_arguments("q_norm"), **options)
            if not config.shared:
                self.k_norm = norm(**config.norm_arguments("k_norm"), **options)
        if config.value_norm is not None:
            self.v_norm = RMSNorm(config.value_width, config.value_norm, affine=False, **options)
        if config.context_norm is not None:
            self.context_norm = RMSNorm(context_width, config.context_norm, **options)
        if config.sinks:
            self.sinks = filled(config.num_heads, 0.0, **options)
        if config.own_table is not None:
            self.relative_bias = filled(config.own_table, 0.0, **options)
        self.dropout = Dropout(config.dropout, rngs=rngs)

    @typed_as(GroupedAttentionCall)
    def __call__(
        self,
        x: Float[Array, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        positions: Int[Array, "... t"] | None = None,
        cache: KeyValueCache | None = None,
        return_weights: bool = False,
        shared: SharedKeys | None = None,
        return_shared: bool = False,
        relative_bias: Float[Array, "buckets h"] | None = None,
    ) -> CachedOutput[KeyValueCache] | SharedOutput:
        """Attend from every token to those that the config's mask shows it.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)``, or broadcastable to ``(B, H, T, S)``; the
                config's mask applies in addition. S counts the tokens in the cache, too.
            positions: integers ``(T,)`` or ``(B, T)``; a `Rotary` with axes also takes ``(rows, B, T)``, and others for
                all rows. By default each sequence counts its tokens, without padding on the left, from 0 or from the
                end of the cache. The config's mask counts the tokens of a sequence so, whatever their positions.
            cache: of `init_cache`; `x` follows the tokens in it.
            return_weights: also return the attention weights ``(B, H, T, S)``, without ``B`` for 2-D `x`, as they are
                before dropout; the reference computes both then, which takes more time and memory.
            shared: keys and values of an earlier layer for the same tokens, if the config has `shared`; the mask,
                positions and cache of that layer apply.
            return_shared: also return the keys and values, for later layers.
            relative_bias: table of an earlier layer, if the config's `RelativeBias` is shared.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``; then the weights if asked for; then the keys and values if
            asked for; then the cache if given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache has room for, or `shared` or
                `relative_bias` that is missing or superfluous; a jit raises for the room when it runs, and its results
                are NaN.
            TypeError: an input that is not floating point, a mask that is not bool, or positions that are not integers.
        """
        config = self.config
        batch = functional.as_batch(x, self.W_query, d_in=config.d_in, cache=cache, misplaced=_misplaced)
        validation.check_shared(config.shared, shared is not None)
        at = positions_of(batch, positions, cache, attention_mask, config.position) if shared is None else shared.at
        query, key, value = self._heads(batch, at)
        if shared is not None:
            view = shared.view
        elif cache is None:
            view = View(key, value, config.mask.restrict(attention_mask), last_of_rows(at))
        else:
            arguments = {"mask": config.mask, "attention_mask": attention_mask, "positions": last_of_rows(at)}
            cache, view = cache.append(key, value, **arguments, num_heads=config.num_heads)
        check_groups(query.shape[2], view.key.shape[2], config.num_heads, config.num_kv_heads)
        table = self._table(relative_bias, query.shape[2])
        result = functional.dot_product_attention(
            query,
            view.key,
            view.value,
            mask=view.mask,
            bias=self._bias(last_of_rows(at), view.positions, functional.wide_dtype(batch), table),
            scale=config.scale,
            softcap=config.softcap,
            sinks=self.sinks[...] if config.sinks else None,
            return_weights=return_weights,
            **functional.attention_arguments(self),
        )
        context, weights = functional.as_pair(result)
        context = rearrange(context, "b t h c -> b t (h c)")
        if config.gate:
            context = context * self._gate(batch, context.shape[-1])
        if config.context_norm is not None:
            context = self.context_norm(context)
        output = functional.as_given(x, self.out_proj(context), weights)
        return functional.with_cache(
            functional.with_cache(output, SharedKeys(view, at) if return_shared else None), cache
        )

    def _heads(self, batch: Float[Array, "b t d"], at: Int[Array, "... t"]) -> tuple[Array, Array | None, Array | None]:
        """Return query, key and value by head, clipped, normed and turned to their positions.

        Key and value are None where they are those of an earlier layer.
        """
        config, tables = self.config, None
        if isinstance(config.position, Rotary):
            width, wide = config.position.width(config.head_dim), functional.wide_dtype(batch)
            tables = (*rotary_tables(config.position, at, width, wide), config.position.pairing)
        query = self._turned(self._clipped(self.W_query(batch)), "q_norm", tables)
        if config.temperature is not None:
            query = apply_temperature(query, config.temperature, last_of_rows(at), functional.wide_dtype(batch))
        if config.shared:
            return query, None, None
        key = self._clipped(self.W_key(batch))
        value = key if config.key_is_value else self._clipped(self.W_value(batch))
        value = split_heads(value, config.value_width, "W_value")
        if config.value_scale != 1.0:
            value = value * config.value_scale
        if config.value_norm is not None:
            value = self.v_norm(value)
        return query, self._turned(key, "k_norm", tables), value

    def _clipped(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        clip = self.config.clip
        return x if clip is None else jnp.clip(x, -clip, clip)

    def _turned(
        self, x: Float[Array, "b t d"], norm: str, tables: tuple[Array, Array, str] | None
    ) -> Float[Array, "b t h c"]:
        """Return queries or keys by head, normed by the norm of that name and turned by tables, paired as named."""
        config = self.config
        scope, rotated = (None, False) if config.qk_norm is None else (config.qk_norm.scope, config.qk_norm.rotated)
        # Over all heads at once, so before they are cut apart (OLMo 3).
        if scope == "full":
            x = getattr(self, norm)(x)
        x = split_heads(x, config.head_dim, "W_query" if norm == "q_norm" else "W_key")
        if scope == "head" and not rotated:
            x = getattr(self, norm)(x)
        if tables is not None:
            x = apply_rotary(x, *tables)
        # After the rotation, which keeps lengths: only a scale per channel makes this differ from a norm in front of
        # it.
        return getattr(self, norm)(x) if rotated else x

    def _gate(self, batch: Float[Array, "b t d"], width: int) -> Float[Array, "b t hc"]:
        """Return the gate of each of the context's channels, `width` in all, from the same input as the query."""
        config = self.config
        by_head = config.gate_scope == "head"
        name, channels = ("W_head_gate", config.value_width) if by_head else ("W_gate", 1)
        logits = getattr(self, name)(batch)
        check_width(name, logits.shape[-1], width // channels)
        if config.gate_activation == "softplus":
            # The softplus of torch is linear above 20, 2e-9 off.
            wide = logits.astype(functional.wide_dtype(batch))
            gate = jnp.logaddexp(wide, jnp.zeros_like(wide)).astype(logits.dtype)
        else:
            gate = jax.nn.sigmoid(logits)
        return repeat(gate, "b t h -> b t (h c)", c=channels) if by_head else gate

    def _table(self, lent: Float[Array, "buckets h"] | None, heads: int) -> Float[Array, "buckets h"] | None:
        """Return the table of the heads' relative biases, its own or that of an earlier layer; None without one."""
        config, shape = self.config, None if lent is None else tuple(lent.shape)
        if not isinstance(config.position, RelativeBias):
            validation.check_table(False, shape, None)
            return None
        wanted = (config.position.num_buckets, heads)
        validation.check_table(config.takes_table, shape, wanted)
        if lent is not None:
            return lent
        validation.check_table(True, tuple(self.relative_bias.shape), wanted)
        return self.relative_bias[...]

    def _bias(
        self,
        query_positions: Int[Array, "... t"],
        key_positions: Int[Array, "... s"],
        dtype: DType,
        table: Float[Array, "buckets h"] | None,
    ) -> Float[Array, "... h t s"] | None:
        """Return the bias of the scores that follows from positions; None without one."""
        position = self.config.position
        if isinstance(position, Alibi):
            return alibi_bias(self.config.num_heads, query_positions, key_positions, dtype)
        if isinstance(position, RelativeBias) and table is not None:
            buckets = relative_buckets(position, query_positions, key_positions)
            return relative_bias(table, buckets, dtype)
        return None

    def init_cache(self, batch_size: int, capacity: int, *, rolling: bool = False) -> KeyValueCache:
        """Return a cache without tokens, for `batch_size` sequences of at most `capacity` tokens.

        Args:
            batch_size: sequences.
            capacity: tokens of each, padding included.
            rolling: keep only the last tokens, as many as the mask shows: in less memory, but `trim` can't go back.

        Raises:
            ValueError: a size below 1, or `rolling` with a mask that shows all tokens.
        """
        config = self.config
        options = {
            "rolling": config.window(rolling),
            **functional.cache_options(self.W_query if config.shared else self.W_key),
        }
        return KeyValueCache.empty(
            batch_size, capacity, config.num_kv_heads, config.head_dim, config.value_dim, **options
        )
