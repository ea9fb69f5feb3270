"""Readers that show tensors of another reader: some of them, without a prefix of their names, or as other numbers."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..printable import printable
from .containers.base import Array, CheckpointError, Reader


class Wrapped(Reader):
    """What another reader is, but for its tensors."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.unread = reader.unread
        self.path: Path = reader.path
        self.metadata: dict[str, Any] = reader.metadata
        self.notes = reader.notes
        self.chosen = reader.chosen

    @property
    def format(self) -> str:  # type: ignore[override]  # that of the reader, of which there are several
        """Container of the file."""
        return self._reader.format

    @property
    def random_access(self) -> bool:  # type: ignore[override]  # as above
        """Whether `read_range` costs no more than the bytes it returns."""
        return self._reader.random_access

    @property
    def config(self) -> Mapping[str, Any] | None:  # type: ignore[override]  # as above
        """The model's config.json, of a container that holds one."""
        return self._reader.config

    def files(self) -> list[Path]:
        """Return every file."""
        return self._reader.files()

    def close(self) -> None:
        """Close its files."""
        self._reader.close()


class Selected(Wrapped):
    """Some tensors of another reader, by names that lack what theirs begin with; all of them can be read."""

    prefix = ""

    def __init__(self, reader: Reader):
        super().__init__(reader)
        self.unread = {}

    def original(self, name: str) -> str:
        """Return the name that the other reader has for a tensor."""
        return self.prefix + name

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        return self._reader.read_range(self.original(name), start, stop)

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that is there."""
        self._reader.read_into(self.original(name), start, into)

    def read_ahead(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Begin to read bytes of tensors that will be asked for soon."""
        self._reader.read_ahead([(self.original(name), start, stop) for name, start, stop in ranges])

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix, each row `step` elements behind the one before."""
        self._reader.read_rows(self.original(name), start, step, into)


class Filtered(Selected):
    """A checkpoint without some of its tensors.

    Args:
        reader: the checkpoint.
        left_out: their names.
        patterns: what fits them; values beside the tensors whose names they fit are left out as well.
    """

    def __init__(self, reader: Reader, left_out: Collection[str], patterns: Iterable[str]):
        super().__init__(reader)
        self.tensors = {name: info for name, info in reader.tensors.items() if name not in left_out}
        if reader.format != "safetensors":  # others hold values by their names
            matches = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
            self.metadata = {
                name: value for name, value in reader.metadata.items() if not any(match(name) for match in matches)
            }


class Stripped(Selected):
    """The tensors whose names begin with a prefix, without it; the others are left out.

    Args:
        reader: the checkpoint.
        prefix: such as ``module.``, which torch's DistributedDataParallel puts before every name.

    Attributes:
        prefix: the same.

    Raises:
        CheckpointError: no name begins with it, or one is nothing else.
    """

    def __init__(self, reader: Reader, prefix: str):
        super().__init__(reader)
        self.prefix = prefix
        self.metadata = reader.metadata if reader.format == "safetensors" else {}  # others hold values by their names
        self.tensors = {
            name[len(prefix) :]: dataclasses.replace(info, name=name[len(prefix) :])
            for name, info in reader.tensors.items()
            if name.startswith(prefix)
        }
        if not prefix or not self.tensors or "" in self.tensors:
            first = next(iter(reader.tensors), "")
            raise CheckpointError(
                f"--strip ({printable(prefix)}) must be what names of {reader.path} begin with, and not a whole name; "
                f"its first is {printable(first)}"
            )


class Renamed(Selected):
    """A checkpoint whose tensors have other names.

    Args:
        reader: the checkpoint.
        names: name -> that of the checkpoint.
    """

    def __init__(self, reader: Reader, names: Mapping[str, str]):
        super().__init__(reader)
        self._names = dict(names)
        self.tensors = {name: dataclasses.replace(reader.tensors[own], name=name) for name, own in names.items()}

    def original(self, name: str) -> str:
        """Return the name that the other reader has for a tensor."""
        return self._names[name]
