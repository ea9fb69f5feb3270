"""Mamba (arXiv 2312.00752) and Falcon Mamba, which brings steps, keys and queries to mean square 1."""

from __future__ import annotations

import dataclasses

from ...specs.base import DERIVED
from ...specs.decoder_model import Attention, DecoderBlockConfig, DecoderConfig
from ...specs.mamba import LatentNorms, MambaConfig
from ...specs.rms_norm import RMSNormConfig
from ...weights.rows import Row
from ..family import AttentionLayer, Family
from ..layout import Layout
from ..reading.decoders import WrittenKeys, attention_of, write_sizes
from ..reading.model_config import ConfigFile
from ..rows.attention import Size, Table, below
from ..rows.common import TIE
from ..rows.decoder import LAYER, OURS, norms


def table(state: Size = "mamba_state", latent_norms: LatentNorms = "none") -> Table:
    """Return the rows of a layer: value and gate in one projection; steps, key and query in another.

    Args:
        state: width of a query, and of a key.
        latent_norms: as in a `MambaConfig`.
    """
    latent = ("W_step_down.weight", "W_key.weight", "W_query.weight")
    scales = (("dt", "step"), ("b", "k"), ("c", "q")) if latent_norms == "scaled" else ()
    return (
        *(
            Row(f"in_proj.{leaf}", (f"W_value.{leaf}", f"W_gate.{leaf}"), pattern, along="o", optional=leaf == "bias")
            for leaf, pattern in (("weight", "o i -> o i"), ("bias", "o -> o"))
        ),
        Row("conv1d.weight", ("conv1d.weight",)),
        Row("conv1d.bias", ("conv1d.bias",), optional=True),
        Row("x_proj.weight", latent, "o i -> o i", along="o", split=("...", state, state)),
        *(Row(f"{theirs}_layernorm.weight", (f"{ours}_norm.scale",)) for theirs, ours in scales),
        Row("dt_proj.weight", ("W_step_up.weight",)),
        Row("dt_proj.bias", ("dt_bias",)),
        *(Row(name, (name,)) for name in ("A_log", "D")),
        Row("out_proj.weight", ("out_proj.weight",)),
        Row("out_proj.bias", ("out_proj.bias",), optional=True),
    )


@dataclasses.dataclass(frozen=True)
class SelectiveKeys:
    """Keys of a config for the sizes and biases of a layer of Mamba.

    Attributes:
        expand: factor of the model's width that makes the channels.
        state: width of the state of a channel.
        rank: width of the latent steps; ``auto`` is a sixteenth of the model's width.
        conv: taps of the convolution.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections of the input and of the output have biases.
        latent_norms: norms of steps, keys and queries, as in a `MambaConfig`.
        eps: epsilon of these norms; "" without any.
    """

    expand: str = "expand"
    state: str = "state_size"
    rank: str = "time_step_rank"
    conv: str = "conv_kernel"
    conv_bias: str = "use_conv_bias"
    bias: str = "use_bias"
    latent_norms: LatentNorms = "none"
    eps: str = ""


KEYS = {"mamba": SelectiveKeys(), "falcon_mamba": SelectiveKeys(latent_norms="plain", eps="mixer_rms_eps")}
"""Model type -> keys of its layers."""


def read_layer(config: ConfigFile, layer: int, prefix: str, keys: SelectiveKeys) -> AttentionLayer:
    """Return a layer of Mamba, whose tensors have names with this prefix."""
    config.refuse("hidden_act", "silu", "swish")
    d_in = config.integer("hidden_size")
    spec = MambaConfig(
        d_in=d_in,
        width=config.integer(keys.expand) * d_in,
        state_size=config.integer(keys.state),
        step_rank=DERIVED if config.get(keys.rank) == "auto" else config.integer(keys.rank),
        conv_size=config.integer(keys.conv),
        conv_bias=config.flag(keys.conv_bias),
        bias=config.flag(keys.bias),
        latent_norms=keys.latent_norms,
        eps=config.positive(keys.eps) if keys.eps else MambaConfig.eps,
    )
    return AttentionLayer("Mamba", spec, layer, {"transformers": table(spec.state_size, keys.latent_norms)}, prefix)


def write_layer(config: DecoderConfig, keys: SelectiveKeys) -> WrittenKeys:
    """Return the keys that `read_layer` reads, of the first layer of Mamba.

    Raises:
        ValueError: no layer of the model is one, or its channels do not fit.
    """
    layer = attention_of(config, MambaConfig)
    if layer.width % layer.d_in:
        raise ValueError(f"width ({layer.width}) must be a multiple of d_in ({layer.d_in}) there")
    return {
        keys.expand: layer.width // layer.d_in,
        keys.state: layer.state_size,
        keys.rank: layer.step_rank,
        keys.conv: layer.conv_size,
        keys.conv_bias: layer.conv_bias,
        keys.bias: layer.bias,
        **({keys.eps: layer.eps} if keys.eps else {}),
    }


def read_mamba(config: ConfigFile, layer: int) -> AttentionLayer:
    """Return a layer of Mamba, or of Falcon Mamba."""
    return read_layer(config, layer, f"backbone.layers.{layer}.mixer.", KEYS[config.model_type])


def _norm(config: ConfigFile) -> RMSNormConfig:
    return RMSNormConfig(config.integer("hidden_size"), config.positive("layer_norm_epsilon"))


def _block(config: ConfigFile, layer: int, attention: Attention) -> DecoderBlockConfig:
    """Return a block of Mamba, which has no feed-forward layers."""
    return DecoderBlockConfig(attention, None, _norm(config))


def _model(config: ConfigFile) -> WrittenKeys:
    return {"norm": _norm(config), "tie": config.flag("tie_word_embeddings")}


def write_mamba(config: DecoderConfig, model_type: str) -> WrittenKeys:
    """Return the keys of Mamba, or of Falcon Mamba."""
    keys = {"layer_norm_epsilon": config.blocks[0].norm.eps, "hidden_act": "silu"}
    return {**write_sizes(config), **keys, **write_layer(config, KEYS[model_type])}


_DEFAULTS = {
    "vocab_size": 50280,
    "hidden_act": "silu",
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "expand": 2,
    "state_size": 16,
    "time_step_rank": "auto",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "tie_word_embeddings": True,
}

FAMILIES = tuple(
    Family((name,), read_mamba, _DEFAULTS, block=_block, model=_model, write=write_mamba, architecture=architecture)
    for name, architecture in (("mamba", "MambaForCausalLM"), ("falcon_mamba", "FalconMambaForCausalLM"))
)


LAYOUT = Layout(
    "hf-mamba",
    "transformers Mamba",
    [
        Row("{prefix}embeddings.weight", ("tok_emb.weight",), tied=("out_head.weight",)),
        Row("lm_head.weight", ("out_head.weight",), optional=True),
        *below(table(), f"{LAYER}mixer.", f"{OURS}linear_att."),
        *norms(norm1="norm"),
        Row("{prefix}norm_f.weight", ("final_norm.scale",)),
    ],
    prefixes=("backbone.", ""),
    settings={**TIE, "mamba_state": ("state_size",)},
    defaults={"tie": 0},
    whole=True,
    model_types=("mamba", "falcon_mamba"),
)
