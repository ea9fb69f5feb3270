"""Dropout whose masks can be those of the other framework (Srivastava et al. 2014).

The twin is `jax_attn.dropout`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from .implementations.reference import drop
from .random import JaxRngs, RngStream, check_rngs


class Dropout(nn.Dropout):
    """`nn.Dropout`; with `rngs`, its masks are those of its Flax twin, call after call.

    Args:
        rate: probability with which an element becomes zero; the rest is scaled by ``1 / (1 - rate)``.
        rngs: source of the masks: the stream ``dropout``, of which it takes one key, unless `rate` is 0; None takes
            torch's global generator.
    """

    rngs: RngStream | None = None

    def __init__(self, rate: float, *, rngs: JaxRngs | None = None):
        check_rngs(rngs)
        super().__init__(rate)
        self.rngs = None if rngs is None or rate == 0.0 else rngs.dropout.fork()

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Drop elements of ``x``, of any shape, in training; return ``x`` in eval mode."""
        if self.rngs is None or not self.training:
            return super().forward(x)
        return drop(x, self.p, self.rngs)
