"""Staging places of a conversion: locks, the job, journals, the payload, and its publication.

`StagingPlace` is their interface; `local` is a folder next to the target, `stored` are objects of a store.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ...containers.base import Reader, TensorInfo, Writer
from ...containers.remote import is_remote
from ..jobs import Job, JournalEntry, Piece

__all__ = ["StagingPlace", "place_of"]


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


def place_of(target: Path) -> StagingPlace:
    """Return the staging place of a target: a folder next to it, or objects of its store."""
    if is_remote(target):
        from .stored import StoredPlace

        return StoredPlace(target)
    from .local import LocalPlace

    return LocalPlace(target)
