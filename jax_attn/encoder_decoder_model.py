"""Encoders with decoders that attend to their outputs: BART, Whisper and T5, each a config.

Twins: `jax_attn.encoder_decoder_model`, `torch_attn.encoder_decoder_model`. Letters: B batch, T query position, S
position in the source, D width, V size of the vocabulary, N prompt and new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from attn_bridge.cache_validation import check_caches
from attn_bridge.generation import end_token, options_of
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import EncoderDecoderConfig
from attn_bridge.specs.encoder_decoder_model import check_batch, check_is_encoded, check_source_mask
from attn_bridge.specs.model import check_ids, check_range, tokens_of
from attn_bridge.validation import check_bounded

from . import functional
from .blocks.stack import Stack
from .checkpoints import Pretrained
from .decoding import generation
from .embedding import Embedding
from .initial_weights import filled, linear
from .layer import Layer, LayerOptions, Unpack
from .losses import check_labels, mean_loss
from .random import RandomSource, Rngs
from .signatures import DType, typed_as
from .signatures.attention import CachedOutput
from .signatures.models import EncoderDecoderCache, EncoderDecoderCall, Source


class EncoderDecoderModel(Pretrained, Layer):
    """An encoder of tokens or of sound, a decoder of tokens that attends to the encoder's output, and logits.

    Args:
        config: an `EncoderDecoderConfig`; ``train()`` and ``eval()`` switch the dropout.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None promotes the input and the parameters to a common one.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        TypeError: `config` is something else.
    """

    @EncoderDecoderConfig.takes
    def __init__(
        self,
        config: EncoderDecoderConfig,
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = EncoderDecoderConfig.read(config)
        config = self.config
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        if config.is_shared:
            self.tok_emb = Embedding(config.vocab_size, config.table_width, **options)
        self.encoder = Stack(config.encoder, **options)
        self.decoder = Stack(config.decoder, **options)
        if not config.tie:
            self.out_head = linear(config.table_width, config.vocab_size, bias=False, **options)
        if config.logits_bias:
            self.logits_bias = filled((1, config.vocab_size), 0.0, **options)

    @typed_as(EncoderDecoderCall)
    def __call__(
        self,
        source: Source | None,
        tokens: Int[Array, "B T"] | None = None,
        *,
        source_mask: Bool[Array, "B S"] | Int[Array, "B S"] | None = None,
        attention_mask: Bool[Array, "..."] | Int[Array, "B S"] | None = None,
        positions: Int[Array, "... T"] | None = None,
        cache: EncoderDecoderCache | None = None,
        last_only: bool = False,
        input_ids: Int[Array, "B T"] | None = None,
        labels: Int[Array, "B T"] | None = None,
    ) -> CachedOutput[EncoderDecoderCache]:
        """Return the logits ``(B, T, V)`` of the token that follows each position.

        Args:
            source: token ids ``(B, S)``, or features ``(B, C, F)`` if the encoder has convolutions. A cache keeps the
                encoded source, and None attends to that; a given source replaces it.
            tokens: token ids ``(B, T)`` of the decoder.
            source_mask: bool ``(B, S)`` or integers, ``False`` or 0 for padding of the source, S being the length
                behind the convolutions; a cache remembers it.
            attention_mask: bool ``(B, T)`` or integers, ``False`` or 0 for padding among the tokens, or bool that
                broadcasts to ``(B, H, T, T)``; the last axis counts the tokens in the cache, too.
            positions: integers ``(T,)`` or ``(B, T)``; by default each row counts its tokens, without padding on the
                left, from 0 or from the end of the cache.
            cache: of `init_cache`; `tokens` follow those in it.
            last_only: whether to compute the logits of the last token alone, ``(B, 1, V)``.
            input_ids: another name of `tokens`.
            labels: ``(B, T)``, the token that follows each position, -100 for ignored positions: also return their mean
                loss. As in `transformers`, where `tokens` are the labels moved to the right, they are not moved.

        Returns:
            The logits; before them the loss, if there are labels, and after them the cache, if given.

        Raises:
            ValueError: a shape that does not fit, an id out of range, more tokens than the cache or the table of
                positions has room for, or no source at all.
            TypeError: ids that are not integers, or features that are not floating point.
        """
        tokens = tokens_of("tokens", tokens, input_ids)
        source_mask, attention_mask = _as_visible(source_mask, attention_mask)
        self.check(source, tokens, source_mask, cache)
        if labels is not None:
            check_labels(labels, tokens, "tokens", last_only)
        context = None if source is None else self.encode(source, source_mask)
        arguments = {"context": context, "context_mask": source_mask, "cache": cache}
        x = self._table("decoder")(tokens, "tokens")
        x = self.decoder(x, attention_mask=attention_mask, positions=positions, **arguments)
        if cache is not None:
            x, cache = x
        logits = self.head(x[:, -1:] if last_only else x)
        result = logits if labels is None else (mean_loss(logits, labels, are_shifted=True), logits)
        return functional.with_cache(result, cache)

    def check(
        self,
        source: Source | None,
        tokens: Int[Array, "B T"],
        source_mask: Bool[Array, "B S"] | Int[Array, "B S"] | None = None,
        cache: EncoderDecoderCache | None = None,
    ) -> None:
        """Check shapes and dtypes of a call.

        Raises:
            ValueError: a shape that does not fit, or no source at all.
            TypeError: a dtype that does not fit.
        """
        longest = None if cache is not None else self.config.decoder.num_positions
        dtype, shape = functional.dtype_name(tokens, "tokens"), functional.shape_of(tokens)
        check_bounded(shape[-1], "num_positions of decoder", longest)
        check_ids(dtype, shape, longest=longest, longest_name="num_positions of decoder", name="tokens")
        check_caches(cache, len(self.config.decoder.blocks), pairs=True)
        if source is None:
            check_is_encoded(cache is not None and all(other is not None for _, other in cache))
            return
        dtype, source_shape = functional.dtype_name(source, "source"), functional.shape_of(source)
        made = self.config.check_source(dtype, source_shape)
        check_batch(source_shape, shape)
        if source_mask is not None:
            dtype = functional.dtype_name(source_mask, "source_mask")
            check_source_mask(dtype, functional.shape_of(source_mask), (source_shape[0], made))

    def encode(self, source: Source, source_mask: Bool[Array, "B S"] | None = None) -> Float[Array, "B S D"]:
        """Encode a source; return ``(B, S, D)``."""
        if self.config.encoder.convolutions is not None:
            x = self.encoder.convolve(source)
        else:
            x = self._table("encoder")(source, "source")
        return self.encoder(x, attention_mask=source_mask)

    def _table(self, side: str) -> Embedding:
        """Return the table of the tokens of ``encoder`` or ``decoder``."""
        stack = getattr(self, side)
        return self.tok_emb if stack.config.reads_shared else stack.tok_emb

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits ``(B, T, V)`` from the decoder's output."""
        logits = x @ self._table("decoder").embedding.T.astype(x.dtype) if self.config.tie else self.out_head(x)
        logits = logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
        if self.config.logits_bias:
            check_width("logits_bias", self.logits_bias.shape[-1], logits.shape[-1])
        return logits + lax.stop_gradient(self.logits_bias[...]) if self.config.logits_bias else logits

    def init_cache(self, batch_size: int, capacity: int) -> EncoderDecoderCache:
        """Return a cache without tokens or source: one of every block of the decoder.

        Args:
            batch_size: sequences.
            capacity: tokens of each, padding included; the source is stored in addition, at its own length.

        Raises:
            ValueError: a size below 1.
        """
        return self.decoder.init_cache(batch_size, capacity)

    def generate(
        self,
        source: Source,
        tokens: Int[Array, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        rng: RandomSource = None,
        eos: int | None = None,
        eos_token_id: int | None = None,
        source_mask: Bool[Array, "B S"] | Int[Array, "B S"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        input_ids: Int[Array, "B T"] | None = None,
    ) -> Int[Array, "B N"]:
        """Append `max_new_tokens` tokens, each drawn from the model's distribution; dropout is off meanwhile.

        Args:
            source: as a call takes it; it is encoded once.
            tokens: token ids ``(B, T)`` that the decoder begins with, such as its start token.
            max_new_tokens: how many to append.
            temperature: the logits are divided by it; 0 takes the likeliest token.
            top_k: draw from this many of the likeliest tokens; None is all.
            top_p: draw from the fewest likeliest tokens whose probabilities add up to this; None is all.
            rng: source of the numbers: a key, a stream of `nnx.Rngs`, or a `TorchRngs`, which gives the tokens that the
                torch twin draws from its generator; needed where `temperature` is above 0.
            eos: a row that draws this token repeats it from there on; None disables that.
            eos_token_id: another name of `eos`.
            source_mask: bool ``(B, S)`` or integers, ``False`` or 0 where the source is padding.
            attention_mask: bool ``(B, T)`` or integers, ``False`` or 0 for padding, on the left only; each row then
                counts positions from its first token.
            input_ids: another name of `tokens`.

        Returns:
            Token ids ``(B, T + max_new_tokens)`` in int32, those given first.

        Raises:
            ValueError: a shape or a number that does not fit, an id out of range, padding on the right.
            TypeError: ids, or a number of tokens, that are not integers.
        """
        tokens = tokens_of("tokens", tokens, input_ids)
        options = options_of(max_new_tokens, temperature, top_k, top_p, end_token(eos, eos_token_id))
        source_mask, attention_mask = _as_visible(source_mask, attention_mask)
        self.check(source, tokens, source_mask)
        source = jnp.asarray(source)  # a call takes lists, too
        source_mask = None if source_mask is None else jnp.asarray(source_mask)
        if self.config.encoder.convolutions is None:
            check_range("source", int(source.min()), int(source.max()), self._table("encoder").num_embeddings)
        return generation.generate(self, tokens, options, rng, attention_mask, (source,), source_mask)

    def stream(
        self,
        source: Source,
        tokens: Int[Array, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        rng: RandomSource = None,
        eos: int | None = None,
        eos_token_id: int | None = None,
        source_mask: Bool[Array, "B S"] | Int[Array, "B S"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        input_ids: Int[Array, "B T"] | None = None,
    ) -> Iterator[Int[Array, "B"]]:
        """Return an iterator over the tokens ``(B,)`` that `generate` appends, each as it is drawn.

        It ends after `max_new_tokens`, or once every row has drawn `eos`. Arguments are checked before the first token.

        Raises:
            ValueError, TypeError: as `generate` does.
        """
        tokens = tokens_of("tokens", tokens, input_ids)
        options = options_of(max_new_tokens, temperature, top_k, top_p, end_token(eos, eos_token_id))
        source_mask, attention_mask = _as_visible(source_mask, attention_mask)
        self.check(source, tokens, source_mask)
        source = jnp.asarray(source)  # a call takes lists, too
        source_mask = None if source_mask is None else jnp.asarray(source_mask)
        if self.config.encoder.convolutions is None:
            check_range("source", int(source.min()), int(source.max()), self._table("encoder").num_embeddings)
        return generation.stream(self, tokens, options, rng, attention_mask, (source,), source_mask)


def _as_visible(source_mask: object, attention_mask: object) -> tuple[Any, Any]:
    """Return both masks of a call, those of integers 0 and 1 in bool."""
    attention_mask = functional.as_visible(attention_mask, "attention_mask")
    return functional.as_visible(source_mask, "source_mask"), attention_mask
