"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, and in every fourth layer MLA without positions."""

from __future__ import annotations

from collections.abc import Sequence

from ...specs.kimi_delta_attention import KimiDeltaAttentionConfig
from ...specs.multi_head_latent_attention import MultiHeadLatentAttentionConfig
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..reading.model_config import ConfigFile
from ..rows.attention import Table
from .deepseek import table as latent_table

_LAYERS: Table = tuple(
    Row(f"{theirs}.weight", (f"{ours}.weight",))
    for theirs, ours in (
        ("q_proj", "W_query"),
        ("k_proj", "W_key"),
        ("v_proj", "W_value"),
        ("b_proj", "W_beta"),
        ("forget_gate.f_a_proj", "W_decay_down"),
        ("forget_gate.f_b_proj", "W_decay_up"),
        ("g_a_proj", "W_gate_down"),
        ("g_b_proj", "W_gate_up"),
        ("conv1d", "conv1d"),
        ("o_proj", "out_proj"),
    )
)

DELTA: Table = (
    *_LAYERS,
    Row("forget_gate.dt_bias", ("dt_bias",)),
    Row("forget_gate.A_log", ("A_log",), "(b t h c) -> b t h c", sizes={"b": 1, "t": 1, "c": 1}),
    Row("o_norm.weight", ("norm.scale",)),
)
"""The names of `transformers` in memory, for Kimi Delta Attention."""

_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Key of ``linear_attn_config`` in the published config.json -> that of `transformers`."""


def read_delta(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Kimi Delta Attention."""
    config.refuse("hidden_act", "silu", "swish")  # of the convolution, too
    defaults = {key: config.get(name) for key, name in _KEYS.items()}
    sizes = ConfigFile(config.mapping("linear_attn_config"), config.model_type, defaults)
    spec = KimiDeltaAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=sizes.integer("num_heads"),
        head_dim=sizes.integer("head_dim"),
        conv_size=sizes.integer("short_conv_kernel_size"),
        eps=config.positive("rms_norm_eps"),
    )
    prefix = f"model.layers.{layer}.self_attn."
    return AttentionLayer("KimiDeltaAttention", spec, layer, {"transformers": DELTA}, prefix)


def read_latent(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of latent attention, whose shared part of the keys has no position.

    The norms of the latents add 1e-6 regardless of ``rms_norm_eps``, as in `transformers`.
    """
    heads = config.integer("num_attention_heads")
    config.refuse("num_key_value_heads", None, heads)
    spec = MultiHeadLatentAttentionConfig(
        d_in=config.integer("hidden_size"),
        num_heads=heads,
        latent_dim=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        query_dim=config.integer_or_none("q_lora_rank"),
        bias=config.flag("attention_bias"),
        position=None,
        dropout=config.number_or_none("attention_dropout") or 0.0,
    )
    prefix = f"model.layers.{layer}.self_attn."
    return AttentionLayer("MultiHeadLatentAttention", spec, layer, {"transformers": latent_table(spec)}, prefix)


def _published_kind(config: ConfigFile, layer: int) -> str:
    """Return the kind of a layer by ``linear_attn_config``, whose indices begin at 1, or else by the default."""
    published = config.mapping("linear_attn_config")
    listed = {
        kind: published[key]
        for key, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention"))
        if isinstance(published.get(key), Sequence)
    }
    if len(listed) < 2:
        return "full_attention" if layer and layer % 4 == 0 else "linear_attention"
    kinds = [kind for kind, numbers in listed.items() if layer + 1 in numbers]
    if len(kinds) != 1:
        raise ValueError(
            f"layer {layer} of {config.model_type} must be in full_attn_layers or in kda_layers of linear_attn_config, "
            f"which count from 1; it is in {' and in '.join(kinds) or 'neither'}"
        )
    return kinds[0]


def read_kimi_linear(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of either kind."""
    kind = config.layer_type(layer, _published_kind(config, layer))
    kinds = {"full_attention": read_latent, "linear_attention": read_delta}
    if kind not in kinds:
        raise ValueError(f"layer {layer} of {config.model_type} is of type {kind}, which must be {' or '.join(kinds)}")
    return kinds[kind](config, layer)


FAMILIES = (
    Family(
        ("kimi_linear",),
        read_kimi_linear,
        {
            "hidden_size": 2304,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
        },
    ),
)
