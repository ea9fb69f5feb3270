"""Reads distributed checkpoints of torch chunk by chunk; nothing of their pickles is executed."""

from __future__ import annotations

import collections
import itertools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from ....printable import printable
from ..base import DCP_METADATA as METADATA
from ..base import GAP, MAX_HEADER, SPARSE, Array, CheckpointError, Reader, rows_as_region
from ..files import bad, boxes, c_strides, check_range, extent, listed
from ..pickles import Machine, PlainValues, Strided
from ..sources import inside, open_file
from ..torch_file import Stored, open_archive
from ..zips import Window
from .metadata import Chunks, Item, read_metadata

UNREAD = "entries that are no plain values"
"""Key of `DcpReader.metadata` for entries that are neither tensors nor plain values: name -> why it is not read."""

MAX_OPENED = 1024
"""Chunks whose own headers are remembered."""

WHOLE, HEAD, TAIL = 1 << 22, 1 << 14, (1 << 16) + 22
"""Bytes of a chunk that are requested from a store at once, and of the ends of a larger one, which locate its data."""

MAX_SPAN = 1 << 24
"""Maximum bytes per read, including gaps between the elements."""

HARMLESS = frozenset(
    {
        *(f"collections.{name}" for name in ("Counter", "defaultdict", "deque")),
        *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        *(f"{home}.{name}" for home in ("builtins", "__builtin__") for name in ("bytearray", "complex", "frozenset")),
        *(f"{home}.{name}" for home in ("builtins", "__builtin__") for name in ("int", "list", "set", "slice")),
        *(f"{home}.multiarray.{name}" for home in ("numpy.core", "numpy._core") for name in ("_reconstruct", "scalar")),
        *("_codecs.encode", "numpy.dtype", "numpy.ndarray", "torch.device"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath", "torch.serialization._get_layout"),
    }
)
"""Classes of values besides the tensors that may appear in a pickle; they are not constructed, and left unread."""

Box = list[tuple[int, int]]
"""(start, stop) for each axis."""


class DcpReader(Reader):
    """A folder written by ``torch.distributed.checkpoint.save``.

    Nested keys are dotted names, since torch flattens them. `metadata` has the plain values besides the tensors by
    name, and under `UNREAD` the names of other objects and why they are not read.
    """

    format: ClassVar[str] = "dcp"

    def __init__(self, path: Path):
        if not path.is_dir():
            raise bad(path, "is not a folder, as torch.distributed.checkpoint writes it")
        self.path = path
        own = inside(path, METADATA, path)
        if not own.is_file():
            raise bad(path, f"has no {METADATA}: it is no distributed checkpoint, or one that was never finished")
        file = open_file(own, path)
        if file.size > MAX_HEADER:
            raise bad(own, f"has {file.size} bytes; more than {MAX_HEADER} are not read")
        self._chunks, others = read_metadata(bytes(file.read(0, file.size)), own)
        file.close()
        self._files = {METADATA: file}
        self.tensors = {name: one.info for name, one in self._chunks.items()}
        self._open_files(others)
        self._opened: collections.OrderedDict[tuple[str, int], Stored] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._last: Stored | None = None
        self.metadata = {}
        unread = {}
        for name, item in others.items():
            try:
                self.metadata[name] = self._value(name, item)
            except _NotPlainError as error:
                unread[name] = str(error)
        if unread:
            if UNREAD in others:
                raise bad(own, f"has a value by the name {UNREAD!r}")
            self.metadata[UNREAD] = unread

    def _open_files(self, others: dict[str, Item]) -> None:
        """Open all files, and check that the entries fit in them and do not overlap."""
        own = self.path / METADATA
        ranges: dict[str, list[tuple[int, int, str, int]]] = {}
        for name, chunks in self._chunks.items():
            sizes = (chunks.stops - chunks.starts).prod(axis=1, dtype=np.int64) * chunks.info.itemsize
            for item, size in zip(chunks.items, sizes.tolist(), strict=True):
                ranges.setdefault(item.file, []).append((item.start, item.start + item.size, name, size))
        for name, item in others.items():
            ranges.setdefault(item.file, []).append((item.start, item.start + item.size, name, 0))
        missing = [file for file in ranges if not inside(self.path, file, own).is_file()]
        if missing:
            raise bad(own, f"these files of it are missing: {listed([printable(one) for one in sorted(missing)])}")
        for name, parts in ranges.items():
            file = self._files[name] = open_file(self.path / name, self.path)
            file.close()
            parts.sort()
            for start, stop, shown, size in parts:
                if stop > file.size:
                    raise bad(file.path, f"ends at byte {file.size}; {printable(shown)} is said to end at byte {stop}")
                if stop - start < size:
                    raise bad(file.path, f"{printable(shown)} takes {size} bytes; {stop - start} are said to be there")
            for (_, stop, shown, _), (start, _, other, _) in itertools.pairwise(parts):
                if start < stop:
                    raise bad(file.path, f"{printable(shown)} and {printable(other)} overlap in it")

    def _value(self, name: str, item: Item) -> object:
        """Return a plain value that is not a tensor."""
        window = Window(self._files[item.file], item.start, item.size, printable(name))
        if item.size > MAX_HEADER:
            raise _NotPlainError(f"it has {item.size} bytes")
        pickle, _, _ = open_archive(window)
        value = Machine(pickle, window.path, HARMLESS).run()
        try:
            return PlainValues(window.path, len(pickle)).value(value, "it")
        except CheckpointError as error:
            raise _NotPlainError(str(error).removeprefix(f"{printable(window.path, 400)}: ")) from None

    def files(self) -> list[Path]:
        """Return the metadata and the files that it names."""
        return [self.path / name for name in self._files]

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor, from the chunks that hold them."""
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        if start == stop:
            return b""
        whole = self._chunks[name]
        if len(whole.items) == 1:
            return self._stored(whole, 0).read(start, stop)
        first, last = start // info.itemsize, -(-stop // info.itemsize)
        flat = np.empty(last - first, _bits(info.itemsize))
        self._fill(whole, first, flat)
        return flat.view(np.uint8)[start - first * info.itemsize : stop - first * info.itemsize].data

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into `into`."""
        info, whole = self.tensors[name], self._chunks[name]
        check_range(self.path, info, start, start + len(into))
        if len(whole.items) == 1 or not into or start % info.itemsize or len(into) % info.itemsize:
            super().read_into(name, start, into)
            return
        self._fill(whole, start // info.itemsize, np.frombuffer(into, np.uint8).view(_bits(info.itemsize)))

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix; if its rows are rows of the tensor, only the needed part of each chunk is read."""
        location = rows_as_region(self.tensors[name].shape, start, step, *into.shape)
        if location is None:
            super().read_rows(name, start, step, into)
            return
        region, axis, (rows, _) = location
        done, column = 0, start % step
        for box in boxes(self.tensors[name].shape[axis:], column, column + into.shape[1]):
            inner = [(part.start, part.stop) for part in box]
            inner += region[axis + len(inner) :]  # from the second axis of a row on, its region is all of it
            bounds = [*region[:axis], *inner]
            block = np.empty([last - first for first, last in bounds], _bits(into.itemsize))
            self._fill_box(self._chunks[name], bounds, block)
            matrix = block.reshape(-1, math.prod(block.shape[axis:]))[rows]
            into.view(block.dtype)[:, done : done + matrix.shape[1]] = matrix
            done += matrix.shape[1]

    def _fill(self, whole: Chunks, first: int, flat: Array) -> None:
        """Read elements from `first` on, in C order."""
        done = 0
        for box in boxes(whole.info.shape, first, first + flat.size):
            bounds = [(part.start, part.stop) for part in box]
            bounds += [(0, size) for size in whole.info.shape[len(bounds) :]]
            sizes = [last - first for first, last in bounds]
            count = math.prod(sizes)
            self._fill_box(whole, bounds, flat[done : done + count].reshape(sizes))
            done += count

    def _fill_box(self, whole: Chunks, box: Box, into: Array) -> None:
        for number in whole.overlapping(box):
            begin = whole.starts[number].tolist()
            part = [
                (max(first, start), min(last, stop))
                for (first, last), start, stop in zip(box, begin, whole.stops[number].tolist(), strict=True)
            ]
            window = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(part, box, strict=True))
            sizes = (whole.stops[number] - whole.starts[number]).tolist()
            chunk_box = [(low - start, high - start) for (low, high), start in zip(part, begin, strict=True)]
            _read_box(self._stored(whole, number), sizes, chunk_box, into[window])

    def _stored(self, whole: Chunks, number: int) -> Stored:
        """Return a chunk after reading its own header and comparing it with the metadata."""
        key = whole.info.name, number
        with self._lock:
            chunk = self._opened.get(key)
            if chunk is None:
                chunk = self._opened[key] = self._open(whole, number)
                if len(self._opened) > MAX_OPENED:
                    self._opened.popitem(last=False)
            self._opened.move_to_end(key)
            if self._last is not None and self._last is not chunk:
                self._last.release()
            self._last = chunk
        return chunk

    def _open(self, whole: Chunks, number: int) -> Stored:
        item, info = whole.items[number], whole.info
        shown = printable(info.name)
        file = self._files[item.file]
        ends = [(0, HEAD), (item.size - TAIL, TAIL)] if item.size > WHOLE else [(0, item.size)]
        file.prefetch((item.start + max(0, start), count) for start, count in ends)
        window = Window(file, item.start, item.size, shown)
        pickle, members, prefix = open_archive(window)
        strided = Machine(pickle, window.path).run()
        if not isinstance(strided, Strided):
            raise bad(window.path, "is stored as something that is no tensor")
        chunk = Stored(window.path, info.name, strided, members, prefix)
        sizes = tuple((whole.stops[number] - whole.starts[number]).tolist())
        if (chunk.info.dtype, chunk.info.shape) != (info.dtype, sizes):
            has = f"{chunk.info.dtype} {printable(list(chunk.info.shape))}"
            raise bad(window.path, f"its chunk is {has}; {METADATA} says {info.dtype} {list(sizes)}")
        return chunk

    def close(self) -> None:
        """Close all files."""
        self._opened.clear()
        self._last = None
        for file in self._files.values():
            file.close()


class _NotPlainError(Exception):
    """A value has a type that JSON lacks."""


def _bits(itemsize: int) -> np.dtype:
    """Return a dtype of that size whose elements are copied as they are."""
    return np.dtype(f"u{itemsize}" if itemsize <= 8 else "c16")


def _read_box(stored: Stored, shape: Sequence[int], box: Box, into: Array) -> None:
    """Read a box of a tensor: at once where its elements lie close to each other, or else row by row."""
    width, strides = into.itemsize, c_strides(shape)
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    span = extent(into.shape, strides)
    rows = next((axis for axis, size in enumerate(into.shape) if size > 1), None)
    is_whole = rows is None or span == into.size
    if is_whole or _is_dense(into.shape[rows:], strides[rows:], width):
        data = np.frombuffer(stored.read(first * width, (first + span) * width), into.dtype)
        steps = [stride * width for stride in strides]
        into[...] = np.lib.stride_tricks.as_strided(data, into.shape, steps, writeable=False)
        return
    assert rows is not None
    for number in range(into.shape[rows]):
        window = (slice(None),) * rows + (slice(number, number + 1),)
        start = box[rows][0] + number
        _read_box(stored, shape, [*box[:rows], (start, start + 1), *box[rows + 1 :]], into[window])


def _is_dense(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Return whether the gaps between elements are small enough to be read along."""
    span, run = extent(shape, strides), extent(shape[1:], strides[1:])
    return span <= SPARSE * math.prod(shape) and span * width <= MAX_SPAN and (strides[0] - run) * width < GAP
