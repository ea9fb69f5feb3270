"""Arrays as `numpy.save` writes them: in archives, ``.npz``, and one after the other, as Equinox serialises leaves."""

from __future__ import annotations

import ast
import functools
import io
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...printable import printable
from ...whole_files import JsonObject
from .base import MAX_HEADER, MAX_TENSORS, Reader, TensorInfo, numpy_dtype
from .files import DTYPES, bad, check_count, check_dtype, check_name, check_shape, leads_out, parse_json
from .shards import ShardedReader, open_parts
from .sources import OrderedReader
from .strided import StridedTensor, c_strides
from .writing import dump_json
from .zips import Archive, ArchiveWriter, Member, members

EXTRA = "attn_bridge.json"
"""Member with the names of dtypes that NumPy lacks, and the metadata; omitted if both are empty."""

MAGIC = b"\x93NUMPY"
MAX_TEXT = 10_000
"""Bytes of an array's header; NumPy's own limit."""


# NumPy fills the header up to a multiple of 64 bytes (`ARRAY_ALIGN`), with room for a first axis of 21 digits: an array
# of few axes has 128.
USUAL = 128
"""Bytes that nearly every array begins with in front of its elements."""


@functools.lru_cache(maxsize=256)
def _literal(text: str) -> Any:
    """Return the value of a Python literal; many arrays of an archive have the same header."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def read_header(
    path: Path, label: str, read: Callable[[int, int], bytes | memoryview], size: int
) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return an array's shape, whether it is in Fortran order, its dtype, and the offset of its elements.

    Args:
        path: of the file, for errors.
        label: name of the array, for errors.
        read: returns bytes of the output of `numpy.save`, by position and count.
        size: bytes available.

    Raises:
        CheckpointError: it is not an array of numbers.
    """
    start = bytes(read(0, min(USUAL, size)))
    version = tuple(start[6:8])
    if start[:6] != MAGIC or version not in ((1, 0), (2, 0)) or len(start) < 12:
        raise bad(path, f"{label} is no array of NumPy's format 1.0 or 2.0")
    wide = version == (2, 0)
    # Format 1.0 has the length of the header in 2 bytes, 2.0 in 4 (numpy.lib.format).
    (length,) = struct.unpack_from("<I" if wide else "<H", start, 8)
    begin = (12 if wide else 10) + length
    if length > MAX_TEXT or begin > size:
        raise bad(path, f"the header of {label} claims {length} bytes")
    whole = start if begin <= len(start) else bytes(read(0, begin))
    try:
        fields = _literal(whole[12 if wide else 10 : begin].decode("latin-1").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        why = str(error).partition(": <ast.")[0]  # without the address of a node
        raise bad(path, f"the header of {label} is damaged: {printable(why)}") from None
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise bad(path, f"the header of {label} is not descr, fortran_order and shape")
    if not isinstance(fields["descr"], str) or not isinstance(fields["fortran_order"], bool):
        raise bad(path, f"{label} is an array of records, or its order is not said; save each field by its own name")
    # Before `numpy.dtype` sees it, which takes far more than dtypes of one array: lists of fields, names of types.
    if not re.fullmatch(r"[<>|=]?[a-zA-Z?][0-9]*(\[[0-9a-zA-Z]+\])?", fields["descr"]):
        raise bad(path, f"{label} is an array of {printable(fields['descr'], 40)}, {NO_DTYPE}")
    try:
        dtype = np.dtype(fields["descr"])
    except (TypeError, ValueError, SyntaxError) as error:
        raise bad(path, f"the header of {label} is damaged: {printable(error)}") from None
    return check_shape(path, label, fields["shape"]), fields["fortran_order"], dtype, begin


NO_DTYPE = "which is no dtype of a tensor; save it as another"


def name_of(path: Path, label: str, dtype: np.dtype) -> str:
    """Return the name of a dtype that NumPy saved.

    Raises:
        CheckpointError: tensors can't have this dtype.
    """
    dtype_name = "bfloat16" if dtype.str == "|V2" else dtype.name  # what NumPy saves of JAX's bfloat16
    if dtype.hasobject or dtype.names or dtype.subdtype or dtype_name not in DTYPES:
        kind = "objects" if dtype.hasobject else f"{printable(dtype.str, 40)}, {NO_DTYPE}"
        raise bad(path, f"{label} is an array of {kind}")
    return dtype_name


def saved_array(
    info: TensorInfo, read: Callable[[int, int], bytes | memoryview], *, fortran: bool, dtype: np.dtype
) -> StridedTensor:
    """Return an array of `numpy.save`, whose elements `read` returns; see `read_header` for the other arguments."""
    # Fortran order is C order of the reversed axes.
    strides = c_strides(info.shape[::-1])[::-1] if fortran else c_strides(info.shape)
    return StridedTensor(info, read, strides, is_swapped=dtype.byteorder == ">")


PLAIN_KINDS = "USMmO"
"""Kinds of dtypes of texts, times and objects, which are named and not read."""

OBJECTS = "objects, which only unpickling reads; save the arrays in it by np.savez(FILE, **arrays)"
"""Kind of an array of objects, and a remedy."""


class NpzReader(OrderedReader[StridedTensor]):
    """One file; arrays in Fortran's order or big-endian come out in C's order and little-endian."""

    format: ClassVar[str] = "npz"

    def _read_headers(self) -> None:
        path = self.path
        entries = members(self._file)
        extra = self._read_extra(entries.pop(EXTRA, None))
        self.metadata = extra.get("metadata", {})
        dtypes = extra.get("dtypes", {})
        if not isinstance(self.metadata, dict) or not isinstance(dtypes, dict):
            raise bad(path, f"{EXTRA} in it has no objects")
        check_count(path, len(entries))
        for file, member in entries.items():
            if not file.endswith(".npy"):
                raise bad(path, f"{printable(file)} in it is no array")
            self._place(file.removesuffix(".npy"), member, dtypes)
        if self._unread and not self._stored:  # nothing else in it
            name, reason = next(iter(self._unread.items()))
            raise bad(path, f"{printable(name)} {reason.removeprefix('it ')}")
        wrong = [printable(name) for name in dtypes if name not in self._stored]
        if wrong:
            raise bad(path, f"{EXTRA} in it names arrays that are not there: {', '.join(wrong[:9])}")

    def _read_extra(self, member: Member | None) -> JsonObject:
        if member is None:
            return {}
        if member.size > MAX_HEADER:
            raise bad(self.path, f"{EXTRA} in it has {member.size} bytes; more than {MAX_HEADER} are not read")
        extra = parse_json(member.read(0, member.size), self.path, EXTRA)
        if not isinstance(extra, dict):
            raise bad(self.path, f"{EXTRA} in it is no object")
        return extra

    def _place(self, name: str, member: Member, dtypes: Mapping[str, object]) -> None:
        """Read the header of an array and check it against its member."""
        label = printable(check_name(self.path, name))
        shape, fortran, dtype, begin = read_header(self.path, label, member.read, member.size)
        if name in dtypes:
            dtype_name = check_dtype(self.path, name, dtypes[name])
            if dtype.kind != "V" or dtype.itemsize != numpy_dtype(dtype_name).itemsize:
                raise bad(self.path, f"{label} is {printable(dtype)}, which can't be {dtype_name}")
        elif dtype.kind in PLAIN_KINDS:
            kind = f"{printable(dtype.str, 40)}, {NO_DTYPE}"
            self._unread[name] = f"it is an array of {OBJECTS if dtype.hasobject else kind}"
            return
        else:
            dtype_name = name_of(self.path, label, dtype)
        info = TensorInfo(name, dtype_name, check_shape(self.path, name, shape))
        if begin + info.nbytes != member.size:
            raise bad(self.path, f"{label} claims {info.nbytes} bytes; its member has {member.size - begin}")

        def read(start: int, count: int) -> bytes | memoryview:
            # From its first byte, as a member checks its checksum only when it is read whole and in order.
            if not start and count:
                member.read(0, begin)
            return member.read(begin + start, count)

        self._stored[name] = saved_array(info, read, fortran=fortran, dtype=dtype)


class ShardedNpzReader(ShardedReader):
    """A folder of files that a model is cut into, as MLX writes them: ``weights.00.npz``."""

    format: ClassVar[str] = "npz"


def open_npz(path: Path, folder: Path | None = None) -> Reader:
    """Open a file, or the numbered files of a folder."""
    return open_parts(path, folder, NpzReader, ShardedNpzReader, ".npz")


class NpzWriter(ArchiveWriter):
    """One file, of stored members, that ``np.load`` reads.

    What NumPy has no dtype for (bfloat16, float8) is written as NumPy itself would: as void of that size. The member
    ``attn_bridge.json`` then names the dtypes: {"dtypes": {name: dtype}, "metadata": metadata}. It is left out where
    both are empty.
    """

    format: ClassVar[str] = "npz"

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object]):
        super().__init__(path, tensors, metadata)
        for info in tensors:
            if info.file:
                raise bad(path, "an .npz is one file; choose safetensors for several")
            if f"{info.name}.npy" == EXTRA or info.name.endswith(".npy"):
                raise bad(path, f"no array of an .npz can be named {printable(info.name)}")
            if leads_out(f"{info.name}.npy"):
                named = printable(info.name)
                raise bad(path, f"no array can be named {named}: an unpacker would write it outside of its folder")
        foreign = {info.name: info.dtype for info in tensors if numpy_dtype(info.dtype).isbuiltin != 1}
        extra_fields = {key: value for key, value in (("dtypes", foreign), ("metadata", self.metadata)) if value}
        self._extra = dump_json(path, extra_fields, sort_keys=True) if extra_fields else b""

    def _begin(self) -> Archive:
        archive = Archive(self.path, align=1)
        if self._extra:
            archive.add(EXTRA, self._extra)
        return archive

    def _enter(self, info: TensorInfo) -> None:
        head = io.BytesIO()
        dtype = numpy_dtype(info.dtype)
        # isbuiltin is 2 for dtypes that a package registered, as ml_dtypes does: NumPy alone could not read their
        # names.
        code = dtype.str if dtype.isbuiltin == 1 else f"<V{dtype.itemsize}"
        descr = {"descr": code, "fortran_order": False, "shape": info.shape}
        np.lib.format.write_array_header_1_0(head, descr)
        self._zip.begin(f"{info.name}.npy", len(head.getvalue()) + info.nbytes)
        self._zip.append(head.getvalue())


LINE = 1 << 20
"""Bytes of the line of hyperparameters, at most."""


class EquinoxReader(OrderedReader[StridedTensor]):
    """One file; its leaves have no names, and are numbered from 0. `metadata` is the JSON in front of them."""

    format: ClassVar[str] = "equinox"

    def _read_headers(self) -> None:
        self.metadata, start = self._read_line()
        while start < self._file.size:
            start = self._place(str(len(self._stored)), start)

    def _read_line(self) -> tuple[dict[str, object], int]:
        """Return the metadata from the line of JSON in front of the arrays, and the offset of the first array."""
        beginning = bytes(self._file.read(0, min(LINE, self._file.size)))
        if beginning[: len(MAGIC)] == MAGIC:
            return {}, 0
        end = beginning.find(b"\n" + MAGIC) + 1
        if not end:
            from .mistaken import kind_of

            other = kind_of(self._file, self.format)
            raise bad(
                self.path,
                other or "is no file of equinox.tree_serialise_leaves: no array of NumPy is at its beginning",
            )
        hyperparameters = parse_json(beginning[:end], self.path, "line of hyperparameters")
        return {"hyperparameters": hyperparameters}, end

    def _place(self, name: str, start: int) -> int:
        """Note an array, and return where the next one begins."""
        label, left = f"leaf {name}", self._file.size - start
        if len(self._stored) == MAX_TENSORS:
            raise bad(self.path, f"has more than {MAX_TENSORS} leaves")

        def read(begin: int, count: int) -> bytes | memoryview:
            return self._file.read(start + begin, count)

        shape, fortran, dtype, begin = read_header(self.path, label, read, min(left, MAX_HEADER))
        info = TensorInfo(name, name_of(self.path, label, dtype), shape)
        if begin + info.nbytes > left:
            raise bad(self.path, f"{label} claims {info.nbytes} bytes; the file has {left - begin}")
        first = start + begin
        self._stored[name] = saved_array(
            info, lambda at, count: self._file.read(first + at, count), fortran=fortran, dtype=dtype
        )
        return start + begin + info.nbytes
