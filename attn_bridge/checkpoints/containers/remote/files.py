"""Files of a store, read by position: few requests for small ranges, several concurrent ones for large ranges."""

from __future__ import annotations

import bisect
import collections
import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..files import File, bad
from .faults import FaultError

if TYPE_CHECKING:
    from .paths import RemotePath

FIRST, MOST = 1 << 16, 1 << 23
"""Bytes that are read ahead of a small range: at first, and at most once a file is read in order."""

LARGE = 1 << 22
"""Ranges of at least this many bytes are read by a separate request, straight to their destination."""

GAP = 1 << 16
"""Maximum gap in bytes between two ranges that are read by one request."""

HELD, HELD_IN_ALL = 1 << 24, 1 << 25
"""Bytes of a file that are cached for later reads, and those of all files together."""

HELD_AHEAD = 1 << 26
"""Maximum bytes of a file that are being read ahead or not yet taken."""

_recent: collections.OrderedDict[int, tuple[weakref.ref[RemoteFile], int]] = collections.OrderedDict()
_recent_lock = threading.Lock()


class RemoteFile(File):
    """A file of a store; every range comes from the version that was opened, or is an error.

    Raises:
        CheckpointError: it does not exist, or is not a file.
    """

    def __init__(self, path: Path):
        self.path = path
        where = cast("RemotePath", path)
        self._store, self._key = where.store, where.key
        entry = self._store.entry(self._key)
        if entry is None:
            raise bad(path, "does not exist")
        if entry.is_folder:
            raise bad(path, "is not a file")
        self._entry, self.size = entry, entry.size
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._blocks: dict[int, memoryview] = {}
        self._held = 0
        self._next, self._run = -1, FIRST
        self._ahead: collections.deque[tuple[int, memoryview, Future[None]]] = collections.deque()
        if entry.head:
            self._remember([(0, memoryview(entry.head))])

    def read(self, start: int, count: int) -> bytes | memoryview:
        """Return exactly that many bytes."""
        if start < 0 or count < 0 or start + count > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {start + count}")
        try:
            whole = memoryview(bytearray(count))
        except MemoryError:
            raise bad(self.path, f"there is no memory for {count} bytes") from None
        self.read_into(start, whole)
        return whole

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with bytes from position `start` on."""
        stop = start + len(into)
        if start < 0 or stop > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {stop}")
        with self._lock:
            in_order = 0 <= start - self._next <= GAP
            self._run = min(2 * self._run, MOST) if in_order else FIRST
            self._next = stop
            done = self._take(start, into)
        done += self._take_ahead(start + done, into[done:])
        if done == len(into):
            return
        rest = len(into) - done
        if rest >= LARGE:
            self._store.read(self._key, self._entry, [(start + done, into[done:])])
            return
        ahead = min(self.size, stop + (self._run if in_order else max(0, FIRST - rest)))
        block = memoryview(bytearray(ahead - start - done))
        self._store.read(self._key, self._entry, [(start + done, block)])
        into[done:] = block[:rest]
        self._remember([(start + done, block)])

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read ranges that will be needed soon, as (start, count); close ranges share a request."""
        wanted, left = [], HELD // 2
        for start, view in self._missing(sorted(ranges)):
            left -= len(view)
            if left < 0:
                break
            wanted.append((start, view))
        if wanted:
            self._store.read(self._key, self._entry, wanted)
            self._remember(wanted)

    def _missing(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
        """Yield start and memory for each run of close ranges that is not cached."""
        runs: list[list[int]] = []
        for start, count in ranges:
            stop = min(start + count, self.size)
            if runs and runs[-1][0] <= start <= runs[-1][1] + GAP:
                runs[-1][1] = max(runs[-1][1], stop)
            elif start < stop:
                runs.append([start, stop])
        for start, stop in runs:
            with self._lock:
                is_cached = self._covers(start, stop)
            if not is_cached:
                yield start, memoryview(bytearray(stop - start))

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read ranges that will be needed soon, in this order; close ranges share a request."""
        for start, view in self._missing(ranges):
            job = self._store.begin(self._key, self._entry, [(start, view)])
            with self._lock:
                self._ahead.append((start, view, job))
                while sum(len(one) for _, one, _ in self._ahead) > HELD_AHEAD:
                    self._ahead.popleft()[2].cancel()  # not taken yet

    def _take_ahead(self, start: int, into: memoryview) -> int:
        """Copy read-ahead bytes from the start of a range, waiting for them, and return their number."""
        done = 0
        while done < len(into):
            position = start + done
            with self._lock:
                request = next((one for one in self._ahead if one[0] <= position < one[0] + len(one[1])), None)
            if request is None:
                break
            first, view, job = request
            try:
                job.result()
            except (FaultError, CancelledError):  # the caller requests it again, and reports a second failure
                count = 0
            else:
                part = view[position - first : position - first + len(into) - done]
                into[done : done + len(part)] = part
                count = len(part)
            done += count
            if not count or position + count == first + len(view):
                with self._lock, contextlib.suppress(ValueError):
                    self._ahead.remove(request)
            if not count:
                break
        return done

    def _covers(self, start: int, stop: int) -> bool:
        number = bisect.bisect_right(self._starts, start) - 1
        return number >= 0 and self._starts[number] + len(self._blocks[self._starts[number]]) >= stop

    def _take(self, start: int, into: memoryview) -> int:
        """Copy cached bytes from the start of a range, and return their number."""
        done = 0
        while done < len(into):
            number = bisect.bisect_right(self._starts, start + done) - 1
            if number < 0:
                break
            block = self._blocks[self._starts[number]]
            first = start + done - self._starts[number]
            part = block[first : first + len(into) - done]
            if not part:
                break
            into[done : done + len(part)] = part
            done += len(part)
        return done

    def _remember(self, blocks: Iterable[tuple[int, memoryview]]) -> None:
        """Cache blocks for later reads, and free those of the least recently read files."""
        with self._lock:
            for start, block in blocks:
                self._hold(start, block)
            num_bytes = self._held
        old = []
        with _recent_lock:
            _recent[id(self)] = weakref.ref(self), num_bytes
            _recent.move_to_end(id(self))
            while len(_recent) > 1 and sum(size for _, size in tuple(_recent.values())) > HELD_IN_ALL:
                old.append(_recent.popitem(last=False)[1][0]())
        for file in old:
            if file is not None:
                file.close()

    def _hold(self, start: int, block: memoryview) -> None:
        """Keep a block; those that were kept first go first."""
        before = self._blocks.pop(start, None)
        if before is not None:
            self._held -= len(before)
            block = block if len(block) >= len(before) else before
        else:
            bisect.insort(self._starts, start)
        self._blocks[start] = block
        self._held += len(block)
        while self._held > HELD and len(self._blocks) > 1:
            oldest = next(iter(self._blocks))
            self._held -= len(self._blocks.pop(oldest))
            self._starts.remove(oldest)

    def close(self) -> None:
        """Free the cache; the next read requests the bytes again."""
        with self._lock:
            self._starts.clear()
            self._blocks.clear()
            self._held = 0
            while self._ahead:
                self._ahead.popleft()[2].cancel()
        with _recent_lock:
            _recent.pop(id(self), None)

    def __del__(self) -> None:
        _recent.pop(id(self), None)
