"""Self-attention with bare weight matrices drawn from U[0, 1) (book section 3.4.2).

Twins: `jax_attn.self_attention_v1`, `torch_attn.self_attention_v1`. Letters: b batch, t position, c channel.
"""

from __future__ import annotations

from typing import Never

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.types import Device

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import SelfAttentionV1Config

from . import functional
from .initial_weights import parameter, uniform
from .layer import Layer
from .random import JaxRngs, check_rngs
from .signatures import DType, typed_as
from .signatures.attention import AttentionCall, AttentionMask, Output


class SelfAttention_v1(Layer):
    """Self-attention whose query, key and value are products with bare matrices.

    Args:
        d_in: width of the input.
        d_out: width of query, key, value and output.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        implementation: a name in `functional.IMPLEMENTATIONS` that computes all calls; None takes the fastest.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.

    Raises:
        ValueError: a size below 1.
    """

    @SelfAttentionV1Config.spreads
    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        rngs: JaxRngs | None = None,
        implementation: str | None = None,
        device: Device = None,
        dtype: DType | None = None,
    ):
        super().__init__()
        check_rngs(rngs)
        self.config = SelfAttentionV1Config(d_in, d_out)
        self.implementation = functional.check_implementation(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        shape = (self.config.d_in, self.config.d_out)
        self.W_query = parameter(uniform(shape, **options))
        self.W_key = parameter(uniform(shape, **options))
        self.W_value = parameter(uniform(shape, **options))

    @torch.no_grad()
    def _reset_own(self) -> None:
        for matrix in (self.W_query, self.W_key, self.W_value):
            matrix.uniform_()

    __call__: AttentionCall

    @typed_as(AttentionCall)
    def forward(
        self,
        x: Float[Tensor, "... t d"],
        *_misplaced: Never,
        attention_mask: AttentionMask | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Attend from every token to every token.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool, ``True`` = may be attended: ``(B, S)``, or broadcastable to ``(B, 1, T, S)``.
            return_weights: also return the attention weights ``(B, T, T)``, without ``B`` for 2-D `x`; the
                reference computes both then, which takes more time and memory.

        Returns:
            The context ``(T, d_out)`` or ``(B, T, d_out)``, and the weights if asked for.

        Raises:
            ValueError: shapes that do not fit.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        batch = functional.as_batch(x, self.W_query, d_in=self.config.d_in, misplaced=_misplaced)
        for name in ("W_query", "W_key", "W_value"):
            check_width(f"the input of {name}", getattr(self, name).shape[0], self.config.d_in)
            check_width(name, getattr(self, name).shape[1], self.config.d_out)
        matrices = self.W_query, self.W_key, self.W_value
        query, key, value = (rearrange(batch @ weight, "b t c -> b t 1 c") for weight in matrices)
        arguments = {"return_weights": return_weights, **functional.attention_arguments(self)}
        result = functional.dot_product_attention(query, key, value, mask=attention_mask, **arguments)
        context, weights = functional.as_pair(result)
        context = rearrange(context, "b t 1 c -> b t c")
        weights = None if weights is None else rearrange(weights, "b 1 t s -> b t s")
        return functional.as_given(x, context, weights)
