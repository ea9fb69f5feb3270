"""Readers of weights in memory or in another reader: a selection of its tensors, renamed, or with other numbers.

`Checkpoint` is a mapping of names to arrays on top of a reader, `Inspection` the summary of its headers.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..printable import printable
from ..weights import Region, everything
from ..whole_files import JsonObject
from .containers.base import Array, CheckpointError, Reader, TensorInfo, numpy_dtype, rows_as_region


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name; each is read from the file on access.

    Args:
        reader: the open container.

    Attributes:
        tensors: name -> shape, dtype and file, from headers alone.
        metadata: the container's metadata besides its tensors.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self.tensors: dict[str, TensorInfo] = reader.tensors
        self.metadata: JsonObject = reader.metadata

    def __getitem__(self, name: str) -> np.ndarray:
        return self._reader.read(name).copy()  # the bytes of a file can't be written to

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __repr__(self) -> str:
        return f"<{self._reader.format} checkpoint {self._reader.path}: {len(self)} tensors>"

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Summary of a checkpoint's headers.

    Attributes:
        path: path of the checkpoint.
        format: its container.
        layout: its layout; "" if its names match none.
        why: the reason why they match none.
        tensors: name -> shape, dtype, file.
        metadata: the container's metadata besides its tensors.
        has_manifest: whether it has a manifest with digests.
        notes: files of the folder that are left out, and why.
    """

    path: Path
    format: str
    layout: str
    why: str
    tensors: dict[str, TensorInfo]
    metadata: JsonObject
    has_manifest: bool
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Dtype -> number of elements."""
        counts: dict[str, int] = {}
        for info in self.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes // info.itemsize
        return counts


class Wrapped(Reader):
    """A view of another reader, with its own tensors."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self._config: Mapping[str, object] | None = None
        self.unread = reader.unread
        self.path: Path = reader.path
        self.metadata: JsonObject = reader.metadata
        self.notes = reader.notes
        self.chosen = reader.chosen
        self.above = reader.above

    @property
    def format(self) -> str:  # type: ignore[override]  # that of the reader, of which there are several
        """Container of the file."""
        return self._reader.format

    @property
    def random_access(self) -> bool:  # type: ignore[override]  # as above
        """Whether `read_range` costs only the bytes that it returns."""
        return self._reader.random_access

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json, if the container has one or the view changes it."""
        return self._reader.config if self._config is None else self._config

    def files(self) -> list[Path]:
        """Return every file."""
        return self._reader.files()

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


class Renamed(Wrapped):
    """Some tensors of a checkpoint, all of them readable, by other names or by the same.

    Args:
        reader: the checkpoint.
        names: name -> that of the checkpoint.
    """

    def __init__(self, reader: Reader, names: Mapping[str, str]):
        super().__init__(reader)
        self.unread = {}
        self._names = dict(names)
        infos = {name: reader.tensors[own] for name, own in names.items()}
        self.tensors = {
            name: info if info.name == name else dataclasses.replace(info, name=name) for name, info in infos.items()
        }

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        return self._reader.read_range(self._names[name], start, stop)

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into `into`."""
        self._reader.read_into(self._names[name], start, into)

    def read_ahead(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Begin to read bytes of tensors that will be needed soon."""
        self._reader.read_ahead([(self._names[name], start, stop) for name, start, stop in ranges])

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix, each row `step` elements behind the one before."""
        self._reader.read_rows(self._names[name], start, step, into)


class Filtered(Renamed):
    """A checkpoint without some of its tensors.

    Args:
        reader: the checkpoint.
        left_out: their names.
        patterns: patterns that match them; metadata whose names they match are left out as well.
    """

    def __init__(self, reader: Reader, left_out: Collection[str], patterns: Iterable[str]):
        super().__init__(reader, {name: name for name in reader.tensors if name not in left_out})
        if reader.format != "safetensors":  # others hold values by their names
            matches = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
            self.metadata = {
                name: value for name, value in reader.metadata.items() if not any(match(name) for match in matches)
            }


class Stripped(Renamed):
    """The tensors whose names begin with a prefix, without the prefix; all others are left out.

    Args:
        reader: the checkpoint.
        prefix: such as ``module.``, which torch's DistributedDataParallel adds to every name.

    Raises:
        CheckpointError: no name begins with the prefix, or a name consists of it alone.
    """

    def __init__(self, reader: Reader, prefix: str):
        super().__init__(reader, {name[len(prefix) :]: name for name in reader.tensors if name.startswith(prefix)})
        self.metadata = reader.metadata if reader.format == "safetensors" else {}  # others hold values by their names
        if not prefix or not self.tensors or "" in self.tensors:
            first = next(iter(reader.tensors), "")
            raise CheckpointError(
                f"--strip ({printable(prefix)}) must be what names of {reader.path} begin with, and not a whole name; "
                f"its first is {printable(first)}"
            )


class MemoryReader(Reader):
    """Tensors of no file.

    Args:
        tensors: name -> header.
    """

    format: ClassVar[str] = "memory"

    def __init__(self, tensors: Mapping[str, TensorInfo]):
        self.path = Path("<memory>")
        self.tensors = dict(tensors)
        self.metadata: JsonObject = {}

    def files(self) -> list[Path]:
        """Return no file."""
        return []


class ArraysReader(MemoryReader):
    """Arrays in memory as a checkpoint to write.

    Args:
        arrays: name -> array.
    """

    def __init__(self, arrays: Mapping[str, Array]):
        super().__init__({name: TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()})
        self._arrays = dict(arrays)

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        flat = np.ascontiguousarray(self._arrays[name]).reshape(-1).view(np.uint8)
        return flat[start:stop].data


class SharedReader(MemoryReader):
    """The weights of a module that are sharded over devices; a tensor or part of one is gathered at a time.

    Args:
        described: name -> shape and dtype name.
        read: returns a region of a weight by name.
    """

    def __init__(self, described: Mapping[str, tuple[tuple[int, ...], str]], read: Callable[[str, Region], Array]):
        super().__init__({name: TensorInfo(name, dtype, shape) for name, (shape, dtype) in described.items()})
        self._read = read

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a weight, reading only the rows, or the part of a single row, that contain the range."""
        info = self.tensors[name]
        region, first, size = list(everything(info.shape)), 0, info.nbytes
        for axis, count in enumerate(info.shape if start < stop else ()):
            size //= count
            low, high = (start - first) // size, -(-(stop - first) // size)
            region[axis], first = (low, high), first + low * size
            if high - low > 1:
                break
        flat = np.ascontiguousarray(self._read(name, tuple(region))).reshape(-1).view(np.uint8)
        return flat[start - first : stop - first].data

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix; if its rows are those of the weight, only these rows and columns are read."""
        location = rows_as_region(self.tensors[name].shape, start, step, *into.shape)
        if location is None:
            super().read_rows(name, start, step, into)
            return
        region, axis, where = location
        block = self._read(name, tuple(region))
        into[...] = block.reshape(-1, math.prod(block.shape[axis:]))[where]


class NumberedReader(MemoryReader):
    """A checkpoint whose elements are their own indices, counted over all tensors: those of floats in float64.

    Args:
        reader: the checkpoint.
    """

    def __init__(self, reader: Reader):
        super().__init__(
            {
                name: dataclasses.replace(info, dtype="float64") if "float" in info.dtype else info
                for name, info in reader.tensors.items()
            }
        )
        self.path, self.metadata, self.unread = reader.path, reader.metadata, reader.unread
        sizes = [math.prod(info.shape) for info in self.tensors.values()]
        starts = np.cumsum([1, *sizes])  # from 1: an element that was never written may be zero
        self._starts = dict(zip(self.tensors, map(int, starts), strict=False))

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        info = self.tensors[name]
        size = info.itemsize
        first, last = start // size, -(-stop // size)
        numbers = (np.arange(first, last) + self._starts[name]).astype(numpy_dtype(info.dtype))
        return numbers.view(np.uint8)[start - size * first : stop - size * first].data
