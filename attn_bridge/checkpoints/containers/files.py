"""What containers share: files read and written by position, strict JSON, and checks of names, shapes and dtypes."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import json
import math
import mmap
import os
import stat
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...printable import printable
from ..threads import Threads
from .base import MOST_AXES, MOST_HEADER, MOST_TENSORS, CheckpointError, TensorInfo

DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    }
)
"""NumPy names of what a tensor may be made of; all of them have whole bytes."""

MOST_NAME = 1000
"""Characters of a tensor's name."""

MOST_BYTES = (1 << 63) - 1
"""Bytes of a tensor: what a file's offset can say."""

MOST_NODES = 4 * MOST_TENSORS
"""Lists and dicts in one header, and steps in walking one, beyond which it is refused."""

MOST_NAMED = 100
"""Findings that one line lists."""

MOST_OPEN = 64
"""Files that are kept open at a time."""


def bad(path: object, reason: str) -> CheckpointError:
    """Return an error that names the file."""
    return CheckpointError(f"{printable(path, 400)}: {reason}")


def listed(findings: Sequence[str], most: int = MOST_NAMED) -> str:
    """Return findings as one line."""
    rest = len(findings) - most
    return "; ".join(findings[:most]) + (f"; and {rest} more" if rest > 0 else "")


# ---- checks


def check_name(path: object, name: object) -> str:
    """Return a tensor's name.

    Raises:
        CheckpointError: it is no text, is empty or too long, or has control characters.
    """
    if not isinstance(name, str):
        raise bad(path, f"a tensor's name is {printable(repr(name))}, not text")
    if not name:
        raise bad(path, "a tensor has an empty name")
    if len(name) > MOST_NAME:
        raise bad(path, f"the name {printable(name, 60)} is longer than {MOST_NAME} characters")
    if not name.isprintable() and any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in name):
        raise bad(path, f"the name {printable(name)} has control characters")
    return name


def check_dtype(path: object, name: str, dtype: object) -> str:
    """Return the NumPy name of a dtype, if it is known."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(path, f"{printable(name)} has the unknown dtype {printable(dtype)}")
    return dtype


def check_shape(path: object, name: str, shape: object) -> tuple[int, ...]:
    """Return a shape, if NumPy and files can hold it."""
    if not isinstance(shape, list | tuple) or any(type(size) is not int for size in shape):
        raise bad(path, f"{printable(name)} has a shape that is no list of integers")
    if len(shape) > MOST_AXES:
        raise bad(path, f"{printable(name)} has {len(shape)} axes; at most {MOST_AXES} can be held")
    if any(size < 0 for size in shape):
        raise bad(path, f"{printable(name)} has a negative size in its shape {printable(list(shape))}")
    if math.prod(size for size in shape if size) * 16 > MOST_BYTES:
        raise bad(path, f"{printable(name)} has the shape {printable(list(shape))}, which no file can hold")
    return tuple(shape)


def check_infos(path: object, infos: Iterable[TensorInfo]) -> None:
    """Refuse names, dtypes and shapes that a reader of ours would refuse, and names that come twice."""
    seen = set()
    for info in infos:
        check_name(path, info.name)
        check_dtype(path, info.name, info.dtype)
        check_shape(path, info.name, info.shape)
        if info.name in seen:
            raise bad(path, f"{printable(info.name)} is to be written twice")
        seen.add(info.name)
    check_count(path, len(seen))


def check_count(path: object, count: int) -> None:
    """Refuse more tensors than one checkpoint may have."""
    if count > MOST_TENSORS:
        raise bad(path, f"has {count} tensors; at most {MOST_TENSORS} are read")


def check_range(path: object, info: TensorInfo, start: int, stop: int) -> None:
    """Refuse a range of bytes that a tensor doesn't have."""
    if not 0 <= start <= stop <= info.nbytes:
        raise bad(path, f"{printable(info.name)} has {info.nbytes} bytes; {start}:{stop} was asked for")


def parse_json(data: bytes | memoryview, path: object, what: str) -> Any:
    """Parse JSON as its standard has it: UTF-8, no NaN, and no key twice in an object."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        one = dict(found)
        if len(one) < len(found):
            twice = next(key for key, times in collections.Counter(key for key, _ in found).items() if times > 1)
            raise bad(path, f"the {what} has {printable(twice)} twice")
        return one

    def constant(text: str) -> None:
        raise bad(path, f"the {what} has {text}, which JSON has not")

    def real(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise bad(path, f"the {what} has the number {printable(text)}, which is too large")
        return number

    data = bytes(data)
    if len(data) > MOST_HEADER:
        raise bad(path, f"the {what} has {len(data)} bytes; more than {MOST_HEADER} are not read")
    if data.count(b"[") + data.count(b"{") > MOST_NODES:
        raise bad(path, f"the {what} has more than {MOST_NODES} lists and objects")
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=real)
    except CheckpointError:
        raise
    except RecursionError:
        raise bad(path, f"the {what} is nested too deeply") from None
    except ValueError as error:
        raise bad(path, f"the {what} is no JSON: {printable(error)}") from None


# ---- reading


PIECE = 1 << 20
"""Bytes that are read or written at a time: measured on ext4, far larger pieces can take ten times as long."""


class _Descriptor:
    """A descriptor that lives as long as someone holds it, so that none is closed under a reading thread."""

    def __init__(self, path: Path):
        self.number = -1
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.status = os.fstat(self.number)
        except FileNotFoundError:
            raise bad(path, "does not exist") from None
        except (OSError, ValueError) as error:
            raise bad(path, f"can't be read: {reason(error)}") from None
        if not stat.S_ISREG(self.status.st_mode):
            raise bad(path, "is not a file")

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


_open: collections.OrderedDict[int, _Descriptor] = collections.OrderedDict()
_lock = threading.Lock()


class File:
    """A file read by position; it is opened when needed, since a folder may have more files than may be open.

    Attributes:
        path: where it is.
        size: its bytes.
    """

    def __init__(self, path: Path):
        self.path = path
        found = _Descriptor(path)
        self.size = found.status.st_size
        self._identity = self._identify(found)
        self._keep(found)

    @staticmethod
    def _identify(found: _Descriptor) -> tuple[int, ...]:
        status = found.status
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _keep(self, found: _Descriptor) -> None:
        with _lock:
            _open[id(self)] = found
            while len(_open) > MOST_OPEN:
                _open.popitem(last=False)

    def _descriptor(self) -> _Descriptor:
        with _lock:
            found = _open.get(id(self))
            if found is not None:
                _open.move_to_end(id(self))
                return found
        found = _Descriptor(self.path)
        if self._identify(found) != self._identity:
            raise bad(self.path, "has changed while it was read")
        self._keep(found)
        return found

    def read(self, start: int, count: int) -> bytes | memoryview:
        """Return exactly that many bytes."""
        if start < 0 or count < 0 or start + count > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {start + count}")
        found = self._descriptor()
        try:
            data = os.pread(found.number, count, start)
            if len(data) == count:
                return data
            whole = bytearray(count)
            whole[: len(data)] = data
            done = len(data)
            while done < count:
                with memoryview(whole) as view, view[done:] as rest:
                    got = os.preadv(found.number, [rest], start + done)
                if not got:
                    raise bad(self.path, f"ends at byte {start + done}, before byte {start + count}")
                done += got
        except OSError as error:
            raise bad(self.path, f"can't be read: {reason(error)}") from None
        except MemoryError:
            raise bad(self.path, f"there is no memory for {count} bytes") from None
        return memoryview(whole)

    def read_into(self, start: int, into: memoryview) -> None:
        """Read as many bytes as there is room for into memory that is there."""
        if start < 0 or start + len(into) > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {start + len(into)}")
        found, done = self._descriptor(), 0
        try:
            while done < len(into):
                got = os.preadv(found.number, [into[done : done + PIECE]], start + done)
                if not got:
                    raise bad(self.path, f"ends at byte {start + done}, before byte {start + len(into)}")
                done += got
        except OSError as error:
            raise bad(self.path, f"can't be read: {reason(error)}") from None

    def close(self) -> None:
        """Close it; the next reading opens it again."""
        with _lock:
            _open.pop(id(self), None)

    def __del__(self) -> None:
        _open.pop(id(self), None)


def reason(error: Exception) -> str:
    """Return what the system says, without the path again."""
    return printable(error.strerror if isinstance(error, OSError) and error.strerror else error)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Cut elements ``start:stop`` of an array in C order into blocks, in that order.

    At most two blocks per axis and one more; an axis that a block leaves out is whole.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    rows = math.prod(shape[1:])
    first, last = start // rows, (stop - 1) // rows
    if first == last and (start % rows or stop % rows):
        for box in boxes(shape[1:], start - first * rows, stop - first * rows):
            yield (slice(first, first + 1), *box)
        return
    if start % rows:
        yield from boxes(shape, start, (first + 1) * rows)
        first += 1
    whole = stop // rows
    if first < whole:
        yield (slice(first, whole),)
    if stop % rows:
        yield from boxes(shape, whole * rows, stop)


# ---- writing


PAGE = 1 << 12
"""What places in a file and in memory are multiples of, where bytes go past the page cache."""

LARGE = 1 << 20
"""Bytes from which on a write goes past the page cache."""

_DIRECT = getattr(os, "O_DIRECT", 0)

BLOCK = 1 << 22
"""Bytes that go past the page cache at a time; two such blocks are under way at once."""

_WRITERS = Threads(2, "write")

_scratch = threading.local()


class Target:
    """A file written by position. One that exists is kept as it is, so that a writer can go on after a restart.

    What is large goes past the page cache where the system can: since all of it is flushed in the end, caching it
    first only costs processor time, several times as much as the disk takes.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        self._number = self._direct = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._number, 0 if size is None else size)
        except OSError as error:
            raise bad(path, f"can't be written: {reason(error)}") from None
        if _DIRECT:
            with contextlib.suppress(OSError):  # a file system that has no such way
                self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)

    def write(self, start: int, data: Any) -> None:
        """Write bytes at a position."""
        view = as_bytes(data)
        try:
            first = -start % PAGE
            whole = (len(view) - first) // PAGE * PAGE
            if self._direct < 0 or whole < LARGE:
                self._write_cached(start, view)
                return
            self._write_cached(start, view[:first])
            done = first + self._write_past_cache(start + first, view[first : first + whole])
            self._write_cached(start + done, view[done:])
        except OSError as error:
            raise bad(self.path, f"can't be written: {reason(error)}") from None

    def _write_cached(self, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._number, view[done : done + PIECE], start + done)

    def _write_past_cache(self, start: int, view: memoryview) -> int:
        """Write whole pages, and return how many bytes that were: fewer where the system won't take more this way."""
        jobs: list[concurrent.futures.Future[int]] = []
        try:
            for place in range(0, len(view), BLOCK):
                jobs.append(_WRITERS.submit(self._write_block, start + place, view[place : place + BLOCK]))
            concurrent.futures.wait(jobs)
        except BaseException:  # whoever is interrupted closes the file, and its number may be another's then
            for job in jobs:
                job.cancel()
            concurrent.futures.wait(jobs)
            raise
        done = 0
        for job in jobs:
            written = job.result()
            done += written
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
            return os.pwrite(self._direct, view, start) // PAGE * PAGE
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return 0  # larger pages than ours, or none of this at all

    def sync(self) -> None:
        """Have the disk hold what was written."""
        try:
            os.fsync(self._number)
        except OSError as error:
            raise bad(self.path, f"can't be written: {reason(error)}") from None

    def close(self) -> None:
        """Close it."""
        for number in (self._number, self._direct):
            if number >= 0:
                os.close(number)
        self._number = self._direct = -1

    def __del__(self) -> None:
        self.close()


def _aligned() -> np.ndarray[Any, Any]:
    """Return this thread's own memory of whole pages."""
    if not hasattr(_scratch, "room"):
        _scratch.room = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
    room: np.ndarray[Any, Any] = _scratch.room
    return room


def as_bytes(data: Any) -> memoryview:
    """Return anything with the buffer protocol as its bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def sync_folder(folder: Path) -> None:
    """Have the disk hold a folder's list of files."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        raise bad(folder, f"can't be written: {reason(error)}") from None


def dump_json(path: object, value: Any, **options: Any) -> bytes:
    """Return JSON as `parse_json` reads it."""
    try:
        return json.dumps(value, allow_nan=False, **options).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise bad(path, f"the metadata can't be written as JSON: {printable(error)}") from None


class InOrder:
    """Checks for writers without random access that bytes come in order, and says whose they are.

    Args:
        path: what is written.
        tensors: what it will hold.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]):
        self._path = path
        self._left = iter(tensors.values())
        self._now: TensorInfo | None = None
        self._done = 0

    def take(self, name: str, start: int, count: int) -> Iterator[TensorInfo]:
        """Go through tensors up to that one; yield those that begin here, the empty ones between included."""
        while self._now is None or self._now.name != name:
            if self._now is not None and self._done != self._now.nbytes:
                raise bad(self._path, f"{printable(self._now.name)} was left at byte {self._done}")
            self._now, self._done = next(self._left, None), 0
            if self._now is None:
                raise bad(self._path, f"{printable(name)} comes too late, or is not to be written")
            yield self._now
        if start != self._done or start + count > self._now.nbytes:
            raise bad(self._path, f"bytes of {printable(name)} come out of order: {start} after {self._done}")
        self._done += count

    def rest(self) -> Iterator[TensorInfo]:
        """Yield what was not begun, all of it empty."""
        if self._now is not None and self._done != self._now.nbytes:
            raise bad(self._path, f"{printable(self._now.name)} was left at byte {self._done}")
        for one in self._left:
            if one.nbytes:
                raise bad(self._path, f"{printable(one.name)} was not written")
            yield one
