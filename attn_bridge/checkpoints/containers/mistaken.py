"""Recognises files whose contents do not fit their extension, by their first bytes, and names a remedy."""

from __future__ import annotations

import re
from typing import Protocol

HEAD = 512
"""Bytes of a file that are looked at."""


class _Readable(Protocol):
    """A file, or a part of one."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read(self, start: int, count: int, /) -> bytes | memoryview:
        """Return bytes."""


_READ_AS = "--source-format {} reads it (--format of inspect)"

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7z"}
"""First bytes of compressed files -> the name of the program."""

_MAGIC = {b"GGUF": "gguf", b"\x89HDF\r\n\x1a\n": "keras"}
"""First bytes of a file -> its container."""

_MEMBERS = {"data.pkl": "torch", ".npy": "npz", "metadata.json": "keras"}
"""Ending of the name of an archive's first member -> its container."""


def kind_of(file: _Readable, format: str) -> str:
    """Return the kind of a file and a remedy, if the file has another format; "" if the kind is unknown.

    Args:
        file: the file.
        format: the container that it was opened as.
    """
    start = bytes(file.read(0, min(HEAD, file.size)))
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself: git lfs pull fetches that"
    if re.match(rb"\s*<(!doctype\s+html|html)", start, re.IGNORECASE):
        return "is a web page, not a checkpoint: download the file itself"
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), "")
    if packed:
        return f"is compressed by {packed}: unpack it first"
    container = _container_of(start)
    if not container or container == format:
        return ""
    return f"is a file of {container}, not of {format}: {_READ_AS.format(container)}"


def _container_of(start: bytes) -> str:
    """Return the container that the first bytes are of; "" if unknown."""
    for magic, name in _MAGIC.items():
        if start.startswith(magic):
            return name
    if start.startswith(b"PK\3\4"):
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode("utf-8", "replace")
        return next((one for ending, one in _MEMBERS.items() if name.endswith(ending)), "")
    length = int.from_bytes(start[:8], "little")
    return "safetensors" if start[8:9] == b"{" and 1 < length <= 100_000_000 else ""
