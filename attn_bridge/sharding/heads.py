"""Projections by head, where layers may hold some of the heads of their config, as devices that share them do.

The twins call these functions with arrays of either framework. Letters: H heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from einops import rearrange


class Shaped(Protocol):
    """An array of either framework."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the axes."""


Array = TypeVar("Array", bound=Shaped)


def split_heads(x: Array, channels: int, name: str, heads: int | None = None) -> Array:
    """Return the output ``(..., H * C)`` of a layer by head, ``(..., H, C)``.

    Args:
        x: the output; it determines H.
        channels: C.
        name: of the layer.
        heads: H where the layer cannot be cut; None takes any number.

    Raises:
        ValueError: a width that is not a multiple of C, or not that of `heads`.
    """
    width = x.shape[-1]
    if heads is not None:
        check_width(name, width, heads * channels)
    if width % channels:
        raise ValueError(f"width of {name} ({width}) must be a multiple of the width of a head ({channels})")
    return rearrange(x, "... (h c) -> ... h c", c=channels)


def check_width(name: str, width: int, expected: int) -> None:
    """Check the width of a layer's output where it cannot be cut.

    Raises:
        ValueError: another width.
    """
    if width != expected:
        raise ValueError(f"width of {name} ({width}) must be {expected}: the layer can't be cut")


def check_groups(
    heads: int, key_heads: int, num_heads: int = 1, num_kv_heads: int = 1, *, value_heads: int | None = None
) -> None:
    """Check that queries find their keys where layers hold some of the heads.

    Args:
        heads: of the query.
        key_heads: of key and value; one may serve queries of its group alone.
        num_heads: of the query in the config.
        num_kv_heads: of key and value in the config.
        value_heads: of the value; None where attention itself checks them.

    Raises:
        ValueError: query, key and value are cut differently.
    """
    if value_heads not in (None, key_heads):
        raise ValueError(f"heads of W_key ({key_heads}) and of W_value ({value_heads}) must be cut alike")
    group = num_heads // num_kv_heads
    if heads == key_heads * group or (key_heads == 1 and heads <= group):
        return
    raise ValueError(
        f"heads of W_query ({heads}) and of W_key ({key_heads}) must be cut alike, with {group} to a key head"
    )
