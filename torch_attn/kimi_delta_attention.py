"""Kimi Delta Attention: the gated delta rule whose state fades channel by channel of the key (arXiv 2510.26692).

As Kimi Linear runs it: a short convolution before the heads, gates of low rank, a norm per head and a sigmoid gate
behind them. Twins: `jax_attn.kimi_delta_attention`, `torch_attn.kimi_delta_attention`. Letters: b batch, t position, h
head, c channel of a head.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch.types import Device

from attn_bridge.recurrence import CHANNEL_CHUNK_SIZE, check_form
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import KimiDeltaAttentionConfig

from . import functional
from .initial_weights import linear, parameter, uniform
from .random import JaxRngs
from .recurrent import decayed, recurrence
from .recurrent.layer import LayerRead, RecurrentLayer, States, Tokens, Visible
from .recurrent.short_convolution import ShortConvolution
from .rms_norm import RMSNorm
from .signatures import DType


class KimiDeltaAttention(RecurrentLayer):
    """Attention with a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes, see `KimiDeltaAttentionConfig`.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
    """

    @KimiDeltaAttentionConfig.takes
    def __init__(
        self,
        config: KimiDeltaAttentionConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        super().__init__()
        self.config = config = KimiDeltaAttentionConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        d_in, heads = config.d_in, config.num_heads
        self.W_query = linear(d_in, config.key_width, bias=False, **options)
        self.W_key = linear(d_in, config.key_width, bias=False, **options)
        self.W_value = linear(d_in, config.value_width, bias=False, **options)
        self.W_beta = linear(d_in, heads, bias=False, **options)
        self.W_decay_down = linear(d_in, config.gate_rank, bias=False, **options)
        self.W_decay_up = linear(config.gate_rank, config.key_width, bias=False, **options)
        self.W_gate_down = linear(d_in, config.gate_rank, bias=False, **options)
        self.W_gate_up = linear(config.gate_rank, config.value_width, bias=False, **options)
        self.conv1d = ShortConvolution(config.conv_width, config.conv_size, **options)
        self.dt_bias = parameter(decayed.initial_step_bias(uniform((config.key_width,), **options)))
        self.A_log = parameter(decayed.initial_log_rates(uniform((heads,), **options)))
        self.norm = RMSNorm(config.value_head_dim, config.eps, **options)
        self.out_proj = linear(config.value_width, config.d_out, bias=False, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.dt_bias.copy_(decayed.initial_step_bias(torch.rand_like(self.dt_bias)))
        self.A_log.copy_(decayed.initial_log_rates(torch.rand_like(self.A_log)))

    def _read(self, batch: Tokens, visible: Visible, states: States, form: str | None) -> LayerRead:
        mixed = functional.joined([self.W_query(batch), self.W_key(batch), self.W_value(batch)])
        mixed, conv_state = self.conv1d(mixed, states[1])
        key_width = self.config.key_width
        low_decay, low_gate = self.W_decay_down(batch), self.W_gate_down(batch)
        check_width("W_decay_down", low_decay.shape[-1], self.config.gate_rank)
        check_width("W_gate_down", low_gate.shape[-1], self.config.gate_rank)
        alpha, gate = self.W_decay_up(low_decay), self.W_gate_up(low_gate)
        check_width("W_decay_up", alpha.shape[-1], key_width)
        check_width("W_gate_up", gate.shape[-1], mixed.shape[-1] - 2 * key_width)
        check_width("dt_bias", self.dt_bias.shape[0], key_width)
        query, key, value, alpha, gate = (
            rearrange(features, "b t (h c) -> b t h c", h=self.config.num_heads)
            for features in (
                mixed[..., :key_width],
                mixed[..., key_width : 2 * key_width],
                mixed[..., 2 * key_width :],
                alpha,
                gate,
            )
        )
        # Keys of length 1: with a beta of 1, k k^T removes the value stored under k alone, and the state cannot grow.
        query, key = recurrence.unit_length(query), recurrence.unit_length(key)
        # A decay per channel of the key, where Gated DeltaNet has one per head; A_log stays one per head.
        dt_bias = self.dt_bias.reshape(alpha.shape[2:])
        context, state = recurrence.gated_delta_rule(
            query * self.config.head_dim**-0.5,
            key,
            value,
            recurrence.log_decay(alpha, dt_bias, self.A_log[:, None]),
            torch.sigmoid(self.W_beta(batch).to(key.dtype)),
            state=states[0],
            form=form,
            # A decay per channel and pair of tokens: a chunk takes the square of its tokens times the channels in
            # memory.
            chunk_size=CHANNEL_CHUNK_SIZE,
            **functional.attention_arguments(self),
        )
        gated = self.norm(context.to(self.norm.scale.dtype)).to(key.dtype) * torch.sigmoid(gate.to(key.dtype))
        output = self.out_proj(rearrange(gated.to(value.dtype), "b t h c -> b t (h c)"))
        return output, (state, conv_state)
