"""What ``flax.serialization`` writes: nested maps of msgpack with arrays as extension 1, read without loading them."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...printable import printable
from .base import MOST_AXES, Reader, TensorInfo, Writer, numpy_dtype
from .files import MOST_NODES, File, bad, check_count, check_dtype, check_infos, check_name, check_range, check_shape
from .writing import Target, as_bytes, dump_json, sync_folder

CHUNK = 1 << 30
"""Bytes beyond which Flax cuts an array, since an object of msgpack has at most 2**31 - 1."""

CHUNKED = "__msgpack_chunked_array__"

MOST_DEPTH = 64
"""Maps within maps."""

MOST_TEXT = 1 << 20
"""Bytes of a text that is no tensor."""

WINDOW = 1 << 16
"""Bytes that are read at a time."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements that lie together: `size` bytes at `start`."""

    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array as the file has it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Extension:
    """The head of an extension: its kind and where its bytes are."""

    kind: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of a map or a list, or of bytes that are skipped."""

    kind: str
    size: int
    start: int = 0


class Scanner:
    """Goes through a file of msgpack and skips what arrays hold.

    Args:
        file: the file.
    """

    def __init__(self, file: File):
        self._file = file
        self.at = 0
        self._window = b""
        self._begin = 0

    def bad(self, reason: str) -> Exception:
        """Return an error that says where."""
        return bad(self._file.path, f"{reason}, at byte {self.at}")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        first = self.at - self._begin
        if first < 0 or first + count > len(self._window):
            if self.at + count > self._file.size:
                raise bad(self._file.path, f"is cut off: byte {self.at + count} is beyond its end {self._file.size}")
            size = min(max(WINDOW, count), self._file.size - self.at)
            self._window, self._begin, first = bytes(self._file.read(self.at, size)), self.at, 0
        self.at += count
        return self._window[first : first + count]

    def skip(self, count: int) -> int:
        """Go over bytes that have to be there, and return where they begin."""
        if self.at + count > self._file.size:
            raise bad(self._file.path, f"is cut off: byte {self.at + count} is beyond its end {self._file.size}")
        self.at += count
        return self.at - count

    def _number(self, form: str) -> Any:
        return struct.unpack(">" + form, self.take(struct.calcsize(">" + form)))[0]

    def next(self) -> Any:
        """Return the next plain value, or the head of what holds more."""
        code = self.take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90:
            return Head("map", code & 0x0F)
        if code < 0xA0:
            return Head("list", code & 0x0F)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code in SIMPLE:
            return SIMPLE[code]
        if code in NUMBERS:
            return self._number(NUMBERS[code])
        kind, form = LENGTHS.get(code, ("", ""))
        if not kind:
            raise self.bad(f"has the code {code:#04x}, which msgpack has not")
        size = int(form) if form.isdigit() else self._number(form)
        if kind == "text":
            return self._text(size)
        if kind == "bytes":
            return Head("bytes", size, self.skip(size))
        if kind == "extension":
            number = self._number("b")
            return Extension(number, self.skip(size), size)
        return Head(kind, size)

    def _text(self, size: int) -> str:
        if size > MOST_TEXT:
            raise self.bad(f"has a text of {size} bytes; more than {MOST_TEXT} are not read")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("has a text that is not UTF-8") from None


SIMPLE = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = {
    0xCA: "f",
    0xCB: "d",
    0xCC: "B",
    0xCD: "H",
    0xCE: "I",
    0xCF: "Q",
    0xD0: "b",
    0xD1: "h",
    0xD2: "i",
    0xD3: "q",
}
LENGTHS = {
    0xC4: ("bytes", "B"),
    0xC5: ("bytes", "H"),
    0xC6: ("bytes", "I"),
    0xC7: ("extension", "B"),
    0xC8: ("extension", "H"),
    0xC9: ("extension", "I"),
    0xD4: ("extension", "1"),
    0xD5: ("extension", "2"),
    0xD6: ("extension", "4"),
    0xD7: ("extension", "8"),
    0xD8: ("extension", "16"),
    0xD9: ("text", "B"),
    0xDA: ("text", "H"),
    0xDB: ("text", "I"),
    0xDC: ("list", "H"),
    0xDD: ("list", "I"),
    0xDE: ("map", "H"),
    0xDF: ("map", "I"),
}


class MsgpackReader(Reader):
    """One file. Names are the keys joined by dots, and numbers within lists; `metadata` has plain leaves by such names.

    An empty map is such a leaf too, so that it is written again.
    """

    format: ClassVar[str] = "msgpack"

    def __init__(self, path: Path):
        self.path = path
        self._file = File(path)
        self._scan = Scanner(self._file)
        self._nodes = 0
        self.tensors = {}
        self.metadata = {}
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        found = self._scan.next()
        if not isinstance(found, Head) or found.kind != "map":
            raise bad(path, "is no map of msgpack")
        self._walk(found, "", 0)
        if self._scan.at != self._file.size:
            raise bad(path, f"its map ends at byte {self._scan.at}; the file has {self._file.size}")
        check_count(path, len(self.tensors))

    def _walk(self, head: Head, name: str, depth: int) -> None:
        """Read a map or a list and what is in it."""
        if depth > MOST_DEPTH:
            raise self._scan.bad(f"{printable(name)} is nested more than {MOST_DEPTH} deep")
        seen: set[str] = set()
        for index in range(head.size):
            part = str(index) if head.kind == "list" else self._key(name)
            if part in seen:
                raise self._scan.bad(f"{printable(name) or 'its map'} has the key {printable(part)} twice")
            if part == CHUNKED and head.kind == "map" and not index:
                if self._scan.next() is not True:
                    raise self._scan.bad(f"{printable(name)} is no array in pieces")
                self._add(name, self._chunked(head.size - 1, name))
                return
            seen.add(part)
            full = f"{name}.{part}" if name else part
            check_name(self.path, full)
            self._nodes += 1
            if self._nodes > MOST_NODES:
                raise self._scan.bad(f"has more than {MOST_NODES} leaves")
            found = self._scan.next()
            if isinstance(found, Head) and found.kind in ("map", "list"):
                if found.size:
                    self._walk(found, full, depth + 1)
                else:
                    self.metadata[full] = {} if found.kind == "map" else []
            elif isinstance(found, Head):
                raise self._scan.bad(f"{printable(full)} is bytes, neither a tensor nor a plain value")
            elif isinstance(found, Extension):
                self._add(full, self._array(found, full))
            elif isinstance(found, float) and not math.isfinite(found):
                raise self._scan.bad(f"{printable(full)} is {found}, which JSON can't hold")
            else:
                self.metadata[full] = found

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

    def _add(self, name: str, found: Stored) -> None:
        info = TensorInfo(check_name(self.path, name), found.dtype, found.shape)
        if name in self.tensors:
            raise self._scan.bad(f"{printable(name)} comes twice")
        if sum(piece.size for piece in found.pieces) != info.nbytes:
            held = sum(piece.size for piece in found.pieces)
            raise self._scan.bad(f"{printable(name)} of shape {list(info.shape)} needs {info.nbytes} bytes; has {held}")
        self.tensors[name] = info
        self._pieces[name] = found.pieces

    def _array(self, found: object, name: str) -> Stored:
        """Read the packed (shape, dtype, bytes) of an extension."""
        if not isinstance(found, Extension):
            raise self._scan.bad(f"{printable(name)} is no array")
        if found.kind not in (1, 3):
            raise self._scan.bad(f"{printable(name)} is an extension of type {found.kind}; only arrays, 1, are read")
        end, self._scan.at = self._scan.at, found.start
        head, sizes = self._scan.next(), self._scan.next()
        if head != Head("list", 3) or not isinstance(sizes, Head) or sizes.kind != "list" or sizes.size > MOST_AXES:
            raise self._scan.bad(f"{printable(name)} is no array: (shape, dtype, bytes) is missing")
        shape = check_shape(self.path, name, [self._scan.next() for _ in range(sizes.size)])
        dtype = self._scan.next()
        if isinstance(dtype, Head) and dtype.kind == "bytes" and dtype.size < 100:
            self._scan.at = dtype.start
            dtype = self._scan.take(dtype.size).decode("latin-1")
        dtype = check_dtype(self.path, name, dtype)
        data = self._scan.next()
        if not isinstance(data, Head) or data.kind != "bytes" or self._scan.at != end:
            raise self._scan.bad(f"{printable(name)} is no array: its bytes don't end where it does")
        return Stored(dtype, shape, (Piece(data.start, data.size),))

    def _chunked(self, left: int, name: str) -> Stored:
        """Read an array in pieces, after its first key."""
        shape: tuple[int, ...] | None = None
        chunks: list[Stored] | None = None
        for _ in range(left):
            key, head = self._scan.next(), self._scan.next()
            if not isinstance(head, Head) or head.kind != "map" or head.size > 1 << 16:
                break
            if key == "shape" and shape is None:
                sizes = self._numbered(head.size, name, plain=True)
                shape = check_shape(self.path, name, sizes)
            elif key == "chunks" and chunks is None:
                chunks = self._numbered(head.size, name, plain=False)
            else:
                break
        if shape is None or not chunks or left != 2 or len({one.dtype for one in chunks}) > 1:
            raise self._scan.bad(f"{printable(name)} is no array in pieces")
        if any(len(one.shape) != 1 for one in chunks):
            raise self._scan.bad(f"a piece of {printable(name)} is not flat")
        for one in chunks:
            if one.shape[0] * numpy_dtype(one.dtype).itemsize != one.pieces[0].size:
                raise self._scan.bad(f"a piece of {printable(name)} has another size than its shape says")
        return Stored(chunks[0].dtype, shape, tuple(one.pieces[0] for one in chunks))

    def _numbered(self, count: int, name: str, plain: bool) -> list[Any]:
        """Read a map of "0", "1" and so on."""
        found: dict[object, Any] = {}
        for _ in range(count):
            key, value = self._scan.next(), self._scan.next()
            if not isinstance(key, str) or key in found:
                raise self._scan.bad(f"{printable(name)} is no array in pieces")
            found[key] = value if plain else self._array(value, name)
        if set(found) != {str(index) for index in range(count)}:
            raise self._scan.bad(f"{printable(name)} is no array in pieces: one is missing")
        return [found[str(index)] for index in range(count)]

    def files(self) -> list[Path]:
        """Return the file."""
        return [self.path]

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        check_range(self.path, self.tensors[name], start, stop)
        parts = [self._file.read(begin, end - begin) for begin, end in cut(self._pieces[name], start, stop)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield where in the file bytes ``start:stop`` of an array are."""
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.size)
        if first < last:
            yield piece.start + first, piece.start + last
        at += piece.size


# ---- writing


def pack_length(size: int, small: tuple[int, int] | None, codes: Sequence[int | None]) -> bytes:
    """Return the head of something of so many bytes or entries, as short as msgpack has it."""
    if small is not None and size < small[1]:
        return bytes([small[0] | size])
    for code, form, most in zip(codes, "BHI", (1 << 8, 1 << 16, 1 << 32), strict=True):
        if code is not None and size < most:
            return bytes([code]) + struct.pack(">" + form, size)
    raise ValueError(f"{size} is more than msgpack can hold")


def pack(value: Any) -> bytes:
    """Return a value of JSON as msgpack."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return pack_integer(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode("utf-8")
        return pack_length(len(raw), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + raw
    if isinstance(value, list | tuple):
        return pack_length(len(value), (0x90, 16), (None, 0xDC, 0xDD)) + b"".join(map(pack, value))
    head = pack_length(len(value), (0x80, 16), (None, 0xDE, 0xDF))
    return head + b"".join(pack(part) for pair in value.items() for part in pair)


def pack_integer(value: int) -> bytes:
    """Return an integer in the shortest form."""
    if -32 <= value < 128:
        return struct.pack("b" if value < 0 else "B", value)
    forms = (
        ((0xCC, "B"), (0xCD, "H"), (0xCE, "I"), (0xCF, "Q"))
        if value > 0
        else ((0xD0, "b"), (0xD1, "h"), (0xD2, "i"), (0xD3, "q"))
    )
    for code, form in forms:
        try:
            return bytes([code]) + struct.pack(">" + form, value)
        except struct.error:
            continue
    raise ValueError(f"{value} is more than msgpack can hold")


def pack_array_head(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """Return what comes before the elements of an array."""
    inner = b"\x93" + pack(list(shape)) + pack(dtype) + pack_length(nbytes, None, (0xC4, 0xC5, 0xC6))
    size = len(inner) + nbytes
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    head = bytes([fixed[size]]) if size in fixed else pack_length(size, None, (0xC7, 0xC8, 0xC9))
    return head + b"\x01" + inner


class MsgpackWriter(Writer):
    """One file that ``flax.serialization.msgpack_restore`` reads: a name's parts are its keys, all of them text.

    Where everything lies is known beforehand. Tensors of one map lie together, whatever the order given. `metadata`
    are plain leaves by dotted name; they come last in their map, or in their place where its tensors are sorted, which
    is Flax's order.
    """

    format: ClassVar[str] = "msgpack"
    random_access: ClassVar[bool] = True

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any]):
        super().__init__(path, tensors, metadata)
        check_infos(path, tensors)
        tree: dict[str, Any] = {}
        for info in tensors:
            if info.file:
                raise bad(path, "a file of msgpack is one; choose safetensors for several")
            self._put(tree, info.name, info)
        for name, value in sorted(metadata.items()):
            dump_json(path, value)
            self._put(tree, name, (value,))
        self._heads: list[tuple[int, bytes]] = []
        self._pieces: dict[str, list[Piece]] = {}
        self._at = 0
        try:
            self._lay_out(tree)
        except (ValueError, RecursionError) as error:
            raise bad(path, f"can't be written as msgpack: {printable(error)}") from None
        self._target = Target(path, self._at)
        for at, head in self._heads:
            self._target.write(at, head)

    def _put(self, tree: dict[str, Any], name: str, leaf: Any) -> None:
        """Put a leaf into nested dicts."""
        *parts, last = check_name(self.path, name).split(".")
        if not last or not all(parts) or CHUNKED in (*parts, last):
            raise bad(self.path, f"{printable(name)} can't be keys of maps: a part of it is empty or reserved")
        for part in parts:
            tree = tree.setdefault(part, {})
            if not isinstance(tree, dict):
                raise bad(self.path, f"{printable(name)} is below a name that is a leaf itself")
        if last in tree:
            raise bad(self.path, f"{printable(name)} is a leaf and has others below it, or comes twice")
        tree[last] = leaf

    def _add(self, data: bytes) -> None:
        if self._heads and self._heads[-1][0] + len(self._heads[-1][1]) == self._at:
            begin, before = self._heads.pop()
            self._heads.append((begin, before + data))
        else:
            self._heads.append((self._at, data))
        self._at += len(data)

    def _array(self, info: TensorInfo, shape: Sequence[int], nbytes: int) -> None:
        self._add(pack_array_head(info.dtype, shape, nbytes))
        self._pieces.setdefault(info.name, []).append(Piece(self._at, nbytes))
        self._at += nbytes

    def _lay_out(self, tree: dict[str, Any]) -> None:
        """Give everything its place."""
        self._add(pack_length(len(tree), (0x80, 16), (None, 0xDE, 0xDF)))
        given = [key for key, value in tree.items() if not isinstance(value, tuple)]
        for key, value in sorted(tree.items()) if given == sorted(given) else tree.items():
            self._add(pack(key))
            if isinstance(value, dict):
                self._lay_out(value)
            elif isinstance(value, tuple):
                self._add(pack(value[0]))
            elif value.nbytes <= CHUNK:
                self._array(value, value.shape, value.nbytes)
            else:
                self._chunks(value)

    def _chunks(self, info: TensorInfo) -> None:
        """Cut an array as Flax does."""
        step = CHUNK // info.itemsize
        count = math.prod(info.shape)
        sizes = {str(axis): size for axis, size in enumerate(info.shape)}
        self._add(b"\x83" + pack(CHUNKED) + pack(True) + pack("shape") + pack(sizes) + pack("chunks"))
        self._add(pack_length(-(-count // step), (0x80, 16), (None, 0xDE, 0xDF)))
        for index, begin in enumerate(range(0, count, step)):
            part = min(step, count - begin)
            self._add(pack(str(index)))
            self._array(info, [part], part * info.itemsize)

    def write_range(self, name: str, start: int, data: Any) -> None:
        """Write bytes of a tensor, in any order."""
        view = as_bytes(data)
        check_range(self.path, self.tensors[name], start, start + len(view))
        done = 0
        for begin, end in cut(self._pieces[name], start, start + len(view)):
            self._target.write(begin, view[done : done + end - begin])
            done += end - begin

    def finish(self) -> None:
        """Flush and close."""
        self._target.sync()
        self._target.close()
        sync_folder(self.path.parent)

    def abort(self) -> None:
        """Close without finishing."""
        self._target.close()
