"""Numbers of described families as a config.json has them: powers, quotients, and a number per layer."""

from __future__ import annotations

from typing import Any

from ...printable import printable
from ..reading.decoders import inverse
from ..reading.model_config import ConfigFile
from .description import KeySource


def written(name: str, value: Any, source: KeySource) -> object:
    """Return the value of a field as the key of its source has it."""
    if name == "pairing":
        return value == "interleaved"
    if source.power == 1.0 or value is None:
        return value
    number = inverse(lambda number: number**source.power, value, value ** (1.0 / source.power))
    return int(number) if number.is_integer() else number  # transformers takes no float where it has an int


def multiplied(quotient: float, divisor: float) -> int | float:
    """Return the number that a divisor divides into a quotient, an integer where it is one."""
    number = inverse(lambda number: number / divisor, quotient, quotient * divisor)
    return int(number) if number.is_integer() else number


def of_layer(config: ConfigFile, key: str, layer: int, usual: int) -> int:
    """Return the number of a layer in a list of one per layer; `usual` where a config has no such list.

    Raises:
        ValueError: the list has another length than the model, or a number below 1.
    """
    counts = config.get(key)
    if counts is None:
        return usual
    layers = config.integer("num_hidden_layers")
    if not isinstance(counts, list | tuple) or len(counts) != layers or any(type(one) is not int for one in counts):
        shown = printable(repr(counts), 60)
        raise ValueError(f"{key} ({shown}) of {config.model_type} must be a list of {layers} integers")
    if counts[layer] < 1:
        raise ValueError(f"{key}[{layer}] ({counts[layer]}) of {config.model_type} must be at least 1")
    return int(counts[layer])
