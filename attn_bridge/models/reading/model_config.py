"""A ``config.json`` as a family reads it: values checked, missing keys as `transformers` has them."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ...printable import printable
from ...validation import MAX_INDEX

MAX_SIZE = (1 << 31) - 1
"""Largest size that a config.json may give."""

MAX_LAYERS = 4096
"""Maximum blocks of a model; a config with more is broken."""


class ConfigFile:
    """A ``config.json``, with the defaults of its family for missing keys.

    A key with a dot, such as ``attn_config.clip_qkv``, is the key of a nested mapping.

    Args:
        values: the file as a dict.
        model_type: its ``model_type``.
        defaults: key -> default of `transformers`; without one, a missing key is None.
        aliases: other names of a key that files have.
        keys: usual key -> the key that holds its value, where the usual one is about another part of the model.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        model_type: str,
        defaults: Mapping[str, object],
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        keys: Mapping[str, str] | None = None,
    ):
        self.given, self.model_type, self.defaults = values, model_type, defaults
        self.aliases, self.keys = dict(aliases or {}), dict(keys or {})

    def __contains__(self, key: str) -> bool:
        outer, _, inner = key.partition(".")
        if inner:
            return inner in self.mapping(outer)
        return any(name in self.given for name in self._names(key))

    def with_given(self, values: Mapping[str, object]) -> ConfigFile:
        """Return another file of the same family."""
        return ConfigFile(values, self.model_type, self.defaults, self.aliases, self.keys)

    def _names(self, key: str) -> tuple[str, ...]:
        key = self.keys.get(key, key)
        return (key, *self.aliases.get(key, ()))

    def get(self, key: str) -> Any:
        """Return the value of a key as it is; null is None, as in the file.

        Raises:
            TypeError: a key with a dot, whose first part is not a mapping.
        """
        outer, _, inner = key.partition(".")
        if inner:
            others = (self.given[name] for name in self.aliases.get(key, ()) if name in self.given)
            return self.mapping(outer).get(inner, next(others, self.defaults.get(key)))
        for name in self._names(key):
            if name in self.given:
                return self.given[name]
        return self.defaults.get(self.keys.get(key, key))

    def integer(self, key: str, least: int = 1, most: int = MAX_INDEX) -> int:
        """Return an integer from `least` to `most`, which is the largest index.

        Raises:
            TypeError: it is something else.
            ValueError: it is smaller or larger.
        """
        value = self.get(key)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{key} of {self.model_type} must be an integer, got {_shown(value)}")
        if value < least:
            raise ValueError(f"{key} ({printable(value)}) of {self.model_type} must be at least {least}")
        if value > most:
            raise ValueError(f"{key} ({printable(value)}) of {self.model_type} must be at most {most}")
        return int(value)

    def size(self, key: str) -> int:
        """Return a size that a tensor can have, as `integer` does."""
        return self.integer(key, most=MAX_SIZE)

    def depth(self, key: str) -> int:
        """Return a number of layers, as `integer` does."""
        return self.integer(key, most=MAX_LAYERS)

    def integer_or_none(self, key: str, least: int = 1) -> int | None:
        """Return an integer as `integer` does, or None for null."""
        return None if self.get(key) is None else self.integer(key, least)

    def number(self, key: str) -> float:
        """Return a finite number.

        Raises:
            TypeError: it is something else.
            ValueError: it is not finite.
        """
        return as_number(f"{key} of {self.model_type}", self.get(key))

    def positive(self, key: str) -> float:
        """Return a finite number above 0.

        Raises:
            TypeError: it is something else.
            ValueError: it is not finite, or not above 0.
        """
        value = self.number(key)
        if value <= 0:
            raise ValueError(f"{key} ({self.get(key)}) of {self.model_type} must be positive")
        return value

    def number_or_none(self, key: str) -> float | None:
        """Return a number as `number` does, or None for null."""
        return None if self.get(key) is None else self.number(key)

    def factors(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of factors; null is that of ones.

        Raises:
            TypeError: one of them is not a number.
            ValueError: the value is not a list of that many numbers, or one of them is not finite.
        """
        values = self.get(key)
        if values is None:
            return (1.0,) * count
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
            raise ValueError(f"{key} ({printable(repr(values))}) of {self.model_type} must be {count} numbers")
        return tuple(as_number(f"{key}[{number}] of {self.model_type}", value) for number, value in enumerate(values))

    def flag(self, key: str) -> bool:
        """Return a bool; null is False.

        Raises:
            TypeError: it is something else.
        """
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise TypeError(f"{key} of {self.model_type} must be a bool, got {_shown(value)}")
        return bool(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return a mapping; null is an empty one.

        Raises:
            TypeError: it is something else.
        """
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{key} of {self.model_type} must be a mapping, got {_shown(value)}")
        return value or {}

    def layer_type(self, layer: int, default: str) -> str:
        """Return the kind of a layer, such as ``sliding_attention``: of ``layer_types``, or else `default`.

        Raises:
            TypeError: ``layer_types`` is not a list of strings.
            ValueError: it has no entry for the layer.
        """
        kinds = self.get("layer_types")
        if kinds is None:
            return default
        if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not all(isinstance(one, str) for one in kinds):
            raise TypeError(f"layer_types of {self.model_type} must be a list of strings, got {_shown(kinds)}")
        if layer >= len(kinds):
            raise ValueError(f"layer_types of {self.model_type} has {len(kinds)} entries, none for layer {layer}")
        return "full_attention" if kinds[layer] == "attention" else str(kinds[layer])  # which older files call it

    def refuse(self, key: str, *accepted: object) -> None:
        """Refuse a value that changes the computation in a way that we don't support.

        Raises:
            ValueError: the value is not one of `accepted`.
        """
        value = self.get(key)
        if value not in accepted:
            only = " or ".join(map(repr, accepted))
            raise ValueError(f"{key} ({printable(repr(value))}) of {self.model_type} is not supported, only {only}")

    def check_keys(self, required: Iterable[str], allowed: Collection[str], idle: Collection[str] = ()) -> None:
        """Check that a config has the required keys, and no unknown key that could change the computation.

        Args:
            required: keys that must be present.
            allowed: all keys that are read.
            idle: keys that do not change the computation.

        Raises:
            ValueError: a key is missing, or an unknown one has a value.
        """
        missing = [key for key in required if self.get(key) is None]
        if missing:
            raise ValueError(f"{self.model_type} lacks {', '.join(missing)}")
        for key, value in self.given.items():
            if key not in allowed and key not in idle and value not in (None, False, 0, "", [], {}):
                raise ValueError(f"{printable(key)} ({printable(value, 40)}) of {self.model_type} is not known")


def as_number(label: str, value: object) -> float:
    """Return a value as a finite float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{label} must be a number, got {_shown(value)}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{label} must be finite in float64, got a number of {len(str(value))} digits")
    if not math.isfinite(value):
        raise ValueError(f"{label} ({value}) must be finite")
    return float(value)


def nested(keys: Mapping[str, object]) -> dict[str, object]:
    """Return keys as in a file: those with a dot in the nested mapping that `ConfigFile` reads them from."""
    inside: dict[str, dict[str, object]] = {}
    for key, value in keys.items():
        outer, _, inner = key.partition(".")
        if inner:
            inside.setdefault(outer, {})[inner] = value
    return {key: value for key, value in keys.items() if "." not in key} | inside


def _shown(value: object) -> str:
    return "null" if value is None else type(value).__name__
