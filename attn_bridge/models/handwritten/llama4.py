"""Llama 4: most layers attend within chunks and have rotary positions; the others attend to all earlier tokens.

Layers without positions scale their queries by a temperature (arXiv 2501.19399). The router's weights multiply the
inputs of experts.
"""

from __future__ import annotations

from ...masks import Mask, causal, chunked
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm, Temperature
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.decoders import (
    WrittenKeys,
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
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT
from ..rows.decoder import FINAL_NORM, LAYER, OURS, attention, decoder, feed_forward, norms
from .grouped import attention_layer, head_dim_of, is_rotated, read_sizes, write_heads

_KINDS = ("full_attention", "chunked_attention")
"""Names of a layer's kind: without and with chunks."""

_ROUTER = Router("sigmoid", normalise=False, corrects="logits")
_FEED_FORWARD = "feed_forward"
_EXPERTS, _DENSE = "feed-forward/experts", "feed-forward/dense"


def read_llama4(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Llama 4."""
    bias, turns = config.flag("attention_bias"), is_rotated(config, layer)
    tuned = config.flag("attn_temperature_tuning") and not turns
    has_norms = config.flag("use_qk_norm") and turns
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config), theta=500000.0, pairing="interleaved") if turns else None,
        qk_norm=QKNorm("head", config.number("rms_norm_eps"), rotated=True, affine=False) if has_norms else None,
        mask=_mask(config, layer, config.layer_type(layer, _KINDS[turns])),
        temperature=Temperature(config.number("attn_scale"), config.integer("floor_scale"), 1) if tuned else None,
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def _mask(config: ConfigFile, layer: int, kind: str) -> Mask:
    """Return the mask of a layer; `transformers` needs the size of a chunk even if no layer has chunks."""
    size = config.integer("attention_chunk_size")
    if kind not in _KINDS:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(_KINDS)}")
    return chunked(size) if kind == _KINDS[True] else causal()


def _block(config: ConfigFile, layer: int, attention: GroupedQueryAttentionConfig) -> DecoderBlockConfig:
    """Return a block: experts, and layers of the same width for every token, or wider dense layers."""
    norm, expert = read_rms_norm(config), read_feed_forward(config)
    if layer not in _sparse_layers(config):
        return DecoderBlockConfig(attention, read_feed_forward(config, width="intermediate_size_mlp"), norm)
    count, chosen = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
    experts = MixtureOfExpertsConfig(expert, count, chosen, _ROUTER, shared=expert, weighs="inputs")
    return DecoderBlockConfig(attention, experts, norm)


def _sparse_layers(config: ConfigFile) -> list[int] | range:
    """Return the indices of the layers with experts: every ``interleave_moe_layer_step``-th, or those listed."""
    listed, step = config.get("moe_layers"), config.integer("interleave_moe_layer_step")
    if listed is None:
        return range(step - 1, config.integer("num_hidden_layers"), step)
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise TypeError(f"moe_layers of {config.model_type} must be a list of integers, got {listed!r:.60}")
    return listed


def write_llama4(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Llama 4."""
    first = attention_of(config, GroupedQueryAttentionConfig)
    attentions = [each.attention for each in config.blocks if isinstance(each.attention, GroupedQueryAttentionConfig)]
    if len(attentions) < len(config.blocks):
        raise ValueError("attention of a block is no GroupedQueryAttentionConfig")
    rotated = next((each for each in attentions if each.position is not None), None)
    tuned = next((each.temperature for each in attentions if each.temperature is not None), None)
    sizes = [each.mask.reach for each in attentions if each.mask != causal()]
    sparse = has_experts(config)
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_heads(first),
        **write_rms_norm(config),
        **({} if rotated is None else write_rotary(rotated.position)),
        "no_rope_layers": [int(each.position is not None) for each in attentions],
        "layer_types": [_KINDS[each.mask != causal()] for each in attentions],
        **({"attention_chunk_size": sizes[0]} if sizes else {}),
        "attention_bias": first.qkv_bias,
        "use_qk_norm": rotated is not None and rotated.qk_norm is not None,
        "attn_temperature_tuning": tuned is not None,
        **({} if tuned is None else {"attn_scale": tuned.rate, "floor_scale": tuned.interval}),
        "moe_layers": [layer for layer, is_sparse in enumerate(sparse) if is_sparse],
    }
    if not all(sparse):
        keys |= write_feed_forward(feed_forward_of(config, FeedForwardConfig), width="intermediate_size_mlp")
    if any(sparse):
        experts = feed_forward_of(config, MixtureOfExpertsConfig)
        keys |= write_feed_forward(experts.expert)
        keys |= {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
    return keys


FAMILIES = (
    Family(
        ("llama4_text",),
        read_llama4,
        {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        block=_block,
        write=write_llama4,
        architecture="Llama4ForCausalLM",
    ),
)


def _experts() -> list[Row]:
    """Return rows of router, shared layers, and the two tensors that hold all experts of a layer."""
    theirs, expert = f"{LAYER}{_FEED_FORWARD}.", f"{OURS}ff.experts.{{j}}."
    gates_and_ups = tuple(f"{expert}{fc}.weight" for fc in ("fc1", "fc2"))
    down = (f"{expert}fc3.weight",)
    return [
        Row(f"{theirs}router.weight", (f"{OURS}ff.router.weight",), branch=_EXPERTS),
        Row(
            f"{theirs}experts.gate_up_proj",
            gates_and_ups,
            "o i -> e i (part o)",
            part="part",
            stack="e",
            branch=_EXPERTS,
        ),
        Row(f"{theirs}experts.down_proj", down, "o i -> e i o", stack="e", branch=_EXPERTS),
        *feed_forward(f"{_FEED_FORWARD}.shared_expert", "ff.shared", branch=_EXPERTS),
    ]


LAYOUT = decoder(
    "hf-llama4",
    "transformers Llama 4, of a multimodal one the text model",
    [
        *attention(SPLIT),
        *_experts(),
        *feed_forward(_FEED_FORWARD, branch=_DENSE),
        *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
        FINAL_NORM,
    ],
    model_types=("llama4", "llama4_text"),
)
