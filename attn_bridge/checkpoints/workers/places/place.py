"""What workers ask of the place that they write to."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...containers.base import Reader, TensorInfo, Writer
from ..jobs import Entry, Job, Piece


class Place(abc.ABC):
    """What is written before it is published, and what is noted about it.

    Attributes:
        shown: its name in messages.
        leftover: how what is left of a failed run is gone on from or removed, in words.
        removal: the end of that, how it is removed.
    """

    shown: str
    leftover: str
    removal: str

    checks_itself: ClassVar[bool] = False
    """Whether what is written is held against what the place has as it is written, so that nothing is read back."""

    def expect(self, nbytes: int, *, in_one_file: bool = False) -> None:  # noqa: B027 - a disk need not know
        """Learn how many bytes a worker is about to write, and whether one file holds all of them."""

    def settle(self) -> None:  # noqa: B027 - a disk holds it by then
        """Have the place hold all that was written and noted."""

    def release(self, file: str, offset: int, count: int) -> None:  # noqa: B027 - a store keeps none of it in memory
        """Learn that bytes of the payload were read back, and need not be kept in memory for that any more."""

    @abc.abstractmethod
    def check(self, reader: Reader, is_folder: bool) -> None:
        """Refuse a target that can't be written to, whose name is too long, or that lies in the source."""

    @abc.abstractmethod
    def check_free(self, overwrite: bool) -> None:
        """Refuse a target that is there and may not be replaced."""

    @abc.abstractmethod
    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Hold the place for one run and the workers that it starts."""

    @abc.abstractmethod
    def among(self) -> contextlib.AbstractContextManager[None]:
        """Hold the place as one of the workers that were started by themselves."""

    @abc.abstractmethod
    def helping(self, job: Job) -> contextlib.AbstractContextManager[None]:
        """Hold the place as a worker of a run that has it alone."""

    @abc.abstractmethod
    def take_over(self) -> bool:
        """Hold the place alone, as one of the workers, until it is left; return whether no other worker is there."""

    @abc.abstractmethod
    def job(self) -> Job | None:
        """Return the job that is carried out here."""

    @abc.abstractmethod
    def begin(self, job: Job, *, anew: bool) -> Job:
        """Note a job where there is none, and return the one that is here; anew: delete what is here before."""

    @abc.abstractmethod
    def replace(self, job: Job) -> None:
        """Note another job in place of the one that is here, and keep what was written."""

    @abc.abstractmethod
    def replace_if_alone(self, job: Job, *, anew: bool = False) -> bool:
        """Do so as one of several workers, if no other is there; tell whether that was done."""

    @abc.abstractmethod
    def is_fit(self, plan: str) -> bool:
        """Tell whether nothing is here that another plan left behind."""

    @abc.abstractmethod
    def is_free(self) -> bool:
        """Tell whether nothing is where the target goes."""

    @abc.abstractmethod
    def was_published(self) -> bool:
        """Tell whether a publication was begun that has yet to be finished or undone."""

    @abc.abstractmethod
    def record(self, entries: Sequence[Entry]) -> None:
        """Note what was written."""

    @abc.abstractmethod
    def entries(self, plan: str) -> dict[Piece, list[Entry]]:
        """Return all that was noted by runs of that plan; tensors that were written by no worker end at -1."""

    @abc.abstractmethod
    def writer(
        self, format: str, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any], *, is_share: bool
    ) -> Writer:
        """Return what writes elements, or, not a share, what goes around them."""

    @abc.abstractmethod
    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Return bytes of the payload as the place has them, until the thread reads the next ones."""

    @abc.abstractmethod
    def beside(self, is_folder: bool) -> tuple[Path, Path, Path]:
        """Return the payload's folder, and where the manifest and what is kept aside are written to."""

    @abc.abstractmethod
    def publish(self, is_folder: bool) -> None:
        """Put everything in its place, all at once as far as a reader sees, and delete the rest."""

    @abc.abstractmethod
    def recover(self, plan: str) -> bool:
        """Finish or undo a publication that was killed; return whether the target of that plan is published by it."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete all that is here."""
