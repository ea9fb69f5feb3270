"""MiniMax-01 (arXiv 2501.08313): lightning attention, and in some layers grouped-query attention as in Mixtral.

Outputs of attention and experts are added to the output of the norm before them.
"""

from __future__ import annotations

from ...specs.base import DERIVED
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.lightning_attention import LightningAttentionConfig, layer_decay_rates
from ..family import AttentionLayer
from ..reading.decoders import (
    WrittenKeys,
    attention_of,
    feed_forward_of,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.grouped import KINDS, head_dim_of, mask_of, read_sizes, window_of, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import interleaved_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-minimax")


def read_lightning(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of lightning attention.

    Its norm adds 1e-6 regardless of ``rms_norm_eps``, as in `transformers`.
    """
    config.refuse("hidden_act", "silu", "swish")
    heads = config.integer("num_attention_heads")
    spec = LightningAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        head_dim=config.integer_or_none("head_dim") or DERIVED,
        decay_rates=layer_decay_rates(heads, layer, config.integer("num_hidden_layers")),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def read_full(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mixtral's attention."""
    kind = KINDS[config.integer_or_none("sliding_window") is not None]
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        position=read_rotary(config, head_dim_of(config), kind),
        mask=mask_of(config, layer, kind),
    )
    meta = interleaved_rotary(spec.num_heads, spec.num_kv_heads or spec.num_heads)
    return attention_of_layer(LAYOUT, config, layer, spec, libraries={"meta": meta})


def read_minimax(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of either kind."""
    kind = _kind(config, layer)
    kinds = {"full_attention": read_full, "linear_attention": read_lightning}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


def _kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer; without ``layer_types`` every second one has lightning attention."""
    return config.layer_type(layer, "linear_attention" if layer % 2 else "full_attention")


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of MiniMax-01.

    Raises:
        ValueError: the factors of the outputs differ from each other.
    """
    kind = _kind(config, layer).removesuffix("_attention")
    scale = config.positive("mlp_beta_factor")
    config.refuse(f"{kind}_attn_beta_factor", scale)
    return DecoderBlockConfig(
        attention,
        MixtureOfExpertsConfig(
            read_feed_forward(config), config.integer("num_local_experts"), config.integer("num_experts_per_tok")
        ),
        read_rms_norm(config),
        norms="stream",
        residual_scale=scale,
        stream_scales=(config.positive(f"{kind}_attn_alpha_factor"), config.positive("mlp_alpha_factor")),
    )


def write_minimax(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of MiniMax-01."""
    names = {GroupedQueryAttentionConfig: "full", LightningAttentionConfig: "linear"}
    kinds = [names.get(type(block.attention), "") for block in config.blocks]
    first, experts = config.blocks[0], feed_forward_of(config, MixtureOfExpertsConfig)
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        **write_feed_forward(experts.expert),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "mlp_alpha_factor": first.stream_scales[1],
        "mlp_beta_factor": first.residual_scale,
    }
    for kind in sorted(set(kinds)):
        block = config.blocks[kinds.index(kind)]
        keys |= {
            f"{kind}_attn_alpha_factor": block.stream_scales[0],
            f"{kind}_attn_beta_factor": block.residual_scale,
        }
    if "full" in kinds:
        full = attention_of(config, GroupedQueryAttentionConfig)
        rotary = write_rotary(full.position)
        return {**keys, **write_heads(full), **rotary, "sliding_window": window_of(full.mask)}
    lightning = attention_of(config, LightningAttentionConfig)
    return {**keys, "num_attention_heads": lightning.num_heads, "head_dim": lightning.head_dim}
