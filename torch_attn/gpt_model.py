"""GPT-2 as the book builds it (section 4.6; Radford et al. 2019): pre-norm blocks of causal attention.

Twins: `jax_attn.gpt_model`, `torch_attn.gpt_model`. Shapes: B batch, T position, D model width, V size of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attn_bridge.specs import GPTModelConfig
from attn_bridge.specs.model import check_ids, check_max_new_tokens, check_range

from . import functional
from .blocks.feed_forward import FeedForward
from .checkpoints import Pretrained
from .dropout import Dropout
from .embedding import Embedding
from .initial_weights import linear
from .layer_norm import LayerNorm
from .multi_head_attention import MultiHeadAttention
from .random import JaxRngs
from .resetting import Resettable


class GPTModel(Pretrained, Resettable):
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
        config: GPTModelConfig | Mapping[str, Any],
        *,
        rngs: JaxRngs | None = None,
        device: Any = None,
        dtype: Any = None,
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

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Return the logits ``(B, T, V)`` of the token that follows each position.

        Args:
            ids: token ids ``(B, T)``, with T at most `context_length`.

        Raises:
            ValueError: a shape that does not fit, more tokens than `context_length`, or an id that is none.
            TypeError: ids that are not integers.
        """
        check_ids(functional.dtype_name(ids), functional.shape_of(ids), longest=self.config.context_length)
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop_emb(x)
        for block in self.trf_blocks:
            x = block(x)
        return self.out_head(self.final_norm(x))

    @torch.no_grad()
    def generate_greedy(self, ids: Int[Tensor, "B T"], max_new_tokens: int) -> Int[Tensor, "B N"]:
        """Append `max_new_tokens` tokens, each the likeliest after the last `context_length` ones.

        Dropout acts as the model's mode says: call ``eval()`` first.

        Args:
            ids: token ids ``(B, T)``, with any T.
            max_new_tokens: how many to append.

        Returns:
            Token ids ``(B, T + max_new_tokens)`` in int64, those given first.

        Raises:
            ValueError: a shape that does not fit, an id that is none, or `max_new_tokens` below 1.
            TypeError: ids, or a number of tokens, that are not integers.
        """
        check_ids(functional.dtype_name(ids), functional.shape_of(ids))
        check_max_new_tokens(max_new_tokens)
        check_range("ids", int(ids.min()), int(ids.max()), self.config.vocab_size)
        tokens = ids.long()
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.context_length :])[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        return tokens


class TransformerBlock(Resettable):
    """Attention and feed-forward layers, each on the norm of what it is added to.

    Args:
        config: of the model.
        rngs: source of the initial weights (stream ``params``) and, with dropout, of its masks (``dropout``).
            Its numbers are JAX's; None takes torch's global generator.
        device: device of the parameters.
        dtype: dtype of the parameters and of the computation.
    """

    def __init__(self, config: GPTModelConfig, *, rngs: JaxRngs | None = None, device: Any = None, dtype: Any = None):
        super().__init__()
        options = {"rngs": rngs, "device": device, "dtype": dtype}
        emb_dim, rate = config.emb_dim, config.drop_rate
        self.att = MultiHeadAttention(
            emb_dim,
            emb_dim,
            config.context_length,
            rate,
            config.n_heads,
            config.qkv_bias,
            **options,
        )
        self.ff = FeedForward(config.feed_forward, **options)
        self.norm1 = LayerNorm(emb_dim, **options)
        self.norm2 = LayerNorm(emb_dim, **options)
        self.drop_shortcut = Dropout(rate, rngs=rngs)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Return ``x`` of shape ``(B, T, D)`` with what attention and feed-forward layers add to it."""
        x = x + self.drop_shortcut(self.att(self.norm1(x)))
        return x + self.drop_shortcut(self.ff(self.norm2(x)))
