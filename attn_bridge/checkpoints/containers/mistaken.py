"""Recognises files whose contents do not fit their extension, by their first bytes, and names a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
        format: the container that it was opened as; "" if none is known.
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
    other = f", not of {format}" if format else ""
    return f"is a file of {container}{other}: {_READ_AS.format(container)}"


def unnamed(file: _Readable) -> str:
    """Return the kind of a file without a known extension, by its first bytes, and a remedy; "" if unknown."""
    kind = kind_of(file, "")
    start = bytes(file.read(0, min(HEAD, file.size)))
    if start[257:262] == b"ustar":
        return "is a tar archive: unpack it, and convert the checkpoint in it"
    is_state = start[:1] in MAPS and start[1:2] in TEXTS
    return kind or (f"may be msgpack: {_READ_AS.format('msgpack')}" if is_state else "")


MAPS, TEXTS = (
    [bytes([code]) for code in (*range(low, high + 1), *others)]
    for low, high, others in ((0x81, 0x8F, (0xDE, 0xDF)), (0xA1, 0xBF, (0xD9,)))
)
"""First bytes of a map, and of a text, in msgpack: `flax.training.checkpoints` gives its files no extension."""

STATES = re.compile(
    r"(optimizer|scheduler|scaler|training_args|(rng_state|random_states|optimizer|scheduler|scaler)_\d+)\.(pt|pth|bin|pkl)"
)
"""Names of a trainer's other files, next to its weights."""


def is_state(name: str) -> bool:
    """Whether a file has the state of a trainer, such as its optimizer's, and no weights."""
    return STATES.fullmatch(name) is not None


RUNS = (
    (r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", "holds the parts of weights that DeepSpeed's ZeRO 3 saves: "
     "its zero_to_fp32.py puts them together, convert what that writes"),
    (r"layer_\d+-model_\d+-model_states\.pt", "holds a file for each layer, as DeepSpeed's pipelines save them: "
     "export it with the trainer's own tool (GPT-NeoX has convert_neox_to_hf.py), and convert that"),
)  # fmt: skip
"""Pattern of file names -> the kind of a folder with such files, and a remedy."""


def run_of(names: Iterable[str]) -> str:
    """Return the kind of a folder of a trainer without whole checkpoints, and a remedy; "" if unknown."""
    kinds = [kind for pattern, kind in RUNS if any(re.fullmatch(pattern, name) for name in names)]
    return kinds[0] if kinds else ""


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
