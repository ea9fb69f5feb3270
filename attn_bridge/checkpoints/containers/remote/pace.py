"""Bodies of answers: read into memory that is there, no longer than was asked for, and at a minimum speed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from .faults import FaultError, SlowError

WINDOW = 30.0
"""Seconds over which the speed of an answer is measured: as long as a connection may be silent."""

MIN_SPEED = 100
"""Bytes per second that an answer has at least, over a window.

A link of GPRS, the slowest in use, carries about 2,500. The 16 requests that a store has under way at the same time
share that, so each gets 156; what is left is for their headers and for shares that are not equal.
"""


class Pace:
    """Measures how fast one answer comes.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._since, self._count = clock, clock(), 0

    def add(self, count: int) -> None:
        """Note bytes that have come.

        Raises:
            SlowError: fewer came in the last window than the minimum speed makes. A window that took longer, as where
                this process was stopped, has to bring no more for that.
        """
        self._count += count
        seconds = self._clock() - self._since
        if seconds < WINDOW:
            return
        if self._count < MIN_SPEED * WINDOW:
            raise SlowError(f"its server sends {self._count} bytes in {seconds:.3g} s: fewer than {MIN_SPEED} a second")
        self._since, self._count = self._clock(), 0


async def take(into: memoryview, read: Callable[[], Awaitable[bytes]]) -> None:
    """Fill memory with an answer that has to be as long.

    Args:
        into: where the bytes go.
        read: gives the next bytes; none at the end.

    Raises:
        FaultError: it is longer or shorter, or comes too slowly.
    """
    pace, done = Pace(), 0
    while data := await read():
        if done + len(data) > len(into):
            raise FaultError(f"the store sends more than the {len(into)} bytes that were asked for", again=True)
        into[done : done + len(data)] = data
        done += len(data)
        pace.add(len(data))
    if done < len(into):
        raise FaultError(f"the store sends {done} bytes of {len(into)}", again=True)


async def beginning(most: int, read: Callable[[], Awaitable[bytes]]) -> bytes:
    """Return the first bytes of an answer, and all of one that is shorter.

    Raises:
        FaultError: it comes too slowly.
    """
    pace, body = Pace(), bytearray()
    while len(body) < most and (data := await read()):
        body += data
        pace.add(len(data))
    return bytes(body[:most])
