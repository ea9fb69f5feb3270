"""A sequence in an order that balances the work of devices: each serves an early and a late piece of its queries.

In the natural order, the last device's queries see most keys under a causal mask, and the others wait for it. The
exchange moves half of a device's part twice, into and out of the attention; outside, everything stays in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from attn_bridge.masks import Mask
from attn_bridge.sharding import pieces_of

LEAST_TOKENS = 128
"""Tokens of a piece from which on the exchange pays."""


def pays(mask: Mask | None, tokens: int, devices: int) -> bool:
    """Return whether the device with most to do has less to do in the balanced order."""
    size = tokens // (2 * devices)
    if mask is None or tokens % (2 * devices) or size < LEAST_TOKENS:
        return False
    pieces = [range(number * size, (number + 1) * size) for number in range(2 * devices)]
    work = [sum(mask.visibility(one, other) is not False for other in pieces) for one in pieces]

    def most(balanced: bool) -> int:
        return max(sum(work[p] for p in pieces_of(device, devices, balanced=balanced)) for device in range(devices))

    return most(balanced=True) < most(balanced=False)


def starts_of(tokens: int, devices: int, *, balanced: bool) -> tuple[tuple[int, ...], ...]:
    """Return the first token of each piece per device: ``starts[piece][device]``.

    Balanced, a device has an early and a late piece; otherwise one piece of neighbouring tokens.
    """
    if not balanced:
        return (tuple(device * (tokens // devices) for device in range(devices)),)
    size = tokens // (2 * devices)
    pieces = [pieces_of(device, devices, balanced=True) for device in range(devices)]
    return tuple(tuple(size * both[number] for both in pieces) for number in range(2))


def to_balanced(array: Array, axis: int, name: str, devices: int) -> Array:
    """Return the device's early and late piece of an array whose pieces lie in order along the devices of an axis."""
    evens, odds = jnp.split(array, 2, axis)
    evens, odds = lax.ppermute(evens, name, _pairs(0, devices)), lax.ppermute(odds, name, _pairs(1, devices))
    return jnp.concatenate(_swapped(evens, odds, name), axis)


def in_order(array: Array, axis: int, name: str, devices: int) -> Array:
    """Undo `to_balanced`."""
    early, late = jnp.split(array, 2, axis)
    evens, odds = _swapped(early, late, name)
    moved = (
        lax.ppermute(one, name, [(owner, device) for device, owner in _pairs(number, devices)])
        for number, one in enumerate((evens, odds))
    )
    return jnp.concatenate(list(moved), axis)


def _swapped(first: Array, second: Array, name: str) -> Sequence[Array]:
    """Return both, the other way round on devices with an odd number, whose early piece has one, too."""
    is_even = lax.axis_index(name) % 2 == 0
    return jnp.where(is_even, first, second), jnp.where(is_even, second, first)


def _pairs(parity: int, devices: int) -> list[tuple[int, int]]:
    """Return who holds a piece of even or odd number in order, and who in the balanced one."""
    owners = {piece: device for device in range(devices) for piece in pieces_of(device, devices, balanced=True)}
    return [(device, owners[2 * device + parity]) for device in range(devices)]
