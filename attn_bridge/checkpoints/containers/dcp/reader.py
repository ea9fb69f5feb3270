"""Reads distributed checkpoints of torch chunk by chunk; nothing of their pickles is executed."""

from __future__ import annotations

import collections
import itertools
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np

from ....printable import printable
from .. import mistaken
from ..base import DCP_METADATA as METADATA
from ..base import MAX_HEADER, CheckpointError, Extent
from ..files import File, bad, listed
from ..pickles import Machine, PlainValues, Strided
from ..sources import Latest, inside, open_file, read_file
from ..torch_file import Stored, open_archive
from ..zips import Window
from .chunks import ChunkedReader, Chunks
from .metadata import read_metadata

UNREAD = "entries that are no plain values"
"""Key of `DcpReader.metadata` for entries that are neither tensors nor plain values: name -> why it is not read."""

MAX_OPENED = 1024
"""Chunks whose own headers are remembered."""

# The end record of a zip has 22 bytes, and a remark of at most 65,535 behind it.
WHOLE, HEAD, TAIL = 1 << 22, 1 << 14, (1 << 16) + 22
"""Bytes of a chunk that are requested from a store at once, and of the ends of a larger one, which locate its data."""

HARMLESS = frozenset(
    {
        *(f"collections.{name}" for name in ("Counter", "defaultdict", "deque")),
        *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        *(f"{home}.{name}" for home in ("builtins", "__builtin__") for name in ("bytearray", "complex", "frozenset")),
        *(f"{home}.{name}" for home in ("builtins", "__builtin__") for name in ("int", "list", "set", "slice")),
        *(f"{home}.multiarray.{name}" for home in ("numpy.core", "numpy._core") for name in ("_reconstruct", "scalar")),
        *("_io.BytesIO", "_codecs.encode", "numpy.dtype", "numpy.ndarray", "torch.device"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath", "torch.serialization._get_layout"),
    }
)
"""Classes of values besides the tensors that may appear in a pickle; they are not constructed, and left unread."""


class DcpReader(ChunkedReader[Extent]):
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
        self._chunks, others = read_metadata(read_file(own, path, MAX_HEADER), own)
        self._files: dict[str, File] = {}
        self.tensors = {name: one.info for name, one in self._chunks.items()}
        self._open_files(others)
        self._opened: collections.OrderedDict[tuple[str, int], Stored] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._latest = Latest[Stored]()
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
        if unread and not self.tensors:
            raise bad(path, f"holds no tensor but objects, such as {printable(next(iter(unread)))}: save it with keys "
                      "that the planner flattens, as it does by default (flatten_state_dict=True)")  # fmt: skip

    def _open_files(self, others: dict[str, Extent]) -> None:
        """Open all files, and check that the entries fit in them and do not overlap."""
        own = self.path / METADATA
        ranges: dict[str, list[tuple[int, int, str, int]]] = {}
        for name, chunks in self._chunks.items():
            sizes = (chunks.stops - chunks.starts).prod(axis=1, dtype=np.int64) * chunks.info.itemsize
            for item, size in zip(chunks.items, sizes.tolist(), strict=True):
                ranges.setdefault(item.file, []).append((item.offset, item.offset + item.count, name, size))
        for name, item in others.items():
            ranges.setdefault(item.file, []).append((item.offset, item.offset + item.count, name, 0))
        missing = [file for file in ranges if not inside(self.path, file, own).is_file()]
        if missing:
            raise bad(own, f"these files of it are missing: {listed([printable(one) for one in sorted(missing)])}")
        for name, parts in ranges.items():
            file = self._files[name] = open_file(self.path / name, self.path)
            file.close()
            parts.sort()
            for start, stop, label, size in parts:
                if stop > file.size:
                    raise bad(file.path, f"ends at byte {file.size}; {printable(label)} is said to end at byte {stop}")
                if stop - start < size:
                    raise bad(file.path, f"{printable(label)} takes {size} bytes; {stop - start} are said to be there")
            for (_, stop, label, _), (start, _, next_label, _) in itertools.pairwise(parts):
                if start < stop:
                    other = mistaken.kind_of(file, "torch")
                    if other:  # as FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS) writes it
                        raise bad(file.path, f"{other}; give this file as SRC")
                    raise bad(file.path, f"{printable(label)} and {printable(next_label)} overlap in it")

    def _value(self, name: str, item: Extent) -> object:
        """Return a plain value that is not a tensor."""
        window = Window(self._files[item.file], item.offset, item.count, printable(name))
        if item.count > MAX_HEADER:
            raise _NotPlainError(f"it has {item.count} bytes")
        pickle, _, _ = open_archive(window)
        value = Machine(pickle, window.path, HARMLESS).run()
        try:
            return PlainValues(window.path, len(pickle)).value(value, "it")
        except CheckpointError as error:
            raise _NotPlainError(str(error).removeprefix(f"{printable(window.path, 400)}: ")) from None

    def files(self) -> list[Path]:
        """Return the metadata and the files that it names."""
        return [self.path / name for name in (METADATA, *self._files)]

    def _stored(self, whole: Chunks[Extent], number: int) -> Stored:
        """Return a chunk after reading its own header and comparing it with the metadata."""
        key = whole.info.name, number
        with self._lock:
            chunk = self._opened.get(key)
            if chunk is None:
                chunk = self._opened[key] = self._open(whole, number)
                if len(self._opened) > MAX_OPENED:
                    self._opened.popitem(last=False)
            self._opened.move_to_end(key)
            return self._latest.of(chunk)

    def _open(self, whole: Chunks[Extent], number: int) -> Stored:
        item, info = whole.items[number], whole.info
        label = printable(info.name)
        file = self._files[item.file]
        ends = [(0, HEAD), (item.count - TAIL, TAIL)] if item.count > WHOLE else [(0, item.count)]
        file.prefetch((item.offset + max(0, start), count) for start, count in ends)
        window = Window(file, item.offset, item.count, label)
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
        self._latest.release()
        for file in self._files.values():
            file.close()


class _NotPlainError(Exception):
    """A value has a type that JSON lacks."""
