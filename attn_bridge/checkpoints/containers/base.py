"""The interface of containers: a reader of tensors by name, and a writer that has all tensors' headers in advance.

Names are dotted; a container of nested dicts (msgpack, Orbax) uses a name's parts as its keys. Dtypes have their NumPy
names (``bfloat16``, ``float8_e4m3fn``).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np

from ...printable import printable
from ...whole_files import JsonObject

Array = np.ndarray

# A header of `MAX_HEADER` bytes holds about as many: an entry of safetensors has some 100 bytes with its name.
MAX_TENSORS = 1_000_000
"""More tensors than this in one checkpoint are refused."""

MAX_AXES = 64
"""NumPy's own limit."""

# The limit of the safetensors library itself (MAX_HEADER_SIZE), which other containers share here.
MAX_HEADER = 100_000_000
"""Bytes of a header, an index or a pickle beyond which it is refused unread."""


SPARSE, GAP, SPAN = 4, 1 << 10, 1 << 20
"""Limits of reading rows of a matrix in one span.

The span is at most SPARSE times the rows' own bytes, gaps are shorter than GAP bytes, and SPAN bytes are read at a
time.
"""

ORBAX_METADATA = "_METADATA"
"""File of an Orbax folder that describes its tree."""

ORBAX_COMMITTED = "commit_success.txt"
"""File that Orbax 0.12.3 and later write last into a folder. Where its rule of commit files applies, as in Google's
store, a folder without it is an unfinished save: ``CheckpointManager(..., cleanup_tmp_directories=True)`` deletes it.
"""

ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the names of folders that Orbax has yet to rename, where renames are atomic."""

DCP_METADATA = ".metadata"
"""File of a distributed checkpoint of torch that lists its tensors and chunks."""

ORBAX_ITEMS = ("default", "model_params")
"""Folders in a step of Orbax's CheckpointManager that hold a model: without a name, and by the name that Tunix has."""


class CheckpointError(ValueError):
    """A checkpoint that can't be read, converted or written, in one line that names the file and the reason."""


class DiskFullError(CheckpointError):
    """A file can't be written for want of room: the disk is full, or the user's share of it."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Header of a tensor.

    Attributes:
        name: dotted name.
        dtype: NumPy name of its dtype.
        shape: its shape.
        file: the file of the checkpoint that contains it, relative to its folder; "" if the checkpoint is a single
            file.
        blocks: quantised type of the blocks that its bytes consist of; "" for numbers of `dtype`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    blocks: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


class Reader(abc.ABC):
    """An open checkpoint. Opening reads headers alone, refuses malformed files, and allocates little.

    Attributes:
        format: name of the container.
        path: file or folder.
        tensors: name -> header, in the container's order.
        metadata: the container's other metadata, in JSON types.
        random_access: whether `read_range` costs only the bytes that it returns.
        notes: messages for the user: files with names of the container that are left out, and values that are skipped.
        unread: name of a tensor that can't be read -> the reason.
        shared: name of a tensor that is stored once for several names -> the name that it is stored under.
        chosen: the step and the item that were read from a folder with several.
        above: the folders around `path`, from the nearest to the one that the user named, where that was followed.
    """

    format: ClassVar[str]
    random_access: ClassVar[bool] = True
    notes: tuple[str, ...] = ()
    unread: Mapping[str, str] = MappingProxyType({})
    shared: Mapping[str, str] = MappingProxyType({})
    chosen: Mapping[str, int | str] = MappingProxyType({})
    above: tuple[Path, ...] = ()
    path: Path
    tensors: dict[str, TensorInfo]
    metadata: JsonObject

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json, if the container has one."""
        return None

    def files(self) -> list[Path]:
        """Return every file with tensors or their index."""
        return [self.path]

    @abc.abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes ``start:stop`` of a tensor's elements in C order, little-endian.

        Raises:
            CheckpointError: the file ends before, or can't be read.
        """

    def check_read(self, wanted: Collection[str]) -> None:
        """Refuse wanted tensors that can't be read.

        Raises:
            CheckpointError: the first of them, and why.
        """
        unread = [name for name in self.unread if name in wanted]
        if unread:
            more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
            raise CheckpointError(
                f"{printable(unread[0])}{more} of {printable(str(self.path), 400)} can't be read: "
                f"{self.unread[unread[0]]}; --strip takes another part of the file, --drop leaves it out"
            )

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with bytes of a tensor, from its byte `start` on."""
        into[:] = self.read_range(name, start, start + len(into))

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix from element `start` of a tensor on, each row `step` elements behind the one before."""
        width, (rows, run) = into.itemsize, into.shape
        # A span would read more gaps than rows, or the rows overlap: each row is read alone.
        if not 0 < run <= step <= SPARSE * run or (step - run) * width >= GAP:
            for number, row in enumerate(into):
                self.read_into(name, (start + number * step) * width, row.view(np.uint8).data)
            return
        most = max(1, SPAN // (step * width))
        for first in range(0, rows, most):  # with what lies between: rows may be single numbers
            part = into[first : first + most]
            begin = start + first * step
            data = self.read_range(name, begin * width, (begin + (len(part) - 1) * step + run) * width)
            between = np.frombuffer(data, into.dtype)
            part[...] = np.lib.stride_tricks.as_strided(between, part.shape, (step * width, width), writeable=False)

    def read_ahead(self, ranges: Sequence[tuple[str, int, int]]) -> None:  # noqa: B027 - disks need not know
        """Begin to read bytes of tensors that will be needed soon, as (name, start, stop), without waiting."""

    def check_numbers(self) -> None:  # noqa: B027 - files may hold any numbers
        """Check the numbers of tensors that are merged as they are read: non-finite numbers would spoil others.

        Raises:
            CheckpointError: some numbers are not finite.
        """

    def read(self, name: str) -> Array:
        """Return a whole tensor, C-contiguous."""
        info = self.tensors[name]
        data = self.read_range(name, 0, info.nbytes)
        return np.frombuffer(data, numpy_dtype(info.dtype)).reshape(info.shape)

    def close(self) -> None:  # noqa: B027 - one that keeps nothing open need not say so
        """Close its files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Contiguous bytes of a tensor in a file.

    Attributes:
        file: the file, relative to the checkpoint; "" is the checkpoint itself.
        offset: where they begin in it.
        count: how many they are.
    """

    file: str
    offset: int
    count: int


class Writer(abc.ABC):
    """Writes a checkpoint whose tensor headers are available in advance, to a path that does not exist yet.

    The caller writes to a temporary path and renames it. The bytes depend on the arguments alone.

    Args:
        path: file or folder to write.
        tensors: all of them, in the order in which they are written; `TensorInfo.file` is the shard.
        metadata: the `metadata` of a reader.
        is_share: whether several writers write the same checkpoint, which needs random access. Such a writer touches
            nothing before the first bytes of a tensor arrive, and writes only these and, if the target's parts are
            joined later (`writing.Target.joins`), the bytes in front of them. At the end, a writer without `is_share`
            on the same path writes the headers and finishes.

    Attributes:
        random_access: whether tensors and parts of them can be written in any order, also after a restart.
    """

    format: ClassVar[str]
    random_access: ClassVar[bool] = False

    def __init__(
        self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any], *, is_share: bool = False
    ):
        self.path = path
        self.tensors = {one.name: one for one in tensors}
        self.metadata = dict(metadata)
        self._is_share = is_share

    @abc.abstractmethod
    def write_range(self, name: str, start: int, data: object) -> None:
        """Write bytes (anything with the buffer protocol) of a tensor's elements from byte `start` on.

        Without random access: tensors in their order, and their bytes from first to last.
        """

    def place(self, name: str, start: int) -> int:
        """Return the offset in its file of byte `start` of a tensor, if fixed in advance, to align memory with it."""
        return 0

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return the file extents of bytes ``start:stop`` of a tensor, in order; with random access only."""
        raise NotImplementedError(f"places in a file of {self.format} are not known beforehand")

    def flush(self) -> None:
        """Flush written data to disk, and close all files; more data may follow. With random access only."""
        raise NotImplementedError(f"a file of {self.format} is flushed when it is finished")

    def write(self, name: str, array: Array) -> None:
        """Write a whole tensor."""
        self.write_range(name, 0, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    @abc.abstractmethod
    def finish(self) -> None:
        """Write what comes last (an index, a directory of a zip), flush everything to disk, and close."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Close without finishing; written data stays, for cleanup or a resumed run."""


def rows_as_region(
    shape: Sequence[int], start: int, step: int, rows: int, run: int
) -> tuple[list[tuple[int, int]], int, tuple[slice, slice]] | None:
    """Return the region of a tensor that holds a matrix whose rows are its own, or None where they are not.

    Args:
        shape: of the tensor.
        start: its element that the matrix begins with.
        step: elements from one row to the next.
        rows: of the matrix.
        run: elements of a row.

    Returns:
        (start, stop) for each axis; the axis from which on a row lies; and where the matrix is in the region, once
        that is a matrix, too.
    """
    # Rows that are `step` apart are sub-arrays of one axis if the axes from it on hold `step` elements.
    axis = next((axis for axis in range(1, len(shape)) if math.prod(shape[axis:]) == step), 0)
    (row, column), inner = divmod(start, step), math.prod(shape[axis + 1 :])
    # A row that runs past the end of its sub-array would wrap round into the next one, and be no box.
    if not axis or column + run > step:
        return None
    above, left = math.prod(shape[1:axis]), column // inner
    region = [(0, size) for size in shape]
    region[0] = row // above, -(-(row + rows) // above)
    region[axis] = left, -(-(column + run) // inner)
    down, right = row - region[0][0] * above, column - left * inner
    return region, axis, (slice(down, down + rows), slice(right, right + run))


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype of that name.

    Raises:
        CheckpointError: NumPy and ml_dtypes have none.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        dtype: np.dtype = np.dtype(getattr(ml_dtypes, name))
        return dtype
    except (AttributeError, TypeError):
        raise CheckpointError(f"dtype {printable(name)} is unknown here") from None
