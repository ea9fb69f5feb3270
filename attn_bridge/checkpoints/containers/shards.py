"""Checkpoints of several files that hold whole tensors: an index from tensors to files, and a reader of all of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ...printable import printable
from ...whole_files import JsonObject
from .base import MAX_HEADER, Reader, TensorInfo
from .files import bad, check_count, check_name, listed, parse_json
from .remote import open_all
from .sources import inside, read_file

MAX_CHAIN = 8
"""Names that metadata leads from one to the next, at most."""

SHOWN = 3
"""Tensors and files that an error names at most."""


class ShardedReader(Reader):
    """Several files as one checkpoint; `metadata` is {"files": {file: its metadata}, "index": the index's own}.

    ``index`` is missing if the folder has no index. The index's ``total_size`` is left out: writers recompute it.

    Args:
        folder: folder of the files.
        index: the index, or None to use `names` alone.
        open_one: opens a file of a folder.
        names: the files, if the folder has no index.
    """

    def __init__(
        self,
        folder: Path,
        index: Path | None,
        open_one: Callable[[Path, Path], Reader],
        names: tuple[str, ...] = (),
    ):
        self.path = folder
        self._index = index
        weight_map: JsonObject | None = None
        own: JsonObject = {}
        if index is not None:
            weight_map, own = self._read_index(folder, index)
            names = tuple(sorted(set(weight_map.values())))
        said_by = folder if index is None else index
        paths = {name: inside(folder, name, said_by) for name in names}
        presence = open_all(lambda path: path.is_file(), paths.values())
        missing = [printable(name) for name, is_there in zip(paths, presence, strict=True) if not is_there]
        absent = _absent(names)
        missing += [] if weight_map is not None else [printable(name) for name in absent]
        if missing:
            raise bad(said_by, f"these files of it are missing: {listed(missing)}")
        unnamed = [printable(name) for name in absent if (folder / name).is_file()]
        if unnamed:
            raise bad(said_by, f"the index has no tensor of these files of its model: {listed(unnamed)}")
        parts = open_all(lambda path: open_one(path, folder), paths.values())
        self._parts = dict(zip(paths, parts, strict=True))
        self.tensors = {}
        twice, files = [], set[str]()
        for file, part in self._parts.items():
            for name, info in part.tensors.items():
                if name in self.tensors:
                    before = self.tensors[name].file
                    twice.append(f"{printable(name)} is in {printable(before)} and {printable(file)}")
                    files |= {printable(before), printable(file)}
                self.tensors[name] = TensorInfo(name, info.dtype, info.shape, file)
            check_count(folder, len(self.tensors))
        self.unread = {name: kind for part in parts for name, kind in part.unread.items()}
        self.shared = {name: stored for part in parts for name, stored in part.shared.items()}
        self.notes += tuple(dict.fromkeys(note for part in parts for note in part.notes))
        if twice:
            choice = f"name one of the files: {listed(sorted(files))}"
            choice = "give a folder of one model's files alone" if any(map(NUMBERED.fullmatch, files)) else choice
            choice = choice if index is None else "each must be in the file that the index names alone"
            raise bad(folder, f"tensors come twice: {listed(twice, SHOWN)}; {choice}")
        if weight_map is not None:
            self._compare(weight_map)
        self.metadata = {"files": {file: part.metadata for file, part in self._parts.items()}}
        if index is not None:
            self.metadata["index"] = own
            shared, notes = share(index, self.tensors, own)
            self.shared, self.notes = {**self.shared, **shared}, (*self.notes, *notes)

    @staticmethod
    def _read_index(folder: Path, index: Path) -> tuple[JsonObject, JsonObject]:
        """Return name -> file of an index, and its metadata without ``total_size``.

        Raises:
            CheckpointError: it is too large, not JSON, or lacks the map of texts.
        """
        inside(folder, index.name, index)
        document = parse_json(read_file(index, folder, MAX_HEADER), index, "index")
        if not isinstance(document, dict) or not isinstance(document.get("weight_map"), dict):
            raise bad(index, "the index has no weight_map")
        own = document.get("metadata", {})
        if not isinstance(own, dict):
            raise bad(index, "the metadata of the index is no object")
        if any(not isinstance(name, str) for name in document["weight_map"].values()):
            raise bad(index, "the weight_map of the index names a file by something that is not text")
        check_count(index, len(document["weight_map"]))
        return document["weight_map"], {key: value for key, value in own.items() if key != "total_size"}

    @classmethod
    def named_by(cls, folder: Path, index: Path) -> tuple[str, ...]:
        """Return the files that an index names, once per tensor."""
        return tuple(cls._read_index(folder, index)[0].values())

    def note_others(self, names: Iterable[str], reason: str) -> None:
        """Add a note on the files of the folder that are not read.

        Args:
            names: files of the folder; those that are read are skipped.
            reason: why the others are not.
        """
        others = [printable(name) for name in names if name not in self._parts]
        if others:
            self.notes += (f"left out, as {reason}: {listed(others, SHOWN)}",)

    def _compare(self, weight_map: JsonObject) -> None:
        """Refuse an index that contradicts its files."""
        wrong = []
        for name, file in weight_map.items():
            if name not in self.tensors and name not in self.unread:
                wrong.append(f"{printable(name)} is not in {printable(file)}")
            elif name in self.tensors and self.tensors[name].file != file:
                wrong.append(f"{printable(name)} is in {printable(self.tensors[name].file)}, not in {printable(file)}")
        for name, info in self.tensors.items():
            if name not in weight_map and name not in self.shared:
                wrong.append(f"{printable(name)} of {printable(info.file)} is not in the index")
        if wrong:
            raise bad(self._index, f"index and files differ: {listed(wrong)}")

    def files(self) -> list[Path]:
        """Return the index and the files it names."""
        return [
            *([self._index] if self._index else []),
            *(path for one in self._parts.values() for path in one.files()),
        ]

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor from its file."""
        return self._parts[self.tensors[name].file].read_range(self.shared.get(name, name), start, stop)

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor from its file into `into`."""
        self._parts[self.tensors[name].file].read_into(self.shared.get(name, name), start, into)

    def read_ahead(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Begin to read bytes of tensors that will be needed soon."""
        for file, some in itertools.groupby(ranges, lambda byte_range: self.tensors[byte_range[0]].file):
            self._parts[file].read_ahead([(self.shared.get(name, name), start, stop) for name, start, stop in some])

    def close(self) -> None:
        """Close all files."""
        for part in self._parts.values():
            part.close()


def share(
    path: Path, tensors: dict[str, TensorInfo], metadata: Mapping[str, object]
) -> tuple[dict[str, str], list[str]]:
    """Add the tensors that metadata maps to others, as libraries leave them that store a tied tensor once.

    Args:
        path: the file that has the metadata.
        tensors: name -> header; the further names are added.
        metadata: of a file (``safetensors.torch.save_model``) or of an index (``save_torch_model`` of the hub's
            library): name that was left out -> name that it is stored under, among other keys.

    Returns:
        The names that were added, each with the name that it is stored under, and a note on them.

    Raises:
        CheckpointError: there are too many, or a name has control characters.
    """
    shared: dict[str, str] = {}
    for name in sorted(metadata):  # safetensors writes them in no order
        stored, steps = metadata[name], 0
        # A name may lead to another one that was left out: a file that has all of them would be read as more.
        while isinstance(stored, str) and stored not in tensors and steps < MAX_CHAIN:
            stored, steps = metadata.get(stored), steps + 1
        if isinstance(stored, str) and stored in tensors and name not in tensors:
            shared[name] = stored
    check_count(path, len(tensors) + len(shared))
    for name, stored in shared.items():
        info = tensors[stored]
        tensors[check_name(path, name)] = TensorInfo(name, info.dtype, info.shape, info.file)
    pairs = [f"{printable(name)} is {printable(stored)}" for name, stored in shared.items()]
    return shared, [f"stored once for several names, as the metadata says: {listed(pairs, SHOWN)}"] if pairs else []


NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<ending>\..+)")
"""Names of the files that a model is cut into, as libraries and llama-gguf-split give them."""


def stem_of(name: str) -> str:
    """Return a file's name without its extension and the number of its part.

    That is ``X`` of ``X-00001-of-00003.bin``, and of Keras's ``X.weights.h5`` and ``X_00001.weights.h5``.
    """
    hit = NUMBERED.fullmatch(name)
    return re.sub(r"(_[0-9]{5})?\.weights$", "", Path(name).stem) if hit is None else hit["stem"]


def note_on_part(name: str) -> tuple[str, ...]:
    """Return a note on a file that is read alone, and is one of several of a model by its name."""
    hit = NUMBERED.fullmatch(name)
    if hit is None or int(hit["count"]) < 2:
        return ()
    return (f"read alone: {printable(name)} is one of {int(hit['count'])} files of a model; its folder has all",)


def is_numbered(names: Iterable[str]) -> bool:
    """Return whether files are parts of one model by their names: ``X-00001-of-00003.bin``."""
    hits = [NUMBERED.fullmatch(name) for name in names]
    return len({hit and hit.group("stem", "count", "ending") for hit in hits}) == 1 and hits[0] is not None


def is_cut(names: Iterable[str]) -> bool:
    """Return whether files may be the parts of one model by their names, which differ by a number alone.

    That is the number of ``X-00001-of-00003.npz``, or one that counts from 0 or 1: ``X.00.npz``, ``X_0001_0.pt``.
    """
    names = list(names)
    if is_numbered(names):
        return True
    pieces = [re.split(r"([0-9]+)", name) for name in names]  # texts and numbers in turn
    if len(names) < 2 or len({len(parts) for parts in pieces}) > 1:
        return False
    differing = [position for position, column in enumerate(zip(*pieces, strict=True)) if len({*column}) > 1]
    if len(differing) != 1 or differing[0] % 2 == 0:
        return False
    numbers = sorted(int(parts[differing[0]]) for parts in pieces)
    return numbers in (list(range(len(names))), list(range(1, len(names) + 1)))


def note_on_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on the files that are read as one model, where their names do not have the number of all."""
    return () if is_numbered(names) else (f"read as one model: {listed(list(map(printable, names)), SHOWN)}",)


def open_parts(
    path: Path, folder: Path | None, open_one: Callable[..., Reader], sharded: type[ShardedReader], ending: str
) -> Reader:
    """Open a file, or the files that a folder's model is cut into, of a container without indexes.

    Args:
        path: file or folder.
        folder: folder that the file may not lead out of, if any.
        open_one: opens a file of a folder.
        sharded: the reader of several.
        ending: extension of the files.

    Raises:
        CheckpointError: the folder's files are not the parts of a model, or one is malformed.
    """
    if not path.is_dir():
        single = open_one(path, folder)
        single.notes += note_on_part(path.name)
        return single
    names = sorted(one.name for one in path.iterdir() if one.suffix == ending and not one.name.startswith("."))
    if not is_cut(names):
        raise bad(path, f"is a folder, which no {sharded.format} is")
    reader = sharded(path, None, open_one, tuple(names))
    reader.notes += note_on_parts(names)
    return reader


def _absent(names: Collection[str]) -> list[str]:
    """Return the missing files of sets whose names contain their number: ``model-00001-of-00003``.

    Sets count from 1, or from 0 if one of the names has that number.
    """
    numbered = [match for match in map(NUMBERED.fullmatch, names) if match]
    models = {(match["stem"], int(match["count"]), match["ending"]) for match in numbered}
    wanted = []
    for stem, count, ending in sorted(models):
        start = 0 if f"{stem}-{0:05}-of-{count:05}{ending}" in names else 1
        wanted += [f"{stem}-{number:05}-of-{count:05}{ending}" for number in range(start, start + count)]
    return [name for name in wanted if name not in names]


def index_of(folder: Path, ending: str, usual: str) -> Path | None:
    """Return a folder's index, where it has one: the usual name, or the only one of that ending."""
    if (folder / (usual + ending)).is_file():
        return folder / (usual + ending)
    indexes = sorted(path for path in folder.iterdir() if path.name.endswith(ending))
    if len(indexes) > 1:
        raise bad(folder, f"has several indexes: {listed([printable(one.name) for one in indexes])}; name one")
    return indexes[0] if indexes else None


GONE = "none of its files exist"
"""Reason why an index is not read."""


def is_stale(folder: Path, index: Path, names: Collection[str]) -> bool:
    """Return whether the file of a whole model has taken the place of all files that an index names.

    transformers leaves such an index where it saves a model again in one file, and reads that file.

    Args:
        folder: the folder.
        index: its index.
        names: its files.

    Raises:
        CheckpointError: the whole model and files of the index exist.
    """
    whole = index.name.removesuffix(".index.json")
    if whole not in names:
        return False
    named = set(ShardedReader.named_by(folder, index))
    if whole not in named and named.intersection(names):
        raise bad(folder, f"has both {printable(whole)} and {printable(index.name)}; name one of them")
    return whole not in named
