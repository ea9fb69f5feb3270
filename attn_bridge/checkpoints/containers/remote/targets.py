"""Files to write, locally or in a store: by position, or small ones as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..files import unwritable
from ..writing import TargetFile, as_bytes
from .paths import RemotePath, as_path

if TYPE_CHECKING:
    from .staged import Staged


class StagedPath(RemotePath):
    """A file that is written to a store, or the folder of such files.

    Args:
        staged: the files.
        key: its place.
        root: any path of the store.
    """

    __slots__ = ("staged",)

    def __init__(self, staged: Staged, key: str, root: RemotePath):
        super().__init__(key, root)
        self.staged = staged

    def derived(self, key: str) -> RemotePath:
        """Return another path of the same files."""
        return StagedPath(self.staged, key, self)

    @property
    def file(self) -> str:
        """Its name among the files."""
        return self.key[len(self.staged.folder) + 1 :]

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: stores have no folders."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete it."""
        self.staged.begin(self.file, None)

    def write_bytes(self, data: bytes) -> None:
        """Write all of it."""
        self.staged.begin(self.file, None)
        self.staged.write(self.file, 0, memoryview(data))


class StagedTarget(TargetFile):
    """A file of a store, written by position."""

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        self._number = self._direct = -1
        own = cast("StagedPath", path)
        self._staged, self._file = own.staged, own.file
        self._staged.begin(self._file, size)

    def write(self, start: int, data: object) -> None:
        """Write bytes at a position."""
        self._staged.write(self._file, start, as_bytes(data))

    joins = True

    def fill(self, start: int, data: object) -> None:
        """Write the bytes that no worker of this plan has written."""
        view = as_bytes(data)
        for span in self._staged.spans(self._file, start, start + len(view)):
            if not span.name:
                self.write(span.start, view[span.start - start : span.stop - start])

    def sync(self) -> None:
        """Do nothing: all that is written is sent before it counts."""

    def close(self) -> None:
        """Do nothing."""


def open_target(path: Path, size: int | None = None, *, past_cache: bool = True) -> TargetFile:
    """Begin to write a file by position, or continue an existing one; `past_cache`: see `TargetFile`."""
    return StagedTarget(path, size) if isinstance(path, StagedPath) else TargetFile(path, size, past_cache=past_cache)


def put(path: Path, data: bytes) -> None:
    """Write a small file and flush it to the disk."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    try:
        with path.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise unwritable(path, error) from None


def staged_path(staged: Staged, name: str, root: Path) -> Path:
    """Return the path of a file that is written to a store."""
    return as_path(StagedPath(staged, f"{staged.folder}/{name}", cast(RemotePath, root)))
