"""LFM2 (arXiv 2511.23404): gated short convolutions, and attention in some layers; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig, Router
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.gated_convolution import GatedConvolutionConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.rms_norm import RMSNormConfig
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import WrittenKeys, feed_forward_of, has_experts, write_sizes
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT, Table, below
from ..rows.decoder import APART, EXPERTS, FUSED, LAYER, OURS, attention, decoder, fused_experts, norms
from .grouped import attention_layer, head_dim_of, read_sizes, write_heads

CONVOLUTION: Table = (
    *(
        Row(f"in_proj.{leaf}", tuple(f"W_{name}.{leaf}" for name in ("key", "query", "value")), pattern, along="o",
            optional=leaf == "bias")
        for leaf, pattern in (("weight", "o i -> o i"), ("bias", "o -> o"))
    ),
    Row("conv.weight", ("conv1d.weight",)),
    Row("conv.bias", ("conv1d.bias",), optional=True),
    Row("out_proj.weight", ("out_proj.weight",)),
    Row("out_proj.bias", ("out_proj.bias",), optional=True),
)  # fmt: skip
"""Rows of a gated convolution: keys, queries and values in one projection."""

ATTENTION: Table = (
    *(row for row in SPLIT if row.theirs in ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
    Row("out_proj.weight", ("out_proj.weight",)),
    *(Row(f"{name}_layernorm.weight", (f"{name}_norm.scale",)) for name in ("q", "k")),
)

_MATRICES = (("w1", "fc1"), ("w3", "fc2"), ("w2", "fc3"))
"""Their name of a matrix of the feed-forward layers -> ours: gate, up, down."""

_SUM_EPS = 1e-6
"""Constant added to the sum of the weights of the chosen experts, whatever the config."""


def _prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys under their newer names, over which the older ones of files take precedence."""
    newer = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    if keys.get("model_type") == "lfm2_moe":
        del newer["block_ff_dim"]
    return {**keys, **{new: keys[old] for old, new in newer.items() if old in keys}}


def _is_convolution(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer is a convolution.

    Raises:
        ValueError: the layer is of an unknown kind.
    """
    attending = config.get("full_attn_idxs") if config.model_type == "lfm2" else None
    kind = config.layer_type(layer, "full_attention" if attending is None or layer in attending else "conv")
    if kind not in ("conv", "full_attention"):
        raise ValueError(
            f"layer {layer} of {config.model_type} is of type {kind}, which must be conv or full_attention"
        )
    return kind == "conv"


def read_lfm2(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a gated convolution, or attention with norms of queries and keys."""
    if _is_convolution(config, layer):
        spec = GatedConvolutionConfig(
            config.integer("hidden_size"), conv_size=config.integer("conv_L_cache"), bias=config.flag("conv_bias")
        )
        prefix = f"model.layers.{layer}.conv."
        return AttentionLayer("GatedConvolution", spec, layer, {"transformers": CONVOLUTION}, prefix)
    attention = GroupedQueryAttentionConfig(
        **{**read_sizes(config), "dropout": 0.0},  # transformers passes over attention_dropout
        qk_norm=QKNorm("head", config.positive("norm_eps")),
        position=read_rotary(config, head_dim_of(config)),
    )
    return attention_layer(layer, attention, {"transformers": ATTENTION})


def _width(config: ConfigFile) -> int:
    """Return the width of the dense feed-forward layers, of which LFM2 may take two thirds, rounded up."""
    width = config.integer("intermediate_size")
    if config.model_type != "lfm2" or not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = config.integer("block_multiple_of")
    return -(-int(config.positive("block_ffn_dim_multiplier") * width) // multiple) * multiple


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("norm_eps"))


def _block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of LFM2, whose activation is SiLU whatever the config."""
    d_in = config.integer("hidden_size")
    layers: FeedForwardConfig | MixtureOfExpertsConfig = FeedForwardConfig(d_in, _width(config), "silu")
    if config.model_type == "lfm2_moe" and layer >= config.integer("num_dense_layers", 0):
        layers = MixtureOfExpertsConfig(
            FeedForwardConfig(d_in, config.integer("moe_intermediate_size"), "silu"),
            config.integer("num_experts"),
            config.integer("num_experts_per_tok"),
            Router(
                "sigmoid",
                normalise=config.flag("norm_topk_prob"),
                scale=config.positive("routed_scaling_factor"),
                correction=config.flag("use_expert_bias"),
                sum_eps=_SUM_EPS if config.flag("norm_topk_prob") else 0.0,
            ),
        )
    return DecoderBlockConfig(attention, layers, _norm(config))


def _model(config: ConfigFile) -> WrittenKeys:
    return {"norm": _norm(config), "tie": config.flag("tie_word_embeddings")}


def write_lfm2(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of LFM2."""
    names = {GroupedQueryAttentionConfig: "full_attention", GatedConvolutionConfig: "conv"}
    keys: WrittenKeys = {
        **write_sizes(config),
        "norm_eps": config.blocks[0].norm.eps,
        "layer_types": [names.get(type(block.attention), "") for block in config.blocks],
    }
    for block in config.blocks:
        layer = block.attention
        if isinstance(layer, GroupedQueryAttentionConfig):
            heads = {key: value for key, value in write_heads(layer).items() if key != "attention_dropout"}
            keys |= {**heads, **write_rotary(layer.position, layer.head_dim)}
        elif isinstance(layer, GatedConvolutionConfig):
            keys |= {"conv_L_cache": layer.conv_size, "conv_bias": layer.bias}
        if isinstance(block.feed_forward, FeedForwardConfig):
            keys["intermediate_size"] = block.feed_forward.hidden_dim
    if model_type == "lfm2":
        return {**keys, "block_auto_adjust_ff_dim": False}
    sparse = has_experts(config)
    keys["num_dense_layers"] = sparse.index(True) if any(sparse) else len(sparse)
    if not any(sparse):
        return keys
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    return {
        **keys,
        "moe_intermediate_size": experts.expert.hidden_dim,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
        "routed_scaling_factor": experts.router.scale,
        "use_expert_bias": experts.router.correction,
    }


_DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "conv_bias": False,
    "conv_L_cache": 3,
}

_DENSE = {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}

_SPARSE = {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}

FAMILIES = tuple(
    Family(
        (name,),
        read_lfm2,
        {**_DEFAULTS, **defaults},
        block=_block,
        model=_model,
        write=write_lfm2,
        architecture=architecture,
        prepare=_prepare,
    )
    for name, architecture, defaults in (
        ("lfm2", "Lfm2ForCausalLM", _DENSE),
        ("lfm2_moe", "Lfm2MoeForCausalLM", _SPARSE),
    )
)


def _gated(theirs: str, ours: str, branch: str = "") -> list[Row]:
    """Return rows of gated feed-forward layers."""
    return [
        Row(f"{LAYER}{theirs}.{name}.weight", (f"{OURS}{ours}.{fc}.weight",), branch=branch) for name, fc in _MATRICES
    ]


def _layout(name: str, title: str, layers: list[Row], *, sparse: bool = False) -> Layout:
    """Return the layout of a model with these rows of feed-forward layers."""
    return decoder(
        f"hf-{name.replace('_', '-')}",
        f"transformers {title}",
        [
            *below(CONVOLUTION, f"{LAYER}conv.", f"{OURS}linear_att.", branch="attention/convolution"),
            *attention(ATTENTION, branch="attention/full"),
            *layers,
            *norms(norm1="operator_norm", norm2="ffn_norm"),
            Row("{prefix}embedding_norm.weight", ("final_norm.scale",)),
        ],
        settings=FUSED if sparse else {},
        defaults={"fused": 0} if sparse else {},
        marks=("feed_forward.gate.",) if sparse else (),
        model_types=(name,),
    )


LAYOUTS = (
    _layout("lfm2", "LFM2", _gated("feed_forward", "ff")),
    _layout(
        "lfm2_moe",
        "LFM2 with experts",
        [
            *_gated("feed_forward.experts.{j}", "ff.experts.{j}", APART),
            *fused_experts("feed_forward"),
            Row(f"{LAYER}feed_forward.gate.weight", (f"{OURS}ff.router.weight",), branch=EXPERTS),
            Row(f"{LAYER}feed_forward.expert_bias", (f"{OURS}ff.router.correction_bias",), optional=True,
                branch=EXPERTS),
            *_gated("feed_forward", "ff", "feed-forward/dense"),
        ],
        sparse=True,
    ),
)  # fmt: skip
