"""The files of a source: every reader opens them here, and none of them leads out of the source's folder.

Folders that lead to a checkpoint are followed: runs of Orbax's CheckpointManager, their steps, and the hub's cache.
"""

from __future__ import annotations

import abc
import errno
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ...printable import printable
from .base import ORBAX_ITEMS, ORBAX_METADATA, ORBAX_UNFINISHED, Reader, TensorInfo
from .files import File, LinkError, bad, check_name, check_range, listed, resolve_below
from .remote import RemotePath

if TYPE_CHECKING:
    from .zips import Window


def inside(folder: Path, name: object, named_by: object) -> Path:
    """Return the path of a file that an index or metadata names; `open_file` checks its links again as it opens it.

    Raises:
        CheckpointError: it is named as a file of another folder, or is a link out of its folder.
    """
    name = check_name(named_by, name)
    path = Path(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or path.as_posix() != name:
        raise bad(named_by, f"the file {printable(name)} is not named as one of its folder")
    try:
        resolve_below(folder, folder / path)
    except LinkError as error:
        raise bad(named_by, f"the file {printable(name)} {error}") from None
    return folder / path


def open_file(path: Path, folder: Path | None) -> File:
    """Return a file of a source that is read by position, local or in a store.

    Args:
        path: the file.
        folder: the source's folder, which no link may lead out of but the hub cache's own; None where the file is the
            source, as the user names it.

    Raises:
        CheckpointError: it does not exist, is not a file, leads out of the folder, or can't be read.
    """
    if isinstance(path, RemotePath):
        from .remote.files import RemoteFile

        return RemoteFile(path)
    return File(path, folder)


def read_file(path: Path, folder: Path, most: int) -> bytes:
    """Return the bytes of a small file of a source, such as its config.

    Raises:
        CheckpointError: as `open_file`, or it has more than `most` bytes.
    """
    file = open_file(path, folder)
    if file.size > most:
        raise bad(path, f"has {file.size} bytes; at most {most} are read")
    data = bytes(file.read(0, file.size))
    file.close()
    return data


class FileReader(Reader):
    """A container in one file, or in a few; `_pieces` has where the elements of each tensor lie in C order.

    Subclasses read headers from `_file`, and open further files by `_open`.

    Args:
        path: the file.
        folder: the folder that no link may lead out of; None where the user names the file.
    """

    def __init__(self, path: Path, folder: Path | None = None):
        self.path, self._folder = path, folder
        self.tensors, self.metadata = {}, {}
        self._unread: dict[str, str] = {}
        self.unread = self._unread
        self._files: list[File] = []
        self._pieces: dict[str, Sequence[tuple[File | Window, int, int]]] = {}
        try:
            self._file = self._open(path, folder)
            self._read_headers()
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, folder: Path | None) -> File:
        self._files.append(open_file(path, folder))
        return self._files[-1]

    @abc.abstractmethod
    def _read_headers(self) -> None:
        """Read tensors and metadata, and (file, start, bytes) of the pieces of each tensor."""

    def files(self) -> list[Path]:
        """Return the files."""
        return [file.path for file in self._files]

    def _cut(self, name: str, start: int, stop: int) -> Iterator[tuple[File | Window, int, int]]:
        """Yield (file, start, count) of bytes ``start:stop`` of a tensor, in order."""
        for file, begin, size in self._pieces.get(name, ()):
            first, last = max(start, 0), min(stop, size)
            if first < last:
                yield file, begin + first, last - first
            start, stop = start - size, stop - size

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        check_range(self.path, self.tensors[name], start, stop)
        parts = [file.read(begin, count) for file, begin, count in self._cut(name, start, stop)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into `into`."""
        check_range(self.path, self.tensors[name], start, start + len(into))
        done = 0
        for file, begin, count in self._cut(name, start, start + len(into)):
            file.read_into(begin, into[done : done + count])
            done += count

    def read_ahead(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Begin to read bytes of tensors that will be needed soon."""
        by_file: dict[File | Window, list[tuple[int, int]]] = {}
        for name, start, stop in ranges:
            for file, begin, count in self._cut(name, start, stop):
                by_file.setdefault(file, []).append((begin, count))
        for file, wanted in by_file.items():
            file.read_ahead(wanted)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class OrderedTensor(Protocol):
    """A tensor that may lie in another order than C's in its file, and then is held in memory once it is read."""

    info: TensorInfo

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes ``start:stop`` of its elements in C order."""

    def release(self) -> None:
        """Free its copy in C order."""


Ordered = TypeVar("Ordered", bound=OrderedTensor)


class Latest(Generic[Ordered]):
    """The tensor of a reader that was read last: the memory of the one before is freed."""

    def __init__(self) -> None:
        self._tensor: Ordered | None = None

    def of(self, tensor: Ordered) -> Ordered:
        """Return a tensor that is about to be read."""
        if self._tensor is not tensor:
            self.release()
        self._tensor = tensor
        return tensor

    def release(self) -> None:
        """Free its memory."""
        if self._tensor is not None:
            self._tensor.release()


class OrderedReader(FileReader, Generic[Ordered]):
    """A container in one file, whose `_stored` has a tensor by each name."""

    def __init__(self, path: Path, folder: Path | None = None):
        self._stored: dict[str, Ordered] = {}
        self._latest = Latest[Ordered]()
        super().__init__(path, folder)
        self.tensors = {name: tensor.info for name, tensor in self._stored.items()}

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        check_range(self.path, self.tensors[name], start, stop)
        return self._latest.of(self._stored[name]).read(start, stop)

    read_into = Reader.read_into

    def close(self) -> None:
        """Close the file."""
        self._latest.release()
        super().close()


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; pathlib raises an error for a name that is too long, which no folder can have."""
    try:
        return path.is_dir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


STEP = re.compile(r"(?:[A-Za-z][\w-]*_)?([0-9]{1,18})")
"""Name of a step's folder: its number, behind the run's ``step_prefix``."""

REPOSITORY = re.compile(r"(?:models|datasets|spaces)--.+")
LOOKED_BACK = 20
"""Steps before the newest that are searched for items that it lacks."""

SNAPSHOTS, MAIN = "snapshots", "refs/main"

Chosen = dict[str, int | str]


def follow(path: Path, step: int | None, item: str | None) -> tuple[Path, Chosen, str]:
    """Return the folder of the checkpoint that a folder leads to, the choices on the way, and a note on them.

    Args:
        path: a folder.
        step: number of the step of a run; None is the newest.
        item: name of the item of a step; None is the item that contains a model.

    Returns:
        The path unchanged, {} and "" for a folder that is the checkpoint itself.

    Raises:
        CheckpointError: a step or an item does not exist, or several items are possible.
    """
    path = snapshot_of(path)
    steps = {} if _is_step(path) else _steps(path)
    run = path
    chosen: Chosen = {}
    notes = []
    if step is not None and step not in steps:
        choices = (
            f"it has {listed([str(number) for number in sorted(steps)], 20)}" if steps else "it is no run of Orbax"
        )
        raise bad(path, f"has no step {step} (--step); {choices}")
    if steps:
        chosen["step"] = max(steps) if step is None else step
        others = f", the newest of {len(steps)}; --step takes another" if step is None and len(steps) > 1 else ""
        notes.append(f"read step {chosen['step']}{others}")
        notes += _passed_over(path, steps) if step is None else []
        path = inside(path, _only(path, int(chosen["step"]), steps), path)
    if (path / ORBAX_METADATA).is_file():
        if item is not None:
            raise bad(path, f"is a single item; --item ({printable(item, 60)}) chooses one of several")
        return path, chosen, "; ".join(notes)
    items = _items(path) if steps or item is not None or _is_step(path) else []
    if item is not None:
        if item not in items:
            choices = f"it has {listed(list(map(printable, items)), 20)}" if items else "it is no step of Orbax"
            older = _with_more(run, steps, items) if step is None else ""
            raise bad(path, f"has no item {printable(item, 60)} (--item); {choices}{older}")
        chosen["item"] = item
        return inside(path, item, path), chosen, "; ".join(notes)
    if not items or any(name in items for name in ORBAX_ITEMS):
        return path, chosen, "; ".join(notes)
    is_optimizer = all(name.lower().startswith("opt") for name in items)
    older = _with_more(run, steps, items) if step is None and is_optimizer else ""
    if older:
        raise bad(path, f"is the newest step and holds {listed(list(map(printable, items)), 20)} alone{older}")
    if len(items) > 1:
        raise bad(path, f"holds several items, {listed(list(map(printable, items)), 20)}; --item chooses one")
    return inside(path, items[0], path), chosen, "; ".join(notes)


def _with_more(run: Path, steps: Mapping[int, list[str]], items: Collection[str]) -> str:
    """Return a hint at the last step before the newest with items that the newest lacks; "" if none has any."""
    for number in sorted(steps)[-2 : -2 - LOOKED_BACK : -1]:
        more = [name for name in _items(run / steps[number][0]) if name not in items]
        if more:
            return f"; step {number} has {listed(list(map(printable, more)), 20)}: --step {number} reads it"
    return ""


def chosen_again(path: Path, chosen: Mapping[str, object]) -> tuple[int | None, str | None]:
    """Return the step and the item that an earlier conversion read from a folder; None for those it does not have.

    Args:
        path: the folder.
        chosen: the manifest's data on its source.
    """
    step, item = chosen.get("step"), chosen.get("item")
    if (type(step) is not int and not isinstance(item, str)) or not path.is_dir():
        return None, None
    steps = _steps(path)
    chosen_step = step if type(step) is int and step in steps else None
    folder = path if chosen_step is None else path / _only(path, chosen_step, steps)
    return chosen_step, item if isinstance(item, str) and item in _items(folder) else None


def snapshot_of(path: Path) -> Path:
    """Return the snapshot that the hub's cache of a repository leads to, and any other path unchanged.

    Raises:
        CheckpointError: the cache has no snapshot, or several of which none is the main branch.
    """
    return _snapshot(path) if REPOSITORY.fullmatch(path.name) and is_folder(path / SNAPSHOTS) else path


def _snapshot(path: Path) -> Path:
    """Return the snapshot of the hub's cache that its main branch is, or the only one."""
    names = _folders(path / SNAPSHOTS)
    if not names:
        raise bad(path, "is the hub's cache of a repository without snapshots; download it first")
    name = names[0] if len(names) == 1 else ""
    if (path / MAIN).is_file():
        main = read_file(path / MAIN, path, 1000).decode("ascii", "replace").strip()
        name = main if main in names else name
    if not name:
        raise bad(path, f"is the hub's cache of a repository with {len(names)} snapshots, of which {MAIN} names none; "
                  f"give one of {SNAPSHOTS}/")  # fmt: skip
    return inside(path, f"{SNAPSHOTS}/{name}", path)


def _is_step(path: Path) -> bool:
    return any((path / name).is_file() for name in (ORBAX_METADATA, "_CHECKPOINT_METADATA"))


def _steps(path: Path) -> dict[int, list[str]]:
    """Return number -> names of the folders of steps."""
    steps: dict[int, list[str]] = {}
    for name in _folders(path):
        hit = STEP.fullmatch(name)
        if hit is not None and (_is_step(path / name) or _items(path / name)):
            steps.setdefault(int(hit[1]), []).append(name)
    return steps


def _passed_over(path: Path, steps: Mapping[int, list[str]]) -> list[str]:
    """Return a note on folders with the numbers of later steps in which Orbax finished nothing."""
    hits = (STEP.fullmatch(name) for name in _folders(path))
    later = [hit[0] for hit in hits if hit is not None and int(hit[1]) > max(steps)]
    return [f"passed over, as Orbax finished no step there: {listed(list(map(printable, later)), 20)}"] if later else []


def numbers_of(path: Path) -> list[int]:
    """Return the numbers of a run's steps; [] if the folder is not a run."""
    return sorted(_steps(path))


def _only(path: Path, step: int, steps: Mapping[int, list[str]]) -> str:
    """Return the name of a step's folder.

    Raises:
        CheckpointError: it has several.
    """
    if len(steps[step]) > 1:
        names = " and ".join(map(printable, steps[step][:2]))
        raise bad(path, f"{names} are both step {step}; give one of the folders")
    return steps[step][0]


def _items(path: Path) -> list[str]:
    """Return the names of a step's folders that Orbax wrote trees to; others hold JSON, or users' files."""
    return [name for name in _folders(path) if (path / name / ORBAX_METADATA).is_file()]


def _folders(path: Path) -> list[str]:
    return sorted(below.name for below in path.iterdir() if ORBAX_UNFINISHED not in below.name and below.is_dir())
