"""Zip archives whose members are stored as they are: where each lies, and a writer of them in a stream."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...printable import printable
from .base import MOST_HEADER, MOST_TENSORS
from .files import File, bad
from .writing import Target, as_bytes

LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
MOST_NARROW = FULL32
"""Sizes and offsets from here on are written with 64 bits."""

MIDNIGHT_1980 = (0, 1 << 5 | 1)
"""Time and date of every member, as zip has them."""


_lock = threading.Lock()


@dataclasses.dataclass
class Member:
    """A member of an archive: `size` bytes at `start`, of this checksum.

    Reading it from first to last byte in order checks that; reading parts of it does not.
    """

    file: File
    name: str
    start: int
    size: int
    crc: int
    seen: int = 0
    seen_crc: int = 0
    checked: bool = True

    def read(self, start: int, count: int) -> bytes | memoryview:
        """Return exactly that many bytes."""
        if start < 0 or start + count > self.size:
            raise bad(self.file.path, f"{printable(self.name)} ends at byte {self.size}, before {start + count}")
        data = self.file.read(self.start + start, count)
        with _lock:  # another thread may read the same member
            if not start:
                self.seen = self.seen_crc = 0
            if start == self.seen and self.checked:
                self.seen_crc = zlib.crc32(data, self.seen_crc)
                self.seen += count
                if self.seen == self.size and self.seen_crc != self.crc:
                    raise bad(self.file.path, f"{printable(self.name)} is damaged: its checksum is another")
        return data


def members(file: File) -> dict[str, Member]:
    """Return all members of an archive by name.

    Raises:
        CheckpointError: it is none, is cut off, has compressed or encrypted members, or members that overlap.
    """
    path = file.path
    begin, length, count = _directory(file)
    if length > MOST_HEADER:
        raise bad(path, f"the directory of the zip has {length} bytes; more than {MOST_HEADER} are not read")
    if count > MOST_TENSORS + 100:
        raise bad(path, f"the zip has {count} members; at most {MOST_TENSORS} are read")
    data = bytes(file.read(begin, length))
    found: dict[str, Member] = {}
    ranges: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        if data[at : at + 4] != CENTRAL or at + 46 > length:
            raise bad(path, "the directory of the zip is damaged")
        flags, method, _, _, crc, packed, size, lengths, more, remark, disk = struct.unpack_from(
            "<HHHHIIIHHHH", data, at + 8
        )
        (offset,) = struct.unpack_from("<I", data, at + 42)
        stop = at + 46 + lengths + more + remark
        if stop > length:
            raise bad(path, "the directory of the zip is damaged")
        raw = data[at + 46 : at + 46 + lengths]
        try:
            name = raw.decode("utf-8" if flags & 0x800 else "cp437")
        except UnicodeDecodeError:
            raise bad(path, f"a member of the zip has the name {printable(raw)}, which is not UTF-8") from None
        extra = data[at + 46 + lengths : at + 46 + lengths + more]
        size, packed, offset = _wide(path, name, extra, [size, packed, offset])
        at = stop
        if flags & 0x2041 or disk not in (0, FULL16):
            raise bad(path, f"the member {printable(name)} of the zip is encrypted or elsewhere")
        if method or packed != size:
            raise bad(path, f"the member {printable(name)} of the zip is compressed; only stored ones are read")
        if name in found:
            raise bad(path, f"the zip has the member {printable(name)} twice")
        local = bytes(file.read(offset, 30))
        if local[:4] != LOCAL:
            raise bad(path, f"the zip has no member {printable(name)} where its directory says")
        local_method, local_packed, local_size, local_lengths, local_more = struct.unpack_from("<8xH8xIIHH", local)
        start = offset + 30 + local_lengths + local_more
        if bytes(file.read(offset + 30, local_lengths)) != raw or local_method:
            raise bad(path, f"the member {printable(name)} of the zip is another one than its directory says")
        if not flags & 8 and any(
            one not in (other, FULL32) for one, other in ((local_packed, packed), (local_size, size))
        ):
            raise bad(path, f"the member {printable(name)} of the zip has another size than its directory says")
        if start + size > begin:
            raise bad(path, f"the member {printable(name)} of the zip claims {size} bytes; the file ends before")
        found[name] = Member(file, name, start, size, crc)
        ranges.append((offset, start + size, name))
    if at != length:
        raise bad(path, "the directory of the zip is damaged")
    ranges.sort()
    for (_, stop, name), (start, _, other) in itertools.pairwise(ranges):
        if start < stop:
            raise bad(path, f"the members {printable(name)} and {printable(other)} of the zip overlap")
    return found


def _directory(file: File) -> tuple[int, int, int]:
    """Return where the directory begins, its bytes, and how many members it has."""
    tail_at = max(0, file.size - 22 - FULL16)
    tail = bytes(file.read(tail_at, file.size - tail_at))
    if bytes(file.read(0, min(4, file.size))) not in (LOCAL, END):
        raise bad(file.path, "is no zip archive")
    at = tail.rfind(END)
    if at < 0 or at + 22 > len(tail):
        raise bad(file.path, "is no whole zip archive: it is cut off, or was never finished")
    disk, other, _, count, length, begin, remark = struct.unpack_from("<HHHHIIH", tail, at + 4)
    end = tail_at + at
    if end + 22 + remark != file.size or disk not in (0, FULL16) or other not in (0, FULL16):
        raise bad(file.path, "the end of the zip is damaged")
    if end >= 20 and bytes(file.read(end - 20, 4)) == LOCATOR64:
        (wide,) = struct.unpack("<Q", file.read(end - 12, 8))
        if wide > end - 20 - 56:
            raise bad(file.path, "the end of the zip is damaged")
        record = bytes(file.read(wide, 56))
        if record[:4] != END64:
            raise bad(file.path, "the end of the zip is damaged")
        count, length, begin = struct.unpack_from("<QQQ", record, 32)
        end = wide
    if begin + length != end:
        raise bad(file.path, "the directory of the zip is not where its end says")
    return begin, length, count


def _wide(path: Path, name: str, extra: bytes, values: list[int]) -> list[int]:
    """Return size, packed size and offset, those beyond 32 bits from the extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            for which, value in enumerate(values):
                if value == FULL32:
                    if len(field) < 8:
                        raise bad(path, f"the member {printable(name)} of the zip has no size")
                    (values[which],) = struct.unpack_from("<Q", field)
                    field = field[8:]
            break
        at += 4 + length
    return values


class Archive:
    """Writes members one after the other; sizes are known beforehand, checksums afterwards.

    Args:
        path: the file.
        align: the bytes of a member begin at a multiple of this.
    """

    def __init__(self, path: Path, align: int = 64):
        self._path = path
        self._align = align
        self._target = Target(path)
        self._at = 0
        self._directory: list[bytes] = []
        self._finish_member: Callable[[], None] | None = None
        self._crc = 0
        self._data = 0
        self._left = 0

    def add(self, name: str, data: Any) -> None:
        """Write a whole member."""
        self.begin(name, memoryview(data).nbytes)
        self.append(data)

    def begin(self, name: str, size: int) -> None:
        """Begin a member of so many bytes."""
        self._end_member()
        raw = name.encode("utf-8")
        if len(raw) > 0xF000:
            raise bad(self._path, f"the name {printable(name, 60)} is too long for a zip")
        offset, wide = self._at, size >= MOST_NARROW
        extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
        begin = offset + 30 + len(raw) + len(extra)
        padding = -begin % self._align
        if 0 < padding < 4:
            padding += self._align
        if padding:
            extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
        shown = FULL32 if wide else size
        version = 45 if wide or offset >= MOST_NARROW else 20

        def head(crc: int) -> bytes:
            return (
                struct.pack(
                    "<4sHHHHHIIIHH", LOCAL, version, 0x800, 0, *MIDNIGHT_1980, crc, shown, shown, len(raw), len(extra)
                )
                + raw
                + extra
            )

        def end() -> None:
            self._target.write(offset, head(self._crc))
            more = b"".join(struct.pack("<Q", one) for one in (*([size, size] if wide else []),))
            more += struct.pack("<Q", offset) if offset >= MOST_NARROW else b""
            more = struct.pack("<HH", 1, len(more)) + more if more else b""
            self._directory.append(
                struct.pack(
                    "<4sHHHHHHIIIHHHHHII",
                    CENTRAL,
                    version,
                    version,
                    0x800,
                    0,
                    *MIDNIGHT_1980,
                    self._crc,
                    shown,
                    shown,
                    len(raw),
                    len(more),
                    0,
                    0,
                    0,
                    0,
                    FULL32 if offset >= MOST_NARROW else offset,
                )
                + raw
                + more
            )

        self._finish_member = end
        self._crc = 0
        self._data, self._left = begin + padding, size
        self._at = self._data + size

    def append(self, data: Any) -> None:
        """Write the next bytes of the member."""
        view = as_bytes(data)
        if len(view) > self._left:
            raise bad(self._path, "more bytes come than were announced")
        self._target.write(self._data, view)
        self._crc = zlib.crc32(view, self._crc)
        self._data += len(view)
        self._left -= len(view)

    def _end_member(self) -> None:
        if self._finish_member is not None:
            if self._left:
                raise bad(self._path, f"a member lacks {self._left} bytes")
            self._finish_member()
            self._finish_member = None

    def finish(self) -> None:
        """Write the directory, flush and close."""
        self._end_member()
        begin, data = self._at, b"".join(self._directory)
        end, count = begin + len(data), len(self._directory)
        wide = begin >= MOST_NARROW or end >= MOST_NARROW or count >= FULL16
        if wide:
            data += struct.pack("<4sQHHIIQQQQ", END64, 44, 45, 45, 0, 0, count, count, end - begin, begin)
            data += struct.pack("<4sIQI", LOCATOR64, 0, end, 1)
        few = min(count, FULL16)
        data += struct.pack("<4sHHHHIIH", END, 0, 0, few, few, min(end - begin, FULL32), FULL32 if wide else begin, 0)
        self._target.write(begin, data)
        self._target.sync()
        self._target.close()

    def abort(self) -> None:
        """Close."""
        self._target.close()
