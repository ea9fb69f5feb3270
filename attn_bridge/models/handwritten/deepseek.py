"""DeepSeek V2, V3 and V3.2, and GLM-5: keys and values from a latent, next to one key with a rotary position.

Layers have experts, but for the first ones. In V3.2 and GLM-5 an indexer chooses the keys of a query.
"""

from __future__ import annotations

import dataclasses

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import ExpertGroups, MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.lightning_indexer import Indexer
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...specs.position import Pairing
from ...specs.sparse_indexed_attention import SparseIndexedAttentionConfig
from ..derived.experts import is_sparse_there
from ..family import AttentionLayer
from ..reading.decoders import (
    attention_of,
    feed_forward_of,
    has_experts,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import magnitude_of, read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer
from .grouped import check_even_heads

_SPARSE: dict[str, Pairing] = {"deepseek_v32": "half", "glm_moe_dsa": "interleaved"}
"""Model type with an indexer -> which channels of the indexer turn together."""


def read_deepseek(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of DeepSeek.

    The norms of the latents add 1e-6 regardless of ``rms_norm_eps``, as in `transformers` and DeepSeek's own code.
    """
    heads, rope_dim = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim")
    config.refuse("num_key_value_heads", None, heads)
    if config.model_type == "deepseek_v3":  # whose rotary table in transformers has head_dim columns
        config.refuse("head_dim", None, rope_dim)
    nope_dim = config.integer("qk_nope_head_dim")
    interleaved = config.model_type != "deepseek_v3" or config.flag("rope_interleave")
    is_sparse = config.model_type in _SPARSE
    position = read_rotary(config, rope_dim, pairing="interleaved" if interleaved else "half")
    magnitude = magnitude_of(config, position.scaling)
    spec = MultiHeadLatentAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        latent_dim=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        query_dim=config.integer("q_lora_rank") if is_sparse else config.integer_or_none("q_lora_rank"),
        bias=config.flag("attention_bias"),
        position=position,
        scale=(nope_dim + rope_dim) ** -0.5 * magnitude * magnitude,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    if is_sparse:
        spec = SparseIndexedAttentionConfig.of(spec, _indexer(config))
    return attention_of_layer(table("hf-deepseek"), config, layer, spec)


def _indexer(config: ConfigFile) -> Indexer:
    """Return the indexer of every layer; GLM-5's layers may share one layer's choice, which ours do not."""
    layers = config.integer("num_hidden_layers")
    config.refuse("indexer_types", None, ["full"] * layers)
    config.refuse("index_topk_pattern", None, "F" * layers, ["full"] * layers)
    config.refuse("index_topk_freq", None, 0, 1)
    heads, width, top_k = (config.integer(f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
    return Indexer(heads, width, top_k, pairing=_SPARSE[config.model_type])


def read_block(config: ConfigFile, layer: int, attention: MultiHeadLatentAttentionConfig) -> DecoderBlockConfig:
    """Return a block of DeepSeek: dense feed-forward layers in the first blocks, experts in the others."""
    norm, is_3 = read_rms_norm(config), config.model_type != "deepseek_v2"
    bias = "" if is_3 else "mlp_bias"  # of dense and shared layers, which V3 never has
    dense = read_feed_forward(config, bias=bias)
    by_kind = config.model_type in _SPARSE  # V3.2 and GLM-5
    if not is_sparse_there(config, layer) if by_kind else layer < config.integer("first_k_dense_replace", 0):
        return DecoderBlockConfig(attention, dense, norm)
    expert = read_feed_forward(config, width="moe_intermediate_size")
    count, shared = config.integer("n_routed_experts"), config.integer_or_none("n_shared_experts")
    grouped = is_3 or config.get("topk_method") == "group_limited_greedy"
    if not is_3:
        config.refuse("topk_method", "greedy", "group_limited_greedy")
    router = Router(
        "sigmoid" if is_3 else "softmax",
        normalise=is_3 and config.flag("norm_topk_prob"),
        scale=config.positive("routed_scaling_factor"),
        correction=is_3,
        groups=ExpertGroups(config.integer("n_group"), config.integer("topk_group"), "top2" if is_3 else "max")
        if grouped
        else None,
    )
    experts = MixtureOfExpertsConfig(
        expert,
        count,
        config.integer("num_experts_per_tok"),
        router,
        shared=None
        if shared is None
        else dataclasses.replace(expert, hidden_dim=expert.hidden_dim * shared, bias=dense.bias),
    )
    return DecoderBlockConfig(attention, experts, norm)


def write_deepseek(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of DeepSeek V2 or V3."""
    attention = attention_of(config, MultiHeadLatentAttentionConfig)
    is_3, sparse = model_type != "deepseek_v2", has_experts(config)
    if not is_3:
        check_even_heads(config, attention.num_heads)
    dense = "mlp_bias" if not is_3 else ""
    position = attention.position
    return {
        **write_sizes(config),
        **write_latent(attention),
        **write_rotary(position),
        **(
            {"rope_interleave": getattr(position, "pairing", "") == "interleaved"}
            if model_type == "deepseek_v3"
            else {}
        ),
        **(_write_indexer(attention) if model_type in _SPARSE else {}),
        **write_rms_norm(config),
        **({} if all(sparse) else write_feed_forward(feed_forward_of(config, FeedForwardConfig), bias=dense)),
        "first_k_dense_replace": sparse.index(True) if any(sparse) else len(sparse),
        **(write_shared_experts(feed_forward_of(config, MixtureOfExpertsConfig), is_3) if any(sparse) else {}),
    }


def write_latent(attention: MultiHeadLatentAttentionConfig) -> dict[str, object]:
    """Return the keys of latent attention, except its positions."""
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "kv_lora_rank": attention.latent_dim,
        "q_lora_rank": attention.query_dim,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
    }


def _write_indexer(attention: MultiHeadLatentAttentionConfig) -> dict[str, object]:
    if not isinstance(attention, SparseIndexedAttentionConfig):
        raise ValueError("attention without an indexer is no attention there")
    indexer = attention.indexer
    return {
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
    }


def write_shared_experts(experts: MixtureOfExpertsConfig, has_groups: bool) -> dict[str, object]:
    """Return the keys of the experts; `transformers` has no model without shared layers, nor V3 without groups."""
    width, shared, groups = experts.expert.hidden_dim, experts.shared, experts.router.groups
    if shared is None or shared.hidden_dim % width:
        had = None if shared is None else shared.hidden_dim
        raise ValueError(f"width of shared layers ({had}) must be a multiple of the experts' ({width}) there")
    written = {
        **write_feed_forward(experts.expert, width="moe_intermediate_size"),
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": shared.hidden_dim // width,
        "norm_topk_prob": experts.router.normalise,
        "routed_scaling_factor": experts.router.scale,
    }
    if groups is not None or has_groups:
        written |= (
            {"n_group": groups.number, "topk_group": groups.chosen} if groups else {"n_group": 1, "topk_group": 1}
        )
    return (
        written
        if has_groups
        else {**written, "mlp_bias": shared.bias, "topk_method": "greedy" if groups is None else "group_limited_greedy"}
    )
