"""OCDBT, TensorStore's key-value database in a folder; only uncompressed databases are supported.

Format: https://google.github.io/tensorstore/kvstore/ocdbt. A manifest names the root of a tree, whose leaves have the
file and offset of each key's value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

from ....printable import printable
from ..base import MAX_HEADER, MAX_TENSORS
from ..files import bad
from ..sources import inside, open_file, read_file

MANIFEST = "manifest.ocdbt"

# The first words of a manifest and of a node, by TensorStore's description of OCDBT.
MAGIC_MANIFEST, MAGIC_NODE = 0x0CDB3A2A, 0x0CDB20DE

NONE = (1 << 64) - 1
"""Offset and length that mark a missing root."""

COMMIT_TIME = 315_532_800 * 10**9
"""Nanoseconds from 1970 to 1 January 1980, the date of all that we write."""

FANOUT = 4096
"""Entries of a node that we write."""

MAX_HEIGHT = 32
"""Levels of a tree beyond which it is refused."""

MAX_VALUES = 8 * MAX_TENSORS
"""Keys beyond which a tree is refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueLocation:
    """Location of a value: in a file, or inline."""

    file: str
    start: int
    size: int
    inline: bytes = b""


# ---- numbers


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _column(values: Sequence[int]) -> bytes:
    return b"".join(map(_varint, values))


@functools.cache
def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            # The polynomial of Castagnoli with its bits reversed, as the lowest bit comes first.
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum of a node; values have no checksum."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


# ---- writing


def _framed(magic: int, body: bytes) -> bytes:
    # Magic number (big-endian, all else little-endian), length of all, version 0 and compression 0, body, checksum.
    size = 4 + 8 + 2 + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", size) + b"\0\0" + body
    return data + struct.pack("<I", crc32c(data))


def _files(names: Sequence[str]) -> bytes:
    """Return a table of files, without prefixes in common."""
    raw = [name.encode() for name in names]
    none = [0] * len(raw)
    return _varint(len(raw)) + _column(none[1:]) + _column([len(one) for one in raw]) + _column(none) + b"".join(raw)


def _keys(keys: Sequence[bytes], between: bytes = b"") -> bytes:
    shared = [_shared(one, two) for one, two in itertools.pairwise(keys)]
    rests = [key[skip:] for key, skip in zip(keys, [0, *shared], strict=True)]
    return _column(shared) + _column([len(one) for one in rests]) + between + b"".join(rests)


def _shared(first: bytes, second: bytes) -> int:
    least = min(len(first), len(second))
    return next((at for at in range(least) if first[at] != second[at]), least)


@dataclasses.dataclass(frozen=True)
class _Node:
    key: bytes
    start: int
    size: int
    count: int
    tree_bytes: int
    value_bytes: int


def encode(places: dict[bytes, ValueLocation], tree_file: str) -> tuple[bytes, bytes]:
    """Return the tree of all values, for a separate file, and the manifest.

    Args:
        places: key -> location of its value.
        tree_file: name of the file for the tree.
    """
    tree = bytearray()

    def add(key: bytes, height: int, body: bytes, count: int, below: int, value_bytes: int) -> _Node:
        data = _framed(MAGIC_NODE, bytes([height]) + body)
        node = _Node(key, len(tree), len(data), count, below + len(data), value_bytes)
        tree.extend(data)
        return node

    nodes = []
    ordered = sorted(places.items())
    for begin in range(0, len(ordered), FANOUT):
        part = ordered[begin : begin + FANOUT]
        names = sorted({place.file for _, place in part})
        number = {name: index for index, name in enumerate(names)}
        sizes = [place.size for _, place in part]
        body = _files(names) + _varint(len(part)) + _keys([key for key, _ in part])
        # Kind 1: the value is in a file; kind 0 would have it in the node.
        body += _column(sizes) + b"\1" * len(part)
        body += _column([number[place.file] for _, place in part]) + _column([place.start for _, place in part])
        nodes.append(add(part[0][0], 0, body, len(part), 0, sum(sizes)))
    height = 0
    while len(nodes) > 1:
        height += 1
        above = []
        for begin in range(0, len(nodes), FANOUT):
            group = nodes[begin : begin + FANOUT]
            none = b"\0" * len(group)  # of each key, nothing is left out below; all nodes are in the one file
            body = _files([tree_file]) + _varint(len(group)) + _keys([one.key for one in group], none) + none
            for column in ("start", "size", "count", "tree_bytes", "value_bytes"):
                body += _column([getattr(one, column) for one in group])
            counts = [sum(getattr(one, column) for one in group) for column in ("count", "tree_bytes", "value_bytes")]
            above.append(add(group[0].key, height, body, *counts))
        nodes = above
    root = nodes[0] if nodes else _Node(b"", NONE, NONE, 0, 0, 0)
    # Configuration: an id, the manifest in one file, limits of inline values and of nodes, log2 of the arity of the
    # tree of versions, no compression. The id is a digest, so that the same values make the same bytes.
    config = hashlib.sha256(tree).digest()[:16] + b"\0" + _column([1024, MAX_HEADER]) + b"\4\0"
    # One version, of generation 1: the height of its root, then file, offset and length of that, and its statistics.
    body = config + _files([tree_file] if nodes else [""]) + b"\1\1" + bytes([height]) + b"\0"
    body += _column([root.start, root.size, root.count, root.tree_bytes, root.value_bytes])
    return bytes(tree), _framed(MAGIC_MANIFEST, body + struct.pack("<Q", COMMIT_TIME) + b"\0")


# ---- reading


class CompressedError(Exception):
    """Part of a database is compressed, so that TensorStore has to read it."""


class _Body:
    """The body of a manifest or node, read from its first byte on."""

    def __init__(self, path: Path, magic: int, data: bytes):
        self._path, self._data = path, data
        if len(data) < 18 or struct.unpack_from(">I", data)[0] != magic or data[12] != 0:
            raise bad(path, "is no manifest or node of OCDBT")
        if struct.unpack_from("<Q", data, 4)[0] != len(data):
            raise bad(path, "has a manifest or node of OCDBT of another length than it says")
        if data[13]:
            raise CompressedError
        if crc32c(data[:-4]) != struct.unpack_from("<I", data, len(data) - 4)[0]:
            raise bad(path, "has a damaged manifest or node of OCDBT: its checksum is another")
        # Behind magic number, length, version and compression, and in front of the checksum: see `_framed`.
        self._at, self._end = 14, len(data) - 4

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > self._end - self._at:
            raise bad(self._path, "has a manifest or node of OCDBT that is cut off")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        """Return the next number."""
        value = shift = 0
        # A varint has seven bits per byte, the lowest first; 64 bits need at most ten of them.
        while shift < 64:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise bad(self._path, "has a number of OCDBT that is too long")

    def numbers(self, count: int) -> list[int]:
        """Return the next numbers, each of which takes a byte at least."""
        if count > self._end - self._at:
            raise bad(self._path, "has a manifest or node of OCDBT that is cut off")
        return [self.number() for _ in range(count)]

    def parts(self, shared: list[int], lengths: list[int]) -> list[bytes]:
        """Return texts that each begin as the one before."""
        texts: list[bytes] = []
        total = 0
        for skip, length in zip(shared, lengths, strict=True):
            before = texts[-1] if texts else b""
            total += skip + length
            if skip > len(before) or total > MAX_HEADER:
                raise bad(self._path, "has keys of OCDBT that are damaged or too long")
            texts.append(before[:skip] + self.take(length))
        return texts

    def files(self, above: str) -> list[tuple[str, str]]:
        """Return the files as names from the folder on, and the prefix of the files that they name."""
        count = self.number()
        shared = [0, *self.numbers(count - 1)] if count else []
        lengths, bases = self.numbers(count), self.numbers(count)
        files = []
        for raw, base in zip(self.parts(shared, lengths), bases, strict=True):
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                raise bad(self._path, f"names the file {printable(raw)}, which is not UTF-8") from None
            if base > len(raw):
                raise bad(self._path, "has a table of files of OCDBT that is damaged")
            files.append((above + name, above + raw[:base].decode("utf-8", "replace")))
        return files

    def one_of(self, files: list[tuple[str, str]], number: int) -> tuple[str, str]:
        """Return the file of that number."""
        if number >= len(files):
            raise bad(self._path, "refers to a file that its table has not")
        return files[number]


def decode(folder: Path, source: Path) -> tuple[dict[bytes, ValueLocation], set[Path]]:
    """Return the location of each key's value, and the files of the tree.

    Args:
        folder: the database.
        source: the folder that no link may lead out of: the database's own, or the step that it is an item of.

    Raises:
        CompressedError: a part of the tree is compressed.
        CheckpointError: the database is malformed.
    """
    path = inside(folder, MANIFEST, folder)
    body = _Body(path, MAGIC_MANIFEST, read_file(path, source, MAX_HEADER))
    # The configuration: id, kind of manifest, limits of inline values and of nodes, arity of versions, compression.
    body.take(16)
    if body.number():
        raise CompressedError  # the manifest is in files with numbers
    body.numbers(2)
    body.take(1)
    if body.number():
        raise CompressedError
    files = body.files("")
    count = body.number()
    if not count:
        raise CompressedError  # all of its versions are in a separate tree
    body.numbers(count)
    heights = body.take(count)
    # Versions are in the order of their generations: the last one is the newest.
    numbers, starts, sizes = (body.numbers(count)[-1] for _ in range(3))
    if (starts, sizes) == (NONE, NONE):
        return {}, {path}
    tree = _Tree(folder, source, path)
    tree.walk(body.one_of(files, numbers), starts, sizes, heights[-1], b"")
    return tree.places, tree.used


class _Tree:
    """Reads the nodes of a tree."""

    def __init__(self, folder: Path, source: Path, manifest: Path):
        self._folder, self._source, self.used = folder, source, {manifest}
        self.places: dict[bytes, ValueLocation] = {}
        self._seen: set[tuple[str, int]] = set()
        self._left = MAX_HEADER

    def _node(self, name: str, start: int, size: int) -> _Body:
        path = inside(self._folder, name, self._folder / MANIFEST)
        self._left -= size
        # A node that names itself, or many that share one below, would be walked without end.
        if (name, start) in self._seen or self._left < 0:
            raise bad(path, "has a tree of OCDBT that is too large, or leads back to itself")
        self._seen.add((name, start))
        file = open_file(path, self._source)
        data = bytes(file.read(start, size))
        file.close()
        self.used.add(path)
        return _Body(path, MAGIC_NODE, data)

    def walk(self, file: tuple[str, str], start: int, size: int, height: int, prefix: bytes) -> None:
        """Note all values below a node."""
        path = self._folder / file[0]
        body = self._node(file[0], start, size)
        if body.take(1)[0] != height or height > MAX_HEIGHT:
            raise bad(path, "has a node of OCDBT of another height than it should be")
        files = body.files(file[1])
        count = body.number()
        shared = [0, *body.numbers(count - 1)] if count else []
        lengths = body.numbers(count)
        common = body.numbers(count) if height else []
        keys = [prefix + one for one in body.parts(shared, lengths)]
        if height:
            # The last three columns count keys and bytes below: statistics that reading does not need.
            numbers, starts, sizes, *_ = (body.numbers(count) for _ in range(6))
            for key, skip, number, at, length in zip(keys, common, numbers, starts, sizes, strict=True):
                self.walk(body.one_of(files, number), at, length, height - 1, key[: len(prefix) + skip])
            return
        sizes, kinds = body.numbers(count), body.numbers(count)
        indirect = sum(kind == 1 for kind in kinds)
        where = iter(zip(body.numbers(indirect), body.numbers(indirect), strict=True))
        for key, length, kind in zip(keys, sizes, kinds, strict=True):
            if key in self.places or len(self.places) >= MAX_VALUES or kind > 1:
                raise bad(path, f"has the key {printable(key)} twice, in another way than known, or too many keys")
            if kind:
                number, at = next(where)
                self.places[key] = ValueLocation(body.one_of(files, number)[0], at, length)
            else:
                self.places[key] = ValueLocation("", 0, length, body.take(length))
