"""A short causal convolution of each channel on its own, then SiLU: what recurrent attention has before its heads.

The twin is `jax_attn.recurrent.short_convolution`. Letters: b batch, t position, c channel, k tokens that the kernel
spans.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.sharding.heads import check_width

from ..random import JaxRngs
from . import chunks


class ShortConvolution(nn.Conv1d):
    """Depthwise convolution over the token itself and those just before it, and SiLU.

    Args:
        channels: width of the input.
        size: tokens that it sees, the token itself included.
        bias: whether each channel has a bias.
        activate: whether SiLU follows.
        rngs: JAX's random numbers, for the initial weights (stream ``params``); None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        bias: bool = False,
        *,
        activate: bool = True,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        where = device if rngs is None else "meta"
        super().__init__(channels, channels, size, groups=channels, bias=bias, device=where, dtype=dtype)
        self.activate = activate
        if rngs is not None:
            self.to_empty(device=torch.get_default_device() if device is None else device)
            with torch.no_grad():
                drawn = rngs.params.uniform((size, 1, channels), -(size**-0.5), size**-0.5, self.weight.dtype)
                self.weight.copy_(drawn.permute(2, 1, 0))
                if bias:
                    self.bias.copy_(rngs.params.uniform((channels,), -(size**-0.5), size**-0.5, self.bias.dtype))

    def forward(
        self, x: Float[Tensor, "B T C"], state: Float[Tensor, "B K-1 C"] | None = None
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B K-1 C"]]:
        """Convolve in float32, in float64 for float64 input.

        Args:
            x: ``(B, T, C)``.
            state: ``(B, K - 1, C)``, the inputs just before `x`; None is zeros.

        Returns:
            The output ``(B, T, C)``, and the last ``K - 1`` inputs, the state that the next tokens need.
        """
        check_width("the input of a convolution", x.shape[2], self.weight.shape[0])
        tokens, (size,) = x.shape[1], self.kernel_size
        check_width("the window of a convolution", self.weight.shape[2], size)
        if self.bias is not None:
            check_width("the bias of a convolution", self.bias.shape[0], x.shape[2])
        if state is None:
            state = chunks.empty_state(x[:, :, None], size - 1)[:, 0]
        inputs = torch.cat([state.to(x.dtype), x], 1)
        wide = inputs.to(torch.promote_types(x.dtype, torch.float32))
        taps = self.weight[:, 0, :].to(wide.dtype)
        total = sum(taps[:, tap] * wide[:, tap : tap + tokens] for tap in range(size))
        if self.bias is not None:
            total = total + self.bias.to(wide.dtype)
        return (nn.functional.silu(total) if self.activate else total).to(x.dtype), inputs[:, tokens:]
