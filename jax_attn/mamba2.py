"""Mamba-2: each head keeps a matrix that fades by a step chosen from each token (Dao and Gu, arXiv 2405.21060).

As published: a short convolution before the heads, a gated norm behind them. The paper's C, B and x are query, key and
value here. Twins: `jax_attn.mamba2`, `torch_attn.mamba2`. Letters: b batch, t position, h head, k group of heads, c
channel of a head.
"""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jaxtyping import Float

from attn_bridge.recurrence import check_form
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import Mamba2Config

from . import functional
from .initial_weights import filled, linear, parameter, uniform
from .layer import LayerOptions, Unpack
from .random import Rngs
from .recurrent import decayed, recurrence
from .recurrent.gated_norm import GatedNorm
from .recurrent.layer import LayerRead, RecurrentLayer, States, Tokens, Visible
from .recurrent.short_convolution import ShortConvolution
from .signatures import DType


class Mamba2(RecurrentLayer):
    """State space layer: a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes, see `Mamba2Config`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @Mamba2Config.takes
    def __init__(
        self,
        config: Mamba2Config,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = Mamba2Config.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        d_in, heads, use_bias = config.d_in, config.num_heads, config.bias
        self.W_gate = linear(d_in, config.width, use_bias, **options)
        self.W_value = linear(d_in, config.width, use_bias, **options)
        self.W_key = linear(d_in, config.key_width, use_bias, **options)
        self.W_query = linear(d_in, config.key_width, use_bias, **options)
        self.W_step = linear(d_in, heads, use_bias, **options)
        self.conv1d = ShortConvolution(config.conv_width, config.conv_size, config.conv_bias, **options)
        self.dt_bias = parameter(decayed.initial_step_bias(uniform((heads,), **options)))
        self.A_log = parameter(decayed.initial_log_rates(uniform((heads,), **options)))
        self.D = filled(heads, 1.0, **options)
        self.norm = GatedNorm(config.width, config.norm_groups, config.eps, config.norm_order, **options)
        self.out_proj = linear(config.width, config.d_out, use_bias, **options)

    def _read(self, batch: Tokens, visible: Visible, states: States, form: str | None) -> LayerRead:
        # The convolution goes over value, key and query, whose projections are neighbours in the published layer.
        # Gate and step are projected where they are used: both at once would be the peak of memory.
        gate_scale, value_scale, key_scale, query_scale, step_scale = self.config.projection_scales
        mixed = functional.joined(
            [
                _scaled(self.W_value(batch), value_scale),
                _scaled(self.W_key(batch), key_scale),
                _scaled(self.W_query(batch), query_scale),
            ]
        )
        mixed = recurrence.without(mixed, visible)  # biases of the projections are no zeros
        mixed, conv_state = self.conv1d(mixed, states[1])
        mixed = recurrence.without(mixed, visible)
        width, key_width = self.config.width, self.config.key_width
        value = rearrange(mixed[..., :width], "b t (h c) -> b t h c", h=self.config.num_heads)
        key, query = (
            rearrange(features, "b t (k c) -> b t k c", k=self.config.num_groups)
            for features in (mixed[..., width : width + key_width], mixed[..., width + key_width :])
        )
        steps = decayed.step_sizes(
            _scaled(self.W_step(batch), step_scale), self.dt_bias, self.config.min_step, self.config.max_step
        )
        for name, vector in (("A_log", self.A_log), ("D", self.D)):
            check_width(name, vector.shape[0], value.shape[2])
        wide = value.astype(steps.dtype)
        context, state = decayed.decayed_attention(
            query,
            key,
            # Discretised: the step scales the written value, and exp(-exp(A_log) * step) the old state.
            wide * steps[..., None],
            -jnp.exp(self.A_log.astype(steps.dtype)) * steps,
            state=states[0],
            form=form,
            **functional.attention_arguments(self),
        )
        # The skip connection of the paper, D x: the value before its step.
        context = context + self.D.astype(steps.dtype)[:, None] * wide
        normed = self.norm(rearrange(context, "b t h c -> b t (h c)"), _scaled(self.W_gate(batch), gate_scale))
        output = self.out_proj(normed.astype(value.dtype))
        return output, (state, conv_state)


def _scaled(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Return a projection times its factor; by 1 as it is, without a copy."""
    return x if factor == 1.0 else x * factor
