"""Writes distributed checkpoints of torch, in chunks and files of bounded size, at places known beforehand."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ....printable import printable
from ..base import DCP_METADATA, MAX_HEADER, Extent, TensorInfo
from ..files import bad, check_infos, check_name
from ..pickles import TORCH_DTYPES, Pickler
from ..writing import PlacedWriter, chunk_shape, put, sync_folder
from ..zips import Archive, Outline
from .metadata import HOME, STORAGE_INFO

CHUNK = 1 << 26
"""Bytes of a chunk, where a single element has no more: torch loads chunks whole."""

FILE = 1 << 32
"""Bytes of a file, where a single chunk has no more."""

# As the records of archives that torch writes (`kFieldAlignment` of its `PyTorchStreamWriter`).
ALIGN = 64
"""Alignment in bytes of a tensor's data."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorChunk:
    """A chunk of a tensor, whose bytes are contiguous in the tensor, and its location.

    Attributes:
        offsets: its first element along each axis.
        sizes: its elements along each axis.
        first: offset of its bytes in the tensor.
        count: number of its bytes.
        file: number of its file.
        start: offset of its archive in the file.
        head: the archive's bytes in front of the data.
        tail: the archive's bytes after the data.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    count: int
    file: int
    start: int
    head: bytes
    tail: bytes

    @property
    def size(self) -> int:
        """Bytes of its archive."""
        return len(self.head) + self.count + len(self.tail)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredValue:
    """A value besides the tensors, stored as an archive of ``torch.save``, and its location."""

    name: str
    file: int
    start: int
    archive: bytes

    @property
    def size(self) -> int:
        """Bytes of its archive."""
        return len(self.archive)


class DcpWriter(PlacedWriter):
    """A folder for ``torch.distributed.checkpoint.load``, which reads the tensors by name in any number of ranks.

    Each chunk is a file of ``torch.save`` within ``__0_0.distcp``, ``__0_1.distcp`` and so on, without checksums (as
    ``torch.serialization.set_crc32_options(False)`` leaves them out), so that it can be written in any order. Each
    entry of `metadata` becomes a value besides the tensors, named by its key.
    """

    format: ClassVar[str] = "dcp"

    def __init__(
        self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool = False
    ):
        super().__init__(path, tensors, metadata, is_share=is_share)
        check_infos(path, tensors)
        for info in tensors:
            if info.file:
                raise bad(path, "a distributed checkpoint has files of its own; tensors can't name one")
            if info.dtype not in TORCH_DTYPES:
                raise bad(path, f"torch has no {info.dtype} ({printable(info.name)})")
            if info.name in self.metadata:
                raise bad(path, f"{printable(info.name)} is to be a tensor and a value")
        self._ends: list[int] = [0]
        self._values = [self._value(check_name(path, name), value) for name, value in sorted(self.metadata.items())]
        self._pieces = {info.name: self._cut(info) for info in tensors}
        metadata_pickle = self._pickle()
        if len(metadata_pickle) > MAX_HEADER:
            raise bad(
                path, f"its {DCP_METADATA} would have {len(metadata_pickle)} bytes; more than {MAX_HEADER} are not read"
            )
        sizes = {_name(number): size for number, size in enumerate(self._ends)}
        self._begin(sizes, [*((file, 0, b"") for file in sizes), *self._shells()])  # also the file of no tensor
        if not is_share:
            put(path / DCP_METADATA, metadata_pickle)

    def _shells(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield the values, and the bytes of archives around the elements of tensors."""
        for value in self._values:
            yield _name(value.file), value.start, value.archive
        for piece in itertools.chain.from_iterable(self._pieces.values()):
            yield _name(piece.file), piece.start, piece.head
            yield _name(piece.file), piece.start + len(piece.head) + piece.count, piece.tail

    def _room(self, size: int) -> tuple[int, int]:
        """Reserve `size` bytes; return the number of the file and the offset in it."""
        # The archives begin aligned, and `Archive` aligns the data within each: the data is aligned in the file.
        start = -(-self._ends[-1] // ALIGN) * ALIGN
        if start and start + size > FILE:
            self._ends.append(0)
            start = 0
        self._ends[-1] = start + size
        return len(self._ends) - 1, start

    def _value(self, name: str, value: object) -> StoredValue:
        pickler = Pickler()
        try:
            pickler.value(value)
        except (TypeError, RecursionError) as error:
            raise bad(self.path, f"{printable(name)} can't be written: {printable(error)}") from None
        archive = _shell(pickler.finish(), None)[0]
        return StoredValue(name, *self._room(len(archive)), archive)

    def _cut(self, info: TensorInfo) -> list[TensorChunk]:
        """Return the chunks of a tensor in the order of their bytes, with their locations."""
        chunk = chunk_shape(info.shape, info.itemsize, CHUNK)
        starts = [range(0, max(size, 1), step) for size, step in zip(info.shape, chunk, strict=True)]
        pieces, first = [], 0
        for offsets in itertools.product(*starts):
            sizes = tuple(min(step, size - start) for start, step, size in zip(offsets, chunk, info.shape, strict=True))
            count = math.prod(sizes) * info.itemsize
            head, tail = _tensor_shell(info.dtype, sizes)
            file, start = self._room(len(head) + count + len(tail))
            pieces.append(TensorChunk(offsets, sizes, first, count, file, start, head, tail))
            first += count
        return pieces

    def _pickle(self) -> bytes:
        """Return the pickled ``.metadata``, in the form that torch writes."""
        pickler = Pickler()

        def new(name: str, attributes: Mapping[str, object]) -> None:
            pickler.remembered(name)
            pickler.raw(b")\x81}(")
            for key, value in attributes.items():
                pickler.remembered(key)
                if isinstance(value, tuple):
                    size(value)
                else:
                    pickler.value(value)
            pickler.raw(b"ub")

        def size(values: tuple[int, ...]) -> None:
            pickler.remembered("torch.Size")
            pickler.numbers(values)
            pickler.raw(b"\x85R")

        def stored(name: str, index: int | None, entry: StoredValue | TensorChunk) -> None:
            where = {} if isinstance(entry, StoredValue) else {"offset": entry.offsets}
            new(f"{HOME}MetadataIndex", {"fqn": name, "index": index, **where})
            storage_info = {"relative_path": _name(entry.file), "offset": entry.start, "length": entry.size}
            new(STORAGE_INFO, storage_info)

        pickler.remembered(f"{HOME}Metadata")
        pickler.raw(b")\x81}(")
        pickler.remembered("state_dict_metadata")
        pickler.raw(b"}(")
        for value in self._values:
            pickler.text(value.name)
            pickler.remembered(f"{HOME}BytesStorageMetadata")
            pickler.raw(b")\x81")
        for name, pieces in self._pieces.items():
            pickler.text(name)
            pickler.remembered(f"{HOME}TensorStorageMetadata")
            pickler.raw(b")\x81}(")
            pickler.remembered("properties")
            pickler.remembered(f"{HOME}TensorProperties")
            pickler.raw(b")\x81(")
            pickler.remembered(f"torch.{self.tensors[name].dtype}")
            pickler.remembered("torch.serialization._get_layout")
            pickler.text("torch.strided")
            pickler.raw(b"\x85R\x89")
            pickler.remembered(f"{HOME}_MEM_FORMAT_ENCODING")
            pickler.number(0)
            pickler.raw(b"\x85R\x89tb")
            pickler.remembered("size")
            size(self.tensors[name].shape)
            pickler.remembered("chunks")
            pickler.raw(b"](")
            for piece in pieces:
                new(f"{HOME}ChunkStorageMetadata", {"offsets": piece.offsets, "sizes": piece.sizes})
            pickler.raw(b"eub")
        pickler.raw(b"u")
        pickler.remembered("planner_data")
        pickler.raw(b"}(")
        for name in (*(value.name for value in self._values), *self._pieces):
            pickler.text(name)
            pickler.text(name)
            pickler.raw(b"\x85")
        pickler.raw(b"u")
        pickler.remembered("storage_data")
        pickler.raw(b"}(")
        for value in self._values:
            stored(value.name, None, value)
        for name, pieces in self._pieces.items():
            for index, piece in enumerate(pieces):
                stored(name, index, piece)
        pickler.raw(b"u")
        pickler.remembered("storage_meta")
        pickler.raw(b"N")
        pickler.remembered("version")
        pickler.text("1.0.0")
        pickler.raw(b"ub")
        return pickler.finish()

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return the file extents of bytes of a tensor, a chunk at a time."""
        extents = []
        # Chunks are contiguous in the tensor and in order, so that the first with bytes from `start` on is found by
        # bisection.
        number = max(0, bisect.bisect_right(self._pieces[name], start, key=lambda piece: piece.first) - 1)
        for piece in itertools.islice(self._pieces[name], number, None):
            if start >= stop:
                break
            count = min(stop, piece.first + piece.count) - start
            extents.append(Extent(_name(piece.file), piece.start + len(piece.head) + start - piece.first, count))
            start += count
        return extents

    def finish(self) -> None:
        """Flush all files."""
        self.flush()
        sync_folder(self.path)
        # Syncing a file keeps its bytes, not its name: the entries of both folders have to reach the disk as well.
        sync_folder(self.path.parent)


def _name(number: int) -> str:
    return f"__0_{number}.distcp"


@functools.lru_cache(maxsize=4096)
def _tensor_shell(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes in front of and after a tensor's data in its archive."""
    pickler, info = Pickler(), TensorInfo("", dtype, shape)
    pickler.tensor(info, "0")
    return _shell(pickler.finish(), info.nbytes)


def _shell(pickle: bytes, size: int | None) -> tuple[bytes, bytes]:
    """Return an archive of ``torch.save`` in two parts around `size` bytes of data; with None, all of it and b""."""
    outline, gap = Outline(), None
    archive = Archive(Path(), ALIGN, outline, has_checksums=False)
    archive.add("archive/data.pkl", pickle)
    archive.add("archive/byteorder", b"little")
    if size is not None:
        archive.begin("archive/data/0", size)
        gap = archive.leave_out()
    archive.add("archive/version", b"3\n")
    # torch hashes the records here and does not check it; a constant keeps the bytes a function of the tensors alone.
    archive.add("archive/.data/serialization_id", b"0" * 40)
    archive.finish()
    return outline.parts(gap, size or 0)
