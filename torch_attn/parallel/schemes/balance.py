"""A sequence in an order that balances the work of devices: each serves an early and a late piece of its queries.

In the natural order, the last device's queries see most keys under a causal mask, and the others wait for it. The
exchange moves a device's part once into and once out of the attention; outside, everything stays in order.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from attn_bridge.masks import Mask
from attn_bridge.sharding import pieces_of

from ..exchange import exchange
from .part import Part

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


@dataclasses.dataclass(frozen=True)
class Places:
    """Which queries each device along an axis serves.

    Attributes:
        group: the devices.
        rank: this device's place among them.
        devices: how many there are.
        tokens: queries of all devices.
        is_balanced: whether each has an early and a late piece, and not those that it holds outside.
    """

    group: ProcessGroup
    rank: int
    devices: int
    tokens: int
    is_balanced: bool

    def starts(self, device: int | None = None) -> tuple[int, ...]:
        """Return where the pieces of a device start, of this one by default; in order, they are one."""
        device = self.rank if device is None else device
        if not self.is_balanced:
            return (device * (self.tokens // self.devices),)
        size = self.tokens // (2 * self.devices)
        return tuple(size * piece for piece in pieces_of(device, self.devices, balanced=True))

    def exchanged(self, part: Part) -> Part:
        """Return a part whose queries, and whatever has rows, are those that the device serves."""

        def rows(array: Tensor | None) -> Tensor | None:
            return array if array is None or array.shape[2] == 1 else self.to_balanced(array, 2)

        return dataclasses.replace(
            part, query=self.to_balanced(part.query, 1), bias=rows(part.bias), keep=rows(part.keep)
        )

    def to_balanced(self, array: Tensor, axis: int) -> Tensor:
        """Return the device's early and late piece of an array whose pieces lie in order on the devices."""
        return self._move(array, axis, self._held(False), self._held(True))

    def in_order(self, array: Tensor, axis: int) -> Tensor:
        """Undo `to_balanced`."""
        return self._move(array, axis, self._held(True), self._held(False))

    def _held(self, balanced: bool) -> list[tuple[int, int]]:
        return [pieces_of(device, self.devices, balanced=balanced) for device in range(self.devices)]

    def _move(self, array: Tensor, axis: int, now: list[tuple[int, int]], then: list[tuple[int, int]]) -> Tensor:
        """Move the pieces from who holds them now to who holds them then."""
        owner = {piece: device for device, both in enumerate(then) for piece in both}
        holder = {piece: device for device, both in enumerate(now) for piece in both}
        pieces = dict(zip(now[self.rank], array.movedim(axis, 0).chunk(2), strict=True))
        size = array.shape[axis] // 2
        sent = sorted(pieces, key=lambda piece: (owner[piece], piece))
        got = sorted(then[self.rank], key=lambda piece: (holder[piece], piece))
        sending, getting = (
            [size * sum(by[p] == device for p in held) for device in range(self.devices)]
            for by, held in ((owner, sent), (holder, got))
        )
        is_bool = array.dtype == torch.bool
        rows = torch.cat([pieces[piece] for piece in sent])
        exchanged = exchange(rows.to(torch.uint8) if is_bool else rows, sending, getting, self.group)
        exchanged = exchanged.to(torch.bool) if is_bool else exchanged
        arrived = dict(zip(got, exchanged.chunk(2), strict=True))
        return torch.cat([arrived[piece] for piece in then[self.rank]]).movedim(0, axis)
