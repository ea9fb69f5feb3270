"""Decoders as they are published since GPT-2: a config made of those of attention, feed-forward, norms and head."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from .base import LATER, Config, Parameter, linear, vector
from .differential_attention import DifferentialAttentionConfig
from .feed_forward import Activation, FeedForwardConfig
from .gated_convolution import GatedConvolutionConfig
from .gated_delta_net import GatedDeltaNetConfig
from .grouped_query_attention import GroupedQueryAttentionConfig
from .kimi_delta_attention import KimiDeltaAttentionConfig
from .layer_norm import LayerNormConfig
from .lightning_attention import LightningAttentionConfig
from .linear_attention import LinearAttentionConfig
from .mamba import MambaConfig
from .mamba2 import Mamba2Config
from .mixture_of_experts import MixtureOfExpertsConfig
from .model import ModelConfig, accepts_use_cache, below, below_blocks, count_blocks, table
from .multi_head_latent_attention import MultiHeadLatentAttentionConfig
from .rms_norm import RMSNormConfig
from .sparse_indexed_attention import SparseIndexedAttentionConfig

Norm = RMSNormConfig | LayerNormConfig
FeedForward = FeedForwardConfig | MixtureOfExpertsConfig
Recurrent = (
    GatedConvolutionConfig
    | GatedDeltaNetConfig
    | KimiDeltaAttentionConfig
    | LightningAttentionConfig
    | LinearAttentionConfig
    | MambaConfig
    | Mamba2Config
)
Attention = (
    GroupedQueryAttentionConfig
    | MultiHeadLatentAttentionConfig
    | SparseIndexedAttentionConfig
    | Recurrent
    | DifferentialAttentionConfig
)
Norms = Literal["pre", "post", "sandwich", "parallel", "parallel_two", "residual", "stream"]

_NORMS = {
    "pre": ("norm1", "norm2"),
    "post": ("post_norm1", "post_norm2"),
    "sandwich": ("norm1", "post_norm1", "norm2", "post_norm2"),
    "parallel": ("norm1",),
    "parallel_two": ("norm1", "norm2"),
    "residual": ("post_norm1", "post_norm2"),
    "stream": ("norm1", "norm2"),
}


@dataclasses.dataclass(frozen=True)
class DecoderBlockConfig(Config):
    """Attention and feed-forward layers, each added to its input.

    Attributes:
        attention: config of the attention; None omits it (Nemotron-H, whose blocks have one of both).
        feed_forward: config of the feed-forward layers, or of a mixture of experts; None omits them (Mamba-2).
        norm: config of every norm of the block.
        norms: their positions: before attention and feed-forward (``pre``), after them (``post``, OLMo 2), both
            (``sandwich``, Gemma), one before the two of them, which run in parallel (``parallel``, GPT-J), or one
            before each of these (``parallel_two``, GPT-NeoX), or after each sum (``residual``, BERT); before attention
            and feed-forward, where each sum adds to the norm's output instead of its input (``stream``, MiniMax-01).
        residual_scale: factor of each sublayer's output (Granite).
        dropout: rate at which that output is dropped in training.
        stream_scales: factors of the norm's output in the sum behind attention, and in that behind feed-forward layers;
            for ``stream`` alone.
        recurrent: config of a recurrent layer next to attention: both read the same norm, and their outputs are added
            (Falcon-H1); None omits it.
        mixer_scales: factors of the output of attention, and of that recurrent layer.
    """

    attention: Attention | None
    feed_forward: FeedForward | None
    norm: Norm
    norms: Norms = "pre"
    residual_scale: float = 1.0
    dropout: float = 0.0
    stream_scales: tuple[float, float] = dataclasses.field(default=(1.0, 1.0), metadata={LATER: True})
    recurrent: Recurrent | None = dataclasses.field(default=None, metadata={LATER: True})
    mixer_scales: tuple[float, float] = dataclasses.field(default=(1.0, 1.0), metadata={LATER: True})

    def __post_init__(self) -> None:
        if self.attention is not None:
            self._require_kind("attention", Attention)
        elif self.feed_forward is None:
            raise ValueError("attention and feed_forward must not both be None")
        if self.feed_forward is not None:
            self._require_kind("feed_forward", FeedForward)
        self._require_kind("norm", Norm)
        self._require_choice("norms", get_args(Norms))
        for name in ("attention", "feed_forward"):
            if getattr(self, name) is None and self.norms != "pre":
                raise ValueError(f"norms ({self.norms}) must be pre without {name}")
        self._require_positive_number("residual_scale")
        self._require_rates("dropout")
        self._require_factors("stream_scales", 2)
        self._require_factors("mixer_scales", 2)
        if self.norms != "stream" and self.stream_scales != (1.0, 1.0):
            raise ValueError(f"stream_scales ({self.stream_scales}) must be (1.0, 1.0) unless norms is stream")
        if self.recurrent is not None:
            self._require_kind("recurrent", Recurrent)
            if self.attention is None or isinstance(self.attention, Recurrent):
                raise ValueError("recurrent must be None unless attention is given and not a recurrent layer itself")
        elif self.mixer_scales != (1.0, 1.0):
            raise ValueError(f"mixer_scales ({self.mixer_scales}) must be (1.0, 1.0) without recurrent")
        first = "emb_dim of norm" if self.attention is None else "d_in of attention"
        width = self.norm.emb_dim if self.attention is None else self.attention.d_in
        wrong = {
            "d_out of attention": getattr(self.attention, "d_out", width),
            "d_in of recurrent": getattr(self.recurrent, "d_in", width),
            "d_out of recurrent": getattr(self.recurrent, "d_out", width),
            "d_in of feed_forward": getattr(self.feed_forward, "d_in", width),
            "emb_dim of norm": self.norm.emb_dim,
        }
        for name, value in wrong.items():
            if value != width:
                raise ValueError(f"{name} ({value}) must be {first} ({width})")

    @property
    def emb_dim(self) -> int:
        """Width of input and output."""
        return self.norm.emb_dim

    @property
    def attention_name(self) -> str:
        """Name of the attention in the block; recurrent layers have a separate name, as models mix both kinds."""
        return "linear_att" if isinstance(self.attention, Recurrent) else "att"

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Names of the block's norms, in order of execution."""
        names = _NORMS[self.norms]
        return names if self.feed_forward is not None and self.attention is not None else names[:1]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Attention, the recurrent layer next to it, feed-forward layers and norms."""
        return (
            *(below(self.attention_name, self.attention.parameters) if self.attention is not None else ()),
            *(below("linear_att", self.recurrent.parameters) if self.recurrent is not None else ()),
            *(below("ff", self.feed_forward.parameters) if self.feed_forward is not None else ()),
            *(row for name in self.norm_names for row in below(name, self.norm.parameters)),
        )

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        parts = [part for part in (self.attention, self.recurrent, self.feed_forward) if part is not None]
        return sum(part.count for part in parts) + len(self.norm_names) * self.norm.count


@accepts_use_cache
@dataclasses.dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Token embeddings, blocks one by one, the last norm, and the head.

    Attributes:
        vocab_size: number of tokens.
        emb_dim: width of the blocks.
        blocks: config of every block; without any, embeddings and head alone.
        norm: config of the norm after the blocks, or None.
        tie: whether the head's matrix is that of the embeddings.
        embedding_scale: factor of the embeddings (Gemma, Granite).
        embedding_norm: config of a norm of the embeddings (BLOOM), or None.
        num_positions: rows of a table of positions that is added to the embeddings (GPT-2); None omits the table.
        position_offset: unused rows before the one of position 0 (OPT has 2), in addition to `num_positions`.
        num_token_types: rows of a table of types of tokens, the first of which is added to every embedding (BERT).
        head_activation: the activation behind one more linear layer before the head (BERT); None omits both.
        head_norm: config of a norm behind that activation, or None.
        head_bias: whether a bias is added to the logits (GPT-J).
        norm_tokens: whether `embedding_norm` is of the tokens' embeddings alone, before positions are added
            (Blenderbot-small); of their sum otherwise.
        logit_scale: factor of the logits (Granite).
        logit_softcap: logits become ``logit_softcap * tanh(logits / logit_softcap)`` (Gemma 2).
        dropout: rate at which embeddings are dropped in training.
    """

    vocab_size: int
    emb_dim: int
    blocks: tuple[DecoderBlockConfig, ...]
    norm: Norm | None
    tie: bool = False
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    num_positions: int | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    dropout: float = 0.0
    position_offset: int = dataclasses.field(default=0, metadata={LATER: True})
    num_token_types: int | None = dataclasses.field(default=None, metadata={LATER: True})
    head_activation: Activation | None = dataclasses.field(default=None, metadata={LATER: True})
    head_norm: Norm | None = dataclasses.field(default=None, metadata={LATER: True})
    head_bias: bool = dataclasses.field(default=False, metadata={LATER: True})
    norm_tokens: bool = dataclasses.field(default=False, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("vocab_size", "emb_dim", *(["num_positions"] if self.num_positions else []))
        if self.num_token_types is not None:
            self._require_positive_ints("num_token_types")
        if self.position_offset != 0:
            self._require_positive_ints("position_offset")
            if self.num_positions is None:
                raise ValueError(f"position_offset ({self.position_offset}) must be 0 without num_positions")
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for number, block in enumerate(self.blocks):
            if not isinstance(block, DecoderBlockConfig):
                raise TypeError(f"blocks[{number}] must be a DecoderBlockConfig, got {type(block).__name__}")
            if block.emb_dim != self.emb_dim:
                raise ValueError(f"width of blocks[{number}] ({block.emb_dim}) must be emb_dim ({self.emb_dim})")
        if self.num_positions is not None and self.blocks:
            first = self.blocks[0]
            if first.attention is None or first.recurrent is not None:  # its cache counts the tokens
                raise ValueError("the first block must have attention alone as its mixer with num_positions")
        self._require_bools("tie", "head_bias", "norm_tokens")
        if self.norm_tokens and self.embedding_norm is None:
            raise ValueError(f"norm_tokens ({self.norm_tokens}) must be False without embedding_norm")
        if self.head_activation is not None:
            self._require_choice("head_activation", get_args(Activation))
        elif self.head_norm is not None:
            raise ValueError("head_norm must be None without head_activation")
        self._require_positive_number("embedding_scale", "logit_scale")
        if self.logit_softcap is not None:
            self._require_positive_number("logit_softcap")
        self._require_rates("dropout")
        for name in ("norm", "embedding_norm", "head_norm"):
            norm = getattr(self, name)
            if norm is not None:
                self._require_kind(name, Norm)
                if norm.emb_dim != self.emb_dim:
                    raise ValueError(f"emb_dim of {name} ({norm.emb_dim}) must be emb_dim ({self.emb_dim})")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Embeddings, the blocks one by one, the last norm, and the head, unless it is tied."""
        return (
            *self.embedding_parameters,
            *below_blocks(self.blocks),
            *self.head_parameters,
        )

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        ends = (*self.embedding_parameters, *self.head_parameters)
        return sum(math.prod(row.shape) for row in ends) + count_blocks(self.blocks)

    def tied_weights(self, side: Literal["torch", "flax"]) -> dict[str, str]:
        """Return redundant name in a checkpoint -> name of the weight that it is tied to."""
        if not self.tie:
            return {}
        return {"out_head.weight": "tok_emb.weight"} if side == "torch" else {"out_head.kernel": "tok_emb.embedding"}

    @property
    def embedding_parameters(self) -> tuple[Parameter, ...]:
        """Parameters in front of the blocks: embeddings, positions, types of tokens and their norm."""
        return (
            table("tok_emb", self.vocab_size, self.emb_dim, "vocab"),
            *(
                (table("pos_emb", self.num_positions + self.position_offset, self.emb_dim, "positions"),)
                if self.num_positions
                else ()
            ),
            *((table("type_emb", self.num_token_types, self.emb_dim, "types"),) if self.num_token_types else ()),
            *(below("emb_norm", self.embedding_norm.parameters) if self.embedding_norm is not None else ()),
        )

    @property
    def head_parameters(self) -> tuple[Parameter, ...]:
        """Parameters behind the blocks: the last norm, the layer before the head, and the head."""
        return (
            *(below("final_norm", self.norm.parameters) if self.norm is not None else ()),
            *(
                linear("head_linear", self.emb_dim, self.emb_dim, bias=True, axes=("mlp", "embed"))
                if self.head_activation is not None
                else ()
            ),
            *(below("head_norm", self.head_norm.parameters) if self.head_norm is not None else ()),
            *((vector("out_bias", self.vocab_size, "vocab"),) if self.head_bias else ()),
            *(
                ()
                if self.tie
                else linear("out_head", self.emb_dim, self.vocab_size, bias=False, axes=("vocab", "embed"))
            ),
        )
