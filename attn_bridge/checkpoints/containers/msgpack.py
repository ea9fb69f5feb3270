"""What ``flax.serialization`` writes: nested maps of msgpack with arrays as extension 1, read without loading them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...printable import printable
from .base import MAX_AXES, MAX_HEADER, Reader, TensorInfo, Writer
from .files import MAX_NODES, File, bad, check_count, check_dtype, check_infos, check_name, check_range, check_shape
from .writing import Target, as_bytes, dump_json, sync_folder

CHUNK = 1 << 30
"""Bytes beyond which Flax cuts an array, since an object of msgpack has at most 2**31 - 1."""

CHUNKED = "__msgpack_chunked_array__"

MAX_DEPTH = 64
"""Maps within maps."""

MAX_TEXT = 1 << 20
"""Bytes of a text that is no tensor."""

WINDOW = 1 << 16
"""Bytes that are read at a time."""


@dataclasses.dataclass(frozen=True)
class Head:
    """What precedes the bytes or entries of a value: `size` bytes at `start`, or `size` entries of a list or map.

    `kind` is "map", "list", "bytes" or "extension"; `code` is an extension's type.
    """

    kind: str
    size: int
    start: int = 0
    code: int = 0


Found = tuple[TensorInfo, tuple[Head, ...]]
"""An array, and where its elements are."""


class Scanner:
    """Reads the values of a msgpack file one by one, and skips what arrays hold.

    Args:
        file: the file.
    """

    def __init__(self, file: File):
        self._file = file
        self.at = 0
        self._window = b""
        self._begin = self._taken = 0

    def bad(self, reason: str) -> Exception:
        """Return an error that says where."""
        return bad(self._file.path, f"{reason}, at byte {self.at}")

    def take(self, count: int) -> bytes:
        """Return the next bytes, which are no elements of arrays."""
        first = self.at - self._begin
        if first < 0 or first + count > len(self._window):
            start = self.skip(count)
            size = min(max(WINDOW, count), self._file.size - start)
            self._window, self._begin, first = bytes(self._file.read(start, size)), start, 0
        else:
            self.at += count
        self._taken += count
        if self._taken > MAX_HEADER:
            raise self.bad(f"has more than {MAX_HEADER} bytes beside its arrays")
        return self._window[first : first + count]

    def skip(self, count: int) -> int:
        """Go over bytes that have to be there, and return where they begin."""
        if self.at + count > self._file.size:
            raise bad(self._file.path, f"is cut off: byte {self.at + count} is beyond its end {self._file.size}")
        self.at += count
        return self.at - count

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
        form = FORMS.get(code)
        if form is None:
            if code in FIXED_EXTENSIONS:
                return self._extension(FIXED_EXTENSIONS[code])
            if code in CONSTANTS:
                return CONSTANTS[code]
            raise self.bad(f"has the invalid msgpack type byte {code:#04x}")
        (number,) = form.unpack(self.take(form.size))
        if code <= 0xC6:
            return Head("bytes", number, self.skip(number))
        if code <= 0xC9:
            return self._extension(number)
        if code <= 0xD3:
            return number
        if code <= 0xDB:
            return self._text(number)
        return Head("list" if code <= 0xDD else "map", number)

    def _extension(self, size: int) -> Head:
        code = int.from_bytes(self.take(1), signed=True)
        return Head("extension", size, self.skip(size), code)

    def _text(self, size: int) -> str:
        if size > MAX_TEXT:
            raise self.bad(f"has a text of {size} bytes; more than {MAX_TEXT} are not read")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("has a text that is not UTF-8") from None


CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
FORMS = {
    **{code: struct.Struct(">" + form) for code, form in enumerate("BHIBHIfdBHIQbhiq", 0xC4)},
    **{code: struct.Struct(">" + form) for code, form in enumerate("BHIHIHI", 0xD9)},
}
"""Type byte -> the number behind it: of bytes, extensions, numbers themselves; texts, lists, maps."""


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
        self._pieces: dict[str, tuple[Head, ...]] = {}
        found = self._scan.next()
        if not isinstance(found, Head) or found.kind != "map":
            raise bad(path, "is no map of msgpack")
        self._walk(found, "", 0)
        if self._scan.at != self._file.size:
            raise bad(path, f"its map ends at byte {self._scan.at}; the file has {self._file.size}")
        check_count(path, len(self.tensors))

    def _walk(self, head: Head, name: str, depth: int) -> None:
        """Read a map or a list and what is in it."""
        if depth > MAX_DEPTH:
            raise self._scan.bad(f"{printable(name)} is nested more than {MAX_DEPTH} deep")
        seen: set[str] = set()
        for index in range(head.size):
            part = str(index) if head.kind == "list" else self._key(name)
            if part in seen:
                raise self._scan.bad(f"{printable(name) or 'its map'} has the key {printable(part)} twice")
            if part == CHUNKED and head.kind == "map" and not index:
                self._add(*self._chunked(head.size - 1, check_name(self.path, name)))
                return
            seen.add(part)
            full = f"{name}.{part}" if name else part
            check_name(self.path, full)
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise self._scan.bad(f"has more than {MAX_NODES} leaves")
            found = self._scan.next()
            kind = found.kind if isinstance(found, Head) else ""
            if kind == "extension":
                self._add(*self._array(found, full))
            elif kind in ("map", "list") and found.size:
                self._walk(found, full, depth + 1)
            elif kind in ("map", "list"):
                self.metadata[full] = {} if kind == "map" else []
            elif kind == "bytes":
                raise self._scan.bad(f"{printable(full)} is bytes, neither a tensor nor a plain value")
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

    def _add(self, info: TensorInfo, pieces: tuple[Head, ...]) -> None:
        held, is_twice = sum(piece.size for piece in pieces), info.name in self.tensors
        if is_twice or held != info.nbytes:
            reason = f"of shape {list(info.shape)} needs {info.nbytes} bytes; has {held}"
            raise self._scan.bad(f"{printable(info.name)} {'comes twice' if is_twice else reason}")
        self.tensors[info.name] = info
        self._pieces[info.name] = pieces

    def _array(self, found: object, name: str) -> Found:
        """Read the packed (shape, dtype, bytes) of an extension."""
        if not isinstance(found, Head) or found.kind != "extension":
            raise self._scan.bad(f"{printable(name)} is no array")
        if found.code not in (1, 3):
            raise self._scan.bad(f"{printable(name)} is an extension of type {found.code}; only arrays, 1, are read")
        end, self._scan.at = self._scan.at, found.start
        head, sizes = self._scan.next(), self._scan.next()
        if head != Head("list", 3) or not isinstance(sizes, Head) or sizes.kind != "list" or sizes.size > MAX_AXES:
            raise self._scan.bad(f"{printable(name)} is no array: (shape, dtype, bytes) is missing")
        shape = check_shape(self.path, name, [self._scan.next() for _ in range(sizes.size)])
        dtype = self._scan.next()
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
        found: dict[object, Any] = {}
        for _ in range(count):
            key, value = self._scan.next(), self._scan.next()
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


def cut(pieces: Sequence[Head], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield where in the file bytes ``start:stop`` of an array are."""
    for piece in pieces:
        first, last = max(start, 0), min(stop, piece.size)
        if first < last:
            yield piece.start + first, piece.start + last
        start, stop = start - piece.size, stop - piece.size


# ---- writing


def pack_length(size: int, small: tuple[int, int] | None, code: int, forms: str = "BHI") -> bytes:
    """Return the shortest head of something of so many bytes or entries.

    `small` is the form of a single byte, if there is one: its type byte, and the sizes that it can't hold any more.
    `code` is the type byte of the first of the others, which hold the size in `forms`.
    """
    if small is not None and size < small[1]:
        return bytes([small[0] | size])
    for one, form in enumerate(forms, code):
        if size < 1 << 8 * struct.calcsize(form):
            return bytes([one]) + struct.pack(">" + form, size)
    raise ValueError(f"{size} is more than msgpack can hold")


def pack(value: Any) -> bytes:
    """Return a value of JSON as msgpack."""
    if value is None or isinstance(value, bool):
        return bytes(code for code, constant in CONSTANTS.items() if constant is value)
    if isinstance(value, int):
        return pack_integer(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode("utf-8")
        return pack_length(len(raw), (0xA0, 32), 0xD9) + raw
    if isinstance(value, list | tuple):
        return pack_length(len(value), (0x90, 16), 0xDC, "HI") + b"".join(map(pack, value))
    head = pack_length(len(value), (0x80, 16), 0xDE, "HI")
    return head + b"".join(pack(part) for pair in value.items() for part in pair)


def pack_integer(value: int) -> bytes:
    """Return an integer in the shortest form."""
    if -32 <= value < 128:
        return struct.pack("b", value)
    for code, form in enumerate("BHIQbhiq", 0xCC):
        with contextlib.suppress(struct.error):
            return bytes([code]) + struct.pack(">" + form, value)
    raise ValueError(f"{value} is more than msgpack can hold")


def pack_array_head(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """Return what comes before the elements of an array."""
    inner = b"\x93" + pack(list(shape)) + pack(dtype) + pack_length(nbytes, None, 0xC4)
    size = len(inner) + nbytes
    fixed = [code for code, held in FIXED_EXTENSIONS.items() if held == size]
    head = bytes(fixed) if fixed else pack_length(size, None, 0xC7)
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
        self._heads: list[tuple[int, bytearray]] = []
        self._pieces: dict[str, list[Head]] = {}
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
        if not self._heads or self._heads[-1][0] + len(self._heads[-1][1]) != self._at:
            self._heads.append((self._at, bytearray()))
        self._heads[-1][1].extend(data)
        self._at += len(data)

    def _array(self, info: TensorInfo, shape: Sequence[int], nbytes: int) -> None:
        self._add(pack_array_head(info.dtype, shape, nbytes))
        self._pieces.setdefault(info.name, []).append(Head("bytes", nbytes, self._at))
        self._at += nbytes

    def _lay_out(self, tree: dict[str, Any]) -> None:
        """Give everything its place."""
        self._add(pack_length(len(tree), (0x80, 16), 0xDE, "HI"))
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
        self._add(pack_length(-(-count // step), (0x80, 16), 0xDE, "HI"))
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
