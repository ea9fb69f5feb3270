"""The staging place in a store: objects in a hidden folder next to the target, assembled to files at the end.

Nothing is renamed. Each worker writes separate objects, and notes in further objects which bytes they contain; the
finishing worker has the store assemble the target's files. Meanwhile, a marker in the target's folder keeps readers
away.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from ....printable import shell_word
from ....whole_files import JsonObject
from ... import configs, containers, manifest
from ...containers import UNFINISHED
from ...containers.base import (
    DCP_METADATA,
    ORBAX_COMMITTED,
    ORBAX_METADATA,
    CheckpointError,
    Reader,
    TensorInfo,
    Writer,
)
from ...containers.remote import RemotePath
from ...containers.remote.joining import abandon, join
from ...containers.remote.staged import Staged, staged_path
from ..jobs import Job, JournalEntry, Piece
from . import staging
from .leases import Lease, is_dead
from .staging import StagingPlace

OFTEN = 1 << 26
"""Bytes between journal entries of a worker."""

AT_ONCE = 8
"""Objects that are read, and files that are assembled, concurrently."""


class StoredPlace(StagingPlace):
    """The staging place in a store.

    Args:
        target: file or folder to write.
    """

    checks_itself = True

    def __init__(self, target: Path):
        self.target = target
        self._path = cast("RemotePath", cast(object, target))
        parent = self._path.key.rpartition("/")[0]
        self._folder = f"{parent}/.{target.name}.partial"
        self.shown = f"{target.parent}/.{target.name}.partial"
        remove = f"aws s3 rm --recursive {shell_word(self.shown)}" if self._path.protocol == "s3" else "deleting it"
        self.removal = f"{remove} removes it"
        self.leftover = f"{self.shown} holds what was written: --resume goes on from it, {self.removal}"
        self._own = uuid.uuid4().hex
        self._plan = ""
        self._waiting: list[tuple[int, JournalEntry]] = []
        self._unnoted: list[JsonObject] = []
        self._notes = 0
        self._journals: dict[str, JsonObject] = {}
        self._lease: Lease | None = None

    @functools.cached_property
    def _store(self) -> Any:
        return self._path.store

    @functools.cached_property
    def _staged(self) -> Staged:
        return Staged(self._store, f"{self._folder}/parts")

    def check(self, reader: Reader, is_folder: bool) -> None:
        """Refuse a target that can't be written to, or that contains or is in the source."""
        if not self.target.name:
            raise CheckpointError(f"{self.target} is no name for a checkpoint")
        source = reader.path
        if source == self.target or source in self.target.parents or self.target in getattr(source, "parents", ()):
            raise CheckpointError(f"{self.target} and the source {source} must not be in one another")

    def check_free(self, overwrite: bool) -> None:
        """Refuse an existing target, or files of an earlier one, unless they may be overwritten."""
        self._path.store.forget()
        is_free = self.is_free()
        if self.was_published():
            return
        paths = [*([] if is_free else [self.target]), *manifest.places(self.target, False)]
        for path in [] if overwrite else paths:
            if path.exists():
                raise CheckpointError(f"{path} exists; --overwrite (in Python, overwrite=True) replaces it")
        if not is_free and self.target.is_dir() and not staging.is_checkpoint(self.target):
            raise CheckpointError(f"{self.target} holds other things than a checkpoint, which are never replaced")

    # ---- leases

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Enter for exclusive use."""
        with Lease(self._store, f"{self._folder}/leases/alone") as lease:
            if not lease.take():
                raise CheckpointError(f"another conversion is writing to {self.shown}")
            self._lease = lease
            yield

    @contextlib.contextmanager
    def among(self) -> Iterator[None]:
        """Enter for shared use with other workers."""
        other = self._store.get(f"{self._folder}/leases/alone")
        if other is not None and not is_dead(other):
            with Lease(self._store, f"{self._folder}/leases/alone") as lease:
                if not lease.take():
                    raise CheckpointError(f"another conversion is writing to {self.shown}")
        with Lease(self._store, f"{self._folder}/leases/{self._own}") as lease:
            lease.take()
            yield
        if self._lease is not None:
            self._lease.leave()
            self._lease = None

    @contextlib.contextmanager
    def helping(self, job: Job) -> Iterator[None]:
        """Enter as a helper of an exclusive run. No lock is needed: every worker writes its own objects."""
        self._staged.suit(job.task_bytes)
        yield

    def take_over(self) -> bool:
        """Take the finisher's lease if it is free; all workers have written their shares by then."""
        lease = Lease(self._store, f"{self._folder}/leases/finisher")
        if not lease.take(waits=False):
            return False
        self._lease = lease
        return True

    def _others(self) -> list[str]:
        """Return the leases of other workers that may be alive."""
        leases = self._store.below(f"{self._folder}/leases")
        others = [f"{self._folder}/leases/{name}" for name in leases if name != self._own]
        lease_data = {key: self._store.get(key) for key in others}
        return [key for key, data in lease_data.items() if data is not None and not is_dead(data)]

    # ---- journals

    def job(self) -> Job | None:
        """Return the job that is carried out here."""
        data = self._store.get(f"{self._folder}/job")
        return None if data is None else Job.from_json(data)

    def begin(self, job: Job, *, anew: bool) -> Job:
        """Create the job object atomically unless it exists, and return the current job."""
        if anew:
            self._empty()
        self._staged.suit(job.task_bytes)
        if self._store.put_if_absent(f"{self._folder}/job", job.to_json()):
            return job
        return self.job() or job

    def _empty(self) -> None:
        """Delete payload and journals; keep leases and the publication marker."""
        self._staged.forget()  # waits for uploads in progress
        names = self._store.below(self._folder)
        kept = ("leases/", "publishing")
        self._store.delete([f"{self._folder}/{name}" for name in names if not name.startswith(kept)])
        self._journals.clear()
        self._waiting, self._unnoted = [], []

    def replace(self, job: Job) -> None:
        """Note another job."""
        self._store.put(f"{self._folder}/job", job.to_json())

    def replace_if_alone(self, job: Job, *, anew: bool = False) -> bool:
        """Replace the job if no other worker is active; return whether that was done."""
        if self._others():
            return False
        if anew:
            self._empty()
        self.replace(job)
        return True

    def is_fit(self, plan: str) -> bool:
        """Return whether no other plan left anything."""
        self._read_journals()
        return all(one.get("plan") == plan for one in self._journals.values())

    def is_free(self) -> bool:
        """Return whether the target does not exist, or is unfinished."""
        self._store.forget()
        return not self.target.exists() or (self.target / UNFINISHED).is_file()

    def was_published(self) -> bool:
        """Return whether assembly of the target's files may have begun."""
        return any(self._store.get(f"{self._folder}/{name}") is not None for name in ("publishing", "committed"))

    def record(self, entries: Sequence[JournalEntry]) -> None:
        """Add entries to the journal, once the store has their bytes."""
        needed = self._staged.sent
        self._waiting += [(needed, entry) for entry in entries]
        self._note(least=OFTEN)

    def expect(self, nbytes: int, *, in_one_file: bool = False) -> None:
        """Choose the size of objects for `nbytes` bytes."""
        self._staged.spread(nbytes, in_one_file=in_one_file)

    def settle(self) -> None:
        """Wait until the store has all written bytes and their journal."""
        self._staged.flush()
        self._waiting = [(0, entry) for _, entry in self._waiting]  # all of it is there
        self._note(least=0)

    def _note(self, least: int) -> None:
        """Store a journal of the settled objects and entries, if the objects not journalled yet have `least` bytes."""
        settled_bytes, notes = self._staged.settled()
        self._unnoted += notes
        ready = [entry for needed, entry in self._waiting if needed <= settled_bytes]
        if sum(note["size"] for note in self._unnoted) < least or not (ready or self._unnoted):
            return
        document = {
            "plan": self._plan,
            "objects": self._unnoted,
            "entries": [entry.to_json() for entry in ready],
        }
        name = f"{time.time_ns():020d}-{self._own}-{self._notes}"
        self._store.put(f"{self._folder}/journals/{name}", json.dumps(document).encode())
        self._notes += 1
        self._journals[name] = document
        self._waiting = [one for one in self._waiting if one[0] > settled_bytes]
        self._unnoted = []

    def _read_journals(self) -> None:
        """Read new journals."""
        listing = self._store.below(f"{self._folder}/journals")
        new = sorted(listing.keys() - self._journals.keys())
        with ThreadPoolExecutor(AT_ONCE, "attn-bridge-notes") as threads:
            all_data = list(threads.map(self._store.get, [f"{self._folder}/journals/{one}" for one in new]))
        for name, data in zip(new, all_data, strict=True):
            with contextlib.suppress(ValueError):
                document = json.loads(data or b"{}")
                self._journals[name] = document if isinstance(document, dict) else {}
        for name in self._journals.keys() - listing.keys():
            del self._journals[name]

    def entries(self, plan: str) -> dict[Piece, list[JournalEntry]]:
        """Return the notes of all workers."""
        self._plan = plan
        self._read_journals()
        entries: dict[Piece, list[JournalEntry]] = {}
        for name in sorted(self._journals):
            document = self._journals[name]
            if document.get("plan") != plan:
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._staged.take(document["objects"])
                for line in document["entries"]:
                    entry = JournalEntry.from_json(line)
                    entries.setdefault(entry.piece, []).append(entry)
        return entries

    # ---- payload

    def _file(self, name: str) -> Path:
        return staged_path(self._staged, name, self.target)

    def writer(
        self, format: str, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool
    ) -> Writer:
        """Return a writer to objects of this process."""
        return containers.make_writer(format, self._file("payload"), tensors, metadata, is_share=is_share)

    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Return bytes of the target, to be, as the store has them."""
        return self._staged.read(f"payload/{file}" if file else "payload", offset, count)

    def beside(self, is_folder: bool) -> tuple[Path, Path, Path]:
        """Return the payload, and the paths to write the manifest and the tensors kept aside to."""
        payload = self._file("payload")
        if is_folder:
            return payload, *manifest.places(payload, True)
        return payload, self._file("manifest"), self._file("kept")

    # ---- the end

    def publish(self, is_folder: bool) -> None:
        """Assemble the target's files, those that mark a complete checkpoint last, and delete the rest."""
        self._staged.flush()
        job = self.job()
        own, kept = (cast("RemotePath", cast(object, one)).key for one in manifest.places(self.target, False))
        goal = self._path.key
        places = {"payload": goal, "manifest": own, "kept": kept}
        files = self._staged.files()
        keys = {name: places.get(name, f"{goal}/{name.removeprefix('payload/')}") for name in files}
        is_single = "payload" in files
        joined = {name: join(self._staged, name, size, keys[name]) for name, size in files.items()}
        try:
            with ThreadPoolExecutor(AT_ONCE, "attn-bridge-publish") as threads:
                list(threads.map(lambda joined_file: joined_file.prepare(), joined.values()))
                self._check_lease()
                begun = sorted(keys[name] for name, one in joined.items() if one.is_in_parts)
                self._store.put(f"{self._folder}/publishing", json.dumps(begun).encode())
                mark = f"{goal}/{UNFINISHED}"
                if not is_single:
                    self._store.put(mark, b"this checkpoint is being written, or was never finished\n")
                self._clear_target(set(keys.values()) | {mark}, {own, kept, f"{goal}/{ORBAX_COMMITTED}"})
                for rank in range(4):
                    some = [one for name, one in joined.items() if _rank(name) == rank]
                    list(threads.map(lambda joined_file: joined_file.complete(), some))
                self._store.put(f"{self._folder}/committed", b"" if job is None else job.plan.encode())
                if not is_single:
                    self._store.delete([mark])
        except BaseException:
            for joined_file in joined.values():
                joined_file.abort()
            raise
        self.clear()

    def _check_lease(self) -> None:
        if self._lease is not None and not self._lease.is_held():
            raise CheckpointError(f"another conversion has taken over {self.shown}")

    def _clear_target(self, keys: set[str], beside: set[str]) -> None:
        """Delete the files that only an earlier target has, and those that describe it or mark it as finished."""
        below = {f"{self._path.key}/{name}" for name in self._store.below(self._path.key)}
        stale = {*below, *beside, self._path.key} - keys
        self._store.delete(sorted(stale | (beside & keys)))

    def recover(self, plan: str) -> bool:
        """Finish a publication that was killed when all files were there; return whether it was of that plan."""
        stored_plan = self._store.get(f"{self._folder}/committed")
        if stored_plan is None:
            return False
        self._store.delete([f"{self._path.key}/{UNFINISHED}"])
        if stored_plan != plan.encode():
            self._empty()
            self._store.delete([f"{self._folder}/publishing"])
        self._store.forget()
        return bool(stored_plan == plan.encode())

    def clear(self) -> None:
        """Delete all that is here."""
        self._staged.forget()
        publishing = self._store.get(f"{self._folder}/publishing")
        with contextlib.suppress(ValueError):
            abandon(self._store, [key for key in json.loads(publishing or b"[]") if isinstance(key, str)])
        names = sorted(self._store.below(self._folder), key=lambda name: name == "committed")
        self._store.delete([f"{self._folder}/{name}" for name in names if name != "committed"])
        self._store.delete([f"{self._folder}/committed"])
        self._store.forget()


def _rank(name: str) -> int:
    """Return the order of assembly: tensors, then their index, then the manifest, then Orbax's commit marker."""
    last = name.rpartition("/")[2]
    if last == ORBAX_COMMITTED:
        return 3
    if last in ("manifest", manifest.IN_FOLDER):
        return 2
    says = last.endswith(".index.json") or last in (DCP_METADATA, ORBAX_METADATA, "_CHECKPOINT_METADATA")
    return int(says or last in ("kept", configs.CONFIG, "manifest.ocdbt"))
