"""Rotary positions as configs say them: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...specs.position import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    Pairing,
    Rotary,
    Scaling,
    YaRNScaling,
)
from .model_config import ModelConfig, as_number

Values = Mapping[str, Any]


def read_rotary(
    config: ModelConfig,
    head_dim: int,
    kind: str = "full_attention",
    *,
    theta: float = 10000.0,
    pairing: Pairing = "half",
    partial: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> Rotary:
    """Return the rotary positions of a layer.

    As in `transformers`, ``rope_scaling`` goes before ``rope_parameters``, and what these leave out is read from the
    config itself.

    Args:
        config: the model's.
        head_dim: width of a head.
        kind: kind of the layer, below which ``rope_parameters`` may hold those of its own.
        theta: base where the config says none.
        pairing: which channels turn together.
        partial: whether the model may turn a part of each head, by ``partial_rotary_factor``; others ignore it.
        renamed: ``rope_type`` of its files -> the one that is meant.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a ``rope_type`` that is not known, or a value that is missing or does not fit.
    """
    values = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if isinstance(values.get(kind), Mapping):
        values = values[kind]
    if renamed:
        values = {**values, "rope_type": renamed.get(rope_type(values), rope_type(values))}
    base = values.get("rope_theta", config.get("rope_theta"))
    part = values.get("partial_rotary_factor", config.get("partial_rotary_factor")) if partial else None
    return make_rotary(config, head_dim, values, theta if base is None else base, part, pairing)


def rope_type(values: Values) -> str:
    """Return the name of the scaling, which older files call ``type``."""
    return str(values.get("rope_type", values.get("type", "default")))


def make_rotary(
    config: ModelConfig, head_dim: int, values: Values, base: Any, part: Any = None, pairing: Pairing = "half"
) -> Rotary:
    """Return rotary positions from their parameters in a config.

    Args:
        config: the model's, for the number of its positions.
        head_dim: width of a head.
        values: ``rope_type`` and what goes with it.
        base: the base of the wavelengths.
        part: the part of a head that turns; None is all of it.
        pairing: which channels turn together.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a ``rope_type`` that is not known, or a value that is missing or does not fit.
    """
    kind = rope_type(values)
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type ({kind}) of {config.model_type} must be one of {', '.join(_SCALINGS)}")
    dim = None if part is None else int(head_dim * _number(config, "partial_rotary_factor", part))
    if dim == 1:
        dim = 2  # as transformers has it: one frequency turns two channels
    scaling = _SCALINGS[kind](config, values)
    return Rotary(_number(config, "rope_theta", base), None if dim == head_dim else dim, pairing, scaling)


def _linear(config: ModelConfig, values: Values) -> Scaling:
    return LinearScaling(_required(config, values, "factor"))


def _dynamic(config: ModelConfig, values: Values) -> Scaling:
    return NTKScaling(_required(config, values, "factor"), config.integer("max_position_embeddings"))


def _yarn(config: ModelConfig, values: Values) -> Scaling:
    original = _original_context(config, values)
    factor = values.get("factor")
    if factor is None:
        factor = config.integer("max_position_embeddings") / original
    return YaRNScaling(
        factor=_number(config, "factor", factor),
        original_context=original,
        beta_fast=_number(config, "beta_fast", values.get("beta_fast") or 32),
        beta_slow=_number(config, "beta_slow", values.get("beta_slow") or 1),
        attention_factor=_optional(config, values, "attention_factor"),
        mscale=_optional(config, values, "mscale"),
        mscale_all_dim=_optional(config, values, "mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )


def _llama3(config: ModelConfig, values: Values) -> Scaling:
    return Llama3Scaling(
        factor=_required(config, values, "factor"),
        low_freq_factor=_required(config, values, "low_freq_factor"),
        high_freq_factor=_required(config, values, "high_freq_factor"),
        original_context=_original_context(config, values),
    )


def _longrope(config: ModelConfig, values: Values) -> Scaling:
    original = _original_context(config, values)
    factor = values.get("factor")
    if factor is None:
        factor = config.integer("max_position_embeddings") / original
    return LongRoPEScaling(
        short_factors=_numbers(config, values, "short_factor"),
        long_factors=_numbers(config, values, "long_factor"),
        original_context=original,
        factor=_number(config, "factor", factor),
        attention_factor=_optional(config, values, "attention_factor"),
    )


_SCALINGS: dict[str, Callable[[ModelConfig, Values], Scaling | None]] = {
    "default": lambda config, values: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _original_context(config: ModelConfig, values: Values) -> int:
    key = "original_max_position_embeddings"
    value = config.get(key) or values.get(key) or config.integer("max_position_embeddings")
    return int(_number(config, key, value))


def _required(config: ModelConfig, values: Values, key: str) -> float:
    if key not in values:
        raise ValueError(f"rope_parameters of {config.model_type} must hold {key}, got {', '.join(values)}")
    return _number(config, key, values[key])


def _numbers(config: ModelConfig, values: Values, key: str) -> tuple[float, ...]:
    found = values.get(key)
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ValueError(f"{key} of {config.model_type} must be a list of numbers, got {found!r}")
    return tuple(_number(config, key, one) for one in found)


def _optional(config: ModelConfig, values: Values, key: str) -> float | None:
    return None if values.get(key) is None else _number(config, key, values[key])


def _number(config: ModelConfig, key: str, value: Any) -> float:
    return as_number(f"{key} of {config.model_type}", value)
