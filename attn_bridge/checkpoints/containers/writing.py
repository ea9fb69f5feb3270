"""Shared by writers: files written by position, with direct I/O where the system allows, JSON, and flushing.

`PlacedWriter` is a writer whose bytes have fixed places: tensors in extents of files, and headers in front of and
between them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import functools
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...printable import printable
from .base import Writer
from .files import PIECE, bad, check_range, unwritable


class Threads:
    """A persistent thread pool; a forked process, which inherits no threads, creates its own.

    Args:
        count: number of threads.
        name: name of the threads, shown by process monitors.
    """

    def __init__(self, count: int, name: str):
        self._count, self._name, self._process = count, name, -1

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[Any]:
        """Have a thread call a function."""
        # Locks and queues of a pool are copied by fork, its threads are not: a job in it would wait for ever.
        if self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self._count, f"attn-bridge-{self._name}")
            self._process = os.getpid()
        return self._pool.submit(function, *arguments)


PAGE = 1 << 12
"""Alignment in bytes of file offsets and memory for direct I/O."""

LARGE = 1 << 20
"""Writes of at least this many bytes bypass the page cache."""

_DIRECT = getattr(os, "O_DIRECT", 0)

BLOCK = 1 << 22
"""Bytes per direct write; two blocks are in flight at once."""

FLUSH = 1 << 26
"""Bytes from which on files are flushed while more is written."""

_WRITERS = Threads(2, "write")
_FLUSHER = Threads(1, "flush")

_scratch = threading.local()


class TargetFile:
    """A file written by position. An existing file keeps its contents, so that a writer can resume after a restart.

    Large writes bypass the page cache where the system allows: since everything is flushed in the end, caching it first
    only costs processor time. Reads go through the cache, and the reading process then has it flushed.

    Args:
        path: the file.
        size: its final size in bytes, if available.
        past_cache: whether writes may bypass the page cache; workers' output is read back.
    """

    def __init__(self, path: Path, size: int | None = None, *, past_cache: bool = True):
        self.path = path
        self._flusher = Flusher() if past_cache else None
        self._number = self._direct = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._number, 0 if size is None else size)
        except OSError as error:
            raise unwritable(path, error) from None
        if _DIRECT and past_cache:
            with contextlib.suppress(OSError):  # a file system that has no such way
                self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)

    def write(self, start: int, data: object) -> None:
        """Write bytes at a position."""
        view = as_bytes(data)
        try:
            # O_DIRECT takes whole pages alone: the bytes before the first and behind the last go through the
            # cache.
            first = -start % PAGE
            whole = (len(view) - first) // PAGE * PAGE
            if self._direct < 0 or whole < LARGE:
                self._write_cached(start, view)
                return
            self._write_cached(start, view[:first])
            done = first + self._write_past_cache(start + first, view[first : first + whole])
            self._write_cached(start + done, view[done:])
        except OSError as error:
            raise unwritable(self.path, error) from None

    joins: ClassVar[bool] = False
    """Whether writing a tensor includes the bytes in front of it, so that contiguous pieces are joined in few steps."""

    def fill(self, start: int, data: object) -> None:
        """Write bytes that depend on the plan alone, unless they exist already."""
        self.write(start, data)

    def _write_cached(self, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            # Short writes are no errors: the loop goes on where the system stopped.
            done += os.pwrite(self._number, view[done : done + PIECE], start + done)
        if self._flusher is not None:
            self._flusher.take(self.path, start, done)

    def _write_past_cache(self, start: int, view: memoryview) -> int:
        """Write whole pages, and return how many bytes that were: fewer where the system won't take more this way."""
        jobs: list[concurrent.futures.Future[int]] = []
        try:
            for offset in range(0, len(view), BLOCK):
                jobs.append(_WRITERS.submit(self._write_block, start + offset, view[offset : offset + BLOCK]))
            concurrent.futures.wait(jobs)
        except BaseException:  # on interrupts the file is closed, and its number may be reused
            for job in jobs:
                job.cancel()
            concurrent.futures.wait(jobs)
            raise
        done = 0
        for job in jobs:
            written = job.result()
            done += written
            # A short block: later ones may be written as well, but `done` counts contiguous bytes, and the cache takes
            # the rest again.
            if written < BLOCK and done < len(view):
                os.close(self._direct)
                self._direct = -1
                break
        return done

    def _write_block(self, start: int, view: memoryview) -> int:
        """Write at most a block of whole pages, and return how many of their bytes were taken."""
        array = np.frombuffer(view, np.uint8)
        if array.__array_interface__["data"][0] % PAGE:
            room = _aligned()[: len(view)]
            np.copyto(room, array)
            view = room.data
        try:
            # A part of a page would leave the next offset unaligned.
            return os.pwrite(self._direct, view, start) // PAGE * PAGE
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return 0  # larger pages than ours, or none of this at all

    def sync(self) -> None:
        """Flush written data to disk."""
        try:
            os.fsync(self._number)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def close(self) -> None:
        """Close it."""
        for number in (self._number, self._direct):
            if number >= 0:
                os.close(number)
        self._number = self._direct = -1

    def __del__(self) -> None:
        self.close()


class Flusher:
    """Flushes files to disk while more is written, so that little is left to flush in the end.

    Flushed pages are dropped from the page cache, so that other programs' pages stay in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Path, int, int]] = []
        self._nbytes = 0

    def take(self, path: Path, start: int, count: int) -> None:
        """Register bytes of a file that were written, and won't be read again."""
        if not hasattr(os, "posix_fadvise") or not hasattr(os, "fdatasync"):
            return
        with self._lock:
            self._waiting.append((path, start, count))
            self._nbytes += count
            is_much = self._nbytes >= FLUSH
        if is_much:
            _FLUSHER.submit(self._flush)

    def _flush(self) -> None:
        """Flush what waits: nothing, if another call did meanwhile."""
        with self._lock:
            ranges: dict[Path, list[tuple[int, int]]] = {}
            for path, start, count in self._waiting:
                ranges.setdefault(path, []).append((start, count))
            self._waiting, self._nbytes = [], 0
        for path, path_ranges in ranges.items():
            with contextlib.suppress(OSError):  # the writer flushes again at the end, and sees the error then
                number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    # Pages that are not on the disk yet are not dropped: flush first.
                    os.fdatasync(number)
                    for start, count in path_ranges:
                        os.posix_fadvise(number, start, count, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(number)


def open_target(path: Path, size: int | None = None, *, past_cache: bool = True) -> TargetFile:
    """Begin to write a file by position, or continue an existing one; `past_cache`: see `TargetFile`."""
    if not isinstance(path, os.PathLike):  # of a store
        return path.open_target(size)
    return TargetFile(path, size, past_cache=past_cache)


def put(path: Path, data: bytes) -> None:
    """Write a small file and flush it to the disk."""
    if not isinstance(path, os.PathLike):  # of a store
        path.write_bytes(data)
        return
    try:
        with path.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise unwritable(path, error) from None


def _aligned() -> np.ndarray:
    """Return this thread's own memory of whole pages."""
    if not hasattr(_scratch, "room"):
        _scratch.room = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
    room: np.ndarray = _scratch.room
    return room


def as_bytes(data: Any) -> memoryview:
    """Return anything with the buffer protocol as its bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk; does nothing for stores."""
    if not isinstance(folder, os.PathLike):
        return
    try:
        number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        raise unwritable(folder, error) from None


def dump_json(path: object, value: Any, **options: Any) -> bytes:
    """Return JSON as `parse_json` reads it."""
    try:
        return json.dumps(value, allow_nan=False, **options).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise bad(path, f"the metadata can't be written as JSON: {printable(error)}") from None


def chunk_shape(shape: Sequence[int], itemsize: int, most: int) -> tuple[int, ...]:
    """Return the shape of the largest chunks of at most `most` bytes that are contiguous in C order."""
    chunk = [max(size, 1) for size in shape]
    for axis in range(len(chunk)):
        row = math.prod(chunk[axis + 1 :]) * itemsize
        chunk[axis] = max(1, min(chunk[axis], most // row))
        if chunk[axis] > 1:
            break
    return tuple(chunk)


MAX_OPEN = 32
"""Files that are open at a time, of two descriptors each: a process may have few (often 1,024, 256 on macOS)."""


class PlacedWriter(Writer):
    """A writer with random access, whose subclass knows the extents of all tensors once its constructor has run.

    Its constructor ends with `_begin`. In an object store, which joins parts and has no holes, a share's tensor brings
    along the bytes in front of it.
    """

    random_access: ClassVar[bool] = True

    def _begin(self, sizes: Mapping[str, int], fixed: Iterable[tuple[str, int, bytes]]) -> None:
        """Write the fixed bytes, unless this is a share.

        Args:
            sizes: file, relative to the checkpoint ("" for itself) -> its bytes.
            fixed: (file, offset, bytes) of all that depends on the headers of tensors alone.
        """
        self._sizes = sizes
        self._fixed: dict[str, list[tuple[int, bytes]]] = {}
        for file, start, data in fixed:
            self._fixed.setdefault(file, []).append((start, data))
        self._open: collections.OrderedDict[str, TargetFile] = collections.OrderedDict()
        for file, parts in () if self._is_share else self._fixed.items():
            for start, data in parts:
                self._target(file).fill(start, data)

    def _target(self, file: str) -> TargetFile:
        """Return an open file; of many, those that were not used lately are flushed and closed."""
        if file not in self._open:
            path = self.path / file if file else self.path
            self._open[file] = open_target(path, self._sizes[file], past_cache=not self._is_share)
        self._open.move_to_end(file)
        while len(self._open) > MAX_OPEN:
            oldest = next(iter(self._open))
            self._open[oldest].sync()
            self._open.pop(oldest).close()
        return self._open[file]

    @functools.cached_property
    def _leads(self) -> dict[tuple[str, int], bytes]:
        """(File, offset of the bytes of a tensor) -> the bytes in front of them, back to those of another tensor."""
        extents = [extent for name, info in self.tensors.items() for extent in self.extents(name, 0, info.nbytes)]
        fixed = {file: collections.deque(sorted(parts)) for file, parts in self._fixed.items()}
        ends: collections.Counter[str] = collections.Counter()
        leads = {}
        for extent in sorted(extents, key=lambda extent: (extent.file, extent.offset)):
            end, parts = ends[extent.file], fixed.get(extent.file, ())
            lead = bytearray(extent.offset - end)
            while parts and parts[0][0] < extent.offset:
                start, data = parts.popleft()
                lead[start - end : start - end + len(data)] = data
            if lead:
                leads[extent.file, extent.offset] = bytes(lead)
            ends[extent.file] = extent.offset + extent.count
        return leads

    def place(self, name: str, start: int) -> int:
        """Return the offset in its file of a byte of a tensor."""
        return self.extents(name, start, start + 1)[0].offset if start < self.tensors[name].nbytes else 0

    def write_range(self, name: str, start: int, data: object) -> None:
        """Write bytes of a tensor, in any order."""
        view, done = as_bytes(data), 0
        check_range(self.path, self.tensors[name], start, start + len(view))
        for extent in self.extents(name, start, start + len(view)):
            target = self._target(extent.file)
            if self._is_share and target.joins and (extent.file, extent.offset) in self._leads:
                lead = self._leads[extent.file, extent.offset]
                target.write(extent.offset - len(lead), lead)
            target.write(extent.offset, view[done : done + extent.count])
            done += extent.count

    def flush(self) -> None:
        """Flush all files and close them."""
        for target in self._open.values():
            target.sync()
        self.abort()

    def abort(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
