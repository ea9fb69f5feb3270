"""Nemotron-H (arXiv 2504.03624): each layer is Mamba-2, attention without positions, or feed-forward layers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...printable import printable
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba2 import Mamba2Config
from ...specs.rms_norm import RMSNormConfig
from ..derived import mixers
from ..family import AttentionLayer
from ..reading.decoders import NAMES, WrittenKeys, activation_of, feed_forward_of, write_sizes
from ..reading.grouped import read_sizes, write_heads
from ..reading.model_config import ConfigFile
from ..tables import table
from ..tables.layers import attention_of_layer

LAYOUT = table("hf-nemotron-h")

_KEYS = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_size": "ssm_state_size",
    "num_groups": "n_groups",
    "conv_size": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "eps": "layer_norm_epsilon",
    "min_step": "time_step_min",  # transformers passes over time_step_limit
}
"""Field of Mamba-2 -> the key that has it."""

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of ``hybrid_override_pattern`` -> kind of a layer."""


def prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys with the kinds of the layers in ``layer_types``, and their number, which files may lack.

    Raises:
        ValueError: a letter of ``hybrid_override_pattern`` is unknown.
    """
    kinds, pattern = keys.get("layers_block_type", keys.get("layer_types")), keys.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        unknown = sorted(set(pattern) - _KINDS.keys())
        if unknown:
            raise ValueError(
                f"hybrid_override_pattern ({printable(pattern)}) must consist of {' '.join(_KINDS)}, "
                f"not {printable(unknown[0])}"
            )
        kinds = [_KINDS[letter] for letter in pattern]
    if kinds is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        return {**keys, "layer_types": kinds}
    return {**keys, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def _kind(config: ConfigFile, layer: int) -> str:
    kind = config.layer_type(layer, "")
    return "linear_attention" if kind == "mamba" else kind  # as older files call it


def attends(config: ConfigFile, layer: int) -> bool:
    """Return whether a layer is Mamba-2 or attention.

    Raises:
        ValueError: a layer of experts, which we do not run without gates, or of an unknown kind.
    """
    kind = _kind(config, layer)
    if kind not in ("linear_attention", "full_attention", "mlp"):
        raise ValueError(
            f"layer {layer} of {config.model_type} is of type {printable(kind)}, which must be linear_attention or "
            "full_attention or mlp"
        )
    return kind != "mlp"


def read_nemotron_h(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mamba-2 or of attention.

    `transformers` passes over ``attention_bias``: attention never has biases.

    Raises:
        ValueError: the layer has neither.
    """
    if not attends(config, layer):
        raise ValueError(f"layer {layer} of {config.model_type} is of type mlp, which has no attention")
    if _kind(config, layer) == "linear_attention":
        config.refuse("mamba_hidden_act", "silu", "swish")
        return attention_of_layer(LAYOUT, config, layer, mixers.read(config, layer, "mamba2", _KEYS, {}))
    spec = GroupedQueryAttentionConfig(**read_sizes(config), position=None)
    return attention_of_layer(LAYOUT, config, layer, spec)


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("layer_norm_epsilon"))


def read_block(config: ConfigFile, layer: int, attention: Attention | None) -> DecoderBlockConfig:
    """Return a block of Nemotron-H: a norm, and one mixer or feed-forward layers."""
    if attention is not None:
        return DecoderBlockConfig(attention, None, _norm(config))
    layers = FeedForwardConfig(
        config.integer("hidden_size"),
        config.integer("intermediate_size"),
        activation_of(config, "mlp_hidden_act"),
        gated=False,
        bias=config.flag("mlp_bias"),
    )
    return DecoderBlockConfig(None, layers, _norm(config))


def read_model(config: ConfigFile) -> WrittenKeys:
    """Return the rest of a model, whose head is never tied."""
    config.refuse("tie_word_embeddings", False, None)  # transformers has no such head
    return {"norm": _norm(config)}


def write_nemotron_h(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Nemotron-H."""
    names = {GroupedQueryAttentionConfig: "full_attention", Mamba2Config: "linear_attention", type(None): "mlp"}
    kinds = [names.get(type(block.attention), "") for block in config.blocks]
    keys: WrittenKeys = {
        **write_sizes(config),
        "layers_block_type": kinds,
        "layer_norm_epsilon": config.blocks[0].norm.eps,
    }
    keys |= mixers.write(config, "mamba2", _KEYS)
    for block in config.blocks:
        if isinstance(block.attention, GroupedQueryAttentionConfig):
            keys |= write_heads(block.attention)
    if "mlp" in kinds:
        layers = feed_forward_of(config, FeedForwardConfig)
        keys |= {
            "intermediate_size": layers.hidden_dim,
            "mlp_hidden_act": NAMES[layers.activation],
            "mlp_bias": layers.bias,
        }
    return {**keys, "mamba_hidden_act": "silu"}
