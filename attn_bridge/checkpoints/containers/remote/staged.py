"""Files written by position to a store before publication, staged in objects in any order.

Object stores write whole objects alone. Writes are collected into objects of some MiB, together with notes on the file
and range of their bytes; `joining` assembles the files.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import threading
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, cast

from ....printable import printable
from ....whole_files import JsonObject
from ..files import bad
from ..writing import TargetFile, Threads, as_bytes
from .faults import FaultError
from .paths import RemotePath, as_path
from .stores import Store, StoreEntry

LEAST, PACK = 5 << 20, 1 << 23
"""Bytes of an object, usually, and where a worker writes many; S3 copies nothing that is smaller."""

MANY = 4096
"""Objects from which on a worker makes larger ones: each of them is a request when files are made of them."""

PARTS = 8000
"""Objects that one file is made of, at most: S3 takes 10,000 parts, and neighbours may cut some in two."""

# 12 objects of `LEAST` are under way: with 8, reading and sending waited for each other.
ROOM, LITTLE = 1 << 26, 8 * LEAST
"""Bytes of objects that are sent at the same time, about, and where tasks are small."""

AHEAD, HELD = 1 << 25, 1 << 26
"""Bytes that are read ahead of a file that is read in order, and bytes of objects that are kept."""

_SENDERS = Threads(round(ROOM / LEAST), "send")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start:stop`` of a file, from byte `at` of an object on; without a name they are zeros."""

    start: int
    stop: int
    name: str
    at: int


class Cover:
    """Which object contains which bytes of a file; later notes take precedence."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[Span] = []

    def paint(self, span: Span) -> None:
        """Note bytes."""
        if span.start >= span.stop:
            return
        first = max(0, bisect.bisect_right(self._starts, span.start) - 1)
        last = bisect.bisect_left(self._starts, span.stop)
        new: list[Span] = []
        for old in self._spans[first:last]:
            if old.start < span.start:
                new.append(Span(old.start, min(old.stop, span.start), old.name, old.at))
            if old.stop > span.stop:
                new.append(Span(max(old.start, span.stop), old.stop, old.name, old.at + max(0, span.stop - old.start)))
        new = sorted([*new, span], key=lambda old: old.start)
        self._spans[first:last] = new
        self._starts[first:last] = [one.start for one in new]

    def between(self, start: int, stop: int) -> list[Span]:
        """Return all that is noted of a range, in order, with zeros where nothing is."""
        spans: list[Span] = []
        position = start
        for span in self._spans[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if span.start >= stop:
                break
            if span.stop <= position:
                continue
            begin, end = max(span.start, position), min(span.stop, stop)
            if begin > position:
                spans.append(Span(position, begin, "", 0))
            spans.append(Span(begin, end, span.name, span.at + begin - span.start))
            position = end
        if position < stop:
            spans.append(Span(position, stop, "", 0))
        return spans

    @property
    def stop(self) -> int:
        """Where the last bytes end."""
        return self._spans[-1].stop if self._spans else 0


def _split(segments: list[tuple[str, int, int]], count: int) -> tuple[list[Any], list[Any]]:
    """Split segments of files after `count` bytes."""
    first: list[Any] = []
    rest: list[Any] = []
    for file, start, size in segments:
        head_size = min(size, count)
        count -= head_size
        if head_size:
            first.append((file, start, head_size))
        if size > head_size:
            rest.append((file, start + head_size, size - head_size))
    return first, rest


class Staged:
    """Files that several processes write.

    Args:
        store: the store.
        folder: key of the folder of the objects.

    Bytes written by this process are verified when they are sent; those of other processes are registered by `take`.
    """

    def __init__(self, store: Store, folder: str):
        self.store, self.folder = store, folder
        self._pack = LEAST
        self._room = LITTLE
        self._own = uuid.uuid4().hex
        self._lock = threading.RLock()
        self._sizes: dict[str, int] = {}
        self._covers: collections.defaultdict[str, Cover] = collections.defaultdict(Cover)
        self._objects: dict[str, tuple[int, str]] = {}
        self._buffer = bytearray()
        self._segments: list[tuple[str, int, int]] = []
        self._sent = 0
        self._sending: collections.deque[tuple[JsonObject, Future[str]]] = collections.deque()
        self._notes: list[JsonObject] = []
        self._changed: dict[str, int] = {}
        self._next = "", 0
        self._held: collections.OrderedDict[str, tuple[memoryview, Future[None]]] = collections.OrderedDict()

    # ---- writing

    def suit(self, task_bytes: int) -> None:
        """Limit the bytes sent concurrently to the memory of workers with tasks of `task_bytes`."""
        with self._lock:
            self._room = max(LITTLE, min(ROOM, 3 * task_bytes // 2))

    def spread(self, nbytes: int, *, in_one_file: bool = False) -> None:
        """Choose the object size so that `nbytes` fill equal objects in few rounds, without a partial last round."""
        with self._lock:
            if in_one_file:  # whose size is not available otherwise
                self._pack = max(self._pack, -(-nbytes // PARTS))
            least = max(self._pack, min(PACK, nbytes // MANY))
            sizes = [-(-nbytes // count) for count in range(nbytes // least, nbytes // (2 * least), -1)]
            self._pack = min(sizes, key=lambda size: -(-nbytes // (size * self._at_once(size))) * size, default=least)

    def _at_once(self, size: int) -> int:
        """Return how many objects of a size are sent at the same time."""
        return max(2, round(self._room / size))

    def begin(self, file: str, size: int | None) -> None:
        """Set the length of a file; with None the file restarts, and is as long as the bytes written."""
        with self._lock:
            if size is None:
                self._covers.pop(file, None)
                self._sizes.pop(file, None)
            elif self._sizes.get(file) != size:
                self._sizes[file] = self._changed[file] = size
                self._pack = max(self._pack, -(-size // PARTS))

    def write(self, file: str, start: int, data: memoryview) -> None:
        """Write bytes of a file.

        Raises:
            CheckpointError: bytes of an earlier call can't be sent.
        """
        done = 0
        full = self._pack + LEAST  # the rest at the end is then long enough to be copied
        with self._lock:
            # A file's last object is then its own, and the next one begins with another: both can be copied.
            if len(data) and self._segments and self._segments[-1][0] != file and len(self._buffer) >= LEAST:
                self._send(len(self._buffer))
            while done < len(data):
                part = data[done : done + full - len(self._buffer)]
                if self._segments and self._segments[-1][0] == file and sum(self._segments[-1][1:]) == start + done:
                    self._segments[-1] = file, self._segments[-1][1], self._segments[-1][2] + len(part)
                else:
                    self._segments.append((file, start + done, len(part)))
                self._buffer += part
                done += len(part)
                if len(self._buffer) >= full:
                    self._send(self._pack)

    def _send(self, most: int) -> None:
        """Begin to send at most `most` bytes of the buffer."""
        if not self._buffer and not self._changed:
            return
        while True:
            under_way = [job for _, job in self._sending if not job.done()]
            if len(under_way) < self._at_once(self._pack):
                break
            wait(under_way, return_when=FIRST_COMPLETED)
        while self._sending and self._sending[0][1].done():
            self._settle()
        name = f"{self._own}-{self._sent}" if self._buffer else ""
        self._sent += 1
        data = bytes(memoryview(self._buffer)[:most])  # of bytes, no copy is made for each try
        first, rest = _split(self._segments, len(data))
        note = {"object": name, "size": len(data), "files": self._changed, "segments": first}
        self._buffer, self._segments, self._changed = self._buffer[len(data) :], rest, {}
        key = f"{self.folder}/{name}"
        job: Future[str] = _SENDERS.submit(self.store.put, key, data) if name else Future()
        if not name:
            job.set_result("")
        self._sending.append((note, job))

    def _settle(self) -> None:
        """Wait until the oldest object is stored."""
        note, job = self._sending[0]
        note["tag"] = job.result()
        self._sending.popleft()
        self._know(note)
        self._notes.append(note)

    def flush(self) -> None:
        """Have the store hold all that was written.

        Raises:
            CheckpointError: it can't be sent.
        """
        with self._lock:
            while self._buffer or self._changed:
                self._send(self._pack if len(self._buffer) >= self._pack + LEAST else len(self._buffer))
            while self._sending:
                self._settle()

    @property
    def sent(self) -> int:
        """How many objects will have been sent when all that was written is."""
        with self._lock:
            return self._sent + (2 if len(self._buffer) > self._pack else bool(self._buffer or self._changed))

    def settled(self) -> tuple[int, list[JsonObject]]:
        """Return the number of this process's objects that are surely stored, and the notes since the last call."""
        with self._lock:
            while self._sending and self._sending[0][1].done():
                self._settle()
            notes, self._notes = self._notes, []
            return self._sent - len(self._sending), notes

    # ---- staged contents

    def take(self, notes: Iterable[Mapping[str, object]]) -> None:
        """Register the notes of other processes, the latest last.

        Raises:
            KeyError, TypeError, ValueError: a note is malformed.
        """
        with self._lock:
            for note in notes:
                self._know(note)

    def _know(self, note: Mapping[str, Any]) -> None:
        for file, size in note["files"].items():
            self._sizes[file] = size
        if note["object"]:
            self._objects[note["object"]] = int(note["size"]), str(note["tag"])
        at = 0
        for file, start, count in note["segments"]:
            self._covers[file].paint(Span(start, start + count, note["object"], at))
            at += count

    def forget(self) -> None:
        """Discard all notes, and everything not yet sent."""
        with self._lock:
            while self._sending:
                self._sending.popleft()[1].exception()
            for collection in (self._sizes, self._covers, self._objects, self._held, self._changed):
                collection.clear()
            self._buffer, self._segments, self._notes = bytearray(), [], []

    def files(self) -> dict[str, int]:
        """Return file -> length for all files."""
        with self._lock:
            names = {*self._sizes, *self._covers}
            return {name: self._sizes.get(name, self._covers[name].stop) for name in sorted(names)}

    def spans(self, file: str, start: int, stop: int) -> list[Span]:
        """Return the staged spans of bytes of a file."""
        with self._lock:
            return self._covers[file].between(start, stop) if file in self._covers else [Span(start, stop, "", 0)]

    def object(self, name: str) -> tuple[str, StoreEntry]:
        """Return the key of an object, and its store metadata."""
        size, tag = self._objects[name]
        return f"{self.folder}/{name}", StoreEntry(size, tag)

    # ---- reading

    def read(self, file: str, start: int, count: int) -> memoryview:
        """Return bytes of a file as the store has them.

        Raises:
            CheckpointError: some bytes were not written, or can't be read.
        """
        whole = memoryview(bytearray(count))
        with self._lock:
            spans = self.spans(file, start, start + count + (AHEAD if self._next == (file, start) else 0))
            self._next = file, start + count
        for span in spans:
            if span.name and span.start >= start + count:
                self._fetch(span.name)  # what comes next is on its way while this is used
        for span in self.spans(file, start, start + count):
            if not span.name:
                raise bad(self.store.shown(self.folder), f"bytes of {printable(file)} are missing")
            data = self._whole(span.name)
            stop = span.at + span.stop - span.start
            whole[span.start - start : span.stop - start] = data[span.at : stop]
        return whole

    def _whole(self, name: str) -> memoryview:
        """Return an object; the latest are kept."""
        data, job = self._fetch(name)
        try:
            job.result()
        except FaultError as fault:
            with self._lock:
                self._held.pop(name, None)
            raise bad(self.store.shown(self.object(name)[0]), str(fault)) from None
        return data

    def _fetch(self, name: str) -> tuple[memoryview, Future[None]]:
        """Begin to read an object unless cached; return its bytes, and a future that is done when they are complete."""
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return self._held[name]
            key, entry = self.object(name)
            data = memoryview(bytearray(entry.size))
            self._held[name] = data, self.store.begin(key, entry, [(0, data)])
            while len(self._held) > 2 and sum(len(one) for one, _ in self._held.values()) > HELD:
                self._held.popitem(last=False)[1][1].cancel()
            return self._held[name]


class StagedPath(RemotePath):
    """A file that is written to a store, or the folder of such files.

    Args:
        staged: the files.
        key: its place.
        root: any path of the store.
    """

    __slots__ = ("staged",)

    def __init__(self, staged: Staged, key: str, root: RemotePath):
        super().__init__(key, root)
        self.staged = staged

    def derived(self, key: str) -> RemotePath:
        """Return another path of the same files."""
        return StagedPath(self.staged, key, self)

    @property
    def file(self) -> str:
        """Its name among the files."""
        return self.key[len(self.staged.folder) + 1 :]

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: stores have no folders."""

    def open_target(self, size: int | None) -> TargetFile:
        """Begin to write it by position."""
        return StagedTarget(self, size)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete it."""
        self.staged.begin(self.file, None)

    def write_bytes(self, data: bytes) -> None:
        """Write all of it."""
        self.staged.begin(self.file, None)
        self.staged.write(self.file, 0, memoryview(data))


class StagedTarget(TargetFile):
    """A file of a store, written by position."""

    def __init__(self, path: StagedPath, size: int | None = None):
        self.path = as_path(path)
        self._number = self._direct = -1
        self._staged, self._file = path.staged, path.file
        self._staged.begin(self._file, size)

    def write(self, start: int, data: object) -> None:
        """Write bytes at a position."""
        self._staged.write(self._file, start, as_bytes(data))

    joins = True

    def fill(self, start: int, data: object) -> None:
        """Write the bytes that no worker of this plan has written."""
        view = as_bytes(data)
        for span in self._staged.spans(self._file, start, start + len(view)):
            if not span.name:
                self.write(span.start, view[span.start - start : span.stop - start])

    def sync(self) -> None:
        """Do nothing: all that is written is sent before it counts."""

    def close(self) -> None:
        """Do nothing."""


def staged_path(staged: Staged, name: str, root: Path) -> Path:
    """Return the path of a file that is written to a store."""
    return as_path(StagedPath(staged, f"{staged.folder}/{name}", cast(RemotePath, root)))
