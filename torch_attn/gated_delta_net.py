"""Gated DeltaNet: each head keeps a matrix, decays it, and corrects its value for a key (arXiv 2412.06464).

As Qwen3-Next runs it: a short convolution before the heads, one beta per value head, a gated norm behind them. Twins:
`jax_attn.gated_delta_net`, `torch_attn.gated_delta_net`. Letters: b batch, t position, h head, c channel of a head.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import nn
from torch.types import Device

from attn_bridge.recurrence import check_form
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import GatedDeltaNetConfig

from . import functional
from .initial_weights import filled, linear, parameter, uniform
from .random import JaxRngs
from .recurrent import decayed, recurrence
from .recurrent.layer import LayerRead, RecurrentLayer, States, Tokens, Visible
from .recurrent.short_convolution import ShortConvolution
from .rms_norm import RMSNorm
from .signatures import DType


class GatedDeltaNet(RecurrentLayer):
    """Attention with a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes, see `GatedDeltaNetConfig`.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
    """

    @GatedDeltaNetConfig.takes
    def __init__(
        self,
        config: GatedDeltaNetConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        super().__init__()
        self.config = config = GatedDeltaNetConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        d_in, heads = config.d_in, config.num_value_heads
        self.W_query = linear(d_in, config.key_width, bias=False, **options)
        self.W_key = linear(d_in, config.key_width, bias=False, **options)
        self.W_value = linear(d_in, config.value_width, bias=False, **options)
        self.W_gate = linear(d_in, config.value_width, bias=False, **options)
        self.W_beta = linear(d_in, heads, bias=False, **options)
        self.W_alpha = linear(d_in, heads, bias=False, **options)
        self.conv1d = ShortConvolution(config.conv_width, config.conv_size, **options)
        self.dt_bias = filled(heads, 1.0, **options)
        # The published layer (Qwen3-Next) draws rates from 0.01 on: the logarithm of 0 is not finite.
        self.A_log = parameter(decayed.initial_log_rates(uniform((heads,), **options), 0.01))
        self.norm = RMSNorm(config.value_head_dim, config.eps, **options)
        self.out_proj = linear(config.value_width, config.d_out, bias=False, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.dt_bias.fill_(1.0)
        self.A_log.copy_(decayed.initial_log_rates(torch.rand_like(self.A_log), 0.01))

    def _read(self, batch: Tokens, visible: Visible, states: States, form: str | None) -> LayerRead:
        mixed = functional.joined([self.W_query(batch), self.W_key(batch), self.W_value(batch)])
        mixed, conv_state = self.conv1d(mixed, states[1])
        key_width = self.config.key_width
        # Keys of length 1: with a beta of 1, k k^T removes the value stored under k alone, and the state cannot grow.
        query, key = (
            recurrence.unit_length(rearrange(one, "b t (h c) -> b t h c", h=self.config.num_heads))
            for one in (mixed[..., :key_width], mixed[..., key_width : 2 * key_width])
        )
        gate = self.W_gate(batch)
        check_width("W_gate", gate.shape[-1], self.config.value_width)
        value, gate = (
            rearrange(one, "b t (h c) -> b t h c", h=self.config.num_value_heads)
            for one in (mixed[..., 2 * key_width :], gate)
        )
        context, state = recurrence.gated_delta_rule(
            query * self.config.head_dim**-0.5,
            key,
            value,
            recurrence.log_decay(self.W_alpha(batch), self.dt_bias, self.A_log),
            torch.sigmoid(self.W_beta(batch).to(key.dtype)) * (2.0 if self.config.negative else 1.0),
            state=states[0],
            form=form,
            **functional.attention_arguments(self),
        )
        # The norm goes over the channels of each head, before the gate (norm, then gate; Mamba-2 gates first).
        gated = self.norm(context.to(self.norm.scale.dtype)).to(key.dtype) * nn.functional.silu(gate.to(key.dtype))
        output = self.out_proj(rearrange(gated.to(value.dtype), "b t h c -> b t (h c)"))
        return output, (state, conv_state)
