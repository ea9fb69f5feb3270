"""The header of a GGUF file: values by key, and where each tensor is; checked as it is parsed."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

from ....printable import printable
from ..base import MAX_HEADER, MAX_TENSORS
from ..files import File, bad, check_name, check_shape

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = "general.alignment"
PIECE = 1 << 20
"""Bytes that are read at a time, and the largest alignment of tensors."""

MAX_KEYS, MAX_ITEMS, MAX_SHOWN = 1 << 16, 1 << 22, 1 << 12
"""Keys; items of an array, such as the tokens of a vocabulary; and items of an array whose values are kept."""

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Number of a type of values -> how its bytes are read."""

# Numbers of the types of values whose length is in the file.
STRING, ARRAY = 8, 9

Value = bool | int | float | str | list[bool | int | float]


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor.

    Attributes:
        name: its name.
        shape: its shape, the last axis the fastest.
        kind: number of the type of its elements.
        offset: of its first byte in the file's data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Contents of a header.

    Attributes:
        values: key -> value; long arrays, and arrays of text, are left out.
        entries: all tensors.
        begin: offset of the tensors' data in the file.
    """

    values: dict[str, Value]
    entries: list[GgufTensor]
    begin: int


class _Cursor:
    """Reads the beginning of a file from first to last."""

    def __init__(self, path: Path, file: File):
        self._path, self._file = path, file
        self.position, self._start, self._data = 0, 0, b""

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.position + count
        if end > min(self._file.size, MAX_HEADER):
            what = "the file ends in its header" if end > self._file.size else f"its header has over {MAX_HEADER} bytes"
            raise bad(self._path, what)
        if end > self._start + len(self._data):
            self._start = self.position
            size = min(max(count, PIECE), self._file.size - self.position)
            self._data = bytes(self._file.read(self.position, size))
        result = self._data[self.position - self._start : end - self._start]
        self.position = end
        return result

    def number(self, form: str) -> int:
        (result,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(result)

    def text(self) -> str:
        data = self.take(self.number("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise bad(self._path, f"the text {printable(repr(data), 60)} in its header is not UTF-8") from None

    def scalar(self, kind: int) -> bool | int | float:
        result: tuple[bool | int | float] = struct.unpack(SCALARS[kind], self.take(struct.calcsize(SCALARS[kind])))
        return result[0]

    def value(self, key: str) -> Value | None:
        """Return the value of a key; None where it is not kept."""
        kind = self.number("<I")
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.scalar(kind)
        if kind != ARRAY:
            raise bad(self._path, f"{printable(key)} has a value of the unknown type {kind}")
        kind, count = self.number("<I"), self.number("<Q")
        if count > MAX_ITEMS or (kind != STRING and kind not in SCALARS):
            raise bad(self._path, f"{printable(key)} is an array of {count} items of type {kind}, which is not read")
        if kind == STRING:
            for _ in range(count):
                self.take(self.number("<Q"))
            return None
        if count > MAX_SHOWN:
            self.take(count * struct.calcsize(SCALARS[kind]))
            return None
        return [self.scalar(kind) for _ in range(count)]


def read(path: Path, file: File) -> Header:
    """Parse the header of an open file.

    Raises:
        CheckpointError: it is malformed, or of a version that is not read.
    """
    cursor = _Cursor(path, file)
    # Magic and version have 4 bytes each, the two counts 8 each.
    if file.size < 24 or cursor.take(4) != MAGIC:
        from ..mistaken import kind_of

        raise bad(path, kind_of(file, "gguf") or "is no GGUF file")
    version = cursor.number("<I")
    if version not in VERSIONS:
        # The magic is bytes, the same in either order: the version is the first number that tells them apart.
        is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "big-endian" if is_big else f"of version {version}"
        remedy = "gguf-convert-endian of the gguf package makes one" if is_big else "convert the model again"
        raise bad(path, f"is GGUF {what}; little-endian files of version {' and '.join(map(str, VERSIONS))} are read: "
                  f"{remedy}")  # fmt: skip
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise bad(path, f"its header claims {tensors} tensors and {keys} keys; at most {MAX_TENSORS} and {MAX_KEYS} "
                  "are read")  # fmt: skip
    values: dict[str, Value] = {}
    seen: set[str] = set()
    for _ in range(keys):
        key = check_name(path, cursor.text())
        if key in seen:
            raise bad(path, f"its header has {printable(key)} twice")
        seen.add(key)
        value = cursor.value(key)
        if value is not None:
            values[key] = value
    entries = [_entry(path, cursor) for _ in range(tensors)]
    # 32 is the specification's default; tensors begin at a multiple of it behind the header.
    step = values.get(ALIGNMENT, 32)
    if type(step) is not int or step < 1 or step & (step - 1) or step > PIECE:
        raise bad(path, f"{ALIGNMENT} ({printable(step, 40)}) must be a power of two of at most {PIECE}")
    return Header(values, entries, -(-cursor.position // step) * step)


def _entry(path: Path, cursor: _Cursor) -> GgufTensor:
    name, axes = check_name(path, cursor.text()), cursor.number("<I")
    if axes > 8:
        raise bad(path, f"{printable(name)} has {axes} axes; GGUF has at most 4")
    # GGUF lists the fastest axis first.
    shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
    return GgufTensor(name, check_shape(path, name, shape), cursor.number("<I"), cursor.number("<Q"))
