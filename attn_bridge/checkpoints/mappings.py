"""A checkpoint as a mapping of names to arrays, and what its headers say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .containers.base import Reader, TensorInfo


class Checkpoint(Mapping[str, "np.ndarray[Any, Any]"]):
    """The tensors of a checkpoint by name; each is read from the file when it is asked for.

    Args:
        reader: the open container.

    Attributes:
        tensors: name -> shape, dtype and file, from headers alone.
        metadata: what the container says beside its tensors.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self.tensors: dict[str, TensorInfo] = reader.tensors
        self.metadata: dict[str, Any] = reader.metadata

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._reader.read(name).copy()  # the bytes of a file can't be written to

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __repr__(self) -> str:
        return f"<{self._reader.format} checkpoint {self._reader.path}: {len(self)} tensors>"

    def close(self) -> None:
        """Close its files."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What headers say of a checkpoint.

    Attributes:
        path: where it is.
        format: its container.
        layout: its layout; "" if its names fit none.
        why: why they fit none.
        tensors: name -> shape, dtype, file.
        metadata: what the container says beside its tensors.
        has_manifest: whether there are digests beside it.
        notes: files of the folder that are left out, and why.
    """

    path: Path
    format: str
    layout: str
    why: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Any]
    has_manifest: bool
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Dtype -> number of elements."""
        found: dict[str, int] = {}
        for info in self.tensors.values():
            found[info.dtype] = found.get(info.dtype, 0) + info.nbytes // info.itemsize
        return found
