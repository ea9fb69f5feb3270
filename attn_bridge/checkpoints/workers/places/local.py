"""The staging folder next to a local target, on a disk that all workers share; renamed onto the target at the end."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

from ....printable import shell_word
from ... import containers, manifest
from ...containers.base import CheckpointError, Reader, TensorInfo, Writer
from ...containers.files import reason, unwritable
from ...containers.writing import Flusher, put
from ..jobs import Job, JournalEntry, Piece
from . import staging
from .staging import StagingPlace


class LocalPlace(StagingPlace):
    """A folder next to the target, on a disk that all workers share.

    Args:
        target: file or folder to write.
    """

    _PUBLISHING: ClassVar[str] = "publishing"

    def __init__(self, target: Path):
        self.target = target
        self.folder = target.parent / f".{target.name}.partial"
        self.payload = self.folder / "payload"
        self.shown = str(self.folder)
        self.removal = f"rm -r {shell_word(self.folder)} removes it"
        self.leftover = f"{self.folder} holds what was written: --resume goes on from it, {self.removal}"
        self._journal = self.folder / "journals" / f"{uuid.uuid4().hex}.jsonl"
        self._lock: BinaryIO | None = None
        self._files = _Files(self.payload)
        self._flusher = Flusher()

    def check(self, reader: Reader, is_folder: bool) -> None:
        """Refuse a target without a parent folder, with too long a name, or that contains or is in the source."""
        staging.check_place(reader, self.target, self.folder, is_folder)

    def check_free(self, overwrite: bool) -> None:
        """Refuse an existing target unless it may be replaced."""
        staging.check_free(self.target, overwrite)

    # ---- locks: "lock": exclusive for a run, shared by independent workers; "workers": by those a run started

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Enter for exclusive use, once workers of a killed run have ended."""
        with staging.locked(self.folder):
            staging.wait_for_workers(self.folder)
            yield

    @contextlib.contextmanager
    def among(self) -> Iterator[None]:
        """Enter for shared use with other workers."""
        with self._shared("lock") as handle:
            self._lock = handle
            try:
                yield
            finally:
                self._lock = None

    @contextlib.contextmanager
    def helping(self, job: Job) -> Iterator[None]:
        """Enter as a helper of an exclusive run.

        Raises:
            CheckpointError: the run has ended, and deleted the folder.
        """
        with self._shared("workers"):
            yield

    @contextlib.contextmanager
    def _shared(self, name: str) -> Iterator[BinaryIO]:
        deadline = time.monotonic() + staging.PATIENCE
        while True:
            try:
                # Again in each round: the worker before may have published, and deleted the folder. A helper makes
                # none: a folder without the lock of its run would be in the way of the next one.
                if name != "workers":
                    self.folder.mkdir(exist_ok=True)
            except OSError as error:
                raise unwritable(self.folder, error) from None
            try:
                handle = (self.folder / name).open("wb")
            except OSError as error:
                if isinstance(error, FileNotFoundError) and name != "workers":
                    continue  # it was just published
                raise unwritable(self.folder, error) from None
            with handle:
                # Between opening and locking the file may have been deleted: a lock on it would not stop a process
                # that opens the new one.
                is_held = staging.lock(handle, is_shared=True)
                if is_held and staging.is_same(handle, self.folder / name):
                    yield handle
                    return
            if time.monotonic() > deadline:
                raise CheckpointError(f"another conversion is writing to {self.folder}")
            time.sleep(0.05)

    def take_over(self) -> bool:
        """Change from shared to exclusive use; return whether no other worker is active."""
        assert self._lock is not None
        return staging.lock(self._lock) and staging.is_same(self._lock, self.folder / "lock")

    # ---- journals

    def job(self) -> Job | None:
        """Return the current job."""
        try:
            return Job.from_json((self.folder / "job").read_bytes())
        except OSError:
            return None

    def begin(self, job: Job, *, anew: bool) -> Job:
        """Create the job file atomically unless it exists, and return the current job."""
        if anew:
            staging.empty(self.folder)
        mine = self.folder / f"job-{uuid.uuid4().hex}"
        put(mine, job.to_json())
        try:
            with contextlib.suppress(FileExistsError):
                # A link fails if the name exists: the first worker's job stays. A rename would replace it.
                os.link(mine, self.folder / "job")
        except OSError:  # a file system without links
            if not (self.folder / "job").exists():
                mine.replace(self.folder / "job")
        mine.unlink(missing_ok=True)
        if self.job() is None:  # the existing job can't be read
            self.replace(job)
        return self.job() or job

    def replace(self, job: Job) -> None:
        """Replace the job atomically."""
        mine = self.folder / f"job-{uuid.uuid4().hex}"
        put(mine, job.to_json())
        mine.replace(self.folder / "job")

    def replace_if_alone(self, job: Job, *, anew: bool = False) -> bool:
        """Replace the job if no other worker is active; return whether that was done."""
        assert self._lock is not None
        is_alone = staging.lock(self._lock)
        if is_alone:
            if anew:
                staging.empty(self.folder)
            self.replace(job)
        while not staging.lock(self._lock, is_shared=True):  # another one is just doing the same
            time.sleep(0.01)
        return is_alone

    def is_fit(self, plan: str) -> bool:
        """Return whether no other plan left a payload."""
        return not os.path.lexists(self.payload)

    def is_free(self) -> bool:
        """Return whether the target does not exist."""
        return not os.path.lexists(self.target)

    def was_published(self) -> bool:
        """Return whether a publication was begun."""
        return (self.folder / self._PUBLISHING).exists()

    def record(self, entries: Sequence[JournalEntry]) -> None:
        """Add lines to this process's own journal."""
        try:
            self._journal.parent.mkdir(exist_ok=True)
            with self._journal.open("a", encoding="utf-8") as handle:
                handle.write("".join(json.dumps(entry.to_json()) + "\n" for entry in entries))
        except OSError as error:
            raise unwritable(self._journal, error) from None

    def entries(self, plan: str) -> dict[Piece, list[JournalEntry]]:
        """Return the entries of all journals."""
        entries: dict[Piece, list[JournalEntry]] = {}
        job = self.job()
        # Journals of another plan are about other bytes at the same offsets.
        if job is not None and job.plan == plan:
            for path in sorted((self.folder / "journals").glob("*.jsonl")):
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # the line that a kill cut short
                        entry = JournalEntry.from_json(json.loads(line))
                        entries.setdefault(entry.piece, []).append(entry)
        return entries

    # ---- the payload

    def writer(
        self, format: str, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool
    ) -> Writer:
        """Return a writer to the payload."""
        return containers.make_writer(format, self.payload, tensors, metadata, is_share=is_share)

    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Return bytes of the payload."""
        return self._files.read(file, offset, count)

    def release(self, file: str, offset: int, count: int) -> None:
        """Flush bytes to disk, and drop them from the page cache."""
        self._flusher.take(self._files.path(file), offset, count)

    def beside(self, is_folder: bool) -> tuple[Path, Path, Path]:
        """Return the payload, and the paths to write the manifest and the tensors kept aside to."""
        if is_folder:
            return self.payload, *manifest.places(self.payload, True)
        return self.payload, self.folder / "manifest", self.folder / "kept"

    def publish(self, is_folder: bool) -> None:
        """Rename the payload onto the target."""
        job = self.job()
        # Written before the first rename, with the plan: after a kill, `recover` knows that renames may be half done,
        # and whose.
        put(self.folder / self._PUBLISHING, b"" if job is None else job.plan.encode())
        try:
            self._rename(is_folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._put_back()
            raise unwritable(self.target, error) from None
        self.clear()

    def _rename(self, is_folder: bool) -> None:
        """Rename everything to its final path: the target first, its manifest last."""
        own, kept = manifest.places(self.target, False)
        for path, name in ((own, "-manifest"), (kept, "-kept")):
            if os.path.lexists(path):  # those of an earlier target don't describe the new one
                path.replace(self.folder / f"replaced{name}")
        # A file replaces a file in one step. A folder replaces none, and nothing replaces a folder with files in it:
        # the old target moves away first.
        if os.path.lexists(self.target) and (self.target.is_dir() or self.payload.is_dir()):
            self.target.replace(self.folder / "replaced")
        self.payload.replace(self.target)
        if not is_folder:
            if (self.folder / "kept").exists():
                (self.folder / "kept").replace(kept)
            (self.folder / "manifest").replace(own)
        # A rename survives a power failure only once the folder is flushed.
        handle = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _put_back(self) -> bool:
        """Undo or finish interrupted renames; return whether the target exists."""
        own, kept = manifest.places(self.target, False)
        is_there = os.path.lexists(self.target) and not self.payload.exists()
        for name, path in (("", self.target), ("-kept", kept), ("-manifest", own)):
            old = self.folder / f"replaced{name}"
            if os.path.lexists(old) and not is_there and not os.path.lexists(path):
                old.replace(path)
            else:
                staging.delete(old)
        if is_there and (self.folder / "manifest").exists():
            if (self.folder / "kept").exists():
                (self.folder / "kept").replace(kept)
            (self.folder / "manifest").replace(own)
        (self.folder / self._PUBLISHING).unlink()
        return is_there

    def recover(self, plan: str) -> bool:
        """Finish or undo a publication that was killed."""
        try:
            stored_plan = (self.folder / self._PUBLISHING).read_bytes()
        except FileNotFoundError:
            return False
        is_there = self._put_back()
        if is_there and stored_plan != plan.encode():
            staging.empty(self.folder)
            return False
        return is_there

    def clear(self) -> None:
        """Delete the folder."""
        staging.remove(self.folder)


class _Files:
    """Files of a payload, read by position; all processes of this machine see the same bytes.

    Args:
        payload: file or folder.
    """

    def __init__(self, payload: Path):
        self._payload = payload
        self._rooms = threading.local()

    def path(self, file: str) -> Path:
        """Return where a file of the payload is."""
        return self._payload / file if file else self._payload

    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Return exactly that many bytes, until the thread reads the next ones."""
        path = self.path(file)
        room = getattr(self._rooms, "room", None)
        if room is None or len(room) < count:
            room = self._rooms.room = memoryview(bytearray(count))
        try:
            with path.open("rb") as handle:
                handle.seek(offset)
                done = handle.readinto(room[:count])
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {reason(error)}") from None
        if done < count:
            raise CheckpointError(f"{path}: ends at byte {offset + done}, before byte {offset + count}")
        return room[:count]
