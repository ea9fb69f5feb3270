"""The folder that a conversion writes to before it renames it onto the target: its names and its locks."""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from ....printable import printable
from ... import containers, manifest
from ...containers.base import DCP_METADATA, ORBAX_METADATA, CheckpointError, DiskFullError, Reader, TensorInfo, Writer
from ...containers.files import resolve
from ..jobs import Job, JournalEntry, Piece

PATIENCE = 10.0
"""Seconds to wait for workers of a killed run, which end as soon as they notice."""

MAX_LINKS = 40
"""Links that Linux follows on the way to a file; more are an error."""

LONGEST = f"journals/{'0' * 32}.jsonl"
"""The longest name of a file in the staging folder but for those of the target's own."""


def check_place(reader: Reader, target: Path, staging: Path, is_folder: bool) -> None:
    """Refuse a target without a parent folder, with too long a name, or that contains or is in the source."""
    if not target.name or target.name in (".", ".."):
        raise CheckpointError(f"{target} is no name for a checkpoint")
    if not os.path.isdir(target.parent):  # noqa: PTH112 - pathlib's raises where a name is too long
        folder = printable(target.parent, 400)
        if not os.path.lexists(target.parent):
            raise CheckpointError(f"{folder} does not exist; make that folder first to write {target.name} to it")
        raise CheckpointError(f"{folder} is no folder to write {target.name} to")
    check_names(target, staging, is_folder)
    try:
        source, places = resolve(reader.path), [resolve(target), resolve(staging)]
    except OSError as error:
        is_loop = error.errno == errno.ELOOP
        why = "is a link to itself" if is_loop else f"can't be written to: {error.strerror}"
        raise CheckpointError(f"{target} {why}") from None
    for path in places:
        # The rename onto the target, or the deletion of the staging folder, would take the source along.
        if path == source or source in path.parents or path in source.parents:
            label = target if path == places[0] else staging
            raise CheckpointError(f"{label} and the source {reader.path} must not be in one another")
    own = staging.is_dir() and ((staging / "lock").is_file() or not any(staging.iterdir()))
    if os.path.lexists(staging) and (staging.is_symlink() or not own):
        raise CheckpointError(f"{staging} is in the way: it is no folder of an interrupted conversion")


def check_names(target: Path, staging: Path, is_folder: bool) -> None:
    """Refuse a target with too long a name for the other files of a conversion.

    A file is published before its manifest, so a name too long for the manifest alone must be refused in advance.
    """
    own = () if is_folder else manifest.places(target, False)
    longest = max((staging, target, *own), key=lambda path: len(os.fsencode(path.name)))
    size, most = len(os.fsencode(longest.name)), os.pathconf(target.parent, "PC_NAME_MAX")
    if 0 <= most < size:
        raise CheckpointError(
            f"{printable(target, 400)}: the name is too long: {printable(longest.name, 40)}, which is written to the "
            f"same folder, has {size} bytes, and the file system takes {most}"
        )
    size, most = len(os.fsencode(staging / LONGEST)) + 1, os.pathconf(target.parent, "PC_PATH_MAX")
    if 0 <= most < size:
        raise CheckpointError(
            f"{printable(target, 400)}: the path is too long: the longest of a file that is written on the way has "
            f"{size} bytes, and the file system takes {most}"
        )


def check_free(target: Path, overwrite: bool) -> None:
    """Refuse an existing target, or files of an earlier one, unless they may be overwritten."""
    own = [path for path in manifest.places(target, False) if os.path.lexists(path)]
    for path in (target, *own):
        check_replaceable(path)
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(f"{target} exists; --overwrite (in Python, overwrite=True) replaces it")
    if target.is_dir() and not target.is_symlink() and not is_checkpoint(target):
        raise CheckpointError(f"{target} is a folder of other things than a checkpoint, which is never replaced")
    for path in own:  # tensors kept aside may be the only copies, even without the checkpoint
        if not overwrite:
            raise CheckpointError(f"{path} exists; --overwrite (in Python, overwrite=True) replaces it")
        if path.is_dir() and not path.is_symlink():
            raise CheckpointError(f"{path} is a folder, which is never replaced")


def check_replaceable(path: Path) -> None:
    """Refuse a path that is, or leads by links to, a device, a pipe, a socket or a file that a process has open.

    A link such as ``/dev/stdout`` leads to a plain file where output goes to one, so each link on the way counts.
    """
    kind = "a device, a pipe or a socket"
    if path.is_symlink():
        kind = "a link to a device, a pipe, a socket or an open file"
    if _is_special(path) or any(_is_in_system(step) for step in _steps(path)):
        raise CheckpointError(f"{path} is {kind}, which is never replaced")


def _is_special(path: Path) -> bool:
    """Whether a path leads to something that is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:  # not there, or a link that leads nowhere
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _steps(path: Path) -> list[Path]:
    """Return a link, the links that it leads to, and where the last of them leads; nothing if it is not a link."""
    steps: list[Path] = []
    while path.is_symlink() and len(steps) < MAX_LINKS:
        steps.append(path)
        path = path.parent / path.readlink()
    return [*steps, path] if steps else []


def _is_in_system(path: Path) -> bool:
    """Return whether a path is in ``/dev`` or ``/proc``: a device, or a process's open file."""
    folder = os.path.realpath(path.parent)
    return folder in ("/dev", "/dev/fd") or f"{folder}/".startswith("/proc/")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is empty, Orbax's, or one of a checkpoint's files without folders among them."""
    inside = {one.name: one.is_dir() and not one.is_symlink() for one in folder.iterdir()}
    if not inside or {ORBAX_METADATA, "_CHECKPOINT_METADATA"} & inside.keys():
        return True
    endings = (*containers.ENDINGS, *containers.INDEXES, DCP_METADATA)
    return not any(inside.values()) and any(name.endswith(endings) for name in inside)


@contextlib.contextmanager
def locked(staging: Path) -> Iterator[None]:
    """Enter the staging folder for exclusive use."""
    try:
        staging.mkdir(exist_ok=True)
        handle = (staging / "lock").open("w")
    except OSError as error:
        raise CheckpointError(f"{staging.parent} can't be written to: {error.strerror}") from None
    with handle, _known(handle):
        if not lock(handle):
            raise CheckpointError(f"another conversion is writing to {staging}")
        if not is_same(handle, staging / "lock"):  # the previous owner deleted it at the end
            raise CheckpointError(f"another conversion has just written {staging.name[1:].removesuffix('.partial')}")
        try:
            yield
        except BaseException:
            if staging.is_dir() and [one.name for one in staging.iterdir()] == ["lock"]:
                remove(staging)
            raise


_locks: set[int] = set()


@contextlib.contextmanager
def _known(handle: IO[Any]) -> Iterator[None]:
    """Register an open lock."""
    _locks.add(handle.fileno())
    try:
        yield
    finally:
        _locks.discard(handle.fileno())


def let_go() -> None:
    """Close locks inherited by a forked process: they must end with the process that took them."""
    while _locks:
        os.close(_locks.pop())


def lock(handle: IO[Any], *, is_shared: bool = False) -> bool:
    """Lock an open file, exclusively or shared; return False if another process has a conflicting lock."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_same(handle: IO[Any], path: Path) -> bool:
    """Return whether an open file is still the file at that path."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def wait_for_workers(staging: Path) -> None:
    """Wait until the workers that a killed run started have ended.

    Raises:
        CheckpointError: they don't.
    """
    deadline = time.monotonic() + PATIENCE
    while (staging / "workers").exists():
        with (staging / "workers").open("wb") as handle:
            if lock(handle):
                return
        if time.monotonic() > deadline:
            raise CheckpointError(f"workers of another conversion are writing to {staging}")
        time.sleep(0.05)


@contextlib.contextmanager
def naming(payload: Path, target: Path, layout: str) -> Iterator[None]:
    """Replace the payload's path in errors by the target's and the layout, or rules, of its names.

    Args:
        payload: the path written to, which is gone when the user reads the message.
        target: its final path.
        layout: of the target; for rules, it begins with their file's name.
    """
    try:
        yield
    except DiskFullError:
        raise
    except CheckpointError as error:
        start, reason = f"{printable(payload, 400)}: ", str(error)
        if not reason.startswith(start):
            raise
        label = f"{target} as {layout}" if layout else str(target)
        raise CheckpointError(f"{label}: {reason.removeprefix(start)}") from None


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def empty(staging: Path) -> None:
    """Delete everything in the staging folder but its lock."""
    for path in staging.iterdir():
        if path.name != "lock":
            delete(path)


def remove(staging: Path) -> None:
    """Delete the staging folder, its identifying files last: a partly deleted folder is still recognised."""
    last = ("job", "publishing", "lock")
    with contextlib.suppress(OSError):
        for path in staging.iterdir():
            if path.name not in last:
                delete(path)
        for name in last:
            (staging / name).unlink(missing_ok=True)
        staging.rmdir()


# ---- the interface of places


class StagingPlace(abc.ABC):
    """Staging place: the payload before publication, and its journals.

    Attributes:
        shown: its name in messages.
        leftover: advice on resuming or removing the leftovers of a failed run.
        removal: the part of that advice on removal.
    """

    shown: str
    leftover: str
    removal: str

    checks_itself: ClassVar[bool] = False
    """Whether written bytes are compared with the stored ones on writing, so that no read-back is needed."""

    def expect(self, nbytes: int, *, in_one_file: bool = False) -> None:  # noqa: B027 - a disk need not know
        """Announce how many bytes a worker is about to write, and whether one file contains all of them."""

    def settle(self) -> None:  # noqa: B027 - a disk holds it by then
        """Wait until everything written and noted is stored."""

    def release(self, file: str, offset: int, count: int) -> None:  # noqa: B027 - a store keeps none of it in memory
        """Announce that bytes of the payload were read back, and need not stay in memory."""

    @abc.abstractmethod
    def check(self, reader: Reader, is_folder: bool) -> None:
        """Refuse a target that can't be written to, whose name is too long, or that is inside the source."""

    @abc.abstractmethod
    def check_free(self, overwrite: bool) -> None:
        """Refuse an existing target unless it may be replaced."""

    @abc.abstractmethod
    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Enter for exclusive use by one run and the workers that it starts."""

    @abc.abstractmethod
    def among(self) -> contextlib.AbstractContextManager[None]:
        """Enter for shared use by workers that were started independently."""

    @abc.abstractmethod
    def helping(self, job: Job) -> contextlib.AbstractContextManager[None]:
        """Enter as a helper of an exclusive run."""

    @abc.abstractmethod
    def take_over(self) -> bool:
        """Change from shared to exclusive use until exit; return whether no other worker is active."""

    @abc.abstractmethod
    def job(self) -> Job | None:
        """Return the current job."""

    @abc.abstractmethod
    def begin(self, job: Job, *, anew: bool) -> Job:
        """Store a job unless one exists, and return the current one; earlier contents may be deleted first."""

    @abc.abstractmethod
    def replace(self, job: Job) -> None:
        """Replace the job, and keep the payload."""

    @abc.abstractmethod
    def replace_if_alone(self, job: Job, *, anew: bool = False) -> bool:
        """Replace the job as one of several workers, if no other is active; return whether that was done."""

    @abc.abstractmethod
    def is_fit(self, plan: str) -> bool:
        """Return whether no other plan left anything."""

    @abc.abstractmethod
    def is_free(self) -> bool:
        """Return whether the target does not exist."""

    @abc.abstractmethod
    def was_published(self) -> bool:
        """Return whether a publication was begun, and neither finished nor undone."""

    @abc.abstractmethod
    def record(self, entries: Sequence[JournalEntry]) -> None:
        """Add entries to the journal."""

    @abc.abstractmethod
    def entries(self, plan: str) -> dict[Piece, list[JournalEntry]]:
        """Return all entries of runs of that plan; tensors without a worker's entry end at -1."""

    @abc.abstractmethod
    def writer(
        self, format: str, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool
    ) -> Writer:
        """Return a writer of elements, or, without `is_share`, of headers and indexes."""

    @abc.abstractmethod
    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Return stored bytes of the payload, valid until this thread's next read."""

    @abc.abstractmethod
    def beside(self, is_folder: bool) -> tuple[Path, Path, Path]:
        """Return the payload, and the paths to write the manifest and the tensors kept aside to."""

    @abc.abstractmethod
    def publish(self, is_folder: bool) -> None:
        """Move everything to its final path, atomically for readers, and delete the rest."""

    @abc.abstractmethod
    def recover(self, plan: str) -> bool:
        """Finish or undo a killed publication; return whether the target of that plan is now published."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete all contents."""
