"""Whole decoders as families say them: blocks, embeddings and head out of a ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ...specs.base import Config
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.encoder_decoder_model import EncoderDecoderConfig
from ...specs.feed_forward import Activation, FeedForwardConfig
from ...specs.rms_norm import RMSNormConfig
from .model_config import ModelConfig

Block = Callable[[ModelConfig, int, Any], DecoderBlockConfig]
"""From a config, the index of a block and the config of its attention to that of the block."""
Model = Callable[[ModelConfig], dict[str, Any]]
"""From a config to what a `DecoderConfig` takes beside its vocabulary, width and blocks."""
Pair = Callable[[ModelConfig, Collection[str]], EncoderDecoderConfig]
"""From a config and the names of the tensors beside it to an encoder with its decoder."""

MAX_LAYERS = 4096
"""Blocks of a model; a config that says more is broken."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def activation_of(config: ModelConfig, key: str = "hidden_act") -> Activation:
    """Return the activation that a key of a config names.

    Raises:
        ValueError: one that is not known.
    """
    value = config.get(key)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(f"{key} ({value!r}) of {config.model_type} must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def read_feed_forward(config: ModelConfig, *, width: str = "intermediate_size", bias: str = "") -> FeedForwardConfig:
    """Return gated feed-forward layers, as Llama has them.

    Args:
        config: the model's.
        width: key of the width between the matrices.
        bias: key of whether they have biases; "" is no.
    """
    return FeedForwardConfig(
        config.integer("hidden_size"),
        config.integer(width),
        activation_of(config),
        bias=config.flag(bias) if bias else False,
    )


def read_rms_norm(config: ModelConfig, *, unit_offset: bool = False) -> RMSNormConfig:
    """Return the norm of a model that has one kind of norms."""
    return RMSNormConfig(config.integer("hidden_size"), config.number("rms_norm_eps"), unit_offset)


def read_llama_block(config: ModelConfig, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block as Llama has it: norms before attention and gated feed-forward layers."""
    return DecoderBlockConfig(attention, read_feed_forward(config, bias="mlp_bias"), read_rms_norm(config))


def read_llama_model(config: ModelConfig) -> dict[str, Any]:
    """Return the rest of a model as Llama has it: a norm behind the blocks, and a head that may be tied."""
    return {"norm": read_rms_norm(config), "tie": config.flag("tie_word_embeddings")}


def make_decoder(
    config: ModelConfig, depth: str, attention: Callable[[ModelConfig, int], Config], block: Block, model: Model
) -> DecoderConfig:
    """Return the config of a whole decoder.

    Args:
        config: the model's.
        depth: key of the number of its blocks.
        attention: from the config and the index of a block to the config of its attention.
        block: to that of the block.
        model: to the rest.
    """
    layers = config.integer(depth)
    if layers > MAX_LAYERS:
        raise ValueError(f"{depth} ({layers}) of {config.model_type} must be at most {MAX_LAYERS}")
    blocks = (block(config, layer, attention(config, layer)) for layer in range(layers))
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        emb_dim=config.integer("hidden_size"),
        blocks=tuple(blocks),
        **model(config),
    )
