"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, and in every fourth layer MLA without positions.

Layers have experts, as in DeepSeek V3, but for the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import ExpertGroups, MixtureOfExpertsConfig, Router
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.kimi_delta_attention import KimiDeltaAttentionConfig
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ..derived.experts import is_sparse_there
from ..derived.latent import write_heads
from ..family import AttentionLayer
from ..reading.decoders import (
    WrittenKeys,
    feed_forward_of,
    has_experts,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-kimi-linear")


_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Key of ``linear_attn_config`` in the published config.json -> that of `transformers`."""


def read_delta(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Kimi Delta Attention."""
    config.refuse("hidden_act", "silu", "swish")  # of the convolution, too
    defaults = {key: config.get(name) for key, name in _KEYS.items()}
    sizes = ConfigFile(config.mapping("linear_attn_config"), config.model_type, defaults)
    spec = KimiDeltaAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=sizes.integer("num_heads"),
        head_dim=sizes.integer("head_dim"),
        conv_size=sizes.integer("short_conv_kernel_size"),
        eps=config.positive("rms_norm_eps"),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def read_latent(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of latent attention, whose shared part of the keys has no position.

    The norms of the latents add 1e-6 regardless of ``rms_norm_eps``, as in `transformers`.
    """
    heads = config.integer("num_attention_heads")
    config.refuse("num_key_value_heads", None, heads)
    spec = MultiHeadLatentAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        latent_dim=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        query_dim=config.integer_or_none("q_lora_rank"),
        bias=config.flag("attention_bias"),
        position=None,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def _published_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer by ``linear_attn_config``, whose indices begin at 1, or else by the default."""
    published = config.mapping("linear_attn_config")
    listed = {
        kind: published[key]
        for key, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention"))
        if isinstance(published.get(key), Sequence)
    }
    if len(listed) < 2:
        return "full_attention" if layer and layer % 4 == 0 else "linear_attention"
    kinds = [kind for kind, numbers in listed.items() if layer + 1 in numbers]
    if len(kinds) != 1:
        raise ValueError(
            f"layer {layer} of {config.model_type} must be in full_attn_layers or in kda_layers of linear_attn_config, "
            f"which count from 1; it is in {' and in '.join(kinds) or 'neither'}"
        )
    return kinds[0]


def read_kimi_linear(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of either kind."""
    kind = config.layer_type(layer, _published_kind(config, layer))
    kinds = {"full_attention": read_latent, "linear_attention": read_delta}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Kimi Linear.

    Raises:
        ValueError: values of keys of the published code that `transformers` passes over.
    """
    config.refuse("moe_layer_freq", None, 1)
    config.refuse("moe_router_activation_func", None, "sigmoid")
    config.refuse("mla_use_nope", None, True)
    norm = read_rms_norm(config)
    if not is_sparse_there(config, layer):
        return DecoderBlockConfig(attention, read_feed_forward(config), norm)
    expert = read_feed_forward(config, width="moe_intermediate_size")
    experts = MixtureOfExpertsConfig(
        expert,
        config.integer("num_experts"),
        config.integer("num_experts_per_tok"),
        Router(
            "sigmoid",
            normalise=config.flag("norm_topk_prob"),
            scale=config.positive("routed_scaling_factor"),
            correction=True,
            groups=ExpertGroups(config.integer("n_group"), config.integer("topk_group"), "top2"),
        ),
        shared=dataclasses.replace(expert, hidden_dim=expert.hidden_dim * config.integer("n_shared_experts")),
    )
    return DecoderBlockConfig(attention, experts, norm)


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model, whose head is never tied."""
    config.refuse("tie_word_embeddings", False, None)  # which transformers passes over
    return {"norm": read_rms_norm(config)}


def write_kimi_linear(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Kimi Linear."""
    names = {MultiHeadLatentAttentionConfig: "full_attention", KimiDeltaAttentionConfig: "linear_attention"}
    sparse = has_experts(config)
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        "hidden_act": "silu",
        "layer_types": [names.get(type(block.attention), "") for block in config.blocks],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
    }
    for block in config.blocks:
        layer = block.attention
        if isinstance(layer, KimiDeltaAttentionConfig):
            keys |= {
                "linear_head_dim": layer.head_dim,
                "linear_num_heads": layer.num_heads,
                "linear_conv_kernel_dim": layer.conv_size,
            }
        elif isinstance(layer, MultiHeadLatentAttentionConfig):
            keys |= {
                **write_heads(layer),
                "kv_lora_rank": layer.latent_dim,
                "q_lora_rank": layer.query_dim,
                "qk_nope_head_dim": layer.nope_dim,
                "qk_rope_head_dim": layer.rope_dim,
                "v_head_dim": layer.value_dim,
                "attention_bias": layer.bias,
            }
    if not all(sparse):
        keys |= write_feed_forward(feed_forward_of(config, FeedForwardConfig))
    if any(sparse):
        keys |= _write_experts(feed_forward_of(config, MixtureOfExpertsConfig))
    return keys


def _write_experts(experts: MixtureOfExpertsConfig) -> WrittenKeys:
    """Return the keys of the experts as published files have them; all models of `transformers` have shared layers."""
    width, shared, groups = experts.expert.hidden_dim, experts.shared, experts.router.groups
    if shared is None or shared.hidden_dim % width:
        had = None if shared is None else shared.hidden_dim
        raise ValueError(f"width of shared layers ({had}) must be a multiple of the experts' ({width}) there")
    return {
        **write_feed_forward(experts.expert, width="moe_intermediate_size"),
        "num_experts": experts.num_experts,
        "num_experts_per_token": experts.top_k,
        "num_shared_experts": shared.hidden_dim // width,
        "moe_renormalize": experts.router.normalise,
        "routed_scaling_factor": experts.router.scale,
        "num_expert_group": groups.number if groups else 1,
        "topk_group": groups.chosen if groups else 1,
    }
