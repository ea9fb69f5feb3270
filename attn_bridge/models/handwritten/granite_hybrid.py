"""Granite 4: Granite whose layers are those of Mamba-2 or attention, in most models without positions.

Feed-forward layers are dense, or experts with shared layers.
"""

from __future__ import annotations

from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.blocks.mixture_of_experts import MixtureOfExpertsConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba2 import Mamba2Config
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import (
    WrittenKeys,
    feed_forward_of,
    has_experts,
    inverse,
    read_feed_forward,
    read_llama_model,
    read_rms_norm,
    write_feed_forward,
    write_rms_norm,
    write_sizes,
)
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT, below
from ..rows.decoder import (
    APART,
    EXPERTS,
    FINAL_NORM,
    FUSED,
    LAYER,
    OURS,
    TOGETHER,
    attention,
    decoder,
    fused_experts,
    norms,
)
from .grouped import attention_layer, head_dim_of, read_sizes, write_heads
from .mamba2 import SIZES, Keys, read_layer, table, write_layer

_KINDS = ("linear_attention", "full_attention")


def read_granite_hybrid(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Granite 4; without ``layer_types`` it is one of Mamba-2."""
    kind = config.layer_type(layer, "linear_attention")
    if kind in ("linear_attention", "mamba"):
        return read_layer(config, layer, f"model.layers.{layer}.mamba.", Keys())
    if kind != "full_attention":
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(_KINDS)}")
    bias = config.flag("attention_bias")
    is_rotary = config.get("position_embedding_type") == "rope"
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config),
        qkv_bias=bias,
        out_bias=bias,
        position=read_rotary(config, head_dim_of(config)) if is_rotary else None,
        scale=config.positive("attention_multiplier"),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


def _block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Granite 4, whose router takes the softmax over the chosen experts."""
    shared: FeedForwardConfig = read_feed_forward(config, width="shared_intermediate_size")
    layers: FeedForwardConfig | MixtureOfExpertsConfig = shared
    if config.integer("num_local_experts", 0):
        layers = MixtureOfExpertsConfig(
            read_feed_forward(config),
            config.integer("num_local_experts"),
            config.integer("num_experts_per_tok"),
            shared=shared,
        )
    scale = config.positive("residual_multiplier")
    return DecoderBlockConfig(attention, layers, read_rms_norm(config), residual_scale=scale)


def _model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model: that of Llama, and factors of embeddings and logits."""
    return {
        **read_llama_model(config),
        "embedding_scale": config.positive("embedding_multiplier"),
        "logit_scale": 1.0 / config.positive("logits_scaling"),
    }


def write_granite_hybrid(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Granite 4."""
    is_full = [isinstance(block.attention, GroupedQueryAttentionConfig) for block in config.blocks]
    keys: WrittenKeys = {
        **write_sizes(config),
        **write_rms_norm(config),
        "residual_multiplier": config.blocks[0].residual_scale,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": inverse(lambda value: 1.0 / value, config.logit_scale, 1.0 / config.logit_scale),
        "layer_types": [_KINDS[full] for full in is_full],
    }
    if any(isinstance(block.attention, Mamba2Config) for block in config.blocks):
        keys |= write_layer(config, Keys())
    if any(is_full):
        attention = next(
            block.attention for block in config.blocks if isinstance(block.attention, GroupedQueryAttentionConfig)
        )
        keys |= {
            **write_heads(attention),
            **write_rotary(attention.position),
            "position_embedding_type": None if attention.position is None else "rope",
            "attention_bias": attention.qkv_bias,
            "attention_multiplier": attention.scale,
        }
    if not any(has_experts(config)):
        shared = feed_forward_of(config, FeedForwardConfig)
        return {**keys, **write_feed_forward(shared, width="shared_intermediate_size"), "num_local_experts": 0}
    experts = feed_forward_of(config, MixtureOfExpertsConfig)
    if experts.shared is None:
        raise ValueError("shared layers of the experts (None) can't be left out there")
    return {
        **keys,
        **write_feed_forward(experts.shared, width="shared_intermediate_size"),
        **write_feed_forward(experts.expert),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


FAMILIES = (
    Family(
        ("granitemoehybrid",),
        read_granite_hybrid,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        aliases={"layer_types": ("layers_block_type",)},
        block=_block,
        model=_model,
        write=write_granite_hybrid,
        architecture="GraniteMoeHybridForCausalLM",
    ),
)


def _gated(theirs: str, ours: str, branch: str = "") -> list[Row]:
    """Return rows of gated feed-forward layers with gates above ups in one tensor."""
    gates_and_ups = tuple(f"{OURS}{ours}.{fc}.weight" for fc in ("fc1", "fc2"))
    return [
        Row(f"{LAYER}{theirs}.input_linear.weight", gates_and_ups, "o i -> (part o) i", part="part", branch=branch),
        Row(f"{LAYER}{theirs}.output_linear.weight", (f"{OURS}{ours}.fc3.weight",), branch=branch),
    ]


def _experts() -> list[Row]:
    """Return rows of experts and router: as files have them, or as `transformers` 5 has them in memory."""
    expert, router = f"{OURS}ff.experts.{{j}}.", (f"{OURS}ff.router.weight",)
    gates_and_ups = tuple(f"{expert}{fc}.weight" for fc in ("fc1", "fc2"))
    apart = f"{LAYER}block_sparse_moe."
    return [
        Row(f"{apart}input_linear.weight", gates_and_ups, "o i -> e (part o) i", part="part", stack="e", branch=APART),
        Row(f"{apart}output_linear.weight", (f"{expert}fc3.weight",), "o i -> e o i", stack="e", branch=APART),
        Row(f"{apart}router.layer.weight", router, branch=APART),
        *fused_experts("block_sparse_moe"),
        Row(f"{apart}router.weight", router, branch=TOGETHER),
    ]


def _layout(name: str, title: str, layers: list[Row], marks: tuple[str, ...] = ()) -> Layout:
    """Return the layout of a model with these rows of feed-forward layers."""
    return decoder(
        name,
        title,
        [
            *below(table(), f"{LAYER}mamba.", f"{OURS}linear_att.", branch="attention/linear"),
            *attention(SPLIT, branch="attention/full"),
            *layers,
            *norms(norm1="input_layernorm", norm2="post_attention_layernorm"),
            FINAL_NORM,
        ],
        settings={**(FUSED if marks else {}), **SIZES},
        defaults={"fused": 0} if marks else {},
        marks=marks,
        model_types=("granitemoehybrid",),
    )


LAYOUTS = (
    _layout(
        "hf-granitemoehybrid",
        "transformers Granite 4 with experts",
        [*_experts(), *_gated("shared_mlp", "ff.shared", EXPERTS)],
        ("block_sparse_moe.",),
    ),
    _layout("hf-granitemoehybrid-dense", "transformers Granite 4 without experts", _gated("shared_mlp", "ff")),
)
"""``shared_mlp`` is all of the feed-forward layers in a model without experts."""
