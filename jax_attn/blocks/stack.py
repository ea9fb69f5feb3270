"""An encoder or a decoder: embeddings or convolutions of its input, positions, and blocks.

Twins: `jax_attn.blocks.stack`, `torch_attn.blocks.stack`. Letters: B batch, T query position, S key position, D width,
E width of the context, C channel of a frame, F frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from attn_bridge.specs import StackConfig

from .. import functional
from ..decoding.token_positions import positions_of
from ..dropout import Dropout
from ..embedding import Embedding
from ..initial_weights import ParameterOptions
from .activation import Activation
from .convolution import Convolution
from .decoder_block import make_norm
from .encoder_decoder_block import EncoderDecoderBlock


class Stack(nnx.Module):
    """Embeddings or convolutions, positions and blocks, with norms before and behind them.

    Args:
        config: of the stack.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: StackConfig, **options: Unpack[ParameterOptions]):
        self.config = config
        front, offset = config.convolutions, config.position_offset
        if front is not None:
            self.conv1 = Convolution(front.channels, front.emb_dim, front.size, **options)
            self.conv2 = Convolution(front.emb_dim, front.emb_dim, front.size, front.stride, **options)
            self.activation = Activation(front.activation)
        if config.vocab_size is not None:
            self.tok_emb = Embedding(config.vocab_size, config.emb_dim, **options)
        if config.num_positions is not None:
            self.pos_emb = Embedding(config.num_positions + offset, config.emb_dim, offset, **options)
        if not config.learned_positions:
            self.pos_emb.embedding.set_value(jnp.asarray(config.sines(), options.get("param_dtype", jnp.float32)))
        if config.embedding_norm is not None:
            self.emb_norm = make_norm(config.embedding_norm, **options)
        self.drop_emb = Dropout(config.dropout, rngs=options["rngs"])
        self.trf_blocks = nnx.List(EncoderDecoderBlock(block, **options) for block in config.blocks)
        if config.norm is not None:
            self.final_norm = make_norm(config.norm, **options)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        attention_mask: Bool[Array, "..."] | None = None,
        positions: Int[Array, "... T"] | None = None,
        context: Float[Array, "B S E"] | None = None,
        context_mask: Bool[Array, "B S"] | None = None,
        cache: Sequence[object] | None = None,
    ) -> Any:
        """Apply the blocks to vectors ``(B, T, D)``.

        Args:
            x: ``(B, T, D)``, rows of a table of tokens, or the output of `convolve`.
            attention_mask: bool ``(B, S)``, ``False`` for padding, or broadcastable to ``(B, H, T, S)``.
            positions: integers ``(T,)`` or ``(B, T)``; the numbers of the tokens by default.
            context: the encoder's output, for a decoder; None if the cache holds it.
            context_mask: bool ``(B, S)``, ``False`` for padding of the context; a cache remembers it.
            cache: of `init_cache`; if given, it is returned behind the output.
        """
        is_decoder = self.config.blocks[0].cross_attention is not None
        # An encoder numbers its padding, as BART and `transformers` do.
        x = self.embed(x, positions, cache, attention_mask if is_decoder else None)
        caches, table = [], None
        for number, block in enumerate(self.trf_blocks):
            layer_cache = None if cache is None else cache[number]
            arguments = {"context": context, "context_mask": context_mask, "cache": layer_cache}
            if block.config.attention.takes_table:
                arguments["relative_bias"] = table
            if number == 0 and self.config.lends_table:
                arguments["return_bias"] = True
            result = block(x, attention_mask=attention_mask, positions=positions, **arguments)
            x, *further = result if isinstance(result, tuple) else (result,)
            if "return_bias" in arguments:
                table, *further = further
            caches += further
        if self.config.norm is not None:
            x = self.final_norm(x)
        return x if cache is None else (x, tuple(caches))

    def convolve(self, frames: Float[Array, "B C F"]) -> Float[Array, "B S D"]:
        """Return the vectors ``(B, S, D)`` of frames ``(B, C, F)``."""
        functional.check_dtype(frames, self.conv1.kernel[...], "source")
        x = rearrange(frames, "b c f -> b f c")
        return self.activation(self.conv2(self.activation(self.conv1(x))))

    def embed(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "... T"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "..."] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the input of the first block, ``(B, T, D)``."""
        config = self.config
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if config.num_positions is not None:
            at = positions_of(x, positions, None if cache is None else cache[0][0], attention_mask)
            vectors = self.pos_emb(at, "positions")
            x = x + (vectors if config.learned_positions else lax.stop_gradient(vectors))
        if config.embedding_norm is not None:
            x = self.emb_norm(x)
        return self.drop_emb(x)

    def init_cache(self, batch_size: int, capacity: int) -> tuple[Any, ...]:
        """Return a cache without tokens: one of every block, for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        return tuple(block.init_cache(batch_size, capacity) for block in self.trf_blocks)
