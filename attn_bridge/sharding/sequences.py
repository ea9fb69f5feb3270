"""The division of a sequence among devices: the pieces of each device's queries, and the order in which keys arrive.

Letters of the formulas: N devices along the context axis; the sequence has 2 N equal pieces, numbered in order.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of the ring: each device meets the keys of the device `hops` places before it."""

    hops: int

    def owner(self, device: int, devices: int) -> int:
        """Return the device whose keys a device has in this turn."""
        return (device - self.hops) % devices


def turns(devices: int) -> tuple[Turn, ...]:
    """Return the turns of a ring: each device's own keys first, then those of all others; N - 1 moves between them."""
    return tuple(Turn(hops) for hops in range(devices))


def pieces_of(device: int, devices: int, *, balanced: bool) -> tuple[int, int]:
    """Return the two pieces of the sequence whose queries a device serves.

    In order, device r has pieces 2r and 2r + 1. A causal mask gives late queries more keys, so that balanced, it has an
    early and a late one: r and 2N - 1 - r.
    """
    return (device, 2 * devices - 1 - device) if balanced else (2 * device, 2 * device + 1)
