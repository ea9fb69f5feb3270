"""Dropout whose masks can be those of the other framework (Srivastava et al. 2014).

The twin is `torch_attn.dropout`.
"""

from __future__ import annotations

from flax import nnx
from jax import Array
from jaxtyping import Float

from .implementations.reference import drop
from .random import Rngs, TorchRngs, check_rngs


class Dropout(nnx.Dropout):
    """`nnx.Dropout`; with a `TorchRngs`, its masks are those of its torch twin, call after call.

    Args:
        rate: probability with which an element becomes zero; the rest is scaled by ``1 / (1 - rate)``.
        rngs: source of the masks: the stream ``dropout``, of which it takes one key, unless `rate` is 0.
    """

    def __init__(self, rate: float, *, rngs: Rngs | None = None):
        check_rngs(rngs)
        theirs = isinstance(rngs, TorchRngs)
        super().__init__(rate, rngs=None if theirs or rate == 0.0 else rngs)
        if theirs:
            self.rngs = nnx.static(rngs)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Drop elements of ``x``, of any shape, in training; return ``x`` in eval mode."""
        if self.deterministic or not isinstance(self.rngs, TorchRngs):
            return super().__call__(x)
        return drop(x, self.rate, self.rngs)
