"""Meta's files of a model that was split over several devices: each holds a part of every matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...printable import printable
from .base import Reader, TensorInfo
from .files import bad, check_range, listed
from .sources import inside

MOST = 8
"""Parts that are read: beyond the 8 heads of keys of Meta's large models, files hold keys and values more than once."""

_AXES = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}
"""Last part of a matrix's name -> the axis along which its parts lie."""


class SplitReader(Reader):
    """Several files as one checkpoint, whose matrices are put together as they are read.

    Vectors are in each of the files, and must be the same in all of them.

    Args:
        folder: where the files are.
        names: ``consolidated.00.pth`` and so on.
        parts: the files, open.
    """

    format: ClassVar[str] = "torch"

    def __init__(self, folder: Path, names: Sequence[str], parts: Sequence[Reader]):
        self.path = folder
        self._parts = list(parts)
        self.metadata: dict[str, Any] = {
            "files": {name: part.metadata for name, part in zip(names, parts, strict=True)}
        }
        self.unread = {name: kind for part in parts for name, kind in part.unread.items()}
        self.notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        self.tensors = {}
        self._axes: dict[str, int | None] = {}
        for name, part in zip(names[1:], parts[1:], strict=True):
            odd = sorted(part.tensors.keys() ^ parts[0].tensors.keys())
            if odd:
                raise bad(folder, f"{names[0]} and {name} hold different tensors: {listed(list(map(printable, odd)))}")
        for name, info in parts[0].tensors.items():
            same = all((one.tensors[name].dtype, one.tensors[name].shape) == (info.dtype, info.shape) for one in parts)
            if not same:
                raise bad(folder, f"{printable(name)} has several shapes or dtypes in {listed(list(names))}")
            axis = self._axes[name] = self._axis_of(info)
            shape = tuple(size * (len(parts) if at == axis else 1) for at, size in enumerate(info.shape))
            self.tensors[name] = TensorInfo(name, info.dtype, shape)

    def _axis_of(self, info: TensorInfo) -> int | None:
        """Return the axis along which a tensor is split; None for one that each file has whole."""
        if len(info.shape) < 2:
            return None
        stem = info.name.removesuffix(".weight").rpartition(".")[2]
        if stem == "tok_embeddings":  # Llama 3 splits the vocabulary, the ones before it the channels
            norm = self._parts[0].tensors.get("norm.weight")
            return 0 if norm is not None and info.shape[1:] == norm.shape else 1
        if len(info.shape) > 2 or stem not in _AXES:
            raise bad(self.path, f"it is not known how {printable(info.name)} is split over its files")
        return _AXES[stem]

    def files(self) -> list[Path]:
        """Return the files."""
        return [path for one in self._parts for path in one.files()]

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor, out of all files."""
        info, axis = self.tensors[name], self._axes[name]
        check_range(self.path, info, start, stop)
        if axis is None:
            first, *others = (one.read_range(name, start, stop) for one in self._parts)
            if any(bytes(one) != bytes(first) for one in others):
                raise bad(self.path, f"{printable(name)} holds different numbers in several of its files")
            return first
        size = info.nbytes // len(self._parts)
        if axis == 0:
            begins = [(one, size * at) for at, one in enumerate(self._parts)]
            return b"".join(
                one.read_range(name, max(start - begin, 0), min(stop - begin, size))
                for one, begin in begins
                if start < begin + size and stop > begin
            )
        row = info.shape[1] * info.itemsize
        width = row // len(self._parts)
        if not row or stop <= start:
            return b""
        above, below = start // row, -(-stop // row)
        pieces = [
            np.frombuffer(one.read_range(name, above * width, below * width), np.uint8).reshape(below - above, width)
            for one in self._parts
        ]
        return np.concatenate(pieces, 1).reshape(-1)[start - above * row : stop - above * row].data

    def close(self) -> None:
        """Close all files."""
        for one in self._parts:
            one.close()


def check_numbers(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a model in parts, of which none may be missing.

    Raises:
        CheckpointError: one is missing, or there are more than can be put together.
    """
    if len(names) > MOST:
        raise bad(folder, f"has {len(names)} parts of one model, {names[0]} to {names[-1]}; at most {MOST} are read")
    wanted = [f"consolidated.{number:02d}.pth" for number in range(len(names))]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise bad(folder, f"these files of it are missing: {listed(missing)}")
    return [inside(folder, name, folder) for name in wanted]
