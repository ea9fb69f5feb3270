"""Rotary positions in configs: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...printable import printable
from ...specs.position import AxesLayout, Pairing, Rotary
from ...specs.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    Scaling,
    YaRNScaling,
)
from .decoders import WrittenKeys
from .model_config import ConfigFile, as_number

Values = Mapping[str, Any]

Reader = Callable[[ConfigFile, Values, str], object]
"""Returns a field of a scaling, from a config, the values of its positions, and the key of the field."""


def read_rotary(
    config: ConfigFile,
    head_dim: int,
    kind: str = "full_attention",
    *,
    theta: float = 10000.0,
    pairing: Pairing = "half",
    partial: bool = False,
    renamed: Mapping[str, str] | None = None,
    sections: bool = False,
    alpha: bool = False,
) -> Rotary:
    """Return the rotary positions of a layer.

    As in `transformers`, ``rope_scaling`` takes precedence over ``rope_parameters``, and values missing there are read
    from the config itself.

    Args:
        config: the model's.
        head_dim: width of a head.
        kind: kind of the layer, for which ``rope_parameters`` may have a separate entry.
        theta: default base.
        pairing: which channels are rotated together.
        partial: whether the model may rotate a part of each head, by ``partial_rotary_factor``; others ignore it if
            positions are not scaled.
        renamed: ``rope_type`` of its files -> the equivalent type.
        sections: whether ``mrope_section`` assigns the pairs of channels to rows of positions.
        alpha: whether ``alpha`` of the type ``dynamic`` stretches the base for all lengths (HunYuan); others ignore it.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an unknown ``rope_type``, or a value that is missing or does not fit.
    """
    values = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if isinstance(values.get(kind), Mapping):
        values = values[kind]
    if renamed:
        values = {**values, "rope_type": renamed.get(rope_type(values), rope_type(values))}
    base = values.get("rope_theta", config.get("rope_theta"))
    if alpha and rope_type(values) == "dynamic" and values.get("alpha"):
        growth = _number(config, "alpha", values["alpha"]) ** (head_dim / (head_dim - 2))
        values, base = {}, _number(config, "rope_theta", theta if base is None else base) * growth
    part = values.get("partial_rotary_factor", config.get("partial_rotary_factor")) if partial else None
    rotary = make_rotary(config, head_dim, values, theta if base is None else base, part, pairing)
    if not sections or values.get("mrope_section") is None:
        return rotary
    axes, layout = _axes(config, values, rotary.width(head_dim) // 2)
    return dataclasses.replace(rotary, axes=axes, layout=layout)


def has_null_positions(config: ConfigFile, kind: str) -> bool:
    """Return whether null is the base of rotary positions (OLMo hybrid), or all of those of a kind (Cohere)."""
    values = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if kind in values:
        return values[kind] is None
    is_given = "rope_theta" in values or "rope_theta" in config
    return is_given and values.get("rope_theta", config.get("rope_theta")) is None


def _axes(config: ConfigFile, values: Values, pairs: int) -> tuple[tuple[int, ...], AxesLayout]:
    """Return the pairs of channels of time, height and width, and how they are laid out.

    As in `transformers`, interleaved height and width end with the head, and time has all other pairs.
    """
    sections = values["mrope_section"]
    if not isinstance(sections, Sequence) or len(sections) != 3 or not all(type(one) is int for one in sections):
        raise ValueError(
            f"mrope_section of {config.model_type} must be three integers, got {printable(repr(sections))}"
        )
    if not values.get("mrope_interleaved"):
        return tuple(sections), "sections"
    height, width = (len(range(row, min(3 * sections[row], pairs), 3)) for row in (1, 2))
    return (pairs - height - width, height, width), "interleaved"


def write_rotary(position: object, head_dim: int | None = None) -> WrittenKeys:
    """Return the keys that `read_rotary` reads, by their older names, which all versions of `transformers` take.

    Args:
        position: of a layer; anything but `Rotary` gives no keys.
        head_dim: width of a head if the model may rotate a part of it; None if it rotates all.
    """
    if not isinstance(position, Rotary):
        return {}
    keys: WrittenKeys = {"rope_theta": position.base, "rope_scaling": None}
    if head_dim is not None:
        keys["partial_rotary_factor"] = _part(position.dim, head_dim)
    scaling = position.scaling
    if position.axes is not None:
        keys["rope_scaling"] = {"rope_type": "default", **_write_axes(position)}
    if scaling is not None:
        keys["rope_scaling"] = {**(keys["rope_scaling"] or {}), **write_scaling(scaling)}
        context = getattr(scaling, "original_context", None)
        if context is not None:
            keys["max_position_embeddings"] = context
            if not isinstance(scaling, NTKScaling):
                keys["max_position_embeddings"] = math.ceil(context * max(1.0, getattr(scaling, "factor", 1.0)))
    return keys


def _write_axes(position: Rotary) -> dict[str, list[int] | bool]:
    """Return the keys that `_axes` reads; `ValueError` if `transformers` has no text model with such positions."""
    if position.is_of_image or position.axes is None or len(position.axes) != 3:
        raise ValueError(f"axes {position.axes} with layout {position.layout!r} are no mrope_section")
    return {"mrope_section": list(position.axes), "mrope_interleaved": position.layout == "interleaved"}


def write_nested(positions: Mapping[str, object], head_dim: int | None = None) -> WrittenKeys:
    """Return the keys of a model with separate rotary positions per kind of layers, kind -> position.

    Args:
        positions: those of each kind.
        head_dim: width of a head if the model may rotate a part of it; None if it rotates all.
    """
    keys = dict[str, object]()
    for kind, position in positions.items():
        if position is None:
            keys[kind] = None
        if isinstance(position, Rotary) and isinstance(position.scaling, ProportionalScaling):
            keys[kind] = {
                "rope_type": "proportional",
                "rope_theta": position.base,
                "partial_rotary_factor": position.scaling.part,
                "factor": position.scaling.factor,
            }
        elif isinstance(position, Rotary):
            written = write_rotary(position, head_dim)
            scaling = written["rope_scaling"] or {"rope_type": "default"}
            if not scaling.get("truncate", True):
                raise ValueError("truncate (False) of YaRN is passed over by transformers where each kind has its own")
            part = {"partial_rotary_factor": written["partial_rotary_factor"]} if head_dim is not None else {}
            keys[kind] = {"rope_theta": position.base, **part, **scaling}
    return {"rope_parameters": keys}


def write_scaling(scaling: Scaling) -> WrittenKeys:
    """Return the mapping of a scaling; `ValueError` if `transformers` has no name for it."""
    kind = next((name for name, (one, _) in _SCALINGS.items() if type(scaling) is one), None)
    fields = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(scaling)}
    if kind is None or (kind == "dynamic" and fields.pop("original_context") is None):
        raise ValueError(f"scaling ({scaling}) has no rope_type")
    written = {_KEYS.get(name, name): value for name, value in fields.items() if value is not None}
    return {"rope_type": kind, **{key: list(one) if isinstance(one, tuple) else one for key, one in written.items()}}


_KEYS = {
    "original_context": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
"""Our name of a value -> theirs; others are the same."""


def magnitude_of(config: ConfigFile, scaling: Scaling | None) -> float:
    """Return the factor of both query and key of latent attention with scaled positions (arXiv 2309.00071)."""
    values = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    weight = as_number("mscale_all_dim", values.get("mscale_all_dim") or 0.0)
    factor = getattr(scaling, "factor", 1.0)
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _part(dim: int | None, head_dim: int) -> float:
    """Return the part of a head that gives `dim` rotated channels after the product is rounded down."""
    part = 1.0 if dim is None else dim / head_dim
    return part if dim is None or int(head_dim * part) == dim else math.nextafter(part, 2.0)


def rope_type(values: Values) -> str:
    """Return the name of the scaling, under the key ``type`` in older files."""
    return str(values.get("rope_type", values.get("type", "default")))


def read_nested_rotary(
    config: ConfigFile,
    head_dim: int,
    kind: str,
    *,
    pairing: Pairing = "half",
    partial: bool = False,
    proportional: bool = False,
) -> Rotary:
    """Return the rotary positions of a layer of a model that has them per kind alone; arguments as for `read_rotary`.

    With `proportional`, a kind may have a `ProportionalScaling`.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: no values for the kind, ``rope_scaling``, or a value that is missing or does not fit.
    """
    values = config.mapping("rope_parameters").get(kind)
    if proportional and isinstance(values, Mapping) and rope_type(values) == "proportional":
        base, part, factor = (
            _number(config, key, values.get(key, usual))
            for key, usual in (("rope_theta", None), ("partial_rotary_factor", 1.0), ("factor", 1.0))
        )
        return Rotary(base, scaling=ProportionalScaling(part, factor))
    config.refuse("rope_scaling", None)
    if not isinstance(values, Mapping):
        raise ValueError(f"rope_parameters of {config.model_type} must hold {kind}, got {printable(repr(values))}")
    turned = values.get("partial_rotary_factor", 1.0) if partial else None
    return make_nested_rotary(config, head_dim, values, _required(config, values, "rope_theta"), turned, pairing)


def read_rotary_by_kind(
    config: ConfigFile,
    head_dim: int,
    kind: str,
    *,
    theta: float = 1_000_000.0,
    local_theta: float = 10_000.0,
    local_key: str = "",
) -> Rotary:
    """Return the rotary positions of a kind of layers in a model that has them per kind, or as older files have them.

    `transformers` applies ``rope_scaling`` and ``rope_theta`` of older files to full attention alone, where it scales
    by its ``rope_type``, and not by its ``type``.

    Args:
        config: the model's.
        head_dim: width of a head.
        kind: kind of the layer.
        theta: default base of full attention.
        local_theta: that of layers with a window.
        local_key: key of the latter in older files; "" where they have none.
    """
    values = dict(config.mapping("rope_parameters").get(kind) or {"rope_type": "default"})
    if kind == "full_attention":
        values |= config.mapping("rope_scaling")
        base, usual = config.get("rope_theta"), theta
    else:
        base, usual = config.get(local_key) if local_key else None, local_theta
    base = values.get("rope_theta", base)
    return make_nested_rotary(config, head_dim, values, usual if base is None else base)


def write_rotary_by_kind(positions: Mapping[str, object], theta: object, local_key: str = "") -> dict[str, object]:
    """Return the keys that `read_rotary_by_kind` reads, by their older names where these have the same meaning.

    Those can't scale layers with a window; without a key of their base, only the usual base is the same in all
    versions of `transformers`.

    Args:
        positions: kind -> position.
        theta: base that older files may leave out.
        local_key: as in `read_rotary_by_kind`.
    """
    by_kind = write_nested(positions)  # refuses what transformers passes over
    full, local = positions.get("full_attention"), positions.get("sliding_attention")
    is_usual = full is not None and all(getattr(one, "base", None) == theta for one in positions.values())
    if getattr(local, "scaling", None) is not None or not (local_key or is_usual):
        return by_kind
    base = getattr(local, "base", None) if local_key else None
    return {**write_rotary(full), **({} if base is None else {local_key: base})}


def make_nested_rotary(
    config: ConfigFile, head_dim: int, values: Values, base: object, part: object = None, pairing: Pairing = "half"
) -> Rotary:
    """Return the rotary positions of a kind of layers, if each kind has its own; arguments as for `make_rotary`.

    As in `transformers`, their original context length comes only from their own values, and ``truncate`` is ignored.
    """
    config_values = {name: value for name, value in config.given.items() if name != "original_max_position_embeddings"}
    inner = config.with_given(config_values)
    return make_rotary(inner, head_dim, {**values, "truncate": True}, base, part, pairing)


_SINGLE = ("gpt_neox_japanese", "persimmon", "phi", "stablelm")
"""Families whose classes cut the channel alone out of a head, and put two back, so that heads get wider.

YaRN has no frequency for a single channel in any family.
"""


def make_rotary(
    config: ConfigFile, head_dim: int, values: Values, base: object, part: object = None, pairing: Pairing = "half"
) -> Rotary:
    """Return rotary positions from their parameters in a config.

    Args:
        config: the model's, for the number of its positions.
        head_dim: width of a head.
        values: ``rope_type`` and its parameters.
        base: the base of the wavelengths.
        part: the rotated part of a head; None is all of it.
        pairing: which channels are rotated together.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an unknown ``rope_type``, or a value that is missing or does not fit.
    """
    kind = rope_type(values)
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type ({printable(kind)}) of {config.model_type} must be one of {', '.join(_SCALINGS)}")
    dim = None if part is None else int(head_dim * _number(config, "partial_rotary_factor", part))
    if dim == 1 and kind != "yarn" and config.model_type not in _SINGLE:
        dim = 2  # as most classes of transformers have it: one frequency turns two channels
    if dim is not None and (dim < 1 or dim % 2 or dim > head_dim):
        raise ValueError(
            f"partial_rotary_factor ({part}) of {config.model_type} turns {dim} of the {head_dim} channels of a head, "
            "which must be an even number of them"
        )
    make, readers = _SCALINGS[kind]
    fields = {name: read(config, values, _KEYS.get(name, name)) for name, read in readers.items()}
    scaling = None if make is None else make(**fields)
    if part is None:
        _refuse_part(config, head_dim, values, kind)
    return Rotary(_number(config, "rope_theta", base), None if dim == head_dim else dim, pairing, scaling)


def _refuse_part(config: ConfigFile, head_dim: int, values: Values, kind: str) -> None:
    """Refuse a rotated part in a model that rotates all of each head: `transformers` would make tables of that part.

    Without scaling, its classes ignore the part, or can't run it, unless one channel is left over: half of an odd width
    is rounded up.
    """
    key = "partial_rotary_factor"
    part = values.get(key, config.get(key))
    turned = head_dim if part is None else int(head_dim * _number(config, key, part))
    if turned != head_dim and (kind != "default" or turned == head_dim - 1):
        raise ValueError(f"{key} ({part}) of {config.model_type} is not supported with rope_type {kind}, only 1.0")


def _original_context(config: ConfigFile, values: Values, key: str) -> int:
    value = config.get(key) or values.get(key) or config.integer("max_position_embeddings")
    tokens = int(_number(config, key, value))
    if tokens < 1:
        raise ValueError(f"{key} ({printable(value)}) of {config.model_type} must be at least 1")
    return tokens


def _factor(config: ConfigFile, values: Values, key: str) -> float:
    """Return the growth factor of the context: from the file, or from both lengths."""
    if values.get(key) is not None:
        return _number(config, key, values[key])
    return config.integer("max_position_embeddings") / _original_context(config, values, _KEYS["original_context"])


def _required(config: ConfigFile, values: Values, key: str) -> float:
    if key not in values:
        raise ValueError(f"rope_parameters of {config.model_type} must hold {key}, got {printable(', '.join(values))}")
    return _number(config, key, values[key])


def _numbers(config: ConfigFile, values: Values, key: str) -> tuple[float, ...]:
    numbers = values.get(key)
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise ValueError(f"{key} of {config.model_type} must be a list of numbers, got {printable(repr(numbers))}")
    return tuple(_number(config, key, one) for one in numbers)


def _optional(config: ConfigFile, values: Values, key: str) -> float | None:
    return None if values.get(key) is None else _number(config, key, values[key])


def _number(config: ConfigFile, key: str, value: object) -> float:
    return as_number(f"{key} of {config.model_type}", value)


_SCALINGS: dict[str, tuple[Callable[..., Scaling] | None, Mapping[str, Reader]]] = {
    "default": (None, {}),
    "linear": (LinearScaling, {"factor": _required}),
    "dynamic": (
        NTKScaling,
        {
            "factor": _required,
            "original_context": lambda config, values, key: config.integer("max_position_embeddings"),
        },
    ),
    "yarn": (
        YaRNScaling,
        {
            "original_context": _original_context,
            "factor": _factor,
            "beta_fast": lambda config, values, key: _number(config, key, values.get(key) or 32),
            "beta_slow": lambda config, values, key: _number(config, key, values.get(key) or 1),
            **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), _optional),
            "truncate": lambda config, values, key: bool(values.get(key, True)),
        },
    ),
    "llama3": (
        Llama3Scaling,
        {
            **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _required),
            "original_context": _original_context,
        },
    ),
    "longrope": (
        LongRoPEScaling,
        {
            "original_context": _original_context,
            **dict.fromkeys(("short_factors", "long_factors"), _numbers),
            "factor": _factor,
            "attention_factor": _optional,
        },
    ),
}
"""``rope_type`` -> our class of scaling, and the reader of each of its fields."""
