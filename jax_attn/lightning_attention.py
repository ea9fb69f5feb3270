"""Lightning attention: linear attention to a state that each head fades at a fixed rate (arXiv 2405.17381).

As MiniMax-01 runs it: SiLU of query, key and value, a norm over all heads, then a sigmoid gate (arXiv 2501.08313).
Twins: `jax_attn.lightning_attention`, `torch_attn.lightning_attention`. Letters: b batch, t position, h head, c channel
of a head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from attn_bridge.recurrence import check_form
from attn_bridge.sharding.heads import check_width, split_heads
from attn_bridge.specs import LightningAttentionConfig

from . import functional
from .decoding.recurrent_cache import RecurrentCache
from .initial_weights import linear
from .layer import LayerOptions, Unpack
from .random import Rngs
from .recurrent import decayed, recurrence
from .recurrent.layer import RecurrentLayer, Tokens
from .rms_norm import RMSNorm
from .signatures import DType
from .signatures.attention import AttentionMask


class LightningAttention(RecurrentLayer):
    """Attention to a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes and decay rates, see `LightningAttentionConfig`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @LightningAttentionConfig.takes
    def __init__(
        self,
        config: LightningAttentionConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = LightningAttentionConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        self.W_query = linear(config.d_in, config.width, bias=False, **options)
        self.W_key = linear(config.d_in, config.width, bias=False, **options)
        self.W_value = linear(config.d_in, config.width, bias=False, **options)
        self.W_gate = linear(config.d_in, config.width, bias=False, **options)
        self.norm = RMSNorm(config.width, config.eps, **options)
        self.out_proj = linear(config.width, config.d_out, bias=False, **options)

    def _run(
        self,
        batch: Tokens,
        attention_mask: AttentionMask | None,
        cache: RecurrentCache | None,
        form: str | None,
    ) -> tuple[Array, RecurrentCache | None]:
        context, gate, *new_cache = self._attend(batch, attention_mask=attention_mask, cache=cache, form=form)
        # The norm spans all heads: where devices share them, it runs on the contexts of all devices.
        return self.out_proj(self.norm(context) * gate), new_cache[0] if new_cache else None

    def _attend(
        self,
        batch: Tokens,
        *,
        attention_mask: AttentionMask | None,
        cache: RecurrentCache | None,
        form: str | None,
    ) -> tuple[Any, ...]:
        """Return the context and the gate of all heads, ``(B, T, H * C)``, and the new cache if one was given."""
        if cache is not None:
            shapes = (self.config.state_shape, self.config.conv_shape)
            cache = cache.admit(batch.shape[0], batch.shape[1], recurrence.mask_shape(attention_mask), shapes)
        batch = recurrence.without(batch, recurrence.visible_tokens(attention_mask, batch, cache))
        config = self.config
        query, key, value = (
            split_heads(jax.nn.silu(getattr(self, name)(batch)), config.head_dim, name, config.num_heads)
            for name in ("W_query", "W_key", "W_value")
        )
        # Fixed by head and layer, not learned: `decay_rates` of the config.
        rates = jnp.asarray(config.decay_rates, functional.wide_dtype(value))
        context, state = decayed.decayed_attention(
            query,
            key,
            value,
            -jnp.broadcast_to(rates, value.shape[:3]),
            state=None if cache is None else cache.state,
            form=form or self.form,
            **functional.attention_arguments(self),
        )
        context = rearrange(context.astype(value.dtype), "b t h c -> b t (h c)")
        gate = jax.nn.sigmoid(self.W_gate(batch))
        check_width("W_gate", gate.shape[-1], config.width)
        return (context, gate) if cache is None else (context, gate, cache.advance(state, None, batch.shape[1]))
