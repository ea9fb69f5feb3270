"""Gated DeltaNet: each head keeps a matrix, decays it, and corrects its value for a key (arXiv 2412.06464).

As Qwen3-Next runs it: a short convolution before the heads, one beta per value head, a gated norm behind them. Twins:
`jax_attn.gated_delta_net`, `torch_attn.gated_delta_net`. Letters: b batch, t position, h head, c channel of a head.
"""

from __future__ import annotations

from typing import Never

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.masks import Mask
from attn_bridge.recurrence import check_form
from attn_bridge.specs import GatedDeltaNetConfig

from . import functional
from .decoding.recurrent_cache import RecurrentCache
from .initial_weights import linear, uniform
from .random import JaxRngs
from .recurrent import recurrence
from .recurrent.short_convolution import ShortConvolution
from .resetting import Resettable
from .rms_norm import RMSNorm
from .signatures import DType, typed_as
from .signatures.attention import RecurrentCall


class GatedDeltaNet(Resettable):
    """Attention with a state of one size however long the sequence is; causal, without positions.

    Args:
        config: sizes, see `GatedDeltaNetConfig`.
        rngs: source of the initial weights (stream ``params``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
        implementation: ``"chunked"`` or ``"recurrent"``, the form of all calls that name none; None takes chunks unless
            there is a single token. Names in `functional.IMPLEMENTATIONS`, and `use_implementation`, are for attention
            to keys.
    """

    @GatedDeltaNetConfig.takes
    def __init__(
        self,
        config: GatedDeltaNetConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: DType | None = None,
        implementation: str | None = None,
    ):
        super().__init__()
        self.config = config = GatedDeltaNetConfig.check(config)
        self.form = check_form(implementation)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        d_in, heads = config.d_in, config.num_value_heads
        self.W_query = linear(d_in, config.key_width, bias=False, **options)
        self.W_key = linear(d_in, config.key_width, bias=False, **options)
        self.W_value = linear(d_in, config.value_width, bias=False, **options)
        self.W_gate = linear(d_in, config.value_width, bias=False, **options)
        self.W_beta = linear(d_in, heads, bias=False, **options)
        self.W_alpha = linear(d_in, heads, bias=False, **options)
        self.conv1d = ShortConvolution(config.conv_width, config.conv_size, **options)
        self.dt_bias = nn.Parameter(torch.ones(heads, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.log(0.01 + 15.99 * uniform((heads,), **options)))
        self.norm = RMSNorm(config.value_head_dim, config.eps, **options)
        self.out_proj = linear(config.value_width, config.d_out, bias=False, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        self.dt_bias.fill_(1.0)
        self.A_log.copy_(torch.log(0.01 + 15.99 * torch.rand_like(self.A_log)))

    @typed_as(RecurrentCall)
    def forward(
        self,
        x: Float[Tensor, "... t d"],
        *_misplaced: Never,
        attention_mask: Mask | Bool[Tensor, "B S"] | None = None,
        positions: Int[Tensor, "... t"] | None = None,
        cache: RecurrentCache | None = None,
        form: str | None = None,
    ) -> Tensor | tuple[Tensor, RecurrentCache]:
        """Read the tokens in order; each one changes the state and is answered from it.

        Args:
            x: ``(T, d_in)`` or ``(B, T, d_in)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, over all tokens so far, the new ones too. As in
                Transformers, padding is read as zeros: on the left it changes nothing; tokens behind other padding meet
                a state that has decayed and a convolution that has seen zeros.
            positions: not used, since order alone counts; taken so that the layers of a model are called alike.
            cache: what earlier tokens left, from `init_cache`; updated in place.
            form: ``"chunked"`` or ``"recurrent"``; None takes that of the constructor.

        Returns:
            The output ``(T, d_out)`` or ``(B, T, d_out)``, and the cache if one was given.

        Raises:
            ValueError: shapes that do not fit, more tokens than the cache takes, or an unknown form.
            TypeError: an input that is not floating point, or a mask that is not bool.
        """
        batch = functional.as_batch(x, self.W_query, d_in=self.config.d_in, cache=cache, misplaced=_misplaced)
        if cache is not None:
            cache = cache.admit(batch.shape[0], batch.shape[1], recurrence.mask_shape(attention_mask))
        batch = recurrence.without(batch, recurrence.visible_tokens(attention_mask, batch, cache))
        mixed = torch.cat([self.W_query(batch), self.W_key(batch), self.W_value(batch)], -1)
        mixed, conv_state = self.conv1d(mixed, None if cache is None else cache.conv_state)
        key_width = self.config.key_width
        # Keys of length 1: with a beta of 1, k k^T removes the value stored under k alone, and the state cannot grow.
        query, key = (
            recurrence.unit_length(rearrange(one, "b t (h c) -> b t h c", h=self.config.num_heads))
            for one in (mixed[..., :key_width], mixed[..., key_width : 2 * key_width])
        )
        value, gate = (
            rearrange(one, "b t (h c) -> b t h c", h=self.config.num_value_heads)
            for one in (mixed[..., 2 * key_width :], self.W_gate(batch))
        )
        context, state = recurrence.gated_delta_rule(
            query * self.config.head_dim**-0.5,
            key,
            value,
            recurrence.log_decay(self.W_alpha(batch), self.dt_bias, self.A_log),
            torch.sigmoid(self.W_beta(batch).to(key.dtype)),
            state=None if cache is None else cache.state,
            form=form or self.form,
            **functional.attention_arguments(self),
        )
        # The norm goes over the channels of each head, before the gate (norm, then gate; Mamba-2 gates first).
        gated = self.norm(context.to(self.norm.scale.dtype)).to(key.dtype) * nn.functional.silu(gate.to(key.dtype))
        output = self.out_proj(rearrange(gated.to(value.dtype), "b t h c -> b t (h c)"))
        cache = cache if cache is None else cache.advance(state, conv_state, batch.shape[1])
        return functional.with_cache(functional.as_given(x, output, None), cache)

    def init_cache(self, batch_size: int, capacity: int) -> RecurrentCache:
        """Return a cache without tokens: for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        config = self.config
        return RecurrentCache.empty(
            batch_size,
            capacity,
            (config.num_value_heads, config.head_dim, config.value_head_dim),
            (config.conv_size - 1, config.conv_width),
            **functional.cache_options(self.W_query),
        )
