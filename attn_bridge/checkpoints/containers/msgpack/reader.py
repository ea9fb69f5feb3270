"""Reads the files of ``flax.serialization``; array elements are loaded only on request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from ....printable import printable
from ..base import MAX_AXES, Reader, TensorInfo
from ..files import MAX_NODES, bad, check_count, check_dtype, check_name, check_shape, listed
from ..shards import ShardedReader, open_parts
from ..sources import FileReader
from . import CHUNKED
from .values import Head, Scanner

MAX_DEPTH = 64
"""Maps within maps."""

COMPLEX, SHOWN = 2, 8
"""Type of the extension with a Python complex number, and the number of skipped values that a note names."""

Found = tuple[TensorInfo, tuple[Head, ...]]
"""An array, and the location of its elements."""


class MsgpackReader(FileReader):
    """One file. Names are the keys joined by dots, and numbers within lists; `metadata` has plain leaves by such names.

    An empty map is such a leaf too, so that it is written again.
    """

    format: ClassVar[str] = "msgpack"

    def _read_headers(self) -> None:
        path = self.path
        self._scan = Scanner(self._file)
        self._nodes = 0
        self._skipped: dict[str, str] = {}
        root = self._scan.next()
        if not isinstance(root, Head) or root.kind != "map":
            from ..mistaken import kind_of

            raise bad(path, kind_of(self._file, self.format) or "is no map of msgpack")
        self._walk(root, "", 0)
        if self._scan.at != self._file.size:
            raise bad(path, f"its map ends at byte {self._scan.at}; the file has {self._file.size}")
        check_count(path, len(self.tensors))
        for name, kind in self._skipped.items() if not self.tensors else ():
            raise bad(path, f"{printable(name)} is {kind}, neither a tensor nor a plain value")
        if self._skipped:
            listing = listed([f"{printable(name)} ({kind})" for name, kind in self._skipped.items()], SHOWN)
            self.notes = (f"skipped, as they are neither tensors nor plain values: {listing}",)

    def _walk(self, head: Head, name: str, depth: int) -> None:
        """Parse a map or a list with everything in it."""
        if depth > MAX_DEPTH:
            raise self._scan.bad(f"{printable(name)} is nested more than {MAX_DEPTH} deep")
        seen: set[str] = set()
        for index in range(head.size):
            part = str(index) if head.kind == "list" else self._key(name)
            if part in seen:
                raise self._scan.bad(f"{printable(name) or 'its map'} has the key {printable(part)} twice")
            # Flax writes this key first; later in a map it is a name like any other.
            if part == CHUNKED and head.kind == "map" and not index:
                self._add(*self._chunked(head.size - 1, check_name(self.path, name)))
                return
            seen.add(part)
            full = f"{name}.{part}" if name else part
            check_name(self.path, full)
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise self._scan.bad(f"has more than {MAX_NODES} leaves")
            value = self._scan.next()
            kind = value.kind if isinstance(value, Head) else ""
            if isinstance(value, Head) and value.code == COMPLEX:
                self._skipped[full] = "a complex number"
            elif kind == "extension":
                self._add(*self._array(value, full))
            elif kind in ("map", "list") and value.size:
                self._walk(value, full, depth + 1)
            elif kind in ("map", "list"):
                self.metadata[full] = {} if kind == "map" else []
            elif kind == "bytes":
                self._skipped[full] = "bytes"
            elif isinstance(value, float) and not math.isfinite(value):
                self._skipped[full] = str(value)
            else:
                self.metadata[full] = value

    def _key(self, name: str) -> str:
        key = self._scan.next()
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise self._scan.bad(f"a key of {printable(name) or 'its map'} is neither text nor a number")
        key = str(key)
        if not key or "." in key:
            raise self._scan.bad(
                f"the key {printable(repr(key))} of {printable(name) or 'its map'} is empty or has a dot"
            )
        return key

    def _add(self, info: TensorInfo, pieces: tuple[Head, ...]) -> None:
        num_bytes, is_twice = sum(piece.size for piece in pieces), info.name in self.tensors
        if is_twice or num_bytes != info.nbytes:
            reason = f"of shape {list(info.shape)} needs {info.nbytes} bytes; has {num_bytes}"
            raise self._scan.bad(f"{printable(info.name)} {'comes twice' if is_twice else reason}")
        self.tensors[info.name] = info
        self._pieces[info.name] = [(self._file, piece.start, piece.size) for piece in pieces]

    def _array(self, extension: object, name: str) -> Found:
        """Read the packed (shape, dtype, bytes) of an extension."""
        if not isinstance(extension, Head) or extension.kind != "extension":
            raise self._scan.bad(f"{printable(name)} is no array")
        # Codes of flax.serialization: 1 an array, 2 a complex number, 3 a NumPy scalar.
        if extension.code not in (1, 3):
            raise self._scan.bad(
                f"{printable(name)} is an extension of type {extension.code}; only arrays, 1, are read"
            )
        # The content of the extension is msgpack as well: the scanner goes back, and must end where the extension does.
        end, self._scan.at = self._scan.at, extension.start
        head, sizes = self._scan.next(), self._scan.next()
        if head != Head("list", 3) or not isinstance(sizes, Head) or sizes.kind != "list" or sizes.size > MAX_AXES:
            raise self._scan.bad(f"{printable(name)} is no array: (shape, dtype, bytes) is missing")
        shape = check_shape(self.path, name, [self._scan.next() for _ in range(sizes.size)])
        dtype = self._scan.next()
        # The longest name of a dtype, float8_e4m3b11fnuz, has 18 letters.
        if isinstance(dtype, Head) and dtype.kind == "bytes" and dtype.size < 100:
            self._scan.at = dtype.start
            dtype = self._scan.take(dtype.size).decode("latin-1")
        dtype = check_dtype(self.path, name, dtype.kind if isinstance(dtype, Head) else dtype)
        data = self._scan.next()
        if not isinstance(data, Head) or data.kind != "bytes" or self._scan.at != end:
            raise self._scan.bad(f"{printable(name)} is no array: its bytes don't end where it does")
        return TensorInfo(name, dtype, shape), (data,)

    def _chunked(self, left: int, name: str) -> Found:
        """Read an array in pieces, after its first key."""
        shape: tuple[int, ...] | None = None
        chunks: list[Found] | None = None
        for _ in range(left if self._scan.next() is True else 0):
            key, head = self._scan.next(), self._scan.next()
            # 65,536 pieces of 1 GiB, as Flax cuts them, are 64 TiB; `_numbered` keeps the headers of all in memory.
            if not isinstance(head, Head) or head.kind != "map" or head.size > 1 << 16:
                break
            if key == "shape" and shape is None:
                sizes = self._numbered(head.size, name, plain=True)
                shape = check_shape(self.path, name, sizes)
            elif key == "chunks" and chunks is None:
                chunks = self._numbered(head.size, name, plain=False)
            else:
                break
        if shape is None or not chunks or left != 2 or len({one.dtype for one, _ in chunks}) > 1:
            raise self._scan.bad(f"{printable(name)} is no array in pieces")
        if any(len(one.shape) != 1 for one, _ in chunks):
            raise self._scan.bad(f"a piece of {printable(name)} is not flat")
        if any(one.nbytes != pieces[0].size for one, pieces in chunks):
            raise self._scan.bad(f"a piece of {printable(name)} has another size than its shape says")
        return TensorInfo(name, chunks[0][0].dtype, shape), tuple(pieces[0] for _, pieces in chunks)

    def _numbered(self, count: int, name: str, plain: bool) -> list[Any]:
        """Read a map of "0", "1" and so on."""
        pieces: dict[object, object] = {}
        for _ in range(count):
            key, value = self._scan.next(), self._scan.next()
            pieces[key] = value if plain else self._array(value, name)
        if set(pieces) != {str(index) for index in range(count)}:
            raise self._scan.bad(f"{printable(name)} is no array in pieces: one is missing")
        return [pieces[str(index)] for index in range(count)]


class ShardedMsgpackReader(ShardedReader):
    """A folder of files that a model is cut into, as transformers 4 writes those of Flax."""

    format: ClassVar[str] = "msgpack"


def open_msgpack(path: Path, folder: Path | None = None) -> Reader:
    """Open a file, or the numbered files of a folder."""
    return open_parts(path, folder, MsgpackReader, ShardedMsgpackReader, ".msgpack")
