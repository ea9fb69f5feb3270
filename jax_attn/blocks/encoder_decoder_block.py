"""Blocks of encoders, and of decoders that attend to an encoder's output, with norms before or behind each part.

Twins: `jax_attn.blocks.encoder_decoder_block`, `torch_attn.blocks.encoder_decoder_block`. Letters: B batch, T query
position, S key position, D width, E width of the context.
"""

from __future__ import annotations

from typing import Any, Unpack

from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import EncoderDecoderBlockConfig

from .. import functional
from ..cross_attention import CrossAttention
from ..dropout import Dropout
from ..grouped_query_attention import GroupedQueryAttention
from ..initial_weights import ParameterOptions
from .decoder_block import make_norm
from .feed_forward import make_feed_forward


class EncoderDecoderBlock(nnx.Module):
    """Attention, in a decoder attention to a context, and feed-forward layers, each added to its input.

    Args:
        config: those of attentions, feed-forward layers and norms, and the positions of the norms.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: EncoderDecoderBlockConfig, **options: Unpack[ParameterOptions]):
        self.config = config
        self.att = GroupedQueryAttention(config.attention, **options)
        if config.cross_attention is not None:
            self.cross_att = CrossAttention(config.cross_attention, **options)
        self.ff = make_feed_forward(config.feed_forward, **options)
        for name in config.norm_names:
            setattr(self, name, make_norm(config.norm, **options))
        self.drop_shortcut = Dropout(config.dropout, rngs=options["rngs"])

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        attention_mask: Bool[Array, "..."] | None = None,
        positions: Int[Array, "... T"] | None = None,
        context: Float[Array, "B S E"] | None = None,
        context_mask: Bool[Array, "B S"] | None = None,
        cache: Any = None,
        relative_bias: Float[Array, "buckets h"] | None = None,
        return_bias: bool = False,
    ) -> Any:
        """Return ``x`` of shape ``(B, T, D)`` plus the outputs of attentions and feed-forward layers.

        Args:
            x: ``(B, T, D)``.
            attention_mask: bool ``(B, S)``, ``False`` for padding, or broadcastable to ``(B, H, T, S)``.
            positions: integers ``(T,)`` or ``(B, T)``; the numbers of the tokens by default.
            context: the encoder's output, for a block with cross attention; None if the cache holds it.
            context_mask: bool ``(B, S)``, ``False`` for padding of the context; a cache remembers it.
            cache: of `init_cache`; if given, it is returned behind the output.
            relative_bias: table of the first block, if the attention's `RelativeBias` is shared.
            return_bias: also return the block's own table of relative biases, in front of the cache.
        """
        own, other = (None, None) if cache is None else cache
        attended = self.att(
            self._before("norm1", x),
            attention_mask=attention_mask,
            positions=positions,
            cache=own,
            relative_bias=relative_bias,
        )
        if cache is not None:
            attended, own = attended
        x = self._add("norm1", x, attended)
        if self.config.cross_attention is not None:
            if cache is not None and context is not None:
                other = self.cross_att.init_cache(context.shape[0], context.shape[1])
            attended = self.cross_att(
                self._before("norm2", x), context=context, attention_mask=context_mask, cache=other
            )
            if cache is not None:
                attended, other = attended
            x = self._add("norm2", x, attended)
        last = self.config.norm_names[-1]
        x = self._add(last, x, self.ff(self._before(last, x)))
        table = self.att.relative_bias[...] if return_bias else None
        return functional.with_cache(functional.with_cache(x, table), None if cache is None else (own, other))

    def _before(self, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of a part of the block."""
        return getattr(self, name)(x) if self.config.norms == "pre" else x

    def _add(self, name: str, x: Float[Array, "B T D"], added: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the sum of a part's input and output."""
        check_width("out_proj", added.shape[-1], x.shape[-1])
        x = x + self.drop_shortcut(added)
        return getattr(self, name)(x) if self.config.norms == "post" else x

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        """Return a cache for `batch_size` sequences of at most `capacity` tokens, without tokens and without a context.

        Its part for the context is allocated once a context is given, with the context's length.
        """
        return self.att.init_cache(batch_size, capacity), None
