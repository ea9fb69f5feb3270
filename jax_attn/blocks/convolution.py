"""A convolution along the tokens or frames of a sequence, whose channels are the last axis.

The twin is `torch_attn.blocks.convolution`. Letters: b batch, t position, c channel.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.sharding.heads import check_width

from ..linear import SymmetricUniform
from ..random import Rngs, check_rngs


class Convolution(nnx.Conv):
    """`nnx.Conv` over ``(B, T, C)``, padded with zeros so that, without a stride, as many positions come out.

    Args:
        d_in: channels of the input.
        d_out: channels of the output.
        size: positions that an output sees, an odd number.
        stride: of how many positions one comes out.
        rngs: source of the initial weights (stream ``params``), of torch's distribution.
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        size: int,
        stride: int = 1,
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        check_rngs(rngs)
        fan_in = size * d_in
        # As `torch.nn.init.kaiming_uniform_` has it for the weights, and `torch.nn.Conv1d` for the bias.
        draw = SymmetricUniform(fan_in**-0.5, math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(fan_in)))
        super().__init__(
            d_in,
            d_out,
            (size,),
            stride,
            padding=((size // 2, size // 2),),
            kernel_init=draw,
            bias_init=SymmetricUniform(fan_in**-0.5, 1.0 / math.sqrt(fan_in)),
            rngs=rngs,
            param_dtype=param_dtype,
            dtype=dtype,
        )

    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b s d"]:
        """Convolve ``x`` of shape ``(B, T, d_in)``; gives ``(B, S, d_out)``, S a `stride`-th of T, rounded up."""
        check_width("the window of a convolution", self.kernel.shape[0], self.kernel_size[0])
        return super().__call__(x)
