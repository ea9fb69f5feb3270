"""Qwen3-Next and Qwen3.5: in every fourth layer gated attention with norms, partly rotary; else a gated delta net.

Feed-forwards of Qwen3-Next have experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.gated_delta_net import GatedDeltaNetConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import (
    feed_forward_of,
    has_experts,
    read_feed_forward,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import DELTA_NET, Size, Table, below, delta_net_by_head, gated
from ..rows.common import HEADS
from ..rows.decoder import EXPERTS, FINAL_NORM, FURTHER_ROWS, FUSED, LAYER, OURS, attention, decoder, experts, norms
from .grouped import attention_layer, head_dim_of, mask_of, read_sizes, write_heads
from .qwen3_moe import is_dense

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Defaults of `transformers` for missing keys."""


def grouped_table(config: GatedDeltaNetConfig) -> Table:
    """Return the table of Qwen3-Next."""
    return delta_net_by_head(config.num_heads, config.key_width // config.num_heads)


def split_table(config: GatedDeltaNetConfig) -> Table:
    """Return the table of Qwen3.5: query, key and value of all heads in one tensor, the others each in its own."""
    return _split_table(config.key_width)


def _split_table(key_width: Size) -> Table:
    return (
        Row(
            "in_proj_qkv.weight",
            ("W_query.weight", "W_key.weight", "W_value.weight"),
            "o i -> o i",
            along="o",
            split=(key_width, key_width, "..."),
        ),
        Row("in_proj_z.weight", ("W_gate.weight",)),
        Row("in_proj_b.weight", ("W_beta.weight",)),
        Row("in_proj_a.weight", ("W_alpha.weight",)),
        *DELTA_NET,
    )


def _delta_net_reader(table: Callable[[GatedDeltaNetConfig], Table]) -> Callable[[ConfigFile, int], AttentionLayer]:
    """Return a reader of a layer whose tensors are in that table."""

    def read(config: ConfigFile, layer: int) -> AttentionLayer:
        """Return a layer of gated delta net."""
        config.refuse("hidden_act", "silu", "swish")  # its convolution has it as well
        spec = GatedDeltaNetConfig(
            d_in=config.integer("hidden_size"),
            num_heads=config.integer("linear_num_key_heads"),
            num_value_heads=config.integer("linear_num_value_heads"),
            head_dim=config.integer("linear_key_head_dim"),
            value_head_dim=config.integer("linear_value_head_dim"),
            conv_size=config.integer("linear_conv_kernel_dim"),
            eps=config.number("rms_norm_eps"),
        )
        tables = {"transformers": table(spec)}
        return AttentionLayer("GatedDeltaNet", spec, layer, tables, f"model.layers.{layer}.linear_attn.")

    return read


def read_full_attention(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of gated attention."""
    bias = config.flag("attention_bias")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), partial=True, sections=config.model_type != "qwen3_next"),
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), unit_offset=True),
        mask=mask_of(config, layer, "full_attention"),
        gate=True,
    )
    return attention_layer(layer, spec, {"transformers": gated(spec.num_heads)})


def _read(config: ConfigFile, layer: int, table: Callable[[GatedDeltaNetConfig], Table]) -> AttentionLayer:
    """Return a layer of either kind; `table` has the tensors of a gated delta net."""
    is_full = (layer + 1) % config.integer("full_attention_interval") == 0
    kind = config.layer_type(layer, "full_attention" if is_full else "linear_attention")
    kinds = {"full_attention": read_full_attention, "linear_attention": _delta_net_reader(table)}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


def read_qwen3_next(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3-Next."""
    return _read(config, layer, grouped_table)


def read_qwen3_5(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Qwen3.5."""
    return _read(config, layer, split_table)


def _block(config: ConfigFile, layer: int, attention: Any) -> DecoderBlockConfig:
    """Return a block: experts, with gated shared layers; or dense layers.

    Qwen3.5 has one kind throughout, and normalises the weights of the experts regardless of ``norm_topk_prob``.
    """
    norm, is_next = read_rms_norm(config, unit_offset=True), config.model_type == "qwen3_next"
    if is_dense(config, layer) if is_next else config.model_type == "qwen3_5_text":
        return DecoderBlockConfig(attention, read_feed_forward(config), norm)
    expert = read_feed_forward(config, width="moe_intermediate_size")
    experts = MixtureOfExpertsConfig(
        expert,
        config.integer("num_experts"),
        config.integer("num_experts_per_tok"),
        Router(normalise=config.flag("norm_topk_prob") or not is_next),
        shared=read_feed_forward(config, width="shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return DecoderBlockConfig(attention, experts, norm)


def _model(config: ConfigFile) -> dict[str, object]:
    return {"norm": read_rms_norm(config, unit_offset=True), "tie": config.flag("tie_word_embeddings")}


def write_qwen3_next(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of Qwen3-Next or Qwen3.5."""
    sparse = has_experts(config)
    keys: dict[str, Any] = {"layer_types": [], "decoder_sparse_step": 1}
    keys["mlp_only_layers"] = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]
    for block in config.blocks:
        attention = block.attention
        is_linear = isinstance(attention, GatedDeltaNetConfig)
        keys["layer_types"].append("linear_attention" if is_linear else "full_attention")
        if isinstance(attention, GatedDeltaNetConfig):
            keys |= {
                "linear_num_key_heads": attention.num_heads,
                "linear_num_value_heads": attention.num_value_heads,
                "linear_key_head_dim": attention.head_dim,
                "linear_value_head_dim": attention.value_head_dim,
                "linear_conv_kernel_dim": attention.conv_size,
            }
        elif isinstance(attention, GroupedQueryAttentionConfig):
            keys |= {**write_heads(attention), **write_rotary(attention.position, attention.head_dim)}
            keys["attention_bias"] = attention.qkv_bias
    keys |= {**write_sizes(config), **write_rms_norm(config)}
    if not all(sparse):
        keys |= write_feed_forward(feed_forward_of(config, FeedForwardConfig))
    if model_type == "qwen3_5_text":
        return keys
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    if experts.shared is None:
        raise ValueError("shared layers of the experts (None) can't be left out there")
    return {
        **keys,
        **write_feed_forward(experts.shared, width="shared_expert_intermediate_size"),
        **write_feed_forward(experts.expert, width="moe_intermediate_size"),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
    }


_EXPERTS: dict[str, object] = {
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}

_ALIKE: dict[str, object] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    **DEFAULTS,
}

FAMILIES = (
    Family(
        ("qwen3_next",),
        read_qwen3_next,
        {**_ALIKE, **_EXPERTS, "hidden_size": 2048, "num_hidden_layers": 48},
        block=_block,
        model=_model,
        write=write_qwen3_next,
        architecture="Qwen3NextForCausalLM",
    ),
    Family(
        ("qwen3_5_text",),
        read_qwen3_5,
        {
            **_ALIKE,
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        block=_block,
        model=_model,
        write=write_qwen3_next,
        architecture="Qwen3_5ForCausalLM",
    ),
    Family(
        ("qwen3_5_moe_text",),
        read_qwen3_5,
        {
            **_ALIKE,
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        },
        block=_block,
        model=_model,
        write=write_qwen3_next,
        architecture="Qwen3_5MoeForCausalLM",
    ),
)


def _layout(name: str, title: str, delta_net: Table, marks: tuple[str, ...], model_types: tuple[str, ...]) -> Layout:
    """Return the layout of a model with these rows of a gated delta net."""
    return decoder(
        name,
        title,
        [
            *below(delta_net, f"{LAYER}linear_attn.", f"{OURS}linear_att.", branch="attention/linear"),
            *attention(gated("num_heads"), required=("q_norm", "k_norm"), branch="attention/full"),
            *experts("shared_expert"),
            Row(f"{LAYER}mlp.shared_expert_gate.weight", (f"{OURS}ff.shared_gate.weight",), branch=EXPERTS),
            *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
            FINAL_NORM,
            *FURTHER_ROWS,
        ],
        settings={**FUSED, **HEADS, **{name: (name,) for name in ("linear_num_key_heads", "linear_key_head_dim")}},
        defaults={"fused": 0},
        marks=marks,
        model_types=model_types,
    )


_SIZES = ("linear_num_key_heads", "linear_key_head_dim")

LAYOUTS = (
    _layout(
        "hf-qwen3-next",
        "transformers Qwen3-Next",
        delta_net_by_head(*_SIZES),
        ("linear_attn.in_proj_qkvz.", "shared_expert_gate."),
        ("qwen3_next",),
    ),
    _layout(
        "hf-qwen3-5",
        "transformers Qwen3.5",
        _split_table("*".join(_SIZES)),
        ("linear_attn.in_proj_qkv.", "linear_attn.in_proj_a."),
        ("qwen3_5_text", "qwen3_5_moe_text"),
    ),
)
"""Tensors of both families; a model without a gated delta net, but with experts, is one of Qwen3-Next."""
