"""Nemotron-H (arXiv 2504.03624): each layer is Mamba-2, attention without positions, or feed-forward layers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...printable import printable
from ...specs.blocks.feed_forward import FeedForwardConfig
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.grouped_query_attention import GroupedQueryAttentionConfig
from ...specs.mamba2 import Mamba2Config
from ...specs.rms_norm import RMSNormConfig
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import NAMES, WrittenKeys, activation_of, feed_forward_of, write_sizes
from ..reading.model_config import ConfigFile
from ..rows.attention import SPLIT, below
from ..rows.decoder import FURTHER_ROWS, LAYER, OURS, QUANTISED, norms
from .grouped import attention_layer, read_sizes, write_heads
from .mamba2 import SIZES, Keys, read_layer, table, write_layer

_KEYS = Keys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    expand="",
    state="ssm_state_size",
    groups="n_groups",
    conv="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    eps="layer_norm_epsilon",
    min_step="time_step_min",  # transformers passes over time_step_limit
    activation="mamba_hidden_act",
)

_ATTENTION = tuple(row for row in SPLIT if row.theirs.endswith("_proj.weight"))
"""Rows of attention, which has neither biases nor norms."""

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of ``hybrid_override_pattern`` -> kind of a layer."""


def _prepare(keys: Mapping[str, object]) -> Mapping[str, object]:
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


def _attends(config: ConfigFile, layer: int) -> bool:
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
    prefix = f"backbone.layers.{layer}.mixer."
    if not _attends(config, layer):
        raise ValueError(f"layer {layer} of {config.model_type} is of type mlp, which has no attention")
    if _kind(config, layer) == "linear_attention":
        return read_layer(config, layer, prefix, _KEYS)
    spec = GroupedQueryAttentionConfig(**read_sizes(config), position=None)
    return attention_layer(layer, spec, {"transformers": _ATTENTION}, prefix)


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("layer_norm_epsilon"))


def _block(config: ConfigFile, layer: int, attention: Attention | None) -> DecoderBlockConfig:
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


def _model(config: ConfigFile) -> WrittenKeys:
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
    if "linear_attention" in kinds:
        keys |= write_layer(config, _KEYS)
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


FAMILIES = (
    Family(
        ("nemotron_h",),
        read_nemotron_h,
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_min": 0.001,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        aliases={
            "n_groups": ("mamba_n_groups",),
            "conv_kernel": ("mamba_d_conv",),
            "use_conv_bias": ("mamba_conv_bias",),
            "time_step_min": ("mamba_dt_min",),
        },
        block=_block,
        model=_model,
        write=write_nemotron_h,
        architecture="NemotronHForCausalLM",
        attends=_attends,
        prepare=_prepare,
    ),
)


LAYOUT = Layout(
    "hf-nemotron-h",
    "transformers Nemotron-H",
    [
        Row("{prefix}embeddings.weight", ("tok_emb.weight",)),
        Row("lm_head.weight", ("out_head.weight",)),
        *below(table(), f"{LAYER}mixer.", f"{OURS}linear_att.", branch="mixer/linear"),
        *below(_ATTENTION, f"{LAYER}mixer.", f"{OURS}att.", branch="mixer/full"),
        *(
            Row(f"{LAYER}mixer.{name}.{leaf}", (f"{OURS}ff.layers.{number}.{leaf}",), optional=leaf == "bias",
                branch="mixer/feed-forward")
            for number, name in ((0, "up_proj"), (2, "down_proj"))
            for leaf in ("weight", "bias")
        ),
        *norms(norm1="norm"),
        Row("{prefix}norm_f.weight", ("final_norm.scale",)),
        *FURTHER_ROWS,
    ],
    prefixes=("backbone.", "model.", ""),
    settings={**SIZES, "mamba_state": ("ssm_state_size",), "mamba_groups": ("n_groups", "mamba_n_groups")},
    refused=QUANTISED,
    whole=True,
    marks=("mixer.up_proj.", "mixer.q_proj."),  # layers of Mamba-2 alone are a model of Mamba-2
    model_types=("nemotron_h",),
)  # fmt: skip
