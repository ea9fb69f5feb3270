"""Decoders as they are published since GPT-2: Llama, Qwen, Gemma, DeepSeek and others, each a config.

Twins: `jax_attn.decoder_model`, `torch_attn.decoder_model`. Letters: B batch, T query position, S key position, D
width, V size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge import cache_validation
from attn_bridge.generation import end_token, options_of
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import DecoderConfig
from attn_bridge.specs.model import check_ids, tokens_of

from . import functional
from .blocks.activation import Activation
from .blocks.alternating_updates import gather, spread
from .blocks.decoder_block import DecoderBlock, make_norm
from .checkpoints import Pretrained
from .decoding import generation
from .decoding.cache import SharedKeys
from .decoding.token_positions import positions_of
from .dropout import Dropout
from .embedding import Embedding
from .initial_weights import filled, linear
from .layer import Layer
from .losses import check_labels, mean_loss
from .positions import sinusoids
from .random import JaxRngs, RandomSource
from .signatures import DType, typed_as
from .signatures.attention import CachedOutput, LayerCache
from .signatures.models import DecoderCache, DecoderCall


class DecoderModel(Pretrained, Layer):
    """Token embeddings, blocks of attention and feed-forward layers, a norm, and logits.

    Args:
        config: a `DecoderConfig`; ``train()`` and ``eval()`` switch the dropout.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.

    Raises:
        TypeError: `config` is something else.
    """

    @DecoderConfig.takes
    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: DType | None = None,
    ):
        super().__init__()
        self.config = DecoderConfig.read(config)
        config = self.config
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        self.tok_emb = Embedding(config.vocab_size, config.token_width, **options)
        if config.num_positions is not None:
            offset = config.position_offset
            self.pos_emb = Embedding(config.num_positions + offset, config.token_width, offset, **options)
        if config.num_token_types is not None:
            self.type_emb = Embedding(config.num_token_types, config.token_width, **options)
        if config.embedding_norm is not None:
            self.emb_norm = make_norm(config.embedding_norm, **options)
        if config.embedding_width is not None:
            self.emb_linear = linear(config.embedding_width, config.emb_dim, True, **options)
        if config.layer_embeddings is not None:
            tables = config.layer_embeddings
            self.layer_emb = Embedding(tables.vocab_size, tables.layers * tables.dim, **options)
            self.layer_linear = linear(config.emb_dim, tables.layers * tables.dim, bias=False, **options)
            self.layer_norm = make_norm(tables.norm, **options)
        if config.updates is not None:
            further, width = range(config.updates.num_streams - 1), config.emb_dim
            self.stream_in = nn.ModuleList(linear(width, width, bias=False, **options) for _ in further)
            self.stream_out = nn.ModuleList(linear(width, width, bias=False, **options) for _ in further)
        self.drop_emb = Dropout(config.dropout, rngs=rngs)
        self.trf_blocks = nn.ModuleList(DecoderBlock(block, **options) for block in config.blocks)
        if config.norm is not None:
            self.final_norm = make_norm(config.norm, **options)
        if config.head_activation is not None:
            self.head_linear = linear(config.emb_dim, config.logit_width, config.head_linear_bias, **options)
            self.head_activation = Activation(config.head_activation)
        if config.head_norm is not None:
            self.head_norm = make_norm(config.head_norm, **options)
        if config.head_bias:
            self.out_bias = filled(config.vocab_size, 0.0, **options)
        if not config.tie:
            self.out_head = linear(config.logit_width, config.vocab_size, bias=False, **options)

    @torch.no_grad()
    def _reset_own(self) -> None:
        if self.config.head_bias:
            self.out_bias.zero_()

    __call__: DecoderCall

    @typed_as(DecoderCall)
    def forward(
        self,
        tokens: Int[Tensor, "B T"] | None = None,
        *,
        attention_mask: Bool[Tensor, "..."] | Int[Tensor, "B S"] | None = None,
        positions: Int[Tensor, "... T"] | None = None,
        cache: Sequence[LayerCache] | None = None,
        last_only: bool = False,
        input_ids: Int[Tensor, "B T"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
    ) -> CachedOutput[DecoderCache]:
        """Return the logits ``(B, T, V)`` of the token that follows each position.

        Args:
            tokens: token ids ``(B, T)``.
            attention_mask: bool ``(B, S)`` or integers, ``False`` or 0 for padding, or bool that broadcasts to
                ``(B, H, T, S)``; S counts the tokens in the cache, too.
            positions: integers ``(T,)`` or ``(B, T)``; a `Rotary` with axes also takes ``(rows, B, T)``, and others for
                all rows. By default each sequence counts its tokens, without padding on the left, from 0 or from the
                end of the cache.
            cache: of `init_cache`; `tokens` follow those in it.
            last_only: whether to compute the logits of the last token alone, ``(B, 1, V)``.
            input_ids: another name of `tokens`.
            labels: ``(B, T)``, usually the tokens, -100 for ignored ones: also return the mean loss of the tokens that
                follow each position among them, as in `transformers`. Padding counts unless it is -100.

        Returns:
            The logits; before them the loss, if there are labels, and after them the cache, if given.

        Raises:
            ValueError: a shape that does not fit, an id out of range, or more tokens than the cache has room for. Code
                from `torch.compile` raises a different error for an id out of range.
            TypeError: ids that are not integers.
        """
        tokens = tokens_of("tokens", tokens, input_ids)
        check_ids(functional.dtype_name(tokens, "tokens"), functional.shape_of(tokens), name="tokens")
        cache_validation.check_caches(cache, len(self.trf_blocks))
        attention_mask = functional.as_visible(attention_mask, "attention_mask")
        if labels is not None:
            check_labels(labels, tokens, "tokens", last_only)
        x = self.embed(tokens, positions, cache, attention_mask)
        parts = self.layer_inputs(tokens, x) if self.config.layer_embeddings is not None else None
        caches: list[LayerCache] = []
        lent: dict[int, SharedKeys] = {}
        for number, block in enumerate(self.trf_blocks):
            arguments = self._arguments_of(number, parts, lent)
            layer_cache = None if cache is None else cache[number]
            x = block(x, attention_mask=attention_mask, positions=positions, cache=layer_cache, **arguments)
            if number in self.config.lenders:
                x, lent[number], *layer_caches = x
                caches += layer_caches
            elif cache is not None:
                x, layer_cache = x
                caches.append(layer_cache)
        logits = self.head(x[:, -1:] if last_only else x)
        result = logits if labels is None else (mean_loss(logits, labels), logits)
        return functional.with_cache(result, None if cache is None else tuple(caches))

    def embed(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "... T"] | None = None,
        cache: Sequence[LayerCache] | None = None,
        attention_mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the input of the first block, ``(B, T, D)``, or ``(B, T, N, D)`` of N streams."""
        config = self.config
        x = self.tok_emb(tokens, "tokens")
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype, device=x.device)
        if config.embedding_norm is not None and config.norm_tokens:
            x = self.emb_norm(x)
        if config.numbers_tokens:
            at = positions_of(x, positions, None if cache is None else cache[0], attention_mask)
            x = x + (self.pos_emb(at, "positions") if config.sinusoids is None else self._sinusoids(x, at))
        if config.num_token_types is not None:
            x = x + self.type_emb(torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device))
        if config.embedding_norm is not None and not config.norm_tokens:
            x = self.emb_norm(x)
        x = self.drop_emb(x)
        if config.embedding_width is not None:
            x = self.emb_linear(x)
        return x if config.updates is None else spread(x, self.stream_in)

    def _sinusoids(self, x: Float[Tensor, "B T D"], at: Int[Tensor, "... T"]) -> Float[Tensor, "... T D"]:
        """Return the sines and cosines of positions that are added to the embeddings `x`."""
        config = self.config
        waves = sinusoids(config.sinusoids, at + config.position_offset, config.emb_dim, functional.wide_dtype(x))
        return waves.to(x.dtype)

    def layer_inputs(self, tokens: Int[Tensor, "B T"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T L C"]:
        """Return the per-layer embeddings ``(B, T, L, C)``: of each block, that of the token and that of its embedding.

        Args:
            tokens: token ids ``(B, T)``.
            x: of `embed`.
        """
        layers = self.config.layer_embeddings
        if self.config.updates is not None:
            x = x[:, :, 0]
        tokens = functional.signed(tokens)
        rows = self.layer_emb(torch.where(tokens < layers.vocab_size, tokens, 0), "tokens")
        rows = rows * torch.tensor(layers.dim**0.5, dtype=x.dtype, device=x.device)
        projected = self.layer_linear(x) * layers.d_in**-0.5
        check_width("layer_linear", projected.shape[-1], layers.layers * layers.dim)
        rows, projected = (rearrange(each, "b t (l c) -> b t l c", c=layers.dim) for each in (rows, projected))
        return (self.layer_norm(projected) + rows) * 2.0**-0.5

    def _arguments_of(
        self, number: int, parts: Float[Tensor, "B T L C"] | None, lent: Mapping[int, SharedKeys]
    ) -> dict[str, object]:
        """Return the arguments that only some blocks take: their part of the per-layer embeddings, shared keys."""
        keys_of = self.config.blocks[number].keys_of
        return {
            **({} if parts is None else {"layer_input": parts[:, :, number]}),
            **({} if keys_of is None else {"shared": lent[keys_of]}),
            **({"return_shared": True} if number in self.config.lenders else {}),
        }

    def head(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Return the logits ``(B, T, V)`` from the output of the last block."""
        config = self.config
        if config.updates is not None:
            x = gather(x, self.stream_out)
        if config.norm is not None:
            x = self.final_norm(x)
        if config.head_activation is not None:
            x = self.head_activation(self.head_linear(x))
        if config.head_norm is not None:
            x = self.head_norm(x)
        logits = x @ self.tok_emb.weight.T if config.tie else self.out_head(x)
        if config.head_bias:
            logits = logits + self.out_bias
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits

    def init_cache(self, batch_size: int, capacity: int) -> DecoderCache:
        """Return a cache without tokens: one of every block, for `batch_size` sequences of at most `capacity` tokens.

        Raises:
            ValueError: a size below 1.
        """
        return tuple(block.init_cache(batch_size, capacity) for block in self.trf_blocks)

    def generate(
        self,
        tokens: Int[Tensor, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        rng: RandomSource = None,
        eos: int | None = None,
        eos_token_id: int | None = None,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        input_ids: Int[Tensor, "B T"] | None = None,
    ) -> Int[Tensor, "B N"]:
        """Append `max_new_tokens` tokens, each drawn from the model's distribution; dropout is off meanwhile.

        Args:
            tokens: token ids ``(B, T)``.
            max_new_tokens: how many to append.
            temperature: the logits are divided by it; 0 takes the likeliest token.
            top_k: draw from this many of the likeliest tokens; None is all.
            top_p: draw from the fewest likeliest tokens whose probabilities add up to this; None is all. Tokens as
                likely as the last of them are drawn from, too, as with `top_k`.
            rng: source of the numbers: None takes torch's global generator; a `torch.Generator`, or a stream of
                `JaxRngs`, which gives the tokens that the Flax twin draws from it.
            eos: a row that draws this token repeats it from there on; None disables that.
            eos_token_id: another name of `eos`.
            attention_mask: bool ``(B, T)`` or integers, ``False`` or 0 for padding, on the left only; each row then
                counts positions from its first token.
            input_ids: another name of `tokens`.

        Returns:
            Token ids ``(B, T + max_new_tokens)`` in int64, those given first.

        Raises:
            ValueError: a shape or a number that does not fit, an id out of range, padding on the right.
            TypeError: ids, or a number of tokens, that are not integers.
        """
        tokens = tokens_of("tokens", tokens, input_ids)
        options = options_of(max_new_tokens, temperature, top_k, top_p, end_token(eos, eos_token_id))
        return generation.generate(self, tokens, options, rng, attention_mask)

    def stream(
        self,
        tokens: Int[Tensor, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        rng: RandomSource = None,
        eos: int | None = None,
        eos_token_id: int | None = None,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        input_ids: Int[Tensor, "B T"] | None = None,
    ) -> Iterator[Int[Tensor, "B"]]:
        """Return an iterator over the tokens ``(B,)`` that `generate` appends, each as it is drawn.

        It ends after `max_new_tokens`, or once every row has drawn `eos`. Arguments are checked before the first token.

        Raises:
            ValueError, TypeError: as `generate` does.
        """
        tokens = tokens_of("tokens", tokens, input_ids)
        options = options_of(max_new_tokens, temperature, top_k, top_p, end_token(eos, eos_token_id))
        return generation.stream(self, tokens, options, rng, attention_mask)
