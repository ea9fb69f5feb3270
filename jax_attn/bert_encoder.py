"""BERT's encoder (Devlin et al., arXiv 1810.04805): post-norm layers of attention to every token, no pooler.

Twins: `jax_attn.bert_encoder`, `torch_attn.bert_encoder`. Letters: b batch, t position, h head, c channel of a head; in
shapes B batch, T position, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attn_bridge.sharding.heads import check_groups, check_width, split_heads
from attn_bridge.specs import BertEncoderConfig
from attn_bridge.specs.model import check_beside_ids, check_ids, tokens_of
from attn_bridge.validation import check_bounded

from . import functional
from .blocks.feed_forward import FeedForward
from .checkpoints import Pretrained
from .dropout import Dropout
from .embedding import Embedding
from .initial_weights import ParameterOptions, linear
from .layer import Layer, LayerOptions, Unpack
from .layer_norm import LayerNorm
from .random import Rngs


class BertEncoder(Pretrained, Layer):
    """BERT without its pooler: embeddings of tokens, positions and segments, and layers of attention.

    Position ``t`` of a sequence has position embedding ``t``, padding on the left included, as in `transformers`.

    Args:
        config: the dict of a Hugging Face ``BertConfig``, of which other keys are left out, or a `BertEncoderConfig`;
            ``train()`` and ``eval()`` switch the dropout.
            So does ``nnx.view``.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
        param_dtype: dtype of the parameters.
        dtype: dtype of the computation; None takes that of the parameters.
        layers: `kernel_init`, `bias_init` and `precision` of the projections, see `LayerOptions`.

    Raises:
        TypeError: `config` is neither, or a value in it has the wrong type.
        ValueError: missing keys, a value that does not fit, or a config of another model.
    """

    @BertEncoderConfig.takes
    def __init__(
        self,
        config: BertEncoderConfig | Mapping[str, object],
        *,
        rngs: Rngs,
        param_dtype: DTypeLike = jnp.float32,
        dtype: DTypeLike | None = None,
        **layers: Unpack[LayerOptions],
    ):
        self.config = BertEncoderConfig.read(config)
        options = {"rngs": rngs, "param_dtype": param_dtype, "dtype": dtype}
        width, eps, rate = self.config.hidden_size, self.config.layer_norm_eps, self.config.hidden_dropout_prob
        longest = self.config.max_position_embeddings
        self.tok_emb = Embedding(self.config.vocab_size, width, **options)
        self.pos_emb = Embedding(longest, width, **options)
        self.type_emb = Embedding(self.config.type_vocab_size, width, **options)
        self.emb_norm = LayerNorm(width, eps, **options)
        self.drop_emb = Dropout(rate, rngs=rngs)
        self.layers = nnx.List(BertLayer(self.config, **options) for _ in range(self.config.num_hidden_layers))

    def __call__(
        self,
        ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
        token_type_ids: Int[Array, "B T"] | None = None,
        *,
        input_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the last hidden state ``(B, T, D)``.

        Args:
            ids: token ids ``(B, T)``, with T at most `max_position_embeddings`.
            attention_mask: ``(B, T)``, bool or integers; False or 0 is padding, which no token attends to.
            token_type_ids: ``(B, T)``, the segment of each token; 0 by default.
            input_ids: another name of `ids`.

        Raises:
            ValueError: shapes that do not fit, more tokens than `max_position_embeddings`, or an id out of range.
            TypeError: ids that are not integers, or a mask that is neither bool nor integers.
        """
        ids = tokens_of("ids", ids, input_ids)
        longest = self.config.max_position_embeddings
        dtype, shape = functional.dtype_name(ids, "ids"), functional.shape_of(ids)
        check_bounded(shape[-1], "max_position_embeddings", longest)
        check_ids(dtype, shape, longest=longest, longest_name="max_position_embeddings")
        if attention_mask is not None:
            dtype, sizes = functional.dtype_name(attention_mask, "attention_mask"), functional.shape_of(attention_mask)
            check_beside_ids("attention_mask", dtype, sizes, shape, may_be_bool=True)
            attention_mask = functional.as_visible(attention_mask, "attention_mask")
        if token_type_ids is None:
            token_type_ids = jnp.zeros(shape, jnp.int32)
        dtype, sizes = functional.dtype_name(token_type_ids, "token_type_ids"), functional.shape_of(token_type_ids)
        check_beside_ids("token_type_ids", dtype, sizes, shape)
        x = self.tok_emb(ids) + self.type_emb(token_type_ids, "token_type_ids")
        x = x + self.pos_emb(jnp.arange(shape[1]))
        x = self.drop_emb(self.emb_norm(x))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


class BertLayer(nnx.Module):
    """Attention and feed-forward layers, each added to its input, and the sum normalised.

    Args:
        config: of the model.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: BertEncoderConfig, **options: Unpack[ParameterOptions]):
        width, eps, rate = config.hidden_size, config.layer_norm_eps, config.hidden_dropout_prob
        self.att = BertAttention(config, **options)
        self.norm1 = LayerNorm(width, eps, **options)
        self.ff = FeedForward(config.feed_forward, **options)
        self.norm2 = LayerNorm(width, eps, **options)
        self.drop_shortcut = Dropout(rate, rngs=options["rngs"])

    def __call__(
        self, x: Float[Array, "B T D"], attention_mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the new hidden state ``(B, T, D)``; `attention_mask` is True where a token may be attended."""
        attended = self.att(x, attention_mask)
        check_width("out_proj", attended.shape[-1], x.shape[-1])
        x = self.norm1(x + self.drop_shortcut(attended))
        return self.norm2(x + self.drop_shortcut(self.ff(x)))


class BertAttention(nnx.Module):
    """Multi-head attention to every token except padding.

    Args:
        config: of the model.
        **options: see `ParameterOptions`.
    """

    def __init__(self, config: BertEncoderConfig, **options: Unpack[ParameterOptions]):
        width, rate = config.hidden_size, config.attention_probs_dropout_prob
        self.head_dim = width // config.num_attention_heads
        self.W_query = linear(width, width, **options)
        self.W_key = linear(width, width, **options)
        self.W_value = linear(width, width, **options)
        self.out_proj = linear(width, width, **options)
        self.dropout = Dropout(rate, rngs=options["rngs"])

    def __call__(
        self, x: Float[Array, "B T D"], attention_mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the context ``(B, T, D)``; `attention_mask` is True where a token may be attended."""
        query, key, value = (
            split_heads(getattr(self, name)(x), self.head_dim, name) for name in ("W_query", "W_key", "W_value")
        )
        check_groups(query.shape[2], key.shape[2])
        context = functional.dot_product_attention(
            query, key, value, mask=attention_mask, **functional.attention_arguments(self)
        )
        return self.out_proj(rearrange(context, "b t h c -> b t (h c)"))
