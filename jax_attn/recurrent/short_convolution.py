"""A short causal convolution of each channel on its own, then SiLU: what recurrent attention has before its heads.

The twin is `torch_attn.recurrent.short_convolution`. Letters: b batch, t position, c channel, k tokens that the kernel
spans.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attn_bridge.sharding.heads import check_width

from ..linear import SymmetricUniform
from ..random import Rngs
from . import chunks


class ShortConvolution(nnx.Conv):
    """Depthwise convolution over the token itself and those just before it, and SiLU.

    Args:
        channels: width of the input.
        size: tokens that it sees, the token itself included.
        bias: whether each channel has a bias.
        activate: whether SiLU follows.
        rngs: source of the initial weights (stream ``params``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        bias: bool = False,
        *,
        activate: bool = True,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
    ):
        # As `torch.nn.init.kaiming_uniform_` has it.
        draw = SymmetricUniform(size**-0.5, math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(size)))
        super().__init__(
            channels,
            channels,
            (size,),
            feature_group_count=channels,
            use_bias=bias,
            kernel_init=draw,
            bias_init=draw,
            rngs=rngs,
            param_dtype=param_dtype,
            dtype=dtype,
        )
        self.activate = activate

    def __call__(
        self, x: Float[Array, "B T C"], state: Float[Array, "B K-1 C"] | None = None
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B K-1 C"]]:
        """Convolve in float32, in float64 for float64 input.

        Args:
            x: ``(B, T, C)``.
            state: ``(B, K - 1, C)``, the inputs just before `x`; None is zeros.

        Returns:
            The output ``(B, T, C)``, and the last ``K - 1`` inputs, the state that the next tokens need.
        """
        check_width("the input of a convolution", x.shape[2], self.kernel.shape[-1])
        tokens, (size,) = x.shape[1], self.kernel_size
        check_width("the window of a convolution", self.kernel.shape[0], size)
        if self.bias is not None:
            check_width("the bias of a convolution", self.bias.shape[0], x.shape[2])
        x = x.astype(self.dtype or jnp.promote_types(x.dtype, self.kernel.dtype))
        if state is None:
            state = chunks.empty_state(x[:, :, None], size - 1)[:, 0]
        inputs = jnp.concatenate([state.astype(x.dtype), x], 1)
        wide = inputs.astype(jnp.promote_types(x.dtype, jnp.float32))
        taps = self.kernel[:, 0, :].astype(wide.dtype)
        total = sum(taps[tap] * wide[:, tap : tap + tokens] for tap in range(size))
        if self.bias is not None:
            total = total + self.bias.astype(wide.dtype)
        return (jax.nn.silu(total) if self.activate else total).astype(x.dtype), inputs[:, tokens:]
