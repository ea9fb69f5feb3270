"""Mamba (arXiv 2312.00752) and Falcon Mamba, which brings steps, keys and queries to mean square 1."""

from __future__ import annotations

import dataclasses

from ...specs.base import DERIVED
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.mamba import LatentNorms, MambaConfig
from ...specs.rms_norm import RMSNormConfig
from ..family import AttentionLayer
from ..reading.decoders import WrittenKeys, attention_of, write_sizes
from ..reading.model_config import ConfigFile
from ..tables import table
from ..tables.layers import attention_of_layer


@dataclasses.dataclass(frozen=True)
class SelectiveKeys:
    """Keys of a config for the sizes and biases of a layer of Mamba.

    Attributes:
        expand: factor of the model's width that makes the channels.
        state: width of the state of a channel.
        rank: width of the latent steps; ``auto`` is a sixteenth of the model's width.
        conv: taps of the convolution.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections of the input and of the output have biases.
        latent_norms: norms of steps, keys and queries, as in a `MambaConfig`.
        eps: epsilon of these norms; "" without any.
    """

    expand: str = "expand"
    state: str = "state_size"
    rank: str = "time_step_rank"
    conv: str = "conv_kernel"
    conv_bias: str = "use_conv_bias"
    bias: str = "use_bias"
    latent_norms: LatentNorms = "none"
    eps: str = ""


KEYS = {"mamba": SelectiveKeys(), "falcon_mamba": SelectiveKeys(latent_norms="plain", eps="mixer_rms_eps")}
"""Model type -> keys of its layers."""


def write_layer(config: DecoderConfig, keys: SelectiveKeys) -> WrittenKeys:
    """Return the keys that `read_config` reads, of the first layer of Mamba.

    Raises:
        ValueError: no layer of the model is one, or its channels do not fit.
    """
    layer = attention_of(config, MambaConfig)
    if layer.width % layer.d_in:
        raise ValueError(f"width ({layer.width}) must be a multiple of d_in ({layer.d_in}) there")
    return {
        keys.expand: layer.width // layer.d_in,
        keys.state: layer.state_size,
        keys.rank: layer.step_rank,
        keys.conv: layer.conv_size,
        keys.conv_bias: layer.conv_bias,
        keys.bias: layer.bias,
        **({keys.eps: layer.eps} if keys.eps else {}),
    }


def read_config(config: ConfigFile, keys: SelectiveKeys) -> MambaConfig:
    """Return the config of a layer of Mamba."""
    config.refuse("hidden_act", "silu", "swish")
    d_in = config.integer("hidden_size")
    return MambaConfig(
        d_in=d_in,
        width=config.integer(keys.expand) * d_in,
        state_size=config.integer(keys.state),
        step_rank=DERIVED if config.get(keys.rank) == "auto" else config.integer(keys.rank),
        conv_size=config.integer(keys.conv),
        conv_bias=config.flag(keys.conv_bias),
        bias=config.flag(keys.bias),
        latent_norms=keys.latent_norms,
        eps=config.positive(keys.eps) if keys.eps else MambaConfig.eps,
    )


def read_mamba(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mamba, or of Falcon Mamba."""
    return attention_of_layer(table("hf-mamba"), config, layer, read_config(config, KEYS[config.model_type]))


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("layer_norm_epsilon"))


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Mamba, which has no feed-forward layers."""
    return DecoderBlockConfig(attention, None, _norm(config))


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: its norm, and a head that may be tied."""
    return {"norm": _norm(config), "tie": config.flag("tie_word_embeddings")}


def write_mamba(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Mamba, or of Falcon Mamba."""
    keys = {"layer_norm_epsilon": config.blocks[0].norm.eps, "hidden_act": "silu"}
    return {**write_sizes(config), **keys, **write_layer(config, KEYS[model_type])}
