"""Encoders and decoders as BART, Whisper and T5 have them: a config of both stacks, and of what stands around them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import numpy as np

from ..validation import is_floating, show
from .base import LATER, Config, Parameter, convolution, linear, matrix
from .blocks.feed_forward import Activation, FeedForwardConfig
from .cross_attention import CrossAttentionConfig
from .decoder_model import Norm
from .grouped_query_attention import GroupedQueryAttentionConfig
from .model import ModelConfig, Shape, accepts_use_cache, below, below_blocks, check_ids, count_blocks, table
from .position import RelativeBias, sinusoid_rates

Side = Literal["torch", "flax"]
Place = Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class ConvolutionsConfig(Config):
    """Two convolutions along the frames of a signal, an activation behind each; the second one is strided.

    Attributes:
        channels: numbers of a frame, such as the mel bands of a spectrogram.
        emb_dim: width of the output.
        size: frames that one of them sees, an odd number; the ends are padded with zeros.
        stride: frames per vector of the second one.
        activation: as in feed-forward layers.
    """

    channels: int
    emb_dim: int
    size: int = 3
    stride: int = 2
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        self._require_positive_ints("channels", "emb_dim", "size", "stride")
        self._require_choice("activation", get_args(Activation))
        if self.size % 2 == 0:
            raise ValueError(f"size ({self.size}) must be odd")

    def positions(self, frames: int) -> int:
        """Return the number of vectors that the convolutions make of `frames`."""
        return -(-frames // self.stride)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Weights and biases of both."""
        return (
            *convolution("conv1", self.channels, self.emb_dim, self.size),
            *convolution("conv2", self.emb_dim, self.emb_dim, self.size),
        )


@dataclasses.dataclass(frozen=True)
class EncoderDecoderBlockConfig(Config):
    """Attention, in a decoder attention to the encoder's output, and feed-forward layers, each added to its input.

    Attributes:
        attention: config of the attention within the sequence; its mask determines whether it is causal.
        feed_forward: config of the feed-forward layers.
        norm: config of every norm of the block.
        cross_attention: config of the attention to the encoder's output; None in an encoder.
        norms: whether norms are in front of each sublayer (``pre``), or behind the sum of it and its input (``post``,
            as in arXiv 1706.03762).
        dropout: rate at which a sublayer's output is dropped in training.
    """

    attention: GroupedQueryAttentionConfig
    feed_forward: FeedForwardConfig
    norm: Norm
    cross_attention: CrossAttentionConfig | None = None
    norms: Place = "pre"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._require_kind("attention", GroupedQueryAttentionConfig)
        self._require_kind("feed_forward", FeedForwardConfig)
        self._require_kind("norm", Norm)
        self._require_choice("norms", get_args(Place))
        self._require_rates("dropout")
        cross = self.cross_attention
        if cross is not None:
            self._require_kind("cross_attention", CrossAttentionConfig)
        widths = {
            "d_out of attention": self.attention.d_out,
            "d_in of feed_forward": self.feed_forward.d_in,
            "emb_dim of norm": self.norm.emb_dim,
            **(
                {}
                if cross is None
                else {"d_in of cross_attention": cross.d_in, "d_out of cross_attention": cross.d_out}
            ),
        }
        for name, value in widths.items():
            if value != self.emb_dim:
                raise ValueError(f"{name} ({value}) must be d_in of attention ({self.emb_dim})")

    @property
    def emb_dim(self) -> int:
        """Width of input and output."""
        return self.attention.d_in

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Names of the norms: of attention, of cross attention where there is one, of the feed-forward layers."""
        return ("norm1", "norm2") if self.cross_attention is None else ("norm1", "norm2", "norm3")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Both attentions, feed-forward layers and norms."""
        cross = self.cross_attention
        return (
            *below("att", self.attention.parameters),
            *(() if cross is None else below("cross_att", cross.parameters)),
            *below("ff", self.feed_forward.parameters),
            *(row for name in self.norm_names for row in below(name, self.norm.parameters)),
        )


@dataclasses.dataclass(frozen=True)
class StackConfig(Config):
    """An encoder or a decoder: embeddings or convolutions of its input, positions, blocks, norms around them.

    Attributes:
        emb_dim: width of the blocks.
        blocks: config of every block.
        num_positions: the most tokens of a sequence, or vectors behind the convolutions; None for as many as there are,
            without a table of positions (T5).
        vocab_size: number of tokens of a separate table; None if it uses that of the model, or convolutions.
        convolutions: config of convolutions of frames that replace the table of tokens (Whisper's encoder).
        position_offset: rows of the table of positions before that of position 0 (2 in BART).
        learned_positions: whether training changes the positions; otherwise they are sines (Whisper's encoder).
        embedding_scale: factor of the vectors of tokens.
        embedding_norm: config of a norm before the blocks (BART).
        norm: config of a norm behind the blocks (Whisper).
        dropout: rate at which the input of the blocks is dropped in training.
    """

    emb_dim: int
    blocks: tuple[EncoderDecoderBlockConfig, ...]
    num_positions: int | None
    vocab_size: int | None = None
    convolutions: ConvolutionsConfig | None = None
    position_offset: int = 0
    learned_positions: bool = True
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    norm: Norm | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        optional = (name for name in ("num_positions", "vocab_size") if getattr(self, name) is not None)
        self._require_positive_ints("emb_dim", *optional)
        if isinstance(self.position_offset, bool) or not isinstance(self.position_offset, int):
            raise TypeError(f"position_offset must be an integer, got {type(self.position_offset).__name__}")
        if self.position_offset < 0:
            raise ValueError(f"position_offset ({self.position_offset}) must be at least 0")
        self._require_bools("learned_positions")
        if self.num_positions is None:
            for name, usual in (("position_offset", 0), ("learned_positions", True), ("convolutions", None)):
                if getattr(self, name) != usual:
                    raise ValueError(f"{name} ({getattr(self, name)}) must be {usual} without num_positions")
        self._require_positive_number("embedding_scale")
        self._require_rates("dropout")
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for number, block in enumerate(self.blocks):
            if not isinstance(block, EncoderDecoderBlockConfig):
                raise TypeError(f"blocks[{number}] must be a EncoderDecoderBlockConfig, got {type(block).__name__}")
            if block.emb_dim != self.emb_dim:
                raise ValueError(f"width of blocks[{number}] ({block.emb_dim}) must be emb_dim ({self.emb_dim})")
            self._check_table(number, block.attention)
        for name, kinds in (("convolutions", ConvolutionsConfig), ("embedding_norm", Norm), ("norm", Norm)):
            part = getattr(self, name)
            if part is not None:
                self._require_kind(name, kinds)
                if part.emb_dim != self.emb_dim:
                    raise ValueError(f"emb_dim of {name} ({part.emb_dim}) must be emb_dim ({self.emb_dim})")
        if self.convolutions is not None and self.vocab_size is not None:
            raise ValueError(f"vocab_size ({self.vocab_size}) must be None beside convolutions")
        if not self.learned_positions and self.emb_dim % 2:
            raise ValueError(f"emb_dim ({self.emb_dim}) must be even for positions that are not learned")

    def _check_table(self, number: int, attention: GroupedQueryAttentionConfig) -> None:
        """Check that a block without a table of relative biases can read that of the first."""
        if attention.takes_table:
            assert isinstance(attention.position, RelativeBias), "takes a table"
            first, own = self.blocks[0].attention, dataclasses.replace(attention.position, shared=False)
            if (first.position, first.num_heads) != (own, attention.num_heads):
                raise ValueError(
                    f"position of blocks[{number}] shares the table of blocks[0], whose attention must have "
                    f"{attention.num_heads} heads and {own}, got {first.num_heads} and {first.position}"
                )

    @property
    def lends_table(self) -> bool:
        """Whether later blocks take the table of relative biases of the first block."""
        return any(block.attention.takes_table for block in self.blocks)

    @property
    def reads_shared(self) -> bool:
        """Whether its tokens are rows of the model's table."""
        return self.vocab_size is None and self.convolutions is None

    def sines(self) -> np.ndarray:
        """Return the table of positions that are not learned: sines of them, then cosines, of ever longer waves.

        As Whisper (arXiv 2212.04356) has them, from a length of ``2 pi`` to one of ``2 pi 10000``.
        """
        assert self.num_positions is not None, "checked"
        rates = sinusoid_rates("tensor2tensor", self.emb_dim)
        angles = (np.arange(self.num_positions + self.position_offset) - self.position_offset)[:, None] * rates
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Convolutions or embeddings, positions, the norm before the blocks, the blocks, and the norm behind them."""
        return (
            *(self.convolutions.parameters if self.convolutions is not None else ()),
            *((table("tok_emb", self.vocab_size, self.emb_dim, "vocab"),) if self.vocab_size is not None else ()),
            *(
                (table("pos_emb", self.num_positions + self.position_offset, self.emb_dim, "positions"),)
                if self.num_positions is not None
                else ()
            ),
            *(below("emb_norm", self.embedding_norm.parameters) if self.embedding_norm is not None else ()),
            *below_blocks(self.blocks),
            *(below("final_norm", self.norm.parameters) if self.norm is not None else ()),
        )


@accepts_use_cache
@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    """An encoder, a decoder that attends to its output, and the head.

    Attributes:
        vocab_size: number of tokens that the decoder reads and writes.
        encoder: config of the encoder.
        decoder: config of the decoder.
        tie: whether the head's matrix is the table of the decoder's tokens.
        logits_bias: whether numbers that training does not change are added to the logits (BART).
        logit_scale: factor of the logits (T5).
    """

    vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    tie: bool = True
    logits_bias: bool = False
    logit_scale: float = dataclasses.field(default=1.0, metadata={LATER: True})

    def __post_init__(self) -> None:
        self._require_positive_ints("vocab_size")
        self._require_kind("encoder", StackConfig)
        self._require_kind("decoder", StackConfig)
        self._require_bools("tie", "logits_bias")
        self._require_positive_number("logit_scale")
        if self.decoder.convolutions is not None:
            raise ValueError("convolutions of decoder must be None: it reads tokens")
        if self.decoder.vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"vocab_size of decoder ({self.decoder.vocab_size}) must be vocab_size ({self.vocab_size})"
            )
        if self.encoder.reads_shared and self.encoder.emb_dim != self.table_width:
            raise ValueError(
                f"emb_dim of encoder ({self.encoder.emb_dim}) must be that of decoder ({self.table_width})"
            )
        if not self.decoder.blocks:
            raise ValueError("blocks of decoder must hold at least 1 block")
        for number, block in enumerate(self.encoder.blocks):
            if block.cross_attention is not None:
                raise ValueError(f"cross_attention of encoder.blocks[{number}] must be None")
        for number, block in enumerate(self.decoder.blocks):
            if block.cross_attention is None:
                raise ValueError(
                    f"cross_attention of decoder.blocks[{number}] must be a CrossAttentionConfig, got None"
                )
            if block.cross_attention.d_context != self.encoder.emb_dim:
                raise ValueError(
                    f"d_context of decoder.blocks[{number}] ({block.cross_attention.d_context}) must be emb_dim of "
                    f"encoder ({self.encoder.emb_dim})"
                )

    @property
    def table_width(self) -> int:
        """Width of the table that encoder and decoder share, and of the head."""
        return self.decoder.emb_dim

    @property
    def num_positions(self) -> int | None:
        """The most tokens that the decoder reads; None for any number."""
        return self.decoder.num_positions

    @property
    def is_shared(self) -> bool:
        """Whether the model has a table of tokens that the encoder or the decoder reads, or both."""
        return self.encoder.reads_shared or self.decoder.reads_shared

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The shared table, encoder, decoder, and the head, unless it is tied, with its bias."""
        return (
            *((table("tok_emb", self.vocab_size, self.table_width, "vocab"),) if self.is_shared else ()),
            *below("encoder", self.encoder.parameters),
            *below("decoder", self.decoder.parameters),
            *(
                ()
                if self.tie
                else linear("out_head", self.table_width, self.vocab_size, bias=False, axes=("vocab", "embed"))
            ),
            *((matrix("logits_bias", 1, self.vocab_size, ("one", "vocab")),) if self.logits_bias else ()),
        )

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        (first, *more), encoder = self.decoder.blocks, self.encoder.blocks
        short = self.replace(encoder=self.encoder.replace(blocks=()), decoder=self.decoder.replace(blocks=(first,)))
        return sum(math.prod(row.shape) for row in short.parameters) + count_blocks([*more, *encoder])

    def tied_weights(self, side: Side) -> dict[str, str]:
        """Return redundant name in a checkpoint -> name of the weight that it is tied to."""
        leaf, head = ("weight", "out_head.weight") if side == "torch" else ("embedding", "out_head.kernel")
        stacks = {"encoder": self.encoder, "decoder": self.decoder}
        ties = {f"{name}.tok_emb.{leaf}": f"tok_emb.{leaf}" for name, stack in stacks.items() if stack.reads_shared}
        if self.tie:
            ties[head] = f"tok_emb.{leaf}" if self.decoder.reads_shared else f"decoder.tok_emb.{leaf}"
        return ties

    def unread_weights(self, side: Side) -> tuple[str, ...]:
        """Return the names that a checkpoint may hold and the model does not read: a table that both sides have."""
        return () if self.is_shared else ("tok_emb.weight" if side == "torch" else "tok_emb.embedding",)

    def check_source(self, dtype: str, shape: Shape) -> int:
        """Check the encoder's input, and return how many vectors the encoder makes of it.

        Raises:
            TypeError: tokens that are not integers, features that are not floating point.
            ValueError: a shape that does not fit, no token, or more than the encoder has positions for.
        """
        encoder = self.encoder
        if encoder.convolutions is None:
            longest = encoder.num_positions
            check_ids(dtype, shape, longest=longest, longest_name="num_positions of encoder", name="source")
            return shape[1]
        assert encoder.num_positions is not None, "checked"
        channels, stride = encoder.convolutions.channels, encoder.convolutions.stride
        if not is_floating(dtype):
            raise TypeError(f"source must have a floating-point dtype, got {dtype}")
        if len(shape) != 3 or shape[1] != channels:
            raise ValueError(f"source must have shape (B, {channels}, frames), got {show(shape)}")
        if shape[0] < 1 or shape[2] < 1:
            raise ValueError(f"source must hold at least 1 frame, got shape {show(shape)}")
        if shape[2] > stride * encoder.num_positions:
            raise ValueError(f"number of frames ({shape[2]}) must be at most {stride * encoder.num_positions}")
        return encoder.convolutions.positions(shape[2])


def check_batch(source: Shape, tokens: Shape) -> None:
    """Check that every sequence of tokens has a source.

    Raises:
        ValueError: the batch sizes differ.
    """
    if source[0] != tokens[0]:
        raise ValueError(f"batch of source ({source[0]}) must be the batch of tokens ({tokens[0]})")


def check_source_mask(dtype: str, shape: Shape, wanted: Shape) -> None:
    """Check the mask of a source that is given with it: bool ``(B, S)``.

    Raises:
        TypeError: `dtype` is not bool.
        ValueError: another shape.
    """
    if dtype != "bool":
        raise TypeError(f"source_mask must be bool, got {dtype}")
    if shape != wanted:
        raise ValueError(f"source_mask must have shape (B, S) = {show(wanted)}, got {show(shape)}")


def check_is_encoded(is_encoded: bool) -> None:
    """Check that a call without a source finds one in its cache.

    Raises:
        ValueError: it doesn't.
    """
    if not is_encoded:
        raise ValueError("source (None) must be given, or a cache that holds one")
