"""OLMo hybrid: a gated delta net whose beta goes to 2; in every fourth layer attention as in OLMo 3, without positions.

Norms are before the sublayers of a delta net's block, and after those of attention's.
"""

from __future__ import annotations

from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig, Norms
from ...specs.gated_delta_net import GatedDeltaNetConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.position import Rotary
from ..family import AttentionLayer
from ..reading.decoders import WrittenKeys, read_feed_forward, read_rms_norm, write_llama_decoder
from ..reading.grouped import head_dim_of, read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-olmo-hybrid")

_EPS = 1e-5
"""Constant of the norm behind the heads, whatever the config."""


def _kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer; without ``layer_types`` every fourth has attention, and a shallow model's last.

    Raises:
        ValueError: the layer is of an unknown kind.
    """
    layers = config.integer("num_hidden_layers")
    attends = layer % 4 == 3 or (layers < 4 and layer == layers - 1)
    kind = config.layer_type(layer, "full_attention" if attends else "linear_attention")
    if kind not in ("full_attention", "linear_attention"):
        only = "full_attention or linear_attention"
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {only}")
    return kind


def _position(config: ConfigFile) -> Rotary | None:
    """Return the positions of attention; None where a config has null as their base."""
    values = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if ("rope_theta" in values or "rope_theta" in config) and values.get(
        "rope_theta", config.get("rope_theta")
    ) is None:
        return None
    return read_rotary(config, head_dim_of(config))


def read_olmo_hybrid(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of either kind."""
    if _kind(config, layer) == "linear_attention":
        return _read_delta(config, layer)
    bias = config.flag("attention_bias")
    spec = GroupedQueryAttentionConfig(
        **read_sizes(config) | {"head_dim": head_dim_of(config)},  # where heads need not divide the width
        qkv_bias=bias,
        out_bias=bias,
        position=_position(config),
        qk_norm=QKNorm("full", config.positive("rms_norm_eps")),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def _read_delta(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of gated delta net, with the sizes that follow from the model's where the config has none."""
    config.refuse("hidden_act", "silu", "swish")  # its convolution has it as well
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    key_heads = config.integer_or_none("linear_num_key_heads") or heads
    key_dim = config.integer_or_none("linear_key_head_dim") or int(0.75 * width / key_heads)
    spec = GatedDeltaNetConfig(
        d_in=width,
        num_heads=key_heads,
        num_value_heads=config.integer_or_none("linear_num_value_heads") or heads,
        head_dim=key_dim,
        value_head_dim=config.integer_or_none("linear_value_head_dim") or 2 * key_dim,
        conv_size=config.integer("linear_conv_kernel_dim"),
        eps=_EPS,
        negative=config.flag("linear_allow_neg_eigval"),
    )
    return attention_of_layer(LAYOUT, config, layer, spec)


def read_block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block, whose norms are where its kind has them."""
    norms: Norms = "pre" if isinstance(attention, GatedDeltaNetConfig) else "post"
    return DecoderBlockConfig(attention, read_feed_forward(config), read_rms_norm(config), norms=norms)


def write_olmo_hybrid(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of OLMo hybrid.

    Raises:
        ValueError: all layers are of one kind, which `transformers` refuses.
    """
    keys: WrittenKeys = {**write_llama_decoder(config), "hidden_act": "silu", "layer_types": []}
    for block in config.blocks:
        layer = block.attention
        if isinstance(layer, GatedDeltaNetConfig):
            keys["layer_types"].append("linear_attention")
            keys |= {
                "linear_num_key_heads": layer.num_heads,
                "linear_num_value_heads": layer.num_value_heads,
                "linear_key_head_dim": layer.head_dim,
                "linear_value_head_dim": layer.value_head_dim,
                "linear_conv_kernel_dim": layer.conv_size,
                "linear_allow_neg_eigval": layer.negative,
            }
        elif isinstance(layer, GroupedQueryAttentionConfig):
            keys["layer_types"].append("full_attention")
            position = {"rope_theta": None} if layer.position is None else write_rotary(layer.position)
            keys |= {**write_heads(layer), **position, "attention_bias": layer.qkv_bias}
    if len({*keys["layer_types"]}) < 2:
        raise ValueError("blocks of one kind alone are no model there")
    return keys
