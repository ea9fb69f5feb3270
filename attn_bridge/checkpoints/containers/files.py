"""Shared by containers: files read by position, strict JSON, checks of names, shapes and dtypes, and strides."""

from __future__ import annotations

import collections
import errno
import json
import math
import os
import re
import stat
import sys
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...printable import printable
from ...whole_files import JsonObject
from .base import MAX_AXES, MAX_HEADER, MAX_TENSORS, CheckpointError, DiskFullError, TensorInfo

DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    }
)
"""NumPy names of supported dtypes; all of them have whole bytes."""

MAX_NAME = 1000
"""Characters of a tensor's name."""

MAX_BYTES = (1 << 63) - 1
"""Maximum bytes of a tensor: the range of a file offset."""

MAX_NODES = 4 * MAX_TENSORS
"""Lists and dicts in one header, and steps in walking one, beyond which it is refused."""

MAX_NAMED = 100
"""Findings that one line lists."""

# With the two descriptors of each of `writing.MAX_OPEN` files that makes 128, half of what macOS gives a process.
MAX_OPEN = 64
"""Files that are kept open at a time."""


def bad(path: object, reason: str) -> CheckpointError:
    """Return an error that names the file."""
    return CheckpointError(f"{printable(path, 400)}: {reason}")


def listed(findings: Sequence[str], most: int = MAX_NAMED) -> str:
    """Return findings as one line."""
    rest = len(findings) - most
    return "; ".join(findings[:most]) + (f"; and {rest} more" if rest > 0 else "")


# ---- checks


def check_name(path: object, name: object) -> str:
    """Return a tensor's name.

    Raises:
        CheckpointError: it is not text, is empty or too long, or has control characters.
    """
    if not isinstance(name, str):
        raise bad(path, f"a tensor's name is {printable(repr(name))}, not text")
    if not name:
        raise bad(path, "a tensor has an empty name")
    if len(name) > MAX_NAME:
        raise bad(path, f"the name {printable(name, 60)} is longer than {MAX_NAME} characters")
    # Categories: control characters, lone surrogates, separators of lines and paragraphs. Any could forge a line of
    # output.
    if not name.isprintable() and any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in name):
        raise bad(path, f"the name {printable(name)} has control characters")
    return name


def leads_out(name: str) -> bool:
    """Whether a name is a path that an unpacker, of any system, would follow out of its folder.

    Windows takes backslashes for slashes, a letter and a colon for a drive, and does not see spaces at a part's end.
    """
    if "\\" in name or name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return True
    return any(part.rstrip() == ".." for part in name.split("/"))


def check_dtype(path: object, name: str, dtype: object) -> str:
    """Return the NumPy name of a dtype, if supported."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(path, f"{printable(name)} has the unknown dtype {printable(dtype)}; cast it before it is saved")
    return dtype


def check_shape(path: object, name: str, shape: object) -> tuple[int, ...]:
    """Return a shape, if NumPy and files can hold it."""
    if not isinstance(shape, list | tuple) or any(type(size) is not int for size in shape):
        raise bad(path, f"{printable(name)} has a shape that is no list of integers")
    if len(shape) > MAX_AXES:
        raise bad(path, f"{printable(name)} has {len(shape)} axes; at most {MAX_AXES} can be held")
    if any(size < 0 for size in shape):
        raise bad(path, f"{printable(name)} has a negative size in its shape {printable(list(shape))}")
    # 16 bytes: complex128, the widest dtype. Sizes of 0 are left out, as a product of 0 would let the others be
    # anything.
    if math.prod(size for size in shape if size) * 16 > MAX_BYTES:
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
    if count > MAX_TENSORS:
        raise bad(path, f"has {count} tensors; at most {MAX_TENSORS} are read")


def check_range(path: object, info: TensorInfo, start: int, stop: int) -> None:
    """Refuse a range of bytes that a tensor doesn't have."""
    if not 0 <= start <= stop <= info.nbytes:
        raise bad(path, f"{printable(info.name)} has {info.nbytes} bytes; {start}:{stop} was asked for")


def parse_json(data: bytes | memoryview, path: object, what: str) -> Any:
    """Parse JSON as its standard has it: UTF-8, no NaN, and no key twice in an object."""

    def pairs(fields: list[tuple[str, object]]) -> JsonObject:
        mapping = dict(fields)
        if len(mapping) < len(fields):
            twice = next(key for key, times in collections.Counter(key for key, _ in fields).items() if times > 1)
            raise bad(path, f"the {what} has {printable(twice)} twice")
        return mapping

    def constant(text: str) -> None:
        raise bad(path, f"the {what} has {text}, which JSON has not")

    def real(text: str) -> float:
        # 1e999 is JSON, and an infinity to Python.
        number = float(text)
        if not math.isfinite(number):
            raise bad(path, f"the {what} has the number {printable(text)}, which is too large")
        return number

    data = bytes(data)
    if len(data) > MAX_HEADER:
        raise bad(path, f"the {what} has {len(data)} bytes; more than {MAX_HEADER} are not read")
    # Before parsing: the objects take many times the memory of their text.
    if data.count(b"[") + data.count(b"{") > MAX_NODES:
        raise bad(path, f"the {what} has more than {MAX_NODES} lists and objects")
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=real)
    except CheckpointError:
        raise
    except RecursionError:
        raise bad(path, f"the {what} is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad(path, f"the {what} is no JSON: {printable(error)}") from None
    except ValueError:  # Python's advice is to raise a limit of its own
        raise bad(path, f"the {what} has a number of more than {sys.get_int_max_str_digits()} digits") from None


# ---- files of a folder, which no link may lead out of


READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags of files: a pipe is opened without a wait for its other end, and refused then."""

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY
"""Flags of folders on the way: with O_PATH, one that may be entered need not be readable."""

_IS_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
"""Errors of opening a link with O_NOFOLLOW: ENOTDIR together with O_DIRECTORY, EMLINK on FreeBSD."""


class LinkError(Exception):
    """A path is a link out of its folder; the message is the end of a sentence about the file."""


def resolve(path: Path) -> Path:
    """Return where a path leads to, after all links.

    Raises:
        OSError: it is a link to itself.
    """
    try:
        target = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    if target.is_symlink():  # how Python 3.13 and later resolve a loop
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def resolve_below(folder: Path, path: Path) -> tuple[Path, Path]:
    """Return where a file of a folder really is, and the folder that holds it.

    The hub's cache is the only exception where a link may lead out: from ``snapshots/<revision>`` to the ``blobs`` of
    the same repository.

    Raises:
        LinkError: it is somewhere else.
    """
    try:
        root, real = resolve(folder), resolve(path)
    except OSError as error:
        why = "has too long a name" if error.errno == errno.ENAMETOOLONG else "is a link to itself"
        raise LinkError(why) from None
    if real.is_relative_to(root):
        return real, root
    for above in root.parents:
        if above.name == "snapshots" and real.parent == above.parent / "blobs":
            return real, real.parent
    raise LinkError("is a link out of its folder; put a copy of the file there")


def open_below(folder: Path, path: Path) -> int:
    """Open a file of a folder for reading, and return the descriptor.

    Links within the folder are followed. The opened file is the one that was checked: each folder on the way is opened
    without following links, so that a link created in the meantime is refused.

    Raises:
        LinkError: the path leads out of the folder.
        OSError: the file does not exist, or can't be opened.
    """
    parts = path.relative_to(folder).parts
    if ".." in parts:
        raise LinkError("is not named as one of its folder")
    try:
        return _open_without_links(folder, parts)
    except OSError as error:
        if error.errno not in _IS_LINK:
            raise
    real, root = resolve_below(folder, path)
    return _open_without_links(root, real.relative_to(root).parts)


def _open_without_links(folder: Path, parts: tuple[str, ...]) -> int:
    current = os.open(folder, _FOLDER)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        return os.open(parts[-1], READING | os.O_NOFOLLOW, dir_fd=current)
    finally:
        os.close(current)


# ---- reading


PIECE = 1 << 20
"""Bytes that are read or written at a time: measured on ext4, far larger pieces can take ten times as long."""


class _Descriptor:
    """A descriptor that lives as long as someone holds it, so that none is closed under a reading thread."""

    def __init__(self, path: Path, folder: Path | None):
        self.number = -1
        try:
            self.number = os.open(path, READING) if folder is None else open_below(folder, path)
            self.status = os.fstat(self.number)
        except LinkError as error:
            relative = path.relative_to(folder or path.parent).as_posix()
            raise bad(folder, f"the file {printable(relative)} {error}") from None
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

    Args:
        path: the file.
        folder: the folder that no link may lead out of; None where the user names the file.

    Attributes:
        path: where it is.
        size: its bytes.
    """

    def __init__(self, path: Path, folder: Path | None = None):
        self.path = path
        self._folder = folder
        descriptor = _Descriptor(path, folder)
        self.size = descriptor.status.st_size
        self._identity = self._identify(descriptor)
        self._keep(descriptor)

    @staticmethod
    def _identify(descriptor: _Descriptor) -> tuple[int, ...]:
        status = descriptor.status
        # Size and time of modification as well: the same file may have been written to.
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _keep(self, descriptor: _Descriptor) -> None:
        with _lock:
            _open[id(self)] = descriptor
            while len(_open) > MAX_OPEN:
                _open.popitem(last=False)

    def _descriptor(self) -> _Descriptor:
        with _lock:
            # Keys are ids, as the cache must not keep files alive; `__del__` removes an id before another file can have
            # it.
            descriptor = _open.get(id(self))
            if descriptor is not None:
                _open.move_to_end(id(self))
                return descriptor
        descriptor = _Descriptor(self.path, self._folder)
        if self._identify(descriptor) != self._identity:
            raise bad(self.path, "has changed while it was read")
        self._keep(descriptor)
        return descriptor

    def read(self, start: int, count: int) -> bytes | memoryview:
        """Return exactly that many bytes."""
        if start < 0 or count < 0 or start + count > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {start + count}")
        descriptor = self._descriptor()
        try:
            # One call suffices nearly always, and needs no buffer of ours; Linux returns at most 2 GiB - 4 KiB of it.
            data = os.pread(descriptor.number, count, start)
            if len(data) == count:
                return data
            whole = memoryview(bytearray(count))
        except OSError as error:
            raise bad(self.path, f"can't be read: {reason(error)}") from None
        except MemoryError:
            raise bad(self.path, f"there is no memory for {count} bytes") from None
        whole[: len(data)] = data
        self.read_into(start + len(data), whole[len(data) :])
        return whole

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with bytes from position `start` on."""
        if start < 0 or start + len(into) > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {start + len(into)}")
        descriptor, done = self._descriptor(), 0
        try:
            while done < len(into):
                got = os.preadv(descriptor.number, [into[done : done + PIECE]], start + done)
                if not got:
                    raise bad(self.path, f"ends at byte {start + done}, before byte {start + len(into)}")
                done += got
        except OSError as error:
            raise bad(self.path, f"can't be read: {reason(error)}") from None

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce the next reads, as (start, count): a store fetches them at once; a disk ignores this."""

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read ranges in the order of their use, as (start, count), without waiting; for stores only."""

    def close(self) -> None:
        """Close it; the next reading opens it again."""
        with _lock:
            _open.pop(id(self), None)

    def __del__(self) -> None:
        _open.pop(id(self), None)


def reason(error: Exception) -> str:
    """Return the system's message for an error, without the path."""
    return printable(error.strerror if isinstance(error, OSError) and error.strerror else error)


def unwritable(path: object, error: OSError) -> CheckpointError:
    """Return an error with the reason why a file can't be written."""
    kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else CheckpointError
    return kind(f"{printable(path, 400)}: can't be written: {reason(error)}")


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
    # Within one row, the same problem has one axis less; else the incomplete first and last rows are cut off.
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
