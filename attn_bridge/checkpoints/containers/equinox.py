"""Leaves that Equinox serialised, ``.eqx``: arrays of NumPy one after the other, maybe behind a line of JSON."""

from __future__ import annotations

from typing import ClassVar

from .base import MAX_HEADER, MAX_TENSORS, TensorInfo
from .files import StridedTensor, bad, parse_json
from .npz import MAGIC, name_of, read_header, saved_array
from .sources import OrderedReader

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
