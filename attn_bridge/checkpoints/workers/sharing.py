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
from .conducting import adding, check_headers, check_published, finish, missing, published
from .jobs import Job, Progress, Result, Task, cut, share
from .places import StagingPlace, place_of, staging
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
    staging_area = place_of(prepared.target)
    staging_area.check(prepared.reader, prepared.is_folder)
    tasks = cut(prepared.plan, job.task_bytes, job.workers)
    mine = share(tasks, index, job.workers)
    advance = adding(progress, sum(task.nbytes for task in mine))
    if staging_area.job() is None:
        if not staging_area.is_free() and check_published(prepared, mine, job.task_bytes):
            return Worked(published(prepared), was_there=True)
        staging_area.check_free(prepared.options.overwrite)
    check_headers(prepared, staging_area)
    token = uuid.uuid4().hex
    with staging_area.among():
        _agree(staging_area, job, index, prepared.options.resume)
        if not staging_area.was_published():
            staging_area.check_free(prepared.options.overwrite)
            with _kept(staging_area):
                work(prepared, staging_area, mine, job, token, advance)
            left = missing(job, tasks, staging_area.entries(job.plan))
            if left:
                return Worked(None, tuple(left))
        if not staging_area.take_over():
            return Worked(None)
        return _finish(prepared, staging_area, job, tasks, token, progress)


def finish_by_hand(prepared: Prepared, progress: Progress) -> Worked:
    """Check every digest of the workers' output, and publish it; a published target stays as it is.

    Raises:
        CheckpointError: output is missing, or its bytes differ from those that were written.
    """
    staging_area = place_of(prepared.target)
    staging_area.check(prepared.reader, prepared.is_folder)
    job = staging_area.job()
    if job is None:
        if not staging_area.is_free() and check_published(prepared, (), 0):
            return Worked(published(prepared), was_there=True)
        raise CheckpointError(
            f"no workers have written anything for {prepared.target}: there is no {staging_area.shown}"
        )
    with staging_area.alone():
        current_job = staging_area.job() or job
        mine = Job.of(prepared, current_job.workers, current_job.task_bytes)
        if current_job.plan != mine.plan:
            raise CheckpointError(f"{staging_area.shown} is of another conversion: {mine.difference(current_job)}")
        tasks = cut(prepared.plan, current_job.task_bytes, current_job.workers)
        return _finish(prepared, staging_area, current_job, tasks, "", progress)


def _finish(
    prepared: Prepared, staging_area: StagingPlace, job: Job, tasks: Sequence[Task], token: str, progress: Progress
) -> Worked:
    if staging_area.recover(job.plan):
        staging_area.clear()
        return Worked(published(prepared), was_there=True)
    staging_area.check_free(prepared.options.overwrite)
    result = finish(prepared, staging_area, job, tasks, token, is_source_checked=False, progress=progress)
    return Worked(result)


def _agree(staging_area: StagingPlace, job: Job, index: int, resume: bool) -> None:
    """Check that all workers write the same plan in the same shares.

    Raises:
        CheckpointError: they don't.
    """
    deadline = time.monotonic() + staging.PATIENCE
    while True:
        if staging_area.job() is None and not staging_area.is_fit(job.plan):
            if not staging_area.replace_if_alone(job, anew=True):
                time.sleep(0.05)
            continue
        current_job = staging_area.begin(job, anew=False)
        difference = job.difference(current_job)
        if not difference:
            return
        message = f"worker {index}/{job.workers}: {staging_area.shown} is of a conversion {difference}"
        if current_job.plan != job.plan or not (
            resume or current_job.workers == 1
        ):  # what one process left has no other workers
            more = "" if current_job.plan != job.plan else "; --resume goes on with these once none of those is left"
            raise CheckpointError(f"{message}{more}; {staging_area.removal}")
        if staging_area.replace_if_alone(job):
            return
        if time.monotonic() > deadline:
            raise CheckpointError(f"{message}, which are still at work")
        time.sleep(0.05)


@contextlib.contextmanager
def _kept(staging_area: StagingPlace) -> Iterator[None]:
    """Mention in errors that the worker's leftovers are kept for the others."""
    hint = f"{staging_area.shown} is kept: the same command goes on from it, {staging_area.removal}"
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{error}; {hint}") from None
    except BaseException as error:
        error.add_note(hint)
        raise
