"""Zip archives with uncompressed members: their offsets, and a writer that streams them.

`zipfile` reads and writes the directory. Members are read by position here, since `zipfile`'s own files can't be shared
by threads; and the directory is first checked against the file, where `zipfile` trusts it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import io
import itertools
import struct
import threading
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...printable import printable
from .base import MAX_HEADER, MAX_TENSORS, TensorInfo, Writer
from .files import File, bad, check_infos, leads_out
from .writing import TargetFile, as_bytes, open_target, sync_folder

LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"
# All ones: the number is in a field of zip64. The first is the length of the longest comment, too.
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF

REFUSED_FLAGS = 0x2041
"""Bits of a member's flags: encrypted, strongly encrypted, directory encrypted."""

MAX_EXTRA = 1024
"""Bytes of a member's extra field in the directory: dates, owners, and sizes of 64 bits take some hundred."""

AHEAD = 1 << 10
"""Bytes from the beginning of a member on that are read with the directory: its own header, and of most an array's."""

_lock = threading.Lock()


class Window:
    """A part of a file, with the interface of `File`.

    Args:
        file: the file.
        start: offset of the part in the file.
        size: its bytes.
        what: added to the path in errors.
    """

    def __init__(self, file: File, start: int, size: int, what: str):
        self.path = Path(f"{file.path}: {what}")
        self.size = size
        self._file, self._start = file, start

    def read(self, start: int, count: int) -> bytes | memoryview:
        """Return exactly that many bytes."""
        if start < 0 or count < 0 or start + count > self.size:
            raise bad(self.path, f"ends at byte {self.size}, before byte {start + count}")
        return self._file.read(self._start + start, count)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with bytes from position `start` on."""
        into[:] = self.read(start, len(into))

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce the next reads, as (start, count)."""
        self._file.prefetch((self._start + start, count) for start, count in ranges)

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read ranges in the order of their use, as (start, count)."""
        self._file.read_ahead((self._start + start, count) for start, count in ranges)


@dataclasses.dataclass
class Member:
    """A member of an archive: `size` bytes at `start`, of this checksum.

    Reading it from first to last byte in order checks that; reading parts of it does not.
    """

    file: File | Window
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


def members(file: File | Window) -> dict[str, Member]:
    """Return all members of an archive by name.

    Raises:
        CheckpointError: the archive is malformed or truncated, has compressed or encrypted members, or members overlap.
    """
    path = file.path
    begin, length, count = _directory(file)
    if length > MAX_HEADER:
        raise bad(path, f"the directory of the zip has {length} bytes; more than {MAX_HEADER} are not read")
    # Beside a member per tensor, archives have a few of their own (data.pkl, version, byteorder).
    if count > MAX_TENSORS + 100:
        raise bad(path, f"the zip has {count} members; at most {MAX_TENSORS} are read")
    archive_members: dict[str, Member] = {}
    ranges: list[tuple[int, int, str]] = []
    entries = _entries(path, bytes(file.read(begin, length)), count)
    file.prefetch((info.header_offset, AHEAD) for info in entries)
    for info in entries:
        name, size, offset = info.orig_filename, info.file_size, info.header_offset
        if leads_out(name) or leads_out(info.filename):
            raise bad(path, f"the member {printable(name)} of the zip would be unpacked outside of its folder")
        # Flag bit 11: the name is UTF-8, and else in code page 437 (APPNOTE 4.4.4, appendix D).
        raw = name.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        if info.flag_bits & REFUSED_FLAGS or info.volume not in (0, FULL16):
            raise bad(path, f"the member {printable(name)} of the zip is encrypted or elsewhere")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != size:
            if "/code/__torch__" in name:
                raise bad(path, "is a TorchScript module; save the state_dict of torch.jit.load(FILE) by torch.save")
            again = {".npz": ": save it again by np.savez", ".keras": ""}.get(
                path.suffix, ": save it again by torch.save"
            )
            raise bad(path, f"the member {printable(name)} of the zip is compressed; only stored ones are read{again}")
        if name in archive_members:
            raise bad(path, f"the zip has the member {printable(name)} twice")
        local = bytes(file.read(offset, 30 + len(raw)))
        if local[:4] != LOCAL:
            raise bad(path, f"the zip has no member {printable(name)} where its directory says")
        # Local header (APPNOTE 4.3.7): the method is at byte 8, the two sizes at 18, the lengths of name and extra
        # field at 26.
        method, packed, unpacked, lengths, more = struct.unpack_from("<8xH8xIIHH", local)
        if lengths != len(raw) or local[30:] != raw or method:
            raise bad(path, f"the member {printable(name)} of the zip is another one than its directory says")
        # With flag 8 the sizes follow the data, and the header has zeros; with 64-bit sizes it has `FULL32`.
        if not info.flag_bits & 8 and not {packed, unpacked} <= {size, FULL32}:
            raise bad(path, f"the member {printable(name)} of the zip has another size than its directory says")
        start = offset + len(local) + more
        if start + size > begin:
            raise bad(path, f"the member {printable(name)} of the zip claims {size} bytes; the file ends before")
        archive_members[name] = Member(file, name, start, size, info.CRC)
        ranges.append((offset, start + size, name))
    ranges.sort()
    for (_, stop, name), (start, _, other) in itertools.pairwise(ranges):
        if start < stop:
            raise bad(path, f"the members {printable(name)} and {printable(other)} of the zip overlap")
    return archive_members


def _entries(path: Path, directory: bytes, count: int) -> list[zipfile.ZipInfo]:
    """Return the entries of a directory, which must have exactly `count` of them."""
    # zipfile ignores the count, takes entries that are cut off, looks for a 64-bit end record of its own in front of
    # the end, and needs time that grows with the square of an extra field.
    # An entry (APPNOTE 4.3.12) has 46 bytes; the lengths of its name, extra field and remark are at byte 28.
    at = most = 0
    for _ in range(count):
        name, extra, remark = struct.unpack_from("<HHH", directory, at + 28) if at + 46 <= len(directory) else (0, 0, 0)
        at += 46 + name + extra + remark
        most = max(most, extra)
    if at != len(directory) or directory[-20:-16] == LOCATOR64:
        raise bad(path, "the directory of the zip is damaged")
    if most > MAX_EXTRA:
        raise bad(path, f"a member of the zip has an extra field of {most} bytes; at most {MAX_EXTRA} are read")
    alone = directory + struct.pack("<4s8xIIH", END, len(directory), 0, 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return zipfile.ZipFile(io.BytesIO(alone)).infolist()
    except UnicodeDecodeError as error:
        raise bad(path, f"a member of the zip has the name {printable(error.object)}, which is not UTF-8") from None
    except (zipfile.BadZipFile, NotImplementedError, ValueError, Warning) as error:
        raise bad(path, f"the directory of the zip is damaged: {printable(error)}") from None


def _directory(file: File | Window) -> tuple[int, int, int]:
    """Return the offset, the size in bytes and the number of members of the central directory.

    Raises:
        CheckpointError: the file is not a zip archive, or its end is missing or damaged.
    """
    # The end record has 22 bytes, and behind it a remark of at most 65,535.
    tail_at = max(0, file.size - 22 - FULL16)
    tail = bytes(file.read(tail_at, file.size - tail_at))
    if bytes(file.read(0, min(4, file.size))) not in (LOCAL, END):
        from .mistaken import kind_of

        raise bad(file.path, kind_of(file, "npz") or "is no zip archive")
    # The last occurrence: one within the remark is refused below, as its own remark would not end with the file.
    at = tail.rfind(END)
    if at < 0 or at + 22 > len(tail):
        raise bad(file.path, "is no whole zip archive: it is cut off, or was never finished")
    disk, other, _, count, length, begin, remark = struct.unpack_from("<HHHHIIH", tail, at + 4)
    end = tail_at + at
    if end + 22 + remark != file.size or disk not in (0, FULL16) or other not in (0, FULL16):
        raise bad(file.path, "the end of the zip is damaged")
    if end >= 20 and bytes(file.read(end - 20, 4)) == LOCATOR64:
        (wide,) = struct.unpack("<Q", file.read(end - 12, 8))
        # 20 bytes of the locator, 56 of the 64-bit end record.
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


class Outline:
    """An archive in memory, with gaps for bytes that are written separately."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes]] = []

    def write(self, start: int, data: Any) -> None:
        """Remember the bytes to be written at a position."""
        self._parts.append((start, bytes(data)))

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def parts(self, gap: int | None, size: int) -> tuple[bytes, bytes]:
        """Return the bytes in front of a gap of that size, and those behind it; without a gap, all bytes and none."""
        whole = bytearray()
        for start, data in self._parts:
            at = start if gap is None or start < gap else start - size
            whole.extend(bytes(max(0, at + len(data) - len(whole))))
            whole[at : at + len(data)] = data
        return (bytes(whole), b"") if gap is None else (bytes(whole[:gap]), bytes(whole[gap:]))


class Archive:
    """Writes members sequentially; sizes are fixed in advance, checksums are computed at the end.

    Args:
        path: the file.
        align: the bytes of a member begin at a multiple of this.
        target: destination of the bytes; None opens the file.
        has_checksums: whether checksums are written, or 0 for all of them.
    """

    def __init__(
        self, path: Path, align: int = 64, target: TargetFile | Outline | None = None, *, has_checksums: bool = True
    ):
        self._path = path
        self._align = align
        self._target = open_target(path) if target is None else target
        self._has_checksums = has_checksums
        self._at = 0
        self._members: list[zipfile.ZipInfo] = []
        self._member: zipfile.ZipInfo | None = None
        self._data = 0
        self._left = 0

    def add(self, name: str, data: bytes) -> None:
        """Write a whole member."""
        self.begin(name, len(data))
        self.append(data)

    def begin(self, name: str, size: int) -> None:
        """Begin a member of `size` bytes."""
        self._end_member()
        info = self._member = zipfile.ZipInfo(name)  # of midnight, 1 January 1980
        info.flag_bits, info.create_system = 0x800, 0  # names are UTF-8; independent of the host system
        info.header_offset, info.file_size, info.compress_size, info.CRC = self._at, size, size, 0
        begin = self._at + len(info.FileHeader())
        padding = -begin % self._align
        # An extra field takes 4 bytes for its kind and length. "FB" and Z are torch's own padding.
        if 0 < padding < 4:
            padding += self._align
        if padding:
            info.extra = struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
        self._data, self._left = begin + padding, size
        self._at = self._data + size

    def append(self, data: object) -> None:
        """Write the next bytes of the member."""
        view = as_bytes(data)
        if len(view) > self._left:
            raise bad(self._path, "more bytes come than were announced")
        self._target.write(self._data, view)
        if self._member is not None and self._has_checksums:
            self._member.CRC = zlib.crc32(view, self._member.CRC)
        self._data += len(view)
        self._left -= len(view)

    def leave_out(self) -> int:
        """Skip the bytes of the member, which the caller writes separately, and return their offset."""
        self._left = 0
        return self._data

    def _end_member(self) -> None:
        if self._member is None:
            return
        if self._left:
            raise bad(self._path, f"a member lacks {self._left} bytes")
        self._target.write(self._member.header_offset, self._member.FileHeader())
        self._member.extra = b""  # the directory needs no padding
        self._members.append(self._member)
        self._member = None

    def finish(self) -> None:
        """Write the directory, flush and close."""
        self._end_member()
        # zipfile takes the position of its file for the offset of the directory, and writes that into the end record.
        directory = _FromPlace(self._at)
        with zipfile.ZipFile(directory, "w") as archive:
            archive.filelist = self._members
        self._target.write(self._at, directory.getvalue())
        self._target.sync()
        self._target.close()

    def abort(self) -> None:
        """Close."""
        self._target.close()


class _FromPlace(io.BytesIO):
    """The bytes of a file from an offset on."""

    def __init__(self, offset: int):
        super().__init__()
        self._place = offset

    def tell(self) -> int:
        return self._place + super().tell()

    def seek(self, position: int, whence: int = 0, /) -> int:
        return self._place + super().seek(position - self._place, whence)


class ArchiveWriter(Writer):
    """A writer of an archive with a member for each tensor, which come in order; nothing is written before the first.

    A subclass makes all checks in its constructor, and opens the archive in `_begin`.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object]):
        super().__init__(path, tensors, metadata)
        check_infos(path, tensors)
        self._left = iter(self.tensors.values())
        self._now: TensorInfo | None = None
        self._done = 0

    @functools.cached_property
    def _zip(self) -> Archive:
        return self._begin()

    @abc.abstractmethod
    def _begin(self) -> Archive:
        """Open the archive, and write the members in front of those of the tensors."""

    @abc.abstractmethod
    def _enter(self, info: TensorInfo) -> None:
        """Begin the member of a tensor."""

    def _next(self) -> TensorInfo | None:
        """Go on to the next tensor once all bytes of the one before have come; None behind the last."""
        if self._now is not None and self._done != self._now.nbytes:
            raise bad(self.path, f"{printable(self._now.name)} was left at byte {self._done}")
        self._now, self._done = next(self._left, None), 0
        if self._now is not None:
            self._enter(self._now)
        return self._now

    def write_range(self, name: str, start: int, data: object) -> None:
        """Write the next bytes of a tensor."""
        while self._now is None or self._now.name != name:
            if self._next() is None:
                raise bad(self.path, f"{printable(name)} comes too late, or is not to be written")
        count = len(as_bytes(data))
        if start != self._done or start + count > self._now.nbytes:
            raise bad(self.path, f"bytes of {printable(name)} come out of order: {start} after {self._done}")
        self._done += count
        self._zip.append(data)

    def finish(self) -> None:
        """Write the empty tensors that are left and the directory, flush and close."""
        while (info := self._next()) is not None:
            if info.nbytes:
                raise bad(self.path, f"{printable(info.name)} was not written")
        self._add_last()
        self._zip.finish()
        sync_folder(self.path.parent)

    def _add_last(self) -> None:
        """Write members behind those of the tensors."""

    def abort(self) -> None:
        """Close without finishing."""
        if "_zip" in self.__dict__:
            self._zip.abort()
