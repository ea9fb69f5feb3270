"""gpt-oss: learned sinks, biases everywhere, a window in every other layer, YaRN.

Its tensors as `transformers` names them and as OpenAI's own files do.
"""

from __future__ import annotations

from typing import Any

from ...specs.blocks.feed_forward import ClampedGate, FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import (
    attention_of,
    feed_forward_of,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import make_rotary, read_rotary, write_rotary
from ..rows.attention import SINKS, SPLIT, Table, below
from ..rows.common import HEADS
from ..rows.decoder import FINAL_NORM, LAYER, OURS, attention, decoder, norms
from .grouped import attention_layer, head_dim_of, mask_of, read_sizes, write_heads, write_windows


def _side_by_side(leaf: str) -> Row:
    parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
    return Row(f"qkv.{leaf}", parts, "o ... -> o ...", along="o")


OPENAI: Table = (
    _side_by_side("weight"),
    _side_by_side("bias"),
    Row("out.weight", ("out_proj.weight",)),
    Row("out.bias", ("out_proj.bias",)),
    SINKS,
    Row("norm.scale", reason="the norm before attention"),
)
"""The names of OpenAI's own files, below ``block.0.attn.``: query, key and value are concatenated."""

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of gpt-oss."""
    bias = config.flag("attention_bias")
    kind = config.layer_type(layer, "full_attention" if layer % 2 else "sliding_attention")
    head_dim, base = head_dim_of(config), config.get("rope_theta")
    says_rotary = any(config.get(key) for key in ("rope_parameters", "rope_scaling"))
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim, kind, theta=150000.0)
        if says_rotary
        else make_rotary(config, head_dim, _YARN, 150000.0 if base is None else base),
        mask=mask_of(config, layer, kind),
        sinks=True,
    )
    return attention_layer(layer, spec, {"transformers": (*SPLIT, SINKS), "openai": OPENAI})


def _block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block of gpt-oss: experts whose gates are clipped, and a router with a bias."""
    config.refuse("hidden_act", "silu", "swish")
    clamp = ClampedGate(config.number("swiglu_limit"), config.number("swiglu_alpha"))
    width = config.integer("hidden_size")
    expert = FeedForwardConfig(width, config.integer("intermediate_size"), bias=True, clamp=clamp)
    experts = MixtureOfExpertsConfig(
        expert, config.integer("num_local_experts"), config.integer("num_experts_per_tok"), Router(bias=True)
    )
    return DecoderBlockConfig(attention, experts, read_rms_norm(config))


def write_gpt_oss(config: DecoderConfig, model_type: str) -> dict[str, object]:
    """Return the keys of gpt-oss; unscaled positions are written explicitly, since `_YARN` is the default."""
    attention = attention_of(config, GroupedQueryAttentionConfig)
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    rotary, clamp = write_rotary(attention.position), experts.expert.clamp
    if not rotary.get("rope_scaling"):
        rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": rotary.get("rope_theta")}}
    if clamp is None:
        raise ValueError("clamp of the experts (None) can't be said there")
    return {
        **write_sizes(config),
        **write_heads(attention),
        **write_windows(config),
        **rotary,
        **write_feed_forward(experts.expert),
        **write_rms_norm(config),
        "attention_bias": attention.qkv_bias,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "swiglu_limit": clamp.limit,
        "swiglu_alpha": clamp.alpha,
    }


FAMILIES = (
    Family(
        ("gpt_oss",),
        read_gpt_oss,
        {
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_hidden_layers": 36,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "attention_bias": True,
            "vocab_size": 201088,
            "intermediate_size": 2880,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "tie_word_embeddings": False,
        },
        block=_block,
        write=write_gpt_oss,
        architecture="GptOssForCausalLM",
    ),
)


MXFP4 = "experts in MXFP4, which can't be rearranged; --dequantize makes bfloat16 of them"
"""Reason to refuse experts in their published form."""

_THEIRS, _EXPERT = f"{LAYER}mlp.experts.", f"{OURS}ff.experts.{{j}}."


def _gate_and_up(leaf: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT}{fc}.{leaf}" for fc in ("fc1", "fc2"))


LAYOUT = decoder(
    "hf-gpt-oss",
    "transformers gpt-oss in bfloat16",
    [
        *attention((*SPLIT, SINKS)),
        *(Row(f"{LAYER}mlp.router.{leaf}", (f"{OURS}ff.router.{leaf}",)) for leaf in ("weight", "bias")),
        Row(f"{_THEIRS}gate_up_proj", _gate_and_up("weight"), "o i -> e i (o part)", part="part", stack="e"),
        Row(f"{_THEIRS}gate_up_proj_bias", _gate_and_up("bias"), "o -> e (o part)", part="part", stack="e"),
        Row(f"{_THEIRS}down_proj", (f"{_EXPERT}fc3.weight",), "o i -> e i o", stack="e"),
        Row(f"{_THEIRS}down_proj_bias", (f"{_EXPERT}fc3.bias",), "o -> e o", stack="e"),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    refused=dict.fromkeys(("{rest}_proj_blocks", "{rest}_proj_scales"), MXFP4),
    model_types=("gpt_oss",),
)


_BLOCK, _OURS = "block.{i}.", "trf_blocks.{i}."
_EXPERT_OF_BLOCK = f"{_OURS}ff.experts.{{j}}."


def _fused(leaf: str) -> Row:
    """Return the row of a projection with all query heads, then all key heads, then all value heads."""
    parts = tuple(f"W_{name}.{leaf}" for name in ("query", "key", "value"))
    split = ("num_heads", "...", "...")
    return Row(f"qkv.{leaf}", parts, "(h c) ... -> (h c) ...", along="h", split=split, sizes={"c": "head_dim"})


def _gates_and_ups(leaf: str) -> tuple[str, ...]:
    return tuple(f"{_EXPERT_OF_BLOCK}{fc}.{leaf}" for fc in ("fc1", "fc2"))


OPENAI_LAYOUT = Layout(
    "openai-gpt-oss",
    "OpenAI's own files of gpt-oss in bfloat16",
    [
        Row("embedding.weight", ("tok_emb.weight",)),
        Row("unembedding.weight", ("out_head.weight",)),
        *below(
            (
                _fused("weight"),
                _fused("bias"),
                Row("out.weight", ("out_proj.weight",)),
                Row("out.bias", ("out_proj.bias",)),
                SINKS,
            ),
            f"{_BLOCK}attn.",
            f"{_OURS}att.",
        ),
        *(Row(f"{_BLOCK}mlp.gate.{leaf}", (f"{_OURS}ff.router.{leaf}",)) for leaf in ("weight", "bias")),
        Row(f"{_BLOCK}mlp.mlp1_weight", _gates_and_ups("weight"), "o i -> e (o part) i", part="part", stack="e"),
        Row(f"{_BLOCK}mlp.mlp1_bias", _gates_and_ups("bias"), "o -> e (o part)", part="part", stack="e"),
        Row(f"{_BLOCK}mlp.mlp2_weight", (f"{_EXPERT_OF_BLOCK}fc3.weight",), "o i -> e o i", stack="e"),
        Row(f"{_BLOCK}mlp.mlp2_bias", (f"{_EXPERT_OF_BLOCK}fc3.bias",), "o -> e o", stack="e"),
        Row(f"{_BLOCK}attn.norm.scale", (f"{_OURS}norm1.scale",)),
        Row(f"{_BLOCK}mlp.norm.scale", (f"{_OURS}norm2.scale",)),
        Row("norm.scale", ("final_norm.scale",)),
    ],
    settings={**HEADS, "head_dim": ("head_dim",)},
    refused=dict.fromkeys(("{rest}_weight.blocks", "{rest}_weight.scales"), MXFP4),
    whole=True,
)
