"""Encoders with decoders, as data: BART, Whisper, T5, mT5 and UMT5.

In: the files of this room, which are descriptions as those of `families`, with the sizes of either side. Out: a
`Family` each. The config of a layer of T5 is that of one stack, as `transformers` makes it: with ``is_decoder`` the
decoder's, else the encoder's. In T5 and mT5, all layers use the table of biases that the first layer has; each layer of
UMT5 has its own.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator
from importlib import resources

from ...masks import causal, full
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.cross_attention import CrossAttentionConfig
from ...specs.encoder_decoder_model import (
    ConvolutionsConfig,
    EncoderDecoderBlockConfig,
    EncoderDecoderConfig,
    StackConfig,
)
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.position import RelativeBias
from ...weights.rows import Row
from ..attention_layer import AttentionLayer
from ..derived.description import loads
from ..derived.fields import FieldReader
from ..reading.decoders import ACTIVATIONS, NAMES, WrittenKeys, activation_of
from ..reading.model_config import ConfigFile
from ..rows.common import Table

SIDES = ("encoder", "decoder")

_LETTERS = (("q", "W_query"), ("k", "W_key"), ("v", "W_value"))
_T5: Table = (
    *(Row(f"{letter}.weight", (f"{ours}.weight",)) for letter, ours in (*_LETTERS, ("o", "out_proj"))),
    Row("relative_attention_bias.weight", ("relative_bias",)),
)
_BART: Table = tuple(
    Row(f"{theirs}.{leaf}", (f"{ours}.{leaf}",), optional=(theirs, leaf) == ("k_proj", "bias"))
    for theirs, ours in (*((f"{letter}_proj", ours) for letter, ours in _LETTERS), ("out_proj", "out_proj"))
    for leaf in ("weight", "bias")
)
"""Of Whisper as well, whose keys have no bias."""

_PROJECTION = "feed_forward.projection"
"""Field of the key that names both the activation of T5 and whether it has a gate."""


class PairFamily(FieldReader):
    """A family of encoders with their decoders."""

    whole = EncoderDecoderConfig

    @property
    def depth(self) -> str:
        """Key of the number of layers of a stack."""
        depth = self.description.fields["decoder.num_layers"]
        return depth.otherwise or depth.key

    # ---- a config.json to ours

    def attention(self, config: ConfigFile, layer: int) -> AttentionLayer:
        """Return the attention of a decoder's layer to the encoder, or that of a layer of T5 to its own sequence.

        Raises:
            ValueError: a layer of T5 or mT5 without a table of biases.
        """
        if "position" not in self.description.parts:
            prefix = f"model.decoder.layers.{layer}.encoder_attn."
            return AttentionLayer("CrossAttention", self._cross(config), layer, {"transformers": _BART}, prefix)
        if layer and "position.shared" in self.description.fields:
            raise ValueError(
                f"layer {layer} of {config.model_type} has no relative_attention_bias; only layer 0 is supported"
            )
        side = SIDES[config.flag("is_decoder")]
        prefix = f"{side}.block.{layer}.layer.0.SelfAttention."
        return AttentionLayer(
            "GroupedQueryAttention", self._attention(config, side), layer, {"transformers": _T5}, prefix
        )

    def model(self, config: ConfigFile, names: Collection[str] = ()) -> EncoderDecoderConfig:
        """Return a whole model, as `transformers` 5 runs it.

        BART's bias of the logits is omitted if the tensor is missing, since it is zero; converted ones have our name.
        The head of T5 is tied unless the file has one; ``tie_word_embeddings`` may be true even then.
        """
        self._refuse(config)
        options = self.part(config, "model")
        tie, scaled = bool(options["tie"]), options.get("scaled", "never")
        if scaled == "tied":
            switch = config.get("scale_decoder_outputs")
            scaled = "always" if (tie if switch is None else config.flag("scale_decoder_outputs")) else "never"
        return EncoderDecoderConfig(
            config.integer("vocab_size"),
            self._stack(config, "encoder"),
            self._stack(config, "decoder"),
            tie and not ("own_head" in options and "lm_head.weight" in names),
            "may_bias" in options and any(name.endswith("logits_bias") for name in names),
            logit_scale=config.integer("d_model") ** -0.5 if scaled == "always" else 1.0,
        )

    def _stack(self, config: ConfigFile, side: str) -> StackConfig:
        """Return one side; the dropout behind T5's last norm, and in its gated layers, is that of training alone."""
        own = {**self.part(config, "stack"), **self.part(config, side)}
        width, layers = config.integer("d_model"), own.pop("num_layers")
        block = EncoderDecoderBlockConfig(
            self._attention(config, side),
            self._feed_forward(config, own.pop("hidden_dim")),
            self._norm(config, width=width),
            self._cross(config) if side == "decoder" else None,
            **self.part(config, "block"),
        )
        position, later = block.attention.position, block
        if isinstance(position, RelativeBias) and "position.shared" in self.description.fields:
            later = block.replace(
                attention=block.attention.replace(position=dataclasses.replace(position, shared=True))
            )
        del own["num_heads"]
        if not own.pop("scale_switch", True):
            del own["embedding_scale"]
        if "channels" in own:
            own["convolutions"] = ConvolutionsConfig(own.pop("channels"), width)
        tokens = own.pop("tokens", "shared")  # "own", "shared", or "untied": those of the model if its head is tied
        is_own = tokens == "own" or (tokens == "untied" and not self.value(config, "model.tie"))
        for name in ("embedding_norm", "norm"):
            if name in own:
                own[name] = block.norm
        return StackConfig(
            width,
            (block, *(later,) * (layers - 1)),
            own.pop("num_positions", None),
            vocab_size=config.integer("vocab_size") if is_own else None,
            **own,
        )

    def _attention(self, config: ConfigFile, side: str) -> GroupedQueryAttentionConfig:
        """Return the attention of the first layer of a side to its own sequence."""
        is_decoder, position = side == "decoder", self.part(config, "position")
        position.pop("shared", None)
        return GroupedQueryAttentionConfig(
            config.integer("d_model"),
            self.value(config, f"{side}.num_heads"),
            **self.part(config, "attention"),
            mask=causal() if is_decoder else full(),
            position=RelativeBias(**position, bidirectional=not is_decoder) if position else None,
        )

    def _cross(self, config: ConfigFile) -> CrossAttentionConfig:
        heads = self.value(config, "decoder.num_heads")
        return CrossAttentionConfig(config.integer("d_model"), heads, **self.part(config, "attention"))

    def _feed_forward(self, config: ConfigFile, hidden: int) -> FeedForwardConfig:
        """Return feed-forward layers; keys that `transformers` derives for T5 go before the one that names both."""
        width, options = config.integer("d_model"), self.part(config, "feed_forward")
        if _PROJECTION not in self.description.fields:
            return FeedForwardConfig(width, hidden, **options)
        key, word = self.description.fields[_PROJECTION].key, str(options["projection"])
        kind, *more = word.split("-")
        if len(more) > 1 or (more and kind != "gated"):
            config.refuse(key, "relu", "gated-gelu")
        derived = {
            "dense_act_fn": "gelu_new" if more == ["gelu"] else (more or [kind])[0],
            "is_gated_act": kind == "gated",
        }
        if derived["dense_act_fn"] not in ACTIVATIONS and "dense_act_fn" not in config.given:
            activation_of(config, key)
        read = config.with_given({**derived, **config.given})
        gated, activation = read.flag("is_gated_act"), activation_of(read, "dense_act_fn")
        return FeedForwardConfig(width, hidden, activation, gated=gated, dropout=0.0 if gated else options["dropout"])

    # ---- ours to a config.json

    def write(self, config: EncoderDecoderConfig) -> WrittenKeys:
        """Return the keys of a model; those that both sides have are the decoder's."""
        block, fields = config.decoder.blocks[0], self.description.fields
        if "position" in self.description.parts and not isinstance(block.attention.position, RelativeBias):
            raise ValueError(f"position of decoder.blocks[0] ({block.attention.position}) must be a RelativeBias")
        if "encoder.channels" in fields and config.encoder.convolutions is None:
            raise ValueError("encoder.convolutions (None) must be a ConvolutionsConfig")
        parts: dict[str, object] = {
            "attention": block.attention,
            "position": block.attention.position,
            "feed_forward": block.feed_forward,
            "block": block,
            "norm": block.norm,
            "model": config,
            "stack": config.decoder,
            **{side: _side_of(getattr(config, side)) for side in SIDES},
        }
        written: WrittenKeys = {"is_encoder_decoder": True, "vocab_size": config.vocab_size}
        written |= {"d_model": config.decoder.emb_dim, **dict.fromkeys(self.description.unset)}
        for field, source in fields.items():
            part, _, name = field.partition(".")
            value = getattr(parts[part], name, None)
            if source.key and source.key != "d_model" and value is not None:
                written[source.key] = NAMES[value] if name == "activation" else value
        if "stack.scale_switch" in fields:
            written[fields["stack.scale_switch"].key] = config.decoder.embedding_scale != 1.0
        if _PROJECTION in fields:
            layers = block.feed_forward
            names = NAMES | {"gelu_tanh": "gelu", "gelu": "gelu_python"} if layers.gated else NAMES
            written[fields[_PROJECTION].key] = "gated-" * layers.gated + names[layers.activation]
            if fields["model.scaled"].value == "tied":
                written["scale_decoder_outputs"] = config.logit_scale != 1.0
        return written


def _side_of(stack: StackConfig) -> types.SimpleNamespace:
    """Return the sizes of a side, by the names of fields."""
    block, convolutions = stack.blocks[0], stack.convolutions
    return types.SimpleNamespace(
        num_layers=len(stack.blocks),
        num_heads=block.attention.num_heads,
        hidden_dim=block.feed_forward.hidden_dim,
        num_positions=stack.num_positions,
        channels=None if convolutions is None else convolutions.channels,
    )


def load() -> Iterator[PairFamily]:
    """Yield the families of all files of this room."""
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            yield PairFamily(loads(file.read_text(encoding="utf-8"), str(file)))


FAMILIES = tuple(load())
