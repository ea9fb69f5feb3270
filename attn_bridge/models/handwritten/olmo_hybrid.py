"""OLMo hybrid: a gated delta net whose beta goes to 2; in every fourth layer attention as in OLMo 3, without positions.

Norms are before the sublayers of a delta net's block, and after those of attention's.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig, Norms
from ...specs.gated_delta_net import GatedDeltaNetConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig, QKNorm
from ...specs.position import Rotary
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.decoders import WrittenKeys, read_feed_forward, read_rms_norm, write_llama_decoder
from ..reading.model_config import ConfigFile
from ..reading.rotary import read_rotary, write_rotary
from ..rows.attention import SPLIT, Table, below
from ..rows.convolution import CONVOLUTION, CONVOLUTIONS, CUT
from ..rows.decoder import FINAL_NORM, LAYER, OURS, attention, decoder, feed_forward
from .grouped import attention_layer, head_dim_of, read_sizes, write_heads

_DELTA: Table = (
    *(
        Row(f"{theirs}_proj.weight", (f"{ours}.weight",))
        for theirs, ours in (
            *(("q", "W_query"), ("k", "W_key"), ("v", "W_value"), ("g", "W_gate")),
            *(("b", "W_beta"), ("a", "W_alpha"), ("o", "out_proj")),
        )
    ),
    Row("dt_bias", ("dt_bias",)),
    Row("A_log", ("A_log",)),
    Row("o_norm.weight", ("norm.scale",)),
)

_TABLES: dict[str, Table] = {"transformers": (*_DELTA, CONVOLUTION), "files": (*_DELTA, *CONVOLUTIONS)}
"""The delta net by the names of `transformers` in memory, and by those of files."""

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
        **{**read_sizes(config), "head_dim": head_dim_of(config)},  # where heads need not divide the width
        qkv_bias=bias,
        out_bias=bias,
        position=_position(config),
        qk_norm=QKNorm("full", config.positive("rms_norm_eps")),
    )
    return attention_layer(layer, spec, {"transformers": SPLIT})


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
    return AttentionLayer("GatedDeltaNet", spec, layer, _TABLES, f"model.layers.{layer}.linear_attn.")


def _block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
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


def _norms(names: Mapping[str, str], branch: str) -> list[Row]:
    return [
        Row(f"{LAYER}{theirs}.weight", (f"{OURS}{ours}.scale",), branch=f"attention/{branch}")
        for theirs, ours in names.items()
    ]


FAMILIES = (
    Family(
        ("olmo_hybrid",),
        read_olmo_hybrid,
        {
            "vocab_size": 100352,
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "hidden_act": "silu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        block=_block,
        write=write_olmo_hybrid,
        architecture="OlmoHybridForCausalLM",
    ),
)

_LINEAR = f"{LAYER}linear_attn.", f"{OURS}linear_att."

LAYOUT = decoder(
    "hf-olmo-hybrid",
    "transformers OLMo hybrid",
    [
        *below(_DELTA, *_LINEAR, branch="attention/linear|joined"),
        *below(CONVOLUTIONS, *_LINEAR, branch="attention/linear"),
        *below([CONVOLUTION], *_LINEAR, branch="attention/joined"),
        *attention(SPLIT, required=("q_norm", "k_norm"), branch="attention/full|resaved"),
        *feed_forward(),
        *_norms({"attention_layer_norm": "norm1", "feedforward_layer_norm": "norm2"}, "linear"),
        *_norms({"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}, "joined"),
        *_norms({"post_attention_layernorm": "post_norm1"}, "full"),
        *_norms({"feedforward_layer_norm": "post_norm1"}, "resaved"),
        *_norms({"post_feedforward_layernorm": "post_norm2"}, "full|resaved"),
        FINAL_NORM,
    ],
    settings=CUT,
    defaults={"joined": 0, "resaved": 0},
    marks=("linear_attn.",),
    model_types=("olmo_hybrid",),
)
"""Where `transformers` saves a model, it renames a norm of attention's blocks as well."""
