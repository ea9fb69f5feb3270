"""A convolution along the tokens or frames of a sequence, whose channels are the last axis.

The twin is `jax_attn.blocks.convolution`. Letters: b batch, t position, c channel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.sharding.heads import check_width

from ..random import JaxRngs, check_rngs


class Convolution(nn.Conv1d):
    """`nn.Conv1d` over ``(B, T, C)``, padded with zeros so that, without a stride, as many positions come out.

    Args:
        d_in: channels of the input.
        d_out: channels of the output.
        size: positions that an output sees, an odd number.
        stride: of how many positions one comes out.
        rngs: JAX's random numbers, for the initial weights (stream ``params``), which are those of the Flax twin then,
            but for rounding; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        size: int,
        stride: int = 1,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        check_rngs(rngs)
        where = device if rngs is None else "meta"
        super().__init__(d_in, d_out, size, stride, size // 2, device=where, dtype=dtype)
        if rngs is not None:
            self.to_empty(device=torch.get_default_device() if device is None else device)
            bound = (size * d_in) ** -0.5
            with torch.no_grad():
                drawn = rngs.params.uniform((size, d_in, d_out), -bound, bound, self.weight.dtype)
                self.weight.copy_(drawn.permute(2, 1, 0))
                assert self.bias is not None, "made by default"
                self.bias.copy_(rngs.params.uniform((d_out,), -bound, bound, self.bias.dtype))

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b s d"]:
        """Convolve ``x`` of shape ``(B, T, d_in)``; gives ``(B, S, d_out)``, S a `stride`-th of T, rounded up."""
        check_width("the window of a convolution", self.weight.shape[2], self.kernel_size[0])
        return super().forward(x.mT).mT.contiguous()  # masks of dropout are drawn in the order of memory
