"""Recurrent layers of described families: their config from the keys of a config.json, and the way back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from ...printable import printable
from ...specs.base import DERIVED
from ...specs.decoder_model import DecoderConfig, Recurrent
from ...specs.gated_convolution import GatedConvolutionConfig
from ...specs.gated_delta_net import GatedDeltaNetConfig
from ...specs.kimi_delta_attention import KimiDeltaAttentionConfig
from ...specs.lightning_attention import LightningAttentionConfig, layer_decay_rates
from ...specs.mamba import MambaConfig
from ...specs.mamba2 import Mamba2Config
from ..reading.decoders import WrittenKeys
from ..reading.model_config import ConfigFile

PART = "mixer"
"""Part of a description that only families with recurrent layers have."""

Keys = Mapping[str, str]
"""Field of our config, or a size that several of them follow from -> the key of a config.json."""

_KINDS: dict[str, type[Recurrent]] = {
    "convolution": GatedConvolutionConfig,
    "gated_delta_net": GatedDeltaNetConfig,
    "kimi_delta": KimiDeltaAttentionConfig,
    "lightning": LightningAttentionConfig,
    "mamba": MambaConfig,
    "mamba2": Mamba2Config,
}
"""Name of a kind of layers in a description -> our config."""

_READ: dict[str, Callable[[ConfigFile, str], object]] = {
    "int": ConfigFile.integer,
    "bool": ConfigFile.flag,
    "float": ConfigFile.number,
}
"""Type of a field of our config -> how its key is read."""


def read(config: ConfigFile, layer: int, kind: str, keys: Keys, constants: Mapping[str, object]) -> Recurrent:
    """Return the config of a layer.

    Args:
        config: the model's.
        layer: index of the layer, which the decay of lightning attention depends on.
        kind: of the layer, such as ``mamba2``.
        keys: field -> key. Further fields of Mamba and Mamba-2: ``expand``, the factor of the model's width that makes
            the channels; ``width``, their number, which takes precedence; ``limits`` of a step;
            ``projection_scales``, multiplied by ``input_scale``; ``out_bias``, which must be ``bias``; whether there is
            a gated norm (``normalised``), and before the gate (``norm_first``).
        constants: field -> value whatever the config.
    """
    config_class = _KINDS[kind]
    make: Callable[..., Recurrent] = config_class
    derived = _DERIVED[kind](config, layer, keys) if kind in _DERIVED else {}
    types = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    values = {
        name: _READ[types[name]](config, key) for name, key in keys.items() if name in types and name not in derived
    }
    return make(d_in=config.integer("hidden_size"), **values, **derived, **constants)


def write(config: DecoderConfig, kind: str, keys: Keys) -> WrittenKeys:
    """Return the keys that `read` reads, of the first such layer; none where the model has no such layer.

    Raises:
        ValueError: a width or a limit that the family has no key for.
    """
    layers = (one for block in config.blocks for one in (block.attention, block.recurrent))
    layer = next((one for one in layers if isinstance(one, _KINDS[kind])), None)
    if layer is None:
        return {}
    written = {key: getattr(layer, name) for name, key in keys.items() if hasattr(layer, name)}
    if "expand" in keys and "width" not in keys and isinstance(layer, MambaConfig | Mamba2Config):
        if layer.width % layer.d_in:
            raise ValueError(f"width of all heads ({layer.width}) must be a multiple of d_in ({layer.d_in}) there")
        written[keys["expand"]] = layer.width // layer.d_in
    if not isinstance(layer, Mamba2Config):
        return written
    derived: WrittenKeys = {
        "normalised": layer.norm_order != "none",
        "norm_first": layer.norm_order == "norm_first",
        "out_bias": layer.bias,
        "projection_scales": list(layer.projection_scales),
    }
    written |= {keys[name]: value for name, value in derived.items() if name in keys}
    if "limits" not in keys and layer.max_step is not None:
        raise ValueError(f"max_step ({layer.max_step}) must be None there")
    if "limits" in keys and (layer.min_step != 0 or layer.max_step is not None):
        most = {"__float__": "Infinity"} if layer.max_step is None else layer.max_step
        written[keys["limits"]] = [layer.min_step, most]
    return written


def _read_mamba2(config: ConfigFile, layer: int, keys: Keys) -> WrittenKeys:
    """Return the width of a head of Mamba-2 and the limits of a step.

    Raises:
        ValueError: the heads have another width than `keys` allow, or limits that are not two numbers.
    """
    d_in, heads = config.integer("hidden_size"), config.integer(keys["num_heads"])
    width, rule = config.integer_or_none(keys["width"]) if "width" in keys else None, keys.get("width")
    if "expand" not in keys:
        width = heads * config.integer(keys["head_dim"])
    elif width is None:
        width, rule = config.integer(keys["expand"]) * d_in, f"{keys['expand']} * hidden_size"
    head_dim = width // heads if config.get(keys["head_dim"]) == "auto" else config.integer(keys["head_dim"])
    if width != heads * head_dim:
        raise ValueError(f"{keys['num_heads']} * {keys['head_dim']} ({heads * head_dim}) must be {rule} ({width})")
    others = (_limits(config, keys), _read_projections(config, keys), _read_norm(config, keys))
    return {"head_dim": head_dim, **{name: value for other in others for name, value in other.items()}}


def _read_projections(config: ConfigFile, keys: Keys) -> WrittenKeys:
    """Return the factors behind the projections, in a family that has them.

    Raises:
        ValueError: some projections have biases, others none.
    """
    if "out_bias" in keys and config.flag(keys["out_bias"]) != config.flag(keys["bias"]):
        (bias, has_bias), (other, is_other) = ((keys[name], config.flag(keys[name])) for name in ("bias", "out_bias"))
        raise ValueError(
            f"{other} ({is_other}) of {config.model_type} must be {bias} ({has_bias}): "
            "the projections of Mamba-2 have biases, or none has"
        )
    if "projection_scales" not in keys:
        return {}
    factor = config.positive(keys["input_scale"])
    return {"projection_scales": tuple(factor * number for number in config.factors(keys["projection_scales"], 5))}


def _read_norm(config: ConfigFile, keys: Keys) -> WrittenKeys:
    """Return the order of gate and norm (`norm_order`), in families whose config chooses it; {} in others."""
    if "normalised" not in keys:
        return {}
    order = "norm_first" if config.flag(keys["norm_first"]) else "gate_first"
    return {"norm_order": order if config.flag(keys["normalised"]) else "none"}


def _limits(config: ConfigFile, keys: Keys) -> WrittenKeys:
    limits = config.get(keys["limits"]) if "limits" in keys else None
    if limits is None:
        return {}
    least, most = map(_limit, limits) if isinstance(limits, (list, tuple)) and len(limits) == 2 else (None, None)
    if least is None or most is None:
        raise ValueError(f"{keys['limits']} ({printable(repr(limits))}) must be two numbers")
    return {"min_step": least, "max_step": None if most == math.inf else most}


def _limit(value: object) -> float | None:
    """Return a number, including transformers 5's form of infinities, which JSON lacks; None for anything else."""
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return math.inf
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _read_mamba(config: ConfigFile, layer: int, keys: Keys) -> WrittenKeys:
    """Return the channels of Mamba, and the width of its latent steps, which may follow from the model's.

    As in `transformers`, a number of channels in the file replaces the factor times the model's width.
    """
    rank, width = keys["step_rank"], config.integer_or_none(keys["width"]) if "width" in keys else None
    return {
        "width": config.integer(keys["expand"]) * config.integer("hidden_size") if width is None else width,
        "step_rank": DERIVED if config.get(rank) == "auto" else config.integer(rank),
    }


def _read_delta_net(config: ConfigFile, layer: int, keys: Keys) -> WrittenKeys:
    """Return the sizes of a gated delta net that follow from the model's where the config has none (OLMo hybrid)."""
    heads = keys.get("heads_of")
    if heads is None:
        return {}
    width, usual = config.integer("hidden_size"), config.integer(heads)
    key_heads = config.integer_or_none(keys["num_heads"]) or usual
    key_dim = config.integer_or_none(keys["head_dim"]) or int(0.75 * width / key_heads)
    return {
        "num_heads": key_heads,
        "num_value_heads": config.integer_or_none(keys["num_value_heads"]) or usual,
        "head_dim": key_dim,
        "value_head_dim": config.integer_or_none(keys["value_head_dim"]) or 2 * key_dim,
    }


def _read_lightning(config: ConfigFile, layer: int, keys: Keys) -> WrittenKeys:
    """Return the width of a head of lightning attention, and the rates of decay of its heads."""
    heads, layers = config.integer(keys["num_heads"]), config.integer("num_hidden_layers")
    return {
        "head_dim": config.integer_or_none(keys["head_dim"]) or DERIVED,
        "decay_rates": layer_decay_rates(heads, layer, layers),
    }


_DERIVED: dict[str, Callable[[ConfigFile, int, Keys], WrittenKeys]] = {
    "gated_delta_net": _read_delta_net,
    "lightning": _read_lightning,
    "mamba": _read_mamba,
    "mamba2": _read_mamba2,
}
"""Kind of layers -> the fields that need more than their key."""
