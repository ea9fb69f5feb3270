"""What every container offers: tensors by name from headers alone, their bytes, and a writer that knows all of them.

Tensors are named by dots; a container of nested dicts (msgpack, Orbax) has a name's parts as its keys. Dtypes go by
their NumPy name (``bfloat16``, ``float8_e4m3fn``).
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

Array = np.ndarray[Any, Any]

MAX_TENSORS = 1_000_000
"""More tensors than this in one checkpoint are refused."""

MAX_AXES = 64
"""NumPy's own limit."""

MAX_HEADER = 100_000_000
"""Bytes of a header, an index or a pickle beyond which it is refused unread."""


SPARSE, GAP, SPAN = 4, 1 << 10, 1 << 20
"""How many times their own bytes rows of a matrix are read with what lies between them, which is less than so many
bytes; and bytes at a time, then."""

ORBAX_METADATA = "_METADATA"
"""File of a folder of Orbax that says what is in it."""

ORBAX_COMMITTED = "commit_success.txt"
"""File that Orbax 0.12.3 and later write last into a folder. Where its rule of commit files applies, as in Google's
store, a folder without it is an unfinished save: ``CheckpointManager(..., cleanup_tmp_directories=True)`` deletes it.
"""

ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the names of folders that Orbax has yet to rename, where renames are atomic."""

DCP_METADATA = ".metadata"
"""File of a distributed checkpoint of torch that says what is in it."""

ORBAX_ITEMS = ("default", "model_params")
"""Folders in a step of Orbax's CheckpointManager that hold a model: without a name, and by the name that Tunix has."""


class CheckpointError(ValueError):
    """A checkpoint that can't be read, converted or written, in one line that names the file and the reason."""


class DiskFullError(CheckpointError):
    """A file can't be written for want of room: the disk is full, or the user's share of it."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor.

    Attributes:
        name: dotted name.
        dtype: NumPy name of its dtype.
        shape: its shape.
        file: the file of the checkpoint that holds it, relative to its folder; "" where there is but one.
        blocks: name of the quantised type whose blocks its bytes are; "" for numbers of `dtype`.
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
    """An open checkpoint. Opening reads headers alone, refuses what is malformed, and allocates little.

    Attributes:
        format: name of the container.
        path: file or folder.
        tensors: name -> what is known of it, in the container's order.
        metadata: what the container says beside its tensors, as JSON has it.
        random_access: whether `read_range` costs no more than the bytes it returns.
        notes: files that are left out although their names are those of the container, and values that are skipped,
            for the user to know.
        unread: names of tensors that can't be read -> the reason.
        config: the model's config.json, of containers that hold one; None of the others.
        chosen: the step and the item that were read of a folder with several.
    """

    format: ClassVar[str]
    random_access: ClassVar[bool] = True
    notes: tuple[str, ...] = ()
    unread: Mapping[str, str] = MappingProxyType({})
    config: Mapping[str, Any] | None = None
    chosen: Mapping[str, int | str] = MappingProxyType({})
    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Any]

    def files(self) -> list[Path]:
        """Return every file that holds tensors or says where they are."""
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
            more = f", and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise CheckpointError(
                f"{printable(unread[0])} of {printable(str(self.path), 400)} can't be read: "
                f"{self.unread[unread[0]]}{more}; --strip takes another part of the file, --drop leaves it out"
            )

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read as many bytes as `into` has room for, from byte `start` of a tensor on, into memory that is there."""
        into[:] = self.read_range(name, start, start + len(into))

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix from element `start` of a tensor on, each row `step` elements behind the one before."""
        width, (rows, run) = into.itemsize, into.shape
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
        """Begin to read bytes of tensors that will be asked for soon, as (name, start, stop), without waiting."""

    def check_numbers(self) -> None:  # noqa: B027 - files may hold any numbers
        """Refuse numbers that would spoil others, in tensors that are merged as they are read.

        Raises:
            CheckpointError: there are some.
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
    """Bytes of a tensor that lie one after the other in a file.

    Attributes:
        file: the file, relative to the checkpoint; "" is the checkpoint itself.
        offset: where they begin in it.
        count: how many they are.
    """

    file: str
    offset: int
    count: int


class Writer(abc.ABC):
    """Writes a checkpoint whose tensors are all known beforehand, in their order, to a place that does not exist yet.

    Whoever uses it writes to a temporary place and renames that; the bytes depend on the arguments alone.

    Args:
        path: file or folder to write.
        tensors: all of them, in the order in which they are written; `TensorInfo.file` is the shard.
        metadata: what a reader's `metadata` gives.
        is_share: whether it is one of several that write the same checkpoint, which needs random access: nothing is
            touched before bytes of a tensor come, and nothing but those is written, and, where that helps to join
            them (`writing.Target.joins`), what lies before them. At the end a writer that is none of several is made of
            the same place, and finishes it.

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
    def write_range(self, name: str, start: int, data: Any) -> None:
        """Write bytes (anything with the buffer protocol) of a tensor's elements from byte `start` on.

        Without random access: tensors in their order, and their bytes from first to last.
        """

    def place(self, name: str, start: int) -> int:
        """Return where in its file byte `start` of a tensor goes, if that is known: memory can be made to suit it."""
        return 0

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return where bytes ``start:stop`` of a tensor go, in order; known beforehand with random access alone."""
        raise NotImplementedError(f"places in a file of {self.format} are not known beforehand")

    def flush(self) -> None:
        """Have the disk hold what was written, and close all files; more may come. With random access alone."""
        raise NotImplementedError(f"a file of {self.format} is flushed when it is finished")

    def write(self, name: str, array: Array) -> None:
        """Write a whole tensor."""
        self.write_range(name, 0, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    @abc.abstractmethod
    def finish(self) -> None:
        """Write what comes last (an index, a directory of a zip), flush everything to disk, and close."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Close without finishing; what is there stays for whoever cleans up or resumes."""


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
    axis = next((axis for axis in range(1, len(shape)) if math.prod(shape[axis:]) == step), 0)
    (row, column), inner = divmod(start, step), math.prod(shape[axis + 1 :])
    if not axis or column + run > step:
        return None
    above, left = math.prod(shape[1:axis]), column // inner
    region = [(0, size) for size in shape]
    region[0] = row // above, -(-(row + rows) // above)
    region[axis] = left, -(-(column + run) // inner)
    down, right = row - region[0][0] * above, column - left * inner
    return region, axis, (slice(down, down + rows), slice(right, right + run))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name.

    Raises:
        CheckpointError: NumPy and ml_dtypes have none.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    except (AttributeError, TypeError):
        raise CheckpointError(f"dtype {printable(name)} is unknown here") from None
