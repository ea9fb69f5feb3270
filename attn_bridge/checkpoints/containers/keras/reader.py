"""The reader of what Keras saves: the arrays of its HDF5 files, by their paths in there."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
        for part in self._parts(self._file, self._folder or self.path.parent):
            self._add(part)
        check_count(self.path, len(self.tensors))

    def _parts(self, file: File, folder: Path) -> Sequence[File | Window]:
        """Return the files of HDF5 that a file consists of, or names."""
        if bytes(file.read(0, min(2, file.size))) == b"PK":
            return self._members(file)
        if self.path.suffix != ".json":
            return [file]
        names = self._listed(self.path, file)
        return [self._open(path, folder) for path in [inside(folder, name, self.path) for name in names]]

    def _members(self, file: File) -> Sequence[Window]:
        """Return the files of HDF5 in an archive."""
        entries = members(file)
        windows = {name: Window(file, one.start, one.size, name) for name, one in entries.items()}
        self._archived_config = windows.get(CONFIG)
        if WEIGHTS in windows:
            return [windows[WEIGHTS]]
        if INDEX not in windows:
            raise bad(self.path, f"has no {WEIGHTS} in it, so it is not an archive of Keras")
        names = self._listed(windows[INDEX].path, windows[INDEX])
        missing = [name for name in names if name not in windows]
        if missing:
            raise bad(self.path, f"has no {printable(missing[0])} in it, which {INDEX} names")
        return [windows[name] for name in names]

    def _listed(self, path: Path, file: File | Window) -> list[str]:
        """Return the files that an index names."""
        if file.size > MAX_HEADER:
            raise bad(path, f"has {file.size} bytes; at most {MAX_HEADER} are read")
        index = parse_json(file.read(0, file.size), path, "index")
        by_group = index.get(MAP) if isinstance(index, dict) else None
        if not isinstance(by_group, dict) or not by_group:
            raise bad(path, f"is not an index of Keras: it has no {MAP}")
        names = [name for value in by_group.values() for name in (value if isinstance(value, list) else [value])]
        if not all(isinstance(name, str) for name in names):
            raise bad(path, f"its {MAP} names a file by something that is not text")
        return sorted(set(names))

    def _add(self, part: File | Window) -> None:
        for dataset in hdf5.datasets(part):
            name = dataset.info.name
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
