"""Configs as JSON and back: every object is a mapping of its fields, with the name of its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .. import masks
from ..masks import blocks, description, positions
from ..printable import printable
from . import (
    cross_attention,
    decoder_model,
    encoder_decoder_model,
    grouped_query_attention,
    multi_head_latent_attention,
    position,
    rope_scaling,
    sparse_indexed_attention,
)
from .base import LATER
from .blocks import feed_forward, mixture_of_experts

CLASS = "class"

_CLASSES: dict[str, type] = {
    one.__name__: one
    for room in (
        cross_attention,
        decoder_model,
        encoder_decoder_model,
        feed_forward,
        grouped_query_attention,
        mixture_of_experts,
        multi_head_latent_attention,
        position,
        rope_scaling,
        sparse_indexed_attention,
    )
    for one in vars(room).values()
    if isinstance(one, type) and dataclasses.is_dataclass(one) and one.__module__.startswith(__package__)
} | {
    one.__name__: one
    for room in (blocks, description, positions)
    for one in vars(room).values()
    if isinstance(one, type) and issubclass(one, masks.Mask) and dataclasses.is_dataclass(one)
}


def as_json(value: Any) -> Any:
    """Return a config, or a part of one, as JSON-ready data.

    Raises:
        TypeError: it holds a value without a JSON form, such as a mask with an array.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    if type(value).__name__ not in _CLASSES:
        raise TypeError(f"{type(value).__name__} in a config can't be written to a file")
    fields = {
        field.name: as_json(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.init and not (LATER in field.metadata and getattr(value, field.name) == field.default)
    }
    return {CLASS: type(value).__name__, **fields}


def from_json(document: object) -> Any:
    """Return the config that `as_json` wrote.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an unknown class, or fields that are unknown, missing, or do not fit.
    """
    if isinstance(document, list):
        return tuple(from_json(one) for one in document)
    if not isinstance(document, Mapping):
        return document
    name = document.get(CLASS)
    if not isinstance(name, str) or name not in _CLASSES:
        raise ValueError(f"class ({printable(repr(name))}) of a config must be one of {', '.join(sorted(_CLASSES))}")
    kind = _CLASSES[name]
    field_names = {field.name for field in dataclasses.fields(kind) if field.init}
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    values = {key: value for key, value in document.items() if key != CLASS}
    for what, names in (("unknown", values.keys() - field_names), ("missing", needed - values.keys())):
        if names:
            raise ValueError(f"{name} has {what} fields: {', '.join(sorted(map(str, names)))}")
    return kind(**{key: from_json(value) for key, value in values.items()})
