"""GPT-2 as the book builds it (section 4.6; Radford et al. 2019): pre-norm blocks of causal attention.

Twins: `jax_attn.gpt_model`, `torch_attn.gpt_model`. Shapes: B batch, T position, D model width, V size of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attn_bridge.generation import check_padding, end_token, options_of
from attn_bridge.sharding.heads import check_width
from attn_bridge.specs import GPTModelConfig
from attn_bridge.specs.model import check_ids, check_range, tokens_of
from attn_bridge.validation import check_bounded

from . import functional
from .blocks.feed_forward import FeedForward
from .checkpoints import Pretrained
from .decoding import generation
from .decoding.token_positions import positions_of
from .dropout import Dropout
from .embedding import Embedding
from .initial_weights import ParameterOptions, linear
from .layer import Layer, LayerOptions, Unpack
from .layer_norm import LayerNorm
from .losses import check_labels, mean_loss
from .multi_head_attention import MultiHeadAttention
from .random import Rngs
from .signatures import DType, typed_as
from .signatures.attention import Output
from .signatures.models import GPTCall


class GPTModel(Pretrained, Layer):
    """A GPT: embeddings of tokens and positions, blocks of attention and feed-forward layers, and logits.

    Args:
        config: the book's dict, ``vocab_size context_length emb_dim n_heads n_layers drop_rate qkv_bias``, or a
            `GPTModelConfig`; ``train()`` and ``eval()`` switch the dropout.
            So does ``nnx.view``.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None takes that of the parameters.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        TypeError: `config` is neither, or a value in it has the wrong type.
        ValueError: missing or unknown keys, or a value that does not fit.
    """

    @GPTModelConfig.takes
    def __init__(
        self,
        config: GPTModelConfig | Mapping[str, object],
        *,
        rngs: Rngs,
        param_dtype: DType = jnp.float32,
        dtype: DType | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = GPTModelConfig.read(config)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        vocab_size, emb_dim = self.config.vocab_size, self.config.emb_dim
        self.tok_emb = Embedding(vocab_size, emb_dim, **options)
        self.pos_emb = Embedding(self.config.context_length, emb_dim, **options)
        self.drop_emb = Dropout(self.config.drop_rate, rngs=rngs)
        self.trf_blocks = nnx.List(TransformerBlock(self.config, **options) for _ in range(self.config.n_layers))
        self.final_norm = LayerNorm(emb_dim, **options)
        self.out_head = linear(emb_dim, vocab_size, bias=False, **options)

    @typed_as(GPTCall)
    def __call__(
        self,
        ids: Int[Array, "B T"] | None = None,
        *,
        attention_mask: Bool[Array, "..."] | Int[Array, "B T"] | None = None,
        input_ids: Int[Array, "B T"] | None = None,
        labels: Int[Array, "B T"] | None = None,
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
        longest = self.config.context_length
        check_bounded(functional.shape_of(ids)[-1], "context_length", longest)
        check_ids(functional.dtype_name(ids, "ids"), functional.shape_of(ids), longest=longest)
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
        ids: Int[Array, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        eos: int | None = None,
        eos_token_id: int | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        input_ids: Int[Array, "B T"] | None = None,
    ) -> Int[Array, "B N"]:
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
            Token ids ``(B, T + max_new_tokens)`` in JAX's widest integers, those given first.

        Raises:
            ValueError: a shape that does not fit, an id out of range, padding on the right, or `max_new_tokens` below
                1.
            TypeError: ids, or a number of tokens, that are not integers.
        """
        ids = tokens_of("ids", ids, input_ids)
        steps = self._steps(ids, max_new_tokens, end_token(eos, eos_token_id), attention_mask)
        return jnp.asarray(
            np.concatenate([np.asarray(ids), np.stack([token for token, _ in steps], 1)], 1, dtype=np.int64)
        )

    def stream(
        self,
        ids: Int[Array, "B T"] | None = None,
        max_new_tokens: int | None = None,
        *,
        eos: int | None = None,
        eos_token_id: int | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        input_ids: Int[Array, "B T"] | None = None,
    ) -> Iterator[Int[Array, "B"]]:
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
        ids: Int[Array, "B T"],
        max_new_tokens: int | None,
        eos: int | None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Check the arguments, and return an iterator over each token ``(B,)`` and whether its rows have ended."""
        check_ids(functional.dtype_name(ids, "ids"), functional.shape_of(ids))
        options = options_of(max_new_tokens, 0.0, None, None, eos).checked(self.config.vocab_size)
        prompt = np.asarray(ids).astype(np.int64)
        check_range("ids", int(prompt.min()), int(prompt.max()), self.config.vocab_size)
        visible = functional.as_visible(attention_mask, "attention_mask")
        if visible is not None:
            visible, wanted = np.asarray(visible), (prompt.shape[0], prompt.shape[1])
            check_padding(functional.shape_of(visible), functional.dtype_name(visible), visible, wanted)

        def steps() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            # Windows of one length compile once; what stands after the last token, a causal model does not see.
            after = ((0, 0), (0, options.max_new_tokens))
            tokens, mask = (
                np.pad(prompt, after),
                None if visible is None else np.pad(visible, after, constant_values=True),
            )
            window = min(self.config.context_length, tokens.shape[1])
            is_done = np.zeros(len(prompt), bool)
            for length in range(prompt.shape[1], tokens.shape[1]):
                start = max(0, length - window)
                seen = None if mask is None else mask[:, start : start + window]
                token = _next_token(self, tokens[:, start : start + window], seen, length - start - 1)
                token, is_done = generation.ended(token, options.eos, is_done)
                tokens[:, length] = token
                yield token, is_done

        return steps()


class TransformerBlock(nnx.Module):
    """Attention and feed-forward layers, each applied to the norm of its residual input.

    Args:
        config: of the model.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: GPTModelConfig, **options: Unpack[ParameterOptions]):
        emb_dim, rate = config.emb_dim, config.drop_rate
        self.att = MultiHeadAttention(
            emb_dim, emb_dim, config.context_length, rate, config.n_heads, config.qkv_bias, **options
        )
        self.ff = FeedForward(config.feed_forward, **options)
        self.norm1 = LayerNorm(emb_dim, **options)
        self.norm2 = LayerNorm(emb_dim, **options)
        self.drop_shortcut = Dropout(rate, rngs=options["rngs"])

    def __call__(
        self, x: Float[Array, "B T D"], attention_mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "B T D"]:
        """Return ``x`` of shape ``(B, T, D)`` plus the outputs of attention and feed-forward layers."""
        attended = self.att(self.norm1(x), attention_mask=attention_mask)
        check_width("out_proj", attended.shape[-1], x.shape[-1])
        x = x + self.drop_shortcut(attended)
        return x + self.drop_shortcut(self.ff(self.norm2(x)))


@jax.jit
def _next_token(
    model: GPTModel, ids: Int[Array, "B T"], attention_mask: Bool[Array, "B T"] | None, index: int
) -> Int[Array, "B"]:
    """Return the likeliest token after position `index`."""
    return model(ids, attention_mask=attention_mask)[:, index].argmax(-1)
