"""Gated short convolution: products of projections, convolved over a few tokens, and gated (LFM2, arXiv 2511.23404).

The paper's C, B and h are query, key and value here. Twins: `jax_attn.gated_convolution`,
`torch_attn.gated_convolution`.
"""

from __future__ import annotations

import jax.numpy as jnp

from attn_bridge.recurrence import check_form, choose_form
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import GatedConvolutionConfig

from .initial_weights import linear
from .layer import LayerOptions, Unpack
from .random import Rngs
from .recurrent import recurrence
from .recurrent.layer import LayerRead, RecurrentLayer, States, Tokens, Visible
from .recurrent.short_convolution import ShortConvolution
from .signatures import DType


class GatedConvolution(RecurrentLayer):
    """A convolution of the products of keys and values, times the queries; causal, without positions.

    Args:
        config: sizes, see `GatedConvolutionConfig`.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        implementation: ``"chunked"`` or ``"recurrent"``, as in other recurrent layers; both compute the same.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.
    """

    @GatedConvolutionConfig.takes
    def __init__(
        self,
        config: GatedConvolutionConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        implementation: str | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = config = GatedConvolutionConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        width, use_bias = config.width, config.bias
        self.W_query = linear(config.d_in, width, use_bias, **options)
        self.W_key = linear(config.d_in, width, use_bias, **options)
        self.W_value = linear(config.d_in, width, use_bias, **options)
        self.conv1d = ShortConvolution(width, config.conv_size, use_bias, activate=False, **options)
        self.out_proj = linear(width, config.d_out, use_bias, **options)

    def _read(self, batch: Tokens, visible: Visible, states: States, form: str | None) -> LayerRead:
        choose_form(form, batch.shape[1])
        state, _ = states
        query, key, value = self.W_query(batch), self.W_key(batch), self.W_value(batch)
        for name, projected in (("W_query", query), ("W_key", key), ("W_value", value)):
            check_width(name, projected.shape[-1], self.config.width)
        products = recurrence.without(key * value, visible)  # biases are no zeros
        mixed, inputs = self.conv1d(products, None if state is None else state[:, 0])
        inputs = inputs[:, None]
        output = self.out_proj(query * mixed)
        return output, (inputs, None)
