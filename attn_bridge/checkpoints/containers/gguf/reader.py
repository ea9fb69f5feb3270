"""Tensors of a GGUF file: floating point as it is, quantised types as the bytes of their blocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ....printable import printable
from ..base import Reader, TensorInfo
from ..files import bad, check_range
from ..sources import open_file
from . import config, header

PLAIN = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"
}  # fmt: skip
"""Number of a type -> its dtype."""

BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}  # fmt: skip
"""Number of a quantised type -> its name, numbers in a block, and bytes of a block."""

OTHERS = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that are named, and not read."""


class GgufReader(Reader):
    """One file; `metadata` has the header's values but for long arrays.

    Args:
        path: the file.
        folder: the folder that no link may lead out of; None where the user names the file.
    """

    format: ClassVar[str] = "gguf"

    def __init__(self, path: Path, folder: Path | None = None):
        self.path = path
        self._file = open_file(path, folder)
        try:
            parsed = header.read(path, self._file)
            self._place(parsed)
        except BaseException:
            self._file.close()
            raise
        self.metadata: dict[str, Any] = parsed.values
        if isinstance(parsed.values.get("split.count"), int) and parsed.values["split.count"] != 1:
            raise bad(path, "is one of several files of a model; llama-gguf-split --merge makes one of them")
        self._values = parsed.values
        self.notes = ("left out: the tokenizer, which GGUF holds in a form of its own",)

    @functools.cached_property
    def config(self) -> Mapping[str, Any] | None:  # type: ignore[override]  # made when it is asked for
        """The model's config, as `transformers` would have it."""
        return config.of(self.path, self._values, self)

    def _place(self, parsed: header.Header) -> None:
        """Check every entry against the file's size, and that no two overlap."""
        self.tensors, self._starts = {}, {}
        self.unread = {}
        spans = []
        for entry in parsed.entries:
            if entry.name in self.tensors or entry.name in self.unread:
                raise bad(self.path, f"its header has the tensor {printable(entry.name)} twice")
            if entry.kind in PLAIN:
                info = TensorInfo(entry.name, PLAIN[entry.kind], entry.shape)
            elif entry.kind in BLOCKS:
                kind, numbers, size = BLOCKS[entry.kind]
                if not entry.shape or entry.shape[-1] % numbers:
                    raise bad(self.path, f"{printable(entry.name)} {entry.shape} must have rows of whole blocks of "
                              f"{numbers} numbers to be {kind}")  # fmt: skip
                info = TensorInfo(
                    entry.name, "uint8", (*entry.shape[:-1], entry.shape[-1] // numbers * size), blocks=kind
                )
            else:
                kind = OTHERS.get(entry.kind, f"type {entry.kind}")
                self.unread[entry.name] = f"it is quantised by GGUF as {kind}, which is not read"
                continue
            self.tensors[entry.name] = info
            self._starts[entry.name] = parsed.begin + entry.offset
            spans.append((self._starts[entry.name], info.nbytes, entry.name))
        end, before = 0, ""
        for start, size, name in sorted(spans):
            if start < end:
                raise bad(self.path, f"{printable(before)} and {printable(name)} overlap")
            end, before = start + size, name
            if end > self._file.size:
                raise bad(self.path, f"{printable(name)} ends at byte {end}; the file has {self._file.size}")

    def files(self) -> list[Path]:
        """Return the file."""
        return [self.path]

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        check_range(self.path, self.tensors[name], start, stop)
        return self._file.read(self._starts[name] + start, stop - start)

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that exists."""
        check_range(self.path, self.tensors[name], start, start + len(into))
        self._file.read_into(self._starts[name] + start, into)

    def read_ahead(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Begin to read bytes of tensors that will be asked for soon."""
        self._file.read_ahead((self._starts[name] + start, stop - start) for name, start, stop in ranges)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
