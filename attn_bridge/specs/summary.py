"""A config in one line, as a module shows it: sizes, and what differs from the defaults."""

from __future__ import annotations

import dataclasses

from ..masks import Mask
from .base import Config


def summarize(config: Config) -> str:
    """Return the fields of a config as ``name=value``, without those that are None, False, or lists of parts.

    Masks and positions are shown without their own defaults, arrays by the class of their object.
    """
    values = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return ", ".join(f"{name}={_short(value)}" for name, value in values if _is_shown(value))


def _is_shown(value: object) -> bool:
    is_part = isinstance(value, (tuple, list, dict, Config))
    return value is not None and value is not False and not is_part


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mask) and any(True for _ in value.arrays()):
        return f"{type(value).__name__}(...)"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    changed = (
        f"{field.name}={_short(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    )
    return f"{type(value).__name__}({', '.join(changed)})"
