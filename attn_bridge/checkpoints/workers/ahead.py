"""Reading ahead: a store is asked for what a worker reads next while it writes, many requests at a time."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from ..containers.base import Reader
from ..elements import Elements
from ..planning.plans import Target

WINDOW, LEAST = 1 << 25, 1 << 24
"""Bytes that are asked for before they are needed, at most, and where tasks are small."""

BATCH = 1 << 22
"""Bytes that are asked for together, at least, where so many are needed: neighbours by one request."""

CHUNK = 1 << 23
"""Bytes that a worker moves at a time, at most, so that several such pieces fit in what is asked for."""

MOST = 256
"""Pieces of work that are looked ahead, at most."""


class Ahead:
    """Starts the reads of a store that a worker needs next.

    Args:
        reader: the source.
        elements: what reads from it.
        work: targets, and ranges of their elements, in the order in which they will be read.
        task_bytes: bytes of a task, at most.
    """

    def __init__(self, reader: Reader, elements: Elements, work: Iterable[tuple[Target, int, int]], task_bytes: int):
        self._reader, self._elements = reader, elements
        self._work = iter(work)
        self._window = min(WINDOW, max(LEAST, task_bytes))
        self._asked: collections.deque[int] = collections.deque()
        self._last: tuple[str, int, int] | None = None
        self._done = False

    def go_on(self) -> None:
        """Ask for what there is room for, once there is room for some."""
        held = sum(self._asked)
        while not self._done and held + BATCH <= self._window and len(self._asked) < MOST:
            batch: list[tuple[str, int, int]] = []
            size = 0
            while size < BATCH and len(self._asked) < MOST:
                item = next(self._work, None)
                if item is None:
                    self._done = True
                    break
                found = [one for one in self._elements.needed(*item) if one != self._last]
                self._last = found[-1] if found else self._last
                count = sum(stop - start for _, start, stop in found)
                if count > self._window:  # as large as that, it is spread over connections by itself
                    found, count = [], 0
                batch += found
                size += count
                self._asked.append(count)
            held += size
            if batch:
                self._reader.read_ahead(batch)

    def taken(self) -> None:
        """Say that the next piece of work was read."""
        if self._asked:
            self._asked.popleft()
