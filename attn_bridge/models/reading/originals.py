"""Shared by readers of configs that are not of `transformers`: checks of required keys and of sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...printable import printable
from ..layout import MAX_SIZE
from .decoders import MAX_LAYERS
from .model_config import ConfigFile


def check_keys(
    config: ConfigFile, required: Iterable[str], allowed_keys: Collection[str], idle: Collection[str] = ()
) -> None:
    """Check that a config has the required keys, and no unknown key that could change the computation.

    Args:
        config: the config.
        required: keys that must be present.
        allowed_keys: all keys that are read.
        idle: keys that do not change the computation.

    Raises:
        ValueError: a key is missing, or an unknown one has a value.
    """
    missing = [key for key in required if config.get(key) is None]
    if missing:
        raise ValueError(f"{config.model_type} lacks {', '.join(missing)}")
    for key, value in config.given.items():
        if key not in allowed_keys and key not in idle and value not in (None, False, 0, "", [], {}):
            raise ValueError(f"{printable(key)} ({printable(value, 40)}) of {config.model_type} is not known")


def check_size(config: ConfigFile, key: str) -> int:
    """Return a size that a tensor can have.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1 or above 2**31 - 1.
    """
    size = config.integer(key)
    if size > MAX_SIZE:
        raise ValueError(f"{key} ({size}) of {config.model_type} must be at most {MAX_SIZE}")
    return size


def layers_of(config: ConfigFile, key: str) -> int:
    """Return the number of layers.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1, or above `MAX_LAYERS`.
    """
    layers = config.integer(key)
    if layers > MAX_LAYERS:
        raise ValueError(f"{key} ({layers}) of {config.model_type} must be at most {MAX_LAYERS}")
    return layers
