"""The reader of what Keras saves: the arrays of its HDF5 files, by their paths in there."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ....printable import printable
from ..base import MAX_HEADER, Reader
from ..files import File, bad, check_count, check_range, parse_json
from ..remote import is_there
from ..sources import FileReader, inside, read_file
from ..zips import Window, members
from . import config, hdf5

WEIGHTS, INDEX = "model.weights.h5", "model.weights.json"
"""Members of a ``.keras`` archive: all weights, or the index of several files of them."""

CONFIG, MAX_CONFIG = "config.json", 1 << 24
"""Member of an archive, or file of a folder, with the serialised model; and its bytes, at most."""

NUMBERED = re.compile(r"(.+)_([0-9]{5})(\.weights\.h5)")
"""Names of the files of an index: front, number, end."""

MAP = "weight_map"
"""Key of an index: path of a group -> the file that has it, or a list of them."""


class KerasReader(FileReader):
    """Weights of a Keras model: a file of HDF5, an index of several, or a ``.keras`` archive of either.

    Names are the paths in HDF5, joined by dots: ``layers.dense_1.vars.0``. No code of an archive is run: of its
    ``config.json``, only numbers of models that are known are used, and nothing is unpickled or imported.
    """

    format: ClassVar[str] = "keras"

    def _read_headers(self) -> None:
        self._archived_config: Window | None = None
        self._compact: dict[str, bytes] = {}
        self._index: dict[str, list[str]] = {}
        self._groups: set[tuple[str, str]] = set()
        for name, part in self._parts(self._file, self._folder or self.path.parent).items():
            self._add(name, part)
        check_count(self.path, len(self.tensors))
        self._check_index()

    def _parts(self, file: File, folder: Path) -> Mapping[str, File | Window]:
        """Return name -> file of HDF5, of those that a file consists of, or names."""
        if bytes(file.read(0, min(2, file.size))) == b"PK":
            return self._members(file)
        if self.path.suffix != ".json":
            if _beside(self.path.name, (), lambda name: is_there(folder / name)):
                self.notes = (f"read alone: {printable(self.path.name)} is one of several files of a model; its index "
                              "(.weights.json) has all",)  # fmt: skip
            return {self.path.name: file}
        names = self._listed(self.path, file)
        self._check_named(names, lambda name: is_there(folder / name))
        paths = {name: inside(folder, name, self.path) for name in names}
        return {name: self._open(path, folder) for name, path in paths.items()}

    def _members(self, file: File) -> Mapping[str, Window]:
        """Return name -> file of HDF5 of those in an archive."""
        entries = members(file)
        windows = {name: Window(file, one.start, one.size, name) for name, one in entries.items()}
        self._archived_config = windows.get(CONFIG)
        if WEIGHTS in windows:
            return {WEIGHTS: windows[WEIGHTS]}
        if INDEX not in windows:
            raise bad(self.path, f"has no {WEIGHTS} in it, so it is not an archive of Keras")
        names = self._listed(windows[INDEX].path, windows[INDEX])
        missing = [name for name in names if name not in windows]
        if missing:
            raise bad(self.path, f"has no {printable(missing[0])} in it, which {INDEX} names")
        self._check_named(names, windows.__contains__)
        return {name: windows[name] for name in names}

    def _listed(self, path: Path, file: File | Window) -> list[str]:
        """Return the files that an index names."""
        if file.size > MAX_HEADER:
            raise bad(path, f"has {file.size} bytes; at most {MAX_HEADER} are read")
        index = parse_json(file.read(0, file.size), path, "index")
        by_group = index.get(MAP) if isinstance(index, dict) else None
        if not isinstance(by_group, dict) or not by_group:
            raise bad(path, f"is not an index of Keras: it has no {MAP}")
        self._index = {group: value if isinstance(value, list) else [value] for group, value in by_group.items()}
        names = [name for some in self._index.values() for name in some]
        if not all(isinstance(name, str) for name in names):
            raise bad(path, f"its {MAP} names a file by something that is not text")
        return sorted(set(names))

    def _check_named(self, names: Collection[str], exists: Callable[[str], bool]) -> None:
        """Refuse an index that leaves out one of its numbered files, which exists."""
        others = [other for name in sorted(names) if (other := _beside(name, names, exists))]
        if others:
            raise bad(self.path, f"its {MAP} does not name {printable(others[0])}, which is a file of its model")

    def _check_index(self) -> None:
        """Refuse an index that names a group, and files in which the group has no array."""
        for group, files in self._index.items():
            inner = group.strip("/").replace("/", ".")
            absent = [name for name in files if (name, inner) not in self._groups]
            if absent:
                raise bad(self.path, f"{printable(absent[0])} has no array of {printable(group)}, which the index says")

    def _add(self, file: str, part: File | Window) -> None:
        for dataset in hdf5.datasets(part):
            name = dataset.info.name
            self._groups.add((file, name.rpartition(".")[0]))
            if name in self.tensors or name in self._unread:
                raise bad(self.path, f"two of its arrays have the name {printable(name)}")
            if dataset.unread:
                self._unread[name] = dataset.unread
            else:
                self.tensors[name] = dataset.info
                self._pieces[name] = ((part, dataset.offset, dataset.info.nbytes),)
            if dataset.compact is not None:
                self._compact[name] = dataset.compact

    @functools.cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config as `transformers` would have it; {} of a model that is not known, None without one."""
        if self._archived_config is not None:
            where, file = self._archived_config.path, self._archived_config
            if file.size > MAX_CONFIG:
                raise bad(where, f"has {file.size} bytes; at most {MAX_CONFIG} are read")
            data = bytes(file.read(0, file.size))
        else:
            where = self.path.parent / CONFIG
            if not is_there(where):
                return None
            data = read_file(where, self.path.parent, MAX_CONFIG)
        document = parse_json(data, where, "config")
        is_serialised = isinstance(document, dict) and config.CLASS in document
        if self._archived_config is None and not is_serialised:
            return None  # of another library: `configs` reads it
        return config.of(where, document, self.tensors) if is_serialised else {}

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        if name not in self._compact:
            return super().read_range(name, start, stop)
        check_range(self.path, self.tensors[name], start, stop)
        return self._compact[name][start:stop]

    read_into = Reader.read_into


def _beside(name: str, names: Collection[str], exists: Callable[[str], bool]) -> str:
    """Return the file with the number before or after that of a file, if it exists and is not among `names`."""
    hit = NUMBERED.fullmatch(name)
    if hit is None:
        return ""
    numbers = (number for number in (int(hit[2]) - 1, int(hit[2]) + 1) if number >= 0)
    others = (f"{hit[1]}_{number:05}{hit[3]}" for number in numbers)
    return next((other for other in others if other not in names and exists(other)), "")
