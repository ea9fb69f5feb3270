"""Tensors of a GGUF file: floating point as it is, quantised types as the bytes of their blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ....printable import printable
from ..base import TensorInfo
from ..files import File, bad
from ..shards import NUMBERED
from ..sources import FileReader
from . import config, header

PLAIN = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"
}  # fmt: skip
"""Number of a type -> its dtype."""

# Bytes follow from the packing. Q4_0: 32 numbers of 4 bits and a float16 scale, 16 + 2. Q6_K: 256 numbers of 6 bits, 16
# scales of 8 bits and a float16, 192 + 16 + 2. Q4_K: 256 of 4 bits, 12 bytes of scales and minima of 6 bits, two
# float16, 128 + 12 + 4.
BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Number of a quantised type -> its name, numbers in a block, and bytes of a block."""

OTHERS = {9: "Q8_1", 15: "Q8_K", 40: "NVFP4", 41: "Q1_0"}
"""Types that are recognised and refused: sums inside llama.cpp, and types with scales in separate tensors."""


NOT_READ = "which is not read; convert the model that it was made of"


NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""Keys of a file that llama-gguf-split wrote."""

MOST = 4096
"""Files of a model at most."""


class GgufReader(FileReader):
    """One file, or any of those that a model was split into; `metadata` has the header's values but for long arrays."""

    format: ClassVar[str] = "gguf"

    def _read_headers(self) -> None:
        parsed = self._headed(self._file)
        count = parsed.values.get(COUNT)
        if isinstance(count, int) and count != 1:
            parsed = self._open_all(parsed, _paths_of(self.path, count))
        self.metadata = dict(parsed.values)
        self._values = parsed.values
        self.notes = ("left out: the tokenizer, which GGUF holds in a form of its own",)

    def _headed(self, file: File) -> header.Header:
        parsed = header.read(file.path, file)
        self._place(file, parsed)
        return parsed

    def _open_all(self, own_header: header.Header, paths: Sequence[Path]) -> header.Header:
        """Open every file of a model; return the first one's header, which has the model's keys."""
        first, folder = own_header, self._folder or self.path.parent
        for number, path in enumerate(paths):
            parsed = own_header if path == self.path else self._headed(self._open(path, folder))
            keys = {key: parsed.values.get(key) for key in (NUMBER, COUNT)}
            if tuple(keys.values()) != (number, len(paths)):
                listing = " and ".join(f"{key} ({printable(value, 40)})" for key, value in keys.items())
                raise bad(path, f"{listing} must be {number} and {len(paths)}, by its name")
            first = parsed if number == 0 else first
        self._files.sort(key=lambda file: file.path)
        count = len(self.tensors) + len(self.unread)
        if first.values.get(TENSORS, count) != count:
            raise bad(paths[0], f"{TENSORS} is {printable(first.values[TENSORS], 40)}; the files have {count} tensors")
        return first

    @functools.cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config, as `transformers` would have it."""
        return config.of(self.path, self._values, self)

    def _place(self, file: File, parsed: header.Header) -> None:
        """Check every entry against the file's size, and that no two overlap."""
        path, spans = file.path, []
        for entry in parsed.entries:
            if entry.name in self.tensors or entry.name in self.unread:
                raise bad(path, f"its header has the tensor {printable(entry.name)} twice")
            if entry.kind in PLAIN:
                info = TensorInfo(entry.name, PLAIN[entry.kind], entry.shape)
            elif entry.kind in BLOCKS:
                kind, numbers, size = BLOCKS[entry.kind]
                if not entry.shape or entry.shape[-1] % numbers:
                    raise bad(path, f"{printable(entry.name)} {entry.shape} must have rows of whole blocks of "
                              f"{numbers} numbers to be {kind}")  # fmt: skip
                info = TensorInfo(
                    entry.name, "uint8", (*entry.shape[:-1], entry.shape[-1] // numbers * size), blocks=kind
                )
            else:
                kind = OTHERS.get(entry.kind, f"type {entry.kind}")
                self._unread[entry.name] = f"it is quantised by GGUF as {kind}, {NOT_READ}"
                continue
            start = parsed.begin + entry.offset
            self.tensors[entry.name] = info
            self._pieces[entry.name] = ((file, start, info.nbytes),)
            spans.append((start, info.nbytes, entry.name))
        end, before = 0, ""
        for start, size, name in sorted(spans):
            if start < end:
                raise bad(path, f"{printable(before)} and {printable(name)} overlap")
            end, before = start + size, name
            if end > file.size:
                raise bad(path, f"{printable(name)} ends at byte {end}; the file has {file.size}")


def _paths_of(path: Path, count: int) -> list[Path]:
    """Return the files of a model that llama-gguf-split cut, by the name of one of them.

    Raises:
        CheckpointError: its name is not that of a part, or a file is missing.
    """
    hit = NUMBERED.fullmatch(path.name)
    if hit is None or hit["ending"] != ".gguf" or int(hit["count"]) != count or not 1 < count <= MOST:
        raise bad(path, f"is one of {printable(count, 40)} files of a model ({COUNT}), whose names must be "
                  f"NAME-00001-of-{count % 100_000:05}.gguf and so on")  # fmt: skip
    paths = [path.with_name(f"{hit['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = next((part for part in paths if not part.is_file()), None)
    if missing is not None:
        raise bad(path, f"is one of {count} files of a model, of which {printable(missing.name)} is missing")
    return paths
