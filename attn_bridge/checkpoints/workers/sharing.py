"""A worker started independently on any machine; workers share source, target and plan alone."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence

from .. import containers
from ..containers.base import CheckpointError
from ..requests import Prepared
from .conducting import adding
from .finishing import check_published, finish, missing, published
from .jobs import Job, Progress, Result, Task, cut, share
from .places import Place, place_of, staging
from .working import work


@dataclasses.dataclass(frozen=True)
class Worked:
    """Outcome of one of several workers.

    Attributes:
        result: the result of the conversion; None while other workers have unwritten tasks.
        waits_for: those workers, in words.
        was_there: whether the target had been published before.
    """

    result: Result | None
    waits_for: tuple[str, ...] = ()
    was_there: bool = False


def worker(prepared: Prepared, job: Job, index: int, progress: Progress) -> Worked:
    """Write the share of one worker, and publish if it was the last.

    A worker that is started again resumes, and a worker that starts after publication succeeds.

    Args:
        prepared: the conversion.
        job: how it is shared; the same for all workers.
        index: the number of this worker, from 0.
        progress: called with the bytes of the share that are done, all of them, and the current tensor.

    Raises:
        CheckpointError: other workers have another job, the target exists or can't be written, the source changed under
            way.
    """
    containers.check_shared(prepared.format)
    place = place_of(prepared.target)
    place.check(prepared.reader, prepared.is_folder)
    tasks = cut(prepared.plan, job.task_bytes, job.workers)
    mine = share(tasks, index, job.workers)
    advance = adding(progress, sum(task.nbytes for task in mine))
    if place.job() is None:
        if not place.is_free() and check_published(prepared, mine, job.task_bytes):
            return Worked(published(prepared), was_there=True)
        place.check_free(prepared.options.overwrite)
    token = uuid.uuid4().hex
    with place.among():
        _agree(place, job, index, prepared.options.resume)
        if not place.was_published():
            place.check_free(prepared.options.overwrite)
            with _kept(place):
                work(prepared, place, mine, job, token, advance)
            left = missing(job, tasks, place.entries(job.plan))
            if left:
                return Worked(None, tuple(left))
        if not place.take_over():
            return Worked(None)
        return _finish(prepared, place, job, tasks, token, progress)


def finish_by_hand(prepared: Prepared, progress: Progress) -> Worked:
    """Check every digest of the workers' output, and publish it; a published target stays as it is.

    Raises:
        CheckpointError: output is missing, or its bytes differ from those that were written.
    """
    place = place_of(prepared.target)
    place.check(prepared.reader, prepared.is_folder)
    job = place.job()
    if job is None:
        if not place.is_free() and check_published(prepared, (), 0):
            return Worked(published(prepared), was_there=True)
        raise CheckpointError(f"no workers have written anything for {prepared.target}: there is no {place.shown}")
    with place.alone():
        here = place.job() or job
        mine = Job.of(prepared, here.workers, here.task_bytes)
        if here.plan != mine.plan:
            raise CheckpointError(f"{place.shown} is of another conversion: {mine.difference(here)}")
        tasks = cut(prepared.plan, here.task_bytes, here.workers)
        return _finish(prepared, place, here, tasks, "", progress)


def _finish(
    prepared: Prepared, place: Place, job: Job, tasks: Sequence[Task], token: str, progress: Progress
) -> Worked:
    if place.recover(job.plan):
        place.clear()
        return Worked(published(prepared), was_there=True)
    place.check_free(prepared.options.overwrite)
    result = finish(prepared, place, job, tasks, token, is_source_checked=False, progress=progress)
    return Worked(result)


def _agree(place: Place, job: Job, index: int, resume: bool) -> None:
    """Check that all workers write the same plan in the same shares.

    Raises:
        CheckpointError: they don't.
    """
    deadline = time.monotonic() + staging.PATIENCE
    while True:
        if place.job() is None and not place.is_fit(job.plan):
            if not place.replace_if_alone(job, anew=True):
                time.sleep(0.05)
            continue
        here = place.begin(job, anew=False)
        difference = job.difference(here)
        if not difference:
            return
        said = f"worker {index}/{job.workers}: {place.shown} is of a conversion {difference}"
        if here.plan != job.plan or not (resume or here.workers == 1):  # what one process left has no other workers
            more = "" if here.plan != job.plan else "; --resume goes on with these once none of those is left"
            raise CheckpointError(f"{said}{more}; {place.removal}")
        if place.replace_if_alone(job):
            return
        if time.monotonic() > deadline:
            raise CheckpointError(f"{said}, which are still at work")
        time.sleep(0.05)


@contextlib.contextmanager
def _kept(place: Place) -> Iterator[None]:
    """Mention in errors that the worker's leftovers are kept for the others."""
    said = f"{place.shown} is kept: the same command goes on from it, {place.removal}"
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{error}; {said}") from None
    except BaseException as error:
        error.add_note(said)
        raise
