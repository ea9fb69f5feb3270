"""Find the arrays of an HDF5 file: h5py parses the headers, and the readers take the elements from the file by offset.

In: an open file. Out: a `Dataset` per array. HDF5 can refer to other files (external links, external storage, virtual
datasets) and load plugins for compressed chunks. None of that is followed: h5py only ever gets the bytes of this file,
and never reads elements, but for those of compact datasets, which are part of a header.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ....printable import printable
from ..base import CheckpointError, TensorInfo, numpy_dtype
from ..files import DTYPES, MAX_NODES, File, bad, check_name, check_shape
from ..zips import Window

MAGIC = b"\x89HDF\r\n\x1a\n"

MAX_DEPTH = 64
"""Groups within groups."""

MAX_COMPACT = 1 << 16
"""Bytes of a dataset in its own header: HDF5's limit."""

PIECE = 1 << 16
"""Bytes that are read at a time while headers are parsed."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An array of a file.

    Attributes:
        info: its name (the names of its groups and its own, joined by dots), dtype and shape.
        offset: where its elements begin in the file.
        compact: the elements themselves, where the header holds them; else None.
        unread: the reason why it can't be read; "" where it can.
    """

    info: TensorInfo
    offset: int = 0
    compact: bytes | None = None
    unread: str = ""


class _Stream(io.RawIOBase):
    """A file of a source as the stream that h5py reads."""

    def __init__(self, file: File | Window):
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, into: Any, /) -> int:
        view = memoryview(into).cast("B")
        count = max(0, min(len(view), self._file.size - self._position))
        view[:count] = self._file.read(self._position, count)
        self._position += count
        return count


def h5py_of(path: Path) -> ModuleType:
    """Return the package h5py.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import h5py
    except ImportError:
        raise bad(path, "files of Keras need h5py: pip install 'attn-bridge[keras]'") from None
    module: ModuleType = h5py
    return module


def datasets(file: File | Window) -> list[Dataset]:
    """Return all arrays of an HDF5 file, in the order of their names.

    Raises:
        CheckpointError: it is malformed, refers to other files, or has groups that contain each other.
    """
    path = file.path
    if bytes(file.read(0, min(len(MAGIC), file.size))) != MAGIC:
        from ..mistaken import kind_of

        raise bad(path, kind_of(file, "keras") or "is not an HDF5 file")
    h5py = h5py_of(path)
    try:
        with h5py.File(io.BufferedReader(_Stream(file), PIECE), "r") as opened:
            return list(_Walk(h5py, file).below(opened.id, (), 0))
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: h5py has its own for every part of a damaged file
        raise bad(path, f"is a damaged HDF5 file: {printable(error, 200)}") from None


class _Walk:
    """Visits the groups of a file, each once."""

    def __init__(self, h5py: ModuleType, file: File | Window):
        self._h5py, self._file = h5py, file
        self._groups: set[int] = set()
        self._count = 0

    def below(self, group: Any, parts: tuple[str, ...], depth: int) -> Iterator[Dataset]:
        """Yield the arrays of a group and of those in it."""
        h5py, path = self._h5py, self._file.path
        # Hard links may make a group contain itself, or have two names: by its address it is known again.
        address = h5py.h5o.get_info(group).addr
        if address in self._groups or depth > MAX_DEPTH:
            why = "has two names" if address in self._groups else f"is deeper than {MAX_DEPTH} groups"
            raise bad(path, f"the group {printable('/'.join(parts))} {why}")
        self._groups.add(address)
        for raw in group:
            self._count += 1
            if self._count > MAX_NODES:
                raise bad(path, f"has more than {MAX_NODES} groups and arrays")
            name = self._name(raw)
            inner = (*parts, name)
            label = printable("/".join(inner))
            if group.links.get_info(raw).type != h5py.h5l.TYPE_HARD:
                raise bad(path, f"{label} is a link to another object or file, which is not followed")
            item = h5py.h5o.open(group, raw)
            if isinstance(item, h5py.h5g.GroupID):
                yield from self.below(item, inner, depth + 1)
            elif isinstance(item, h5py.h5d.DatasetID):
                yield self._dataset(item, check_name(path, ".".join(inner)), label)

    def _name(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise bad(self._file.path, f"the name {printable(repr(raw), 60)} is not UTF-8") from None

    def _dataset(self, item: Any, name: str, label: str) -> Dataset:
        """Return an array, after checks of its storage against the file."""
        h5py, path = self._h5py, self._file.path
        created = item.get_create_plist()
        layout = created.get_layout()
        if created.get_external_count() or layout == h5py.h5d.VIRTUAL:
            raise bad(path, f"{label} has its numbers in other files, which are not read")
        dtype, reason = self._dtype(item)
        shape = item.shape
        info = TensorInfo(name, dtype or "uint8", check_shape(path, name, shape if dtype and shape is not None else ()))
        if reason or shape is None:
            return Dataset(info, unread=reason or "it has no elements")
        if layout == h5py.h5d.CHUNKED:
            return Dataset(info, unread="its numbers are in chunks, maybe compressed; Keras stores them in one piece")
        if layout == h5py.h5d.COMPACT:
            if info.nbytes > MAX_COMPACT:
                raise bad(path, f"{label} claims {info.nbytes} bytes in its header")
            # Safe to read by h5py: compact elements are bytes of the header that it has parsed already.
            return Dataset(info, compact=h5py.Dataset(item)[()].tobytes())
        offset = item.get_offset()
        if offset is None and info.nbytes:
            return Dataset(info, unread="no numbers were ever written to it")
        if (offset or 0) + info.nbytes > self._file.size:
            raise bad(path, f"{label} ends at byte {offset + info.nbytes}; the file has {self._file.size}")
        return Dataset(info, offset or 0)

    def _dtype(self, item: Any) -> tuple[str, str]:
        """Return the name of a dtype whose bytes are NumPy's, and ""; or "" and the reason why it can't be read."""
        h5py = self._h5py
        kind = item.get_type()
        if kind.get_class() == h5py.h5t.OPAQUE:
            is_known = kind.get_size() == numpy_dtype("bfloat16").itemsize
            return ("bfloat16", "") if is_known else ("", f"it has opaque elements of {kind.get_size()} bytes")
        try:
            dtype = kind.dtype
            is_plain = dtype.name in DTYPES and kind == h5py.h5t.py_create(dtype, logical=True)
        except TypeError:  # NumPy has no such numbers
            is_plain = False
        if not is_plain:
            return "", "its elements are not numbers that NumPy has"
        return ("", "it is big-endian") if dtype.byteorder == ">" else (dtype.name, "")
