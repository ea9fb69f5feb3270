"""GPT-2 as the book builds it (section 4.6; Radford et al. 2019): pre-norm blocks of causal attention.

Twins: `jax_attn.gpt_model`, `torch_attn.gpt_model`. Shapes: B batch, T position, D model width, V size of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.types import Device

from attn_bridge.generation import check_padding, end_token, options_of
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import GPTModelConfig
from attn_bridge.specs.model import check_ids, check_range, tokens_of

from . import functional
from .blocks.feed_forward import FeedForward
from .checkpoints import Pretrained
from .decoding import generation
from .decoding.token_positions import positions_of
from .dropout import Dropout
from .embedding import Embedding
from .initial_weights import ParameterOptions, linear
from .layer import Layer
from .layer_norm import LayerNorm
from .losses import check_labels, mean_loss
from .multi_head_attention import MultiHeadAttention
from .random import JaxRngs
from .signatures import DType, typed_as
from .signatures.attention import Output
from .signatures.models import GPTCall


class GPTModel(Pretrained, Layer):
    """A GPT: embeddings of tokens and positions, blocks of attention and feed-forward layers, and logits.

    Args:
        config: the book's dict, ``vocab_size context_length emb_dim n_heads n_layers drop_rate qkv_bias``, or a
            `GPTModelConfig`; ``train()`` and ``eval()`` switch the dropout.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.

    Raises:
        TypeError: `config` is neither, or a value in it has the wrong type.
        ValueError: missing or unknown keys, or a value that does not fit.
    """

    @GPTModelConfig.takes
    def __init__(
        self,
        config: GPTModelConfig | Mapping[str, object],
        *,
        rngs: JaxRngs | None = None,
        device: Device = None,
        dtype: DType | None = None,
    ):
        super().__init__()
        self.config = GPTModelConfig.read(config)
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        vocab_size, emb_dim = self.config.vocab_size, self.config.emb_dim
        self.tok_emb = Embedding(vocab_size, emb_dim, **options)
        self.pos_emb = Embedding(self.config.context_length, emb_dim, **options)
        self.drop_emb = Dropout(self.config.drop_rate, rngs=rngs)
        self.trf_blocks = nn.ModuleList(TransformerBlock(self.config, **options) for _ in range(self.config.n_layers))
        self.final_norm = LayerNorm(emb_dim, **options)
        self.out_head = linear(emb_dim, vocab_size, bias=False, **options)

    __call__: GPTCall

    @typed_as(GPTCall)
    def forward(
        self,
        ids: Int[Tensor, "B T"] | None = None,
        *,
        attention_mask: Bool[Tensor, "..."] | Int[Tensor, "B T"] | None = None,
        input_ids: Int[Tensor, "B T"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
    ) -> Output:
        """Return the logits ``(B, T, V)`` of the token that follows each position.

        Args:
            ids: token ids ``(B, T)``, with T at most `context_length`.
            attention_mask: bool ``(B, T)`` or integers, ``False`` or 0 for padding, or bool that broadcasts to
                ``(B, H, T, T)``; each row counts its positions without padding on the left.
            input_ids: another name of `ids`.
            labels: ``(B, T)``, usually the ids, -100 for ignored ones: also return the mean loss of the tokens that
                follow each position among them, as in `transformers`. Padding counts unless it is -100.

        Returns:
            The logits; before them the loss, if there are labels.

        Raises:
            ValueError: a shape that does not fit, more tokens than `context_length`, or an id out of range.
            TypeError: ids that are not integers.
        """
        ids = tokens_of("ids", ids, input_ids)
        check_ids(functional.dtype_name(ids, "ids"), functional.shape_of(ids), longest=self.config.context_length)
        if labels is not None:
            check_labels(labels, ids, "ids")
        attention_mask = functional.as_visible(attention_mask, "attention_mask")
        x = self.tok_emb(ids)
        x = self.drop_emb(x + self.pos_emb(positions_of(x, attention_mask=attention_mask)))
        for block in self.trf_blocks:
            x = block(x, attention_mask)
        logits = self.out_head(self.final_norm(x))
        return logits if labels is None else (mean_loss(logits, labels), logits)

    def generate_greedy(
        self,
        ids: Int[Tensor, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        eos: int | None = None,
        eos_token_id: int | None = None,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        input_ids: Int[Tensor, "B T"] | None = None,
    ) -> Int[Tensor, "B N"]:
        """Append `max_new_tokens` tokens, each the likeliest after the last `context_length` ones.

        Dropout follows the model's mode: call ``eval()`` first.

        Args:
            ids: token ids ``(B, T)``, with any T.
            max_new_tokens: how many to append.
            eos: a row that draws this token repeats it from there on; None disables that.
            eos_token_id: another name of `eos`.
            attention_mask: bool ``(B, T)`` or integers, ``False`` or 0 for padding, on the left only; each row then
                counts positions from its first token.
            input_ids: another name of `ids`.

        Returns:
            Token ids ``(B, T + max_new_tokens)`` in int64, those given first.

        Raises:
            ValueError: a shape that does not fit, an id out of range, padding on the right, or `max_new_tokens` below
                1.
            TypeError: ids, or a number of tokens, that are not integers.
        """
        ids = tokens_of("ids", ids, input_ids)
        steps = self._steps(ids, max_new_tokens, end_token(eos, eos_token_id), attention_mask)
        return torch.cat([ids.long(), torch.stack([token for token, _ in steps], 1)], 1)

    def stream(
        self,
        ids: Int[Tensor, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        eos: int | None = None,
        eos_token_id: int | None = None,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        input_ids: Int[Tensor, "B T"] | None = None,
    ) -> Iterator[Int[Tensor, "B"]]:
        """Return an iterator over the tokens ``(B,)`` that `generate_greedy` appends, each as it is drawn.

        It ends after `max_new_tokens`, or once every row has drawn `eos`. Arguments are checked before the first token.

        Raises:
            ValueError, TypeError: as `generate_greedy` does.
        """
        steps = self._steps(
            tokens_of("ids", ids, input_ids), max_new_tokens, end_token(eos, eos_token_id), attention_mask
        )
        return generation.until_ended(steps)

    def _steps(
        self,
        ids: Int[Tensor, "B T"],
        max_new_tokens: int | None,
        eos: int | None,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Check the arguments, and return an iterator over each token ``(B,)`` and whether its rows have ended."""
        check_ids(functional.dtype_name(ids, "ids"), functional.shape_of(ids))
        options = options_of(max_new_tokens, 0.0, None, None, eos).checked(self.config.vocab_size)
        check_range("ids", int(ids.min()), int(ids.max()), self.config.vocab_size)
        visible = functional.as_visible(attention_mask, "attention_mask")
        if visible is not None:
            wanted = (ids.shape[0], ids.shape[1])
            check_padding(
                functional.shape_of(visible), functional.dtype_name(visible), visible.numpy(force=True), wanted
            )

        def steps() -> Iterator[tuple[Tensor, Tensor]]:
            tokens, mask, window = ids.long(), visible, self.config.context_length
            is_done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=ids.device)
            for _ in range(options.max_new_tokens):
                with torch.no_grad():
                    seen = None if mask is None else mask[:, -window:]
                    token = self(tokens[:, -window:], attention_mask=seen)[:, -1].argmax(-1)
                    token, is_done = generation.ended(token, options.eos, is_done)
                    tokens = torch.cat([tokens, token[:, None]], dim=1)
                    mask = None if mask is None else nn.functional.pad(mask, (0, 1), value=True)
                yield token, is_done

        return steps()


class TransformerBlock(Layer):
    """Attention and feed-forward layers, each applied to the norm of its residual input.

    Args:
        config: of the model.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: GPTModelConfig, **options: Unpack[ParameterOptions]):
        super().__init__()
        emb_dim, rate = config.emb_dim, config.drop_rate
        self.att = MultiHeadAttention(
            emb_dim, emb_dim, config.context_length, rate, config.n_heads, config.qkv_bias, **options
        )
        self.ff = FeedForward(config.feed_forward, **options)
        self.norm1 = LayerNorm(emb_dim, **options)
        self.norm2 = LayerNorm(emb_dim, **options)
        self.drop_shortcut = Dropout(rate, rngs=options.get("rngs"))

    def forward(
        self, x: Float[Tensor, "B T D"], attention_mask: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Return ``x`` of shape ``(B, T, D)`` plus the outputs of attention and feed-forward layers."""
        attended = self.att(self.norm1(x), attention_mask=attention_mask)
        check_width("out_proj", attended.shape[-1], x.shape[-1])
        x = x + self.drop_shortcut(attended)
        return x + self.drop_shortcut(self.ff(self.norm2(x)))
