"""Decoders as they are published since GPT-2: a config made of those of attention, feed-forward, norms and head."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from ..validation import check_integer
from .base import LATER, Config, Parameter, linear, vector
from .blocks.alternating_updates import AlternatingUpdatesConfig
from .blocks.feed_forward import Activation, FeedForwardConfig
from .blocks.layer_embeddings import LayerEmbeddingsConfig, LayerInputConfig
from .blocks.mixture_of_experts import MixtureOfExpertsConfig
from .differential_attention import DifferentialAttentionConfig
from .gated_convolution import GatedConvolutionConfig
from .gated_delta_net import GatedDeltaNetConfig
from .grouped_query_attention import GroupedQueryAttentionConfig
from .kimi_delta_attention import KimiDeltaAttentionConfig
from .layer_norm import LayerNormConfig
from .lightning_attention import LightningAttentionConfig
from .linear_attention import LinearAttentionConfig
from .mamba import MambaConfig
from .mamba2 import Mamba2Config
from .model import ModelConfig, accepts_use_cache, below, below_blocks, count_blocks, table
from .multi_head_latent_attention import MultiHeadLatentAttentionConfig
from .position import Sinusoids
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
Norms = Literal["pre", "pre_last", "post", "sandwich", "pre_and_last", "parallel", "parallel_two", "residual", "stream"]

_NORMS = {
    "pre": ("norm1", "norm2"),
    "pre_last": ("norm2",),
    "post": ("post_norm1", "post_norm2"),
    "sandwich": ("norm1", "post_norm1", "norm2", "post_norm2"),
    "pre_and_last": ("norm1", "norm2", "post_norm2"),
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
        norms: their positions: before attention and feed-forward (``pre``), before the latter alone (``pre_last``, the
            first block of ModernBERT's decoder), after them (``post``, OLMo 2), both (``sandwich``, Gemma), before both
            and after feed-forward (``pre_and_last``, experts of A.X K1), one before the two of them, which run in
            parallel (``parallel``, GPT-J), or one before each of these (``parallel_two``, GPT-NeoX), or after each sum
            (``residual``, BERT); before attention and feed-forward, where each sum adds to the norm's output instead of
            its input (``stream``, MiniMax-01).
        residual_scale: factor of each sublayer's output (Granite).
        dropout: rate at which that output is dropped in training.
        stream_scales: factors of the norm's output in the sum behind attention, and in that behind feed-forward layers;
            for ``stream`` alone.
        recurrent: config of a recurrent layer next to attention: both read the same norm, and their outputs are added
            (Falcon-H1); None omits it.
        mixer_scales: factors of the output of attention, and of that recurrent layer.
        dense: config of feed-forward layers next to experts, which then read the sum itself instead of its norm; the
            outputs of both are normed and added (Gemma 4). None omits them; for ``sandwich`` alone.
        keys_of: number of the earlier block whose keys and values the attention reads (Gemma 3n and 4); None for
            attention that projects them.
        layer_input: config of a last sum, with the block's part of the per-layer embeddings; None omits it.
        scaled: whether the block's output is multiplied by a learned number (Gemma 4).
        laurel_rank: rank of a learned residual layer next to attention (LAuReL, arXiv 2411.07501): the norm's output
            ``y`` and ``norm(up(down(y)))`` join the sum, which is divided by the square root of 2; None omits it; for
            ``sandwich`` alone.
        updates: config of alternating updates of several streams, one of which the sublayers read (Gemma 3n); None for
            blocks of one stream.
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
    dense: FeedForwardConfig | None = dataclasses.field(default=None, metadata={LATER: True})
    keys_of: int | None = dataclasses.field(default=None, metadata={LATER: True})
    layer_input: LayerInputConfig | None = dataclasses.field(default=None, metadata={LATER: True})
    scaled: bool = dataclasses.field(default=False, metadata={LATER: True})
    laurel_rank: int | None = dataclasses.field(default=None, metadata={LATER: True})
    updates: AlternatingUpdatesConfig | None = dataclasses.field(default=None, metadata={LATER: True})

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
        self._check_additions()
        first = "emb_dim of norm" if self.attention is None else "d_in of attention"
        width = self.norm.emb_dim if self.attention is None else self.attention.d_in
        wrong = {
            "d_out of attention": getattr(self.attention, "d_out", width),
            "d_in of recurrent": getattr(self.recurrent, "d_in", width),
            "d_out of recurrent": getattr(self.recurrent, "d_out", width),
            "d_in of feed_forward": getattr(self.feed_forward, "d_in", width),
            "d_in of dense": getattr(self.dense, "d_in", width),
            "d_in of updates": getattr(self.updates, "d_in", width),
            "emb_dim of norm": self.norm.emb_dim,
        }
        for name, value in wrong.items():
            if value != width:
                raise ValueError(f"{name} ({value}) must be {first} ({width})")

    def _check_additions(self) -> None:
        """Check the parts that Gemma 3n and 4 add to a block."""
        if self.dense is not None:
            self._require_kind("dense", FeedForwardConfig)
            if self.norms != "sandwich" or not isinstance(self.feed_forward, MixtureOfExpertsConfig):
                raise ValueError("dense must be None unless feed_forward are experts and norms is sandwich")
        if getattr(self.attention, "takes_table", False):
            raise ValueError("position of attention must not be shared: blocks of decoders have their own tables")
        is_shared = getattr(self.attention, "shared", False)
        if self.keys_of is not None:
            check_integer("keys_of", self.keys_of)
            if self.keys_of < 0:
                raise ValueError(f"keys_of ({self.keys_of}) must be at least 0")
        if is_shared != (self.keys_of is not None):
            raise ValueError(f"keys_of ({self.keys_of}) must name a block where attention is shared, and only there")
        if is_shared and self.recurrent is not None:
            raise ValueError("recurrent must be None where attention is shared")
        if self.layer_input is not None:
            self._require_kind("layer_input", LayerInputConfig)
        self._require_bools("scaled")
        if self.laurel_rank is not None:
            self._require_positive_ints("laurel_rank")
            if self.norms != "sandwich":
                raise ValueError(f"norms ({self.norms}) must be sandwich with laurel_rank")
        if self.updates is not None:
            self._require_kind("updates", AlternatingUpdatesConfig)

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
        names = names if self.feed_forward is not None and self.attention is not None else names[:1]
        of_both = () if self.dense is None else ("dense_norm", "experts_norm")
        of_laurel = () if self.laurel_rank is None else ("laurel_norm",)
        return (*names, *of_laurel, *of_both, *(() if self.layer_input is None else ("input_norm",)))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Attention, the recurrent layer next to it, feed-forward layers and norms."""
        return (
            *(below(self.attention_name, self.attention.parameters) if self.attention is not None else ()),
            *(below("linear_att", self.recurrent.parameters) if self.recurrent is not None else ()),
            *(below("ff", self.feed_forward.parameters) if self.feed_forward is not None else ()),
            *(below("dense", self.dense.parameters) if self.dense is not None else ()),
            *self._own_parameters,
            *(row for name in self.norm_names for row in below(name, self.norm.parameters)),
        )

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        parts = [self.attention, self.recurrent, self.feed_forward, self.dense]
        own = sum(math.prod(row.shape) for row in self._own_parameters)
        return sum(part.count for part in parts if part is not None) + own + len(self.norm_names) * self.norm.count

    @property
    def _own_parameters(self) -> tuple[Parameter, ...]:
        """Those of no sublayer: of the layer's input, LAuReL and alternating updates, and the factor of the output."""
        layer_input = () if self.layer_input is None else self.layer_input.parameters_of(self.emb_dim)
        rank, width = self.laurel_rank, self.emb_dim
        laurel = (
            ()
            if rank is None
            else (
                *linear("laurel_down", width, rank, bias=False),
                *linear("laurel_up", rank, width, bias=False),
            )
        )
        updates = () if self.updates is None else below("altup", self.updates.parameters)
        return (*layer_input, *laurel, *updates, *((vector("scalar", 1, "numbers"),) if self.scaled else ()))


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
        position_offset: unused rows before the one of position 0 (OPT has 2), in addition to `num_positions`; of
            `sinusoids`, which position is the first.
        num_token_types: rows of a table of types of tokens, the first of which is added to every embedding (BERT).
        head_activation: the activation behind one more linear layer before the head (BERT); None omits both.
        head_norm: config of a norm behind that activation, or None.
        head_bias: whether a bias is added to the logits (GPT-J).
        norm_tokens: whether `embedding_norm` is of the tokens' embeddings alone, before positions are added
            (Blenderbot-small); of their sum otherwise.
        logit_scale: factor of the logits (Granite).
        logit_softcap: logits become ``logit_softcap * tanh(logits / logit_softcap)`` (Gemma 2).
        dropout: rate at which embeddings are dropped in training.
        layer_embeddings: config of a second table with a row of every token for each block, and of what comes with it;
            None omits them.
        sinusoids: kind of the sines and cosines of positions that are added to the embeddings (CTRL, XGLM), or None.
        head_linear_bias: whether that linear layer before the head has a bias; ModernBERT's has none.
        embedding_width: width of the embeddings and of their norm, where a further linear layer makes vectors of width
            `emb_dim` of them (RemBERT); None omits that layer.
        head_width: width of the output of the linear layer before the head, and of its norm (RemBERT); `emb_dim` by
            default.
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
    layer_embeddings: LayerEmbeddingsConfig | None = dataclasses.field(default=None, metadata={LATER: True})
    sinusoids: Sinusoids | None = dataclasses.field(default=None, metadata={LATER: True})
    head_linear_bias: bool = dataclasses.field(default=True, metadata={LATER: True})
    embedding_width: int | None = dataclasses.field(default=None, metadata={LATER: True})
    head_width: int | None = dataclasses.field(default=None, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("vocab_size", "emb_dim", *(["num_positions"] if self.num_positions else []))
        if self.num_token_types is not None:
            self._require_positive_ints("num_token_types")
        if self.position_offset != 0:
            self._require_positive_ints("position_offset")
            if self.num_positions is None and self.sinusoids is None:
                raise ValueError(f"position_offset ({self.position_offset}) must be 0 without num_positions")
        self._check_widths()
        if self.sinusoids is not None:
            self._require_choice("sinusoids", get_args(Sinusoids))
            if self.num_positions is not None:
                raise ValueError(f"sinusoids ({self.sinusoids}) must be None with num_positions")
            if self.emb_dim % 2:
                raise ValueError(f"emb_dim ({self.emb_dim}) must be even with sinusoids")
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for number, block in enumerate(self.blocks):
            if not isinstance(block, DecoderBlockConfig):
                raise TypeError(f"blocks[{number}] must be a DecoderBlockConfig, got {type(block).__name__}")
            if block.emb_dim != self.emb_dim:
                raise ValueError(f"width of blocks[{number}] ({block.emb_dim}) must be emb_dim ({self.emb_dim})")
        if self.numbers_tokens and self.blocks:
            first, by = self.blocks[0], "num_positions" if self.sinusoids is None else "sinusoids"
            if first.attention is None or first.recurrent is not None:  # its cache counts the tokens
                raise ValueError(f"the first block must have attention alone as its mixer with {by}")
        self._require_bools("tie", "head_bias", "norm_tokens", "head_linear_bias")
        if not self.head_linear_bias and self.head_activation is None:
            raise ValueError(f"head_linear_bias ({self.head_linear_bias}) must be True without head_activation")
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
        widths = {
            "norm": ("emb_dim", self.emb_dim),
            "embedding_norm": ("emb_dim" if self.embedding_width is None else "embedding_width", self.token_width),
            "head_norm": ("emb_dim" if self.head_width is None else "head_width", self.logit_width),
        }
        for name, (rule, width) in widths.items():
            norm = getattr(self, name)
            if norm is not None:
                self._require_kind(name, Norm)
                if norm.emb_dim != width:
                    raise ValueError(f"emb_dim of {name} ({norm.emb_dim}) must be {rule} ({width})")
        self._check_lenders()
        self._check_layer_embeddings()
        streams = {"none" if block.updates is None else str(block.updates.num_streams) for block in self.blocks}
        if len(streams) > 1:
            raise ValueError(
                f"num_streams of updates must be the same in all blocks, got {' and '.join(sorted(streams))}"
            )

    def _check_widths(self) -> None:
        """Check the widths of the embeddings and of the head's input, where these are not those of the blocks."""
        if self.embedding_width is not None:
            self._require_positive_ints("embedding_width")
            for name in ("sinusoids", "layer_embeddings"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} must be None with embedding_width ({self.embedding_width})")
        if self.head_width is not None:
            self._require_positive_ints("head_width")
            if self.head_activation is None:
                raise ValueError(f"head_width ({self.head_width}) must be None without head_activation")
        if self.tie and self.token_width != self.logit_width:
            raise ValueError(
                f"tie ({self.tie}) needs embeddings as wide as the input of the head: {self.token_width} is not "
                f"{self.logit_width}"
            )

    def _check_lenders(self) -> None:
        """Check that blocks without keys read those of an earlier block with the same heads, mask and positions."""
        for number, block in enumerate(self.blocks):
            if block.keys_of is None:
                continue
            name = f"keys_of of blocks[{number}] ({block.keys_of})"
            if block.keys_of >= number:
                raise ValueError(f"{name} must be the number of an earlier block")
            lender, own = self.blocks[block.keys_of].attention, block.attention
            is_alone = self.blocks[block.keys_of].recurrent is None
            if not isinstance(lender, GroupedQueryAttentionConfig) or lender.shared or not is_alone:
                raise ValueError(f"{name} must be a block of grouped-query attention alone, with keys of its own")
            for field in ("num_kv_heads", "head_dim", "value_dim", "mask", "position"):
                theirs, ours = getattr(lender, field), getattr(own, field)
                if theirs != ours:
                    raise ValueError(f"{name} must be a block of the same {field}: {theirs} is not {ours}")

    def _check_layer_embeddings(self) -> None:
        """Check that all blocks take a part of the per-layer embeddings, or none."""
        parts = {None if block.layer_input is None else block.layer_input.dim for block in self.blocks}
        embeddings = self.layer_embeddings
        if embeddings is not None:
            self._require_kind("layer_embeddings", LayerEmbeddingsConfig)
            if embeddings.d_in != self.emb_dim:
                raise ValueError(f"d_in of layer_embeddings ({embeddings.d_in}) must be emb_dim ({self.emb_dim})")
            if embeddings.layers != len(self.blocks):
                raise ValueError(
                    f"layers of layer_embeddings ({embeddings.layers}) must be that of blocks ({len(self.blocks)})"
                )
        wanted = None if embeddings is None else embeddings.dim
        wrong = next((dim for dim in parts if dim != wanted), wanted)
        if wrong != wanted:
            raise ValueError(f"dim of layer_input ({wrong}) must be that of layer_embeddings ({wanted}) in every block")

    @property
    def token_width(self) -> int:
        """Width of a row of the embeddings."""
        return self.emb_dim if self.embedding_width is None else self.embedding_width

    @property
    def logit_width(self) -> int:
        """Width of the input of the head."""
        return self.emb_dim if self.head_width is None else self.head_width

    @property
    def numbers_tokens(self) -> bool:
        """Whether vectors of the tokens' positions are added to the embeddings."""
        return self.num_positions is not None or self.sinusoids is not None

    @property
    def updates(self) -> AlternatingUpdatesConfig | None:
        """Config of the streams that all blocks have; None for one stream."""
        return self.blocks[0].updates if self.blocks else None

    @property
    def lenders(self) -> frozenset[int]:
        """Numbers of the blocks whose keys and values later blocks read."""
        return frozenset(block.keys_of for block in self.blocks if block.keys_of is not None)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Embeddings, the blocks one by one, the last norm, and the head, unless it is tied."""
        return (*self.embedding_parameters, *below_blocks(self.blocks), *self.head_parameters)

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
            table("tok_emb", self.vocab_size, self.token_width, "vocab"),
            *(
                (table("pos_emb", self.num_positions + self.position_offset, self.token_width, "positions"),)
                if self.num_positions
                else ()
            ),
            *((table("type_emb", self.num_token_types, self.token_width, "types"),) if self.num_token_types else ()),
            *(self.layer_embeddings.parameters if self.layer_embeddings is not None else ()),
            *(self.updates.ends if self.updates is not None else ()),
            *(below("emb_norm", self.embedding_norm.parameters) if self.embedding_norm is not None else ()),
            *(
                linear("emb_linear", self.embedding_width, self.emb_dim, bias=True, axes=("mlp", "embed"))
                if self.embedding_width is not None
                else ()
            ),
        )

    @property
    def head_parameters(self) -> tuple[Parameter, ...]:
        """Parameters behind the blocks: the last norm, the layer before the head, and the head."""
        return (
            *(below("final_norm", self.norm.parameters) if self.norm is not None else ()),
            *(
                linear("head_linear", self.emb_dim, self.logit_width, bias=self.head_linear_bias, axes=("mlp", "embed"))
                if self.head_activation is not None
                else ()
            ),
            *(below("head_norm", self.head_norm.parameters) if self.head_norm is not None else ()),
            *((vector("out_bias", self.vocab_size, "vocab"),) if self.head_bias else ()),
            *(
                ()
                if self.tie
                else linear("out_head", self.logit_width, self.vocab_size, bias=False, axes=("vocab", "embed"))
            ),
        )
