"""Single values of msgpack: read one by one, and written in their shortest form."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from ..base import MAX_HEADER
from ..files import File, bad

MAX_TEXT = 1 << 20
"""Maximum bytes of a string."""

WINDOW = 1 << 16
"""Bytes that are read at a time."""

CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
FORMS = {
    # From 0xC4 on: lengths of bytes and of extensions, floats, unsigned and signed integers; from 0xD9 on: texts,
    # lists, maps.
    **{code: struct.Struct(">" + form) for code, form in enumerate("BHIBHIfdBHIQbhiq", 0xC4)},
    **{code: struct.Struct(">" + form) for code, form in enumerate("BHIHIHI", 0xD9)},
}
"""Type byte -> the number behind it: of bytes, extensions, numbers themselves; texts, lists, maps."""


@dataclasses.dataclass(frozen=True)
class Head:
    """The head of a value: its `size` bytes begin at `start`, or its `size` entries (list or map) follow.

    `kind` is "map", "list", "bytes" or "extension"; `code` is an extension's type.
    """

    kind: str
    size: int
    start: int = 0
    code: int = 0


class Scanner:
    """Reads the values of a msgpack file one by one, and skips the elements of arrays.

    Args:
        file: the file.
    """

    def __init__(self, file: File):
        self._file = file
        self.at = 0
        self._window = b""
        self._begin = self._taken = 0

    def bad(self, reason: str) -> Exception:
        """Return an error with the byte position."""
        return bad(self._file.path, f"{reason}, at byte {self.at}")

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, which must not be elements of arrays."""
        first = self.at - self._begin
        if first < 0 or first + count > len(self._window):
            start = self.skip(count)
            size = min(max(WINDOW, count), self._file.size - start)
            self._window, self._begin, first = bytes(self._file.read(start, size)), start, 0
        else:
            self.at += count
        self._taken += count
        # Counts the values kept in memory; elements of arrays are skipped, and may be any number.
        if self._taken > MAX_HEADER:
            raise self.bad(f"has more than {MAX_HEADER} bytes beside its arrays")
        return self._window[first : first + count]

    def skip(self, count: int) -> int:
        """Skip `count` bytes, which must exist, and return their offset."""
        if self.at + count > self._file.size:
            raise bad(self._file.path, f"is cut off: byte {self.at + count} is beyond its end {self._file.size}")
        self.at += count
        return self.at - count

    def next(self) -> Any:
        """Return the next plain value, or the head of a collection."""
        code = self.take(1)[0]
        # Type bytes below 0xC0 and from 0xE0 on hold a small integer, or the size of a map, a list or a text,
        # themselves.
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


def cut(pieces: Sequence[Head], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield where in the file bytes ``start:stop`` of an array are."""
    for piece in pieces:
        first, last = max(start, 0), min(stop, piece.size)
        if first < last:
            yield piece.start + first, piece.start + last
        start, stop = start - piece.size, stop - piece.size


def pack_length(size: int, small: tuple[int, int] | None, code: int, forms: str = "BHI") -> bytes:
    """Return the shortest head of a value of `size` bytes or entries.

    `small` is the single-byte form, if the type has it: its type byte, and the smallest size that it can't hold. `code`
    is the type byte of the first of the other forms, which store the size in `forms`.
    """
    if small is not None and size < small[1]:
        return bytes([small[0] | size])
    for type_byte, form in enumerate(forms, code):
        if size < 1 << 8 * struct.calcsize(form):
            return bytes([type_byte]) + struct.pack(">" + form, size)
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
    # Widths ascend, unsigned ones first: the first that holds the number is the shortest.
    for code, form in enumerate("BHIQbhiq", 0xCC):
        with contextlib.suppress(struct.error):
            return bytes([code]) + struct.pack(">" + form, value)
    raise ValueError(f"{value} is more than msgpack can hold")


def pack_array_head(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """Return the bytes in front of the elements of an array."""
    # Flax (flax.serialization): extension 1 with a packed list of shape, name of the dtype, and bytes.
    inner = b"\x93" + pack(list(shape)) + pack(dtype) + pack_length(nbytes, None, 0xC4)
    size = len(inner) + nbytes
    fixed = [code for code, held in FIXED_EXTENSIONS.items() if held == size]
    head = bytes(fixed) if fixed else pack_length(size, None, 0xC7)
    return head + b"\x01" + inner
