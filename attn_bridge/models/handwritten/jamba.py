"""Jamba (arXiv 2403.19887): Mamba with normalised steps, keys and queries, and attention without positions.

Feed-forward layers are dense, or experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba import MambaConfig
from ..family import AttentionLayer
from ..reading.decoders import (
    WrittenKeys,
    has_experts,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.grouped import read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..tables import table
from ..tables.layers import attention_of_layer
from .mamba import SelectiveKeys, read_config, write_layer

LAYOUT = table("hf-jamba")

_KEYS = SelectiveKeys(
    expand="mamba_expand",
    state="mamba_d_state",
    rank="mamba_dt_rank",
    conv="mamba_d_conv",
    conv_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
    latent_norms="scaled",
    eps="rms_norm_eps",
)


def _recurs(config: ConfigFile, layer: int, part: str) -> bool:
    """Return whether a layer has a part, ``attn`` or ``expert``, that comes once in every period.

    Raises:
        ValueError: the offset is not within the period.
    """
    period, offset = config.integer(f"{part}_layer_period"), config.integer(f"{part}_layer_offset", 0)
    if offset >= period:
        raise ValueError(f"{part}_layer_offset ({offset}) must be less than {part}_layer_period ({period})")
    return layer % period == offset


def read_jamba(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of attention or of Mamba."""
    if not _recurs(config, layer, "attn"):
        return attention_of_layer(LAYOUT, config, layer, read_config(config, _KEYS))
    spec = GroupedQueryAttentionConfig(**read_sizes(config), position=None)
    return attention_of_layer(LAYOUT, config, layer, spec)


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Jamba, whose router takes the softmax over all experts; one expert is a dense layer."""
    layers: FeedForwardConfig | MixtureOfExpertsConfig = read_feed_forward(config)
    if _recurs(config, layer, "expert") and config.integer("num_experts") > 1:
        layers = MixtureOfExpertsConfig(
            read_feed_forward(config),
            config.integer("num_experts"),
            config.integer("num_experts_per_tok"),
            Router(normalise=False),
        )
    return DecoderBlockConfig(attention, layers, read_rms_norm(config))


def _write_period(part: str, layers: Sequence[bool]) -> Mapping[str, int]:
    """Return the keys of the layers with a part.

    Raises:
        ValueError: the distances between them differ.
    """
    numbers = [number for number, has_part in enumerate(layers) if has_part]
    offset = numbers[0] if numbers else len(layers)
    period = numbers[1] - offset if len(numbers) > 1 else len(layers) + 1
    if offset >= period or [number % period == offset for number in range(len(layers))] != list(layers):
        raise ValueError(f"layers with {part} ({', '.join(map(str, numbers))}) must be one in every period there")
    return {f"{part}_layer_period": period, f"{part}_layer_offset": offset}


def write_jamba(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Jamba."""
    is_full = [isinstance(block.attention, GroupedQueryAttentionConfig) for block in config.blocks]
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        **_write_period("attn", is_full),
        **_write_period("expert", has_experts(config)),
        "num_experts": 1,
    }
    for block in config.blocks:
        if isinstance(block.attention, GroupedQueryAttentionConfig):
            keys |= write_heads(block.attention)
        layers = block.feed_forward
        if isinstance(layers, MixtureOfExpertsConfig):
            keys |= {"num_experts": layers.num_experts, "num_experts_per_tok": layers.top_k}
            layers = layers.expert
        keys |= write_feed_forward(layers) if layers is not None else {}
    if any(isinstance(block.attention, MambaConfig) for block in config.blocks):
        keys |= write_layer(config, _KEYS)
    return keys
