"""Mamba: each channel keeps a state that fades by a step chosen from each token (Gu and Dao, arXiv 2312.00752).

As published: a short convolution before the states, a gate behind them. The paper's C, B and x are query, key and value
here. Twins: `jax_attn.mamba`, `torch_attn.mamba`. Letters: b batch, t position, c channel, k number of its state.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from attn_bridge.recurrence import check_form
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import MambaConfig

from . import functional
from .initial_weights import filled, linear, parameter, uniform
from .random import JaxRngs
from .recurrent import decayed, recurrence, selective
from .recurrent.gated_norm import GatedNorm
from .recurrent.layer import LayerRead, RecurrentLayer, States, Tokens, Visible
from .recurrent.short_convolution import ShortConvolution
from .rms_norm import RMSNorm
from .signatures import DType


class Mamba(RecurrentLayer):
    """Selective state space layer: a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes, see `MambaConfig`.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
    """

    @MambaConfig.takes
    def __init__(
        self,
        config: MambaConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        super().__init__()
        self.config = config = MambaConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        width, state, rank = config.width, config.state_size, config.step_rank
        self.W_gate = linear(config.d_in, width, config.bias, **options)
        self.W_value = linear(config.d_in, width, config.bias, **options)
        self.conv1d = ShortConvolution(width, config.conv_size, config.conv_bias, **options)
        self.W_step_down = linear(width, rank, False, **options)
        self.W_key = linear(width, state, False, **options)
        self.W_query = linear(width, state, False, **options)
        if config.latent_norms == "scaled":
            self.step_norm = RMSNorm(rank, config.eps, **options)
            self.k_norm = RMSNorm(state, config.eps, **options)
            self.q_norm = RMSNorm(state, config.eps, **options)
        self.W_step_up = linear(rank, width, False, **options)
        self.dt_bias = parameter(decayed.initial_step_bias(uniform((width,), **options)))
        self.A_log = parameter(selective.initial_rates(width, state, device=device, dtype=dtype))
        self.D = filled(width, 1.0, **options)
        self.norm = GatedNorm(width, order="none", **options)
        self.out_proj = linear(width, config.d_out, config.bias, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.dt_bias.copy_(decayed.initial_step_bias(torch.rand_like(self.dt_bias)))
        self.A_log.copy_(selective.initial_rates(*self.A_log.shape))
        self.D.fill_(1.0)

    def _read(self, batch: Tokens, visible: Visible, states: States, form: str | None) -> LayerRead:
        value = recurrence.without(self.W_value(batch), visible)  # a bias of the projection is no zero
        value, conv_state = self.conv1d(value, states[1])
        value = recurrence.without(value, visible)
        low, key, query = (
            self._normalise(layer(value), name)
            for layer, name in ((self.W_step_down, "step_norm"), (self.W_key, "k_norm"), (self.W_query, "q_norm"))
        )
        for name, width, expected in (
            ("W_key", key.shape[-1], self.A_log.shape[-1]),
            ("W_query", query.shape[-1], self.A_log.shape[-1]),
            ("A_log", self.A_log.shape[0], value.shape[-1]),
            ("D", self.D.shape[0], value.shape[-1]),
        ):
            check_width(name, width, expected)
        check_width("W_step_down", low.shape[-1], self.config.step_rank)
        steps = decayed.step_sizes(self.W_step_up(low), self.dt_bias, 0.0, None)
        wide = value.to(steps.dtype)
        context, state = selective.selective_scan(
            query,
            key,
            wide,
            steps,
            -torch.exp(self.A_log.to(steps.dtype)),
            state=states[0],
            form=form,
            **functional.attention_arguments(self),
        )
        context = context + self.D.to(steps.dtype) * wide
        output = self.out_proj(self.norm(context, self.W_gate(batch)).to(value.dtype))
        return output, (state, conv_state)

    def _normalise(self, latent: Float[Tensor, "b t k"], name: str) -> Float[Tensor, "b t k"]:
        """Return the latent step, the keys or the queries as the config has them normalised."""
        if self.config.latent_norms == "none":
            return latent
        if self.config.latent_norms == "plain":
            return selective.mean_square_one(latent, self.config.eps)
        return getattr(self, name)(latent)
