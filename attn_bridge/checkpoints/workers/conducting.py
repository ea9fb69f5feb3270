"""One run with one worker or several: it starts them, does a share itself, and publishes at the end.

Workers of this machine are started as `executors` run them, none where this process does all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...backends import usable_cores
from .. import containers, copying
from ..containers.base import CheckpointError, DiskFullError
from ..containers.remote import is_remote, is_url
from ..planning.plans import Plan
from ..requests import Prepared, Request
from ..verification import budget_of
from .finishing import check_published, check_source, finish, is_intact, published
from .jobs import CORES, Helpers, Job, Progress, Result, cut, job_of, most, share, shares
from .places import StagingPlace, place_of
from .working import SPARE, Advance, Sole, work, writer_of

if TYPE_CHECKING:
    from .executors.nursery import Nursery

WORTH = 2 << 30
"""Bytes per additional worker, where the user gives no number."""

Start = Callable[[Prepared, Job, str, Sequence[int], Advance], Helpers]
"""Starts the workers with these numbers for a job and a run; they report the bytes done."""


def usual(plan: Plan) -> int:
    """Return the number of workers for this machine: a single one for small plans or few cores."""
    return max(1, min(8, usable_cores() // CORES, plan.nbytes // WORTH))


def chosen(
    prepared: Prepared,
    workers: int | None,
    task_bytes: int | None,
    max_memory: int | None,
    *,
    is_elsewhere: bool = False,
) -> tuple[Job, int | None]:
    """Return the job of a conversion; for a single process also the memory budget of tensors in bytes, else None.

    Args:
        prepared: the conversion.
        workers: number of workers; None: by cores and size.
        task_bytes: maximum bytes of a task; None: the default.
        max_memory: bytes of memory that all workers of this machine stay within together.
        is_elsewhere: whether other processes than this one do the work.
    """
    if not containers.writer_class(prepared.format).random_access:
        return sole_job(prepared, max_memory)
    count = usual(prepared.plan) if workers is None else workers
    if count > most() and not is_elsewhere:
        raise CheckpointError(
            f"workers ({count}): this machine starts {most()} at most; for more, see --worker and --ray"
        )
    job = job_of(prepared, count, task_bytes, max_memory if count != 1 or task_bytes is not None else None)
    if count > 1 or is_elsewhere or task_bytes is not None or is_remote(prepared.target):
        return job, None
    return sole_job(prepared, max_memory)


def sole_job(prepared: Prepared, max_memory: int | None) -> tuple[Job, int]:
    """Return the job of a conversion by one process, tensor by tensor, and the memory budget of tensors in bytes.

    Raises:
        CheckpointError: the bound is too small.
    """
    budget = budget_of(prepared.plan, max_memory)
    return Job.of(prepared, 1, budget), budget


def run(
    prepared: Prepared,
    job: Job,
    start: Start | None,
    works_itself: bool,
    progress: Progress,
    budget: int | None = None,
) -> Result:
    """Have all workers of a job write their shares, and publish.

    The target appears only when all of it is written and on disk.

    Args:
        prepared: the conversion; its options decide whether a target is replaced, and whether an interrupted run of the
            same plan, with any number of workers, is resumed.
        job: how it is shared.
        start: starts other workers, if any.
        works_itself: whether this process does the first share.
        progress: called with the bytes that all workers have done, all bytes, and the current tensor.
        budget: for a conversion by this process alone, tensor by tensor: the memory budget of tensors in bytes.

    Raises:
        CheckpointError: another target exists or it can't be written, the source changed, or a worker failed.
    """
    options, staging_area = prepared.options, place_of(prepared.target)
    staging_area.check(prepared.reader, prepared.is_folder)
    tasks = cut(prepared.plan, job.task_bytes if budget is None else max(1, prepared.plan.nbytes), job.workers)
    if staging_area.job() is None:
        is_again = options.resume and not options.overwrite and not staging_area.is_free()
        if is_again and check_published(prepared, tasks, job.task_bytes):  # the run ended after it had published
            return published(prepared)
        staging_area.check_free(options.overwrite)
    advance = adding(progress, prepared.plan.nbytes)
    is_resumable = containers.writer_class(prepared.format).random_access

    with staging_area.alone():
        if staging_area.recover(job.plan) and is_intact(prepared, progress):
            result = published(prepared)
            staging_area.clear()
            return result
        staging_area.check_free(options.overwrite)
        journal = staging_area.entries(job.plan) if options.resume and is_resumable else {}
        reason = "" if journal or not options.resume else _why_anew(prepared, staging_area, job, is_resumable)
        token = uuid.uuid4().hex
        with _leftovers(staging_area, job, is_resumable):
            if staging_area.begin(job, anew=not journal) != job:
                staging_area.replace(job)
            busy = [index for index, mine in enumerate(shares(tasks, job.workers)) if mine]
            others = [index for index in busy if index or not works_itself]
            helpers = start(prepared, job, token, others, advance) if others and start is not None else None
            try:
                check_source(prepared, job.task_bytes + SPARE if budget is None else budget)
                sole = None if budget is None else Sole(writer_of(prepared, staging_area, is_share=False), budget)
                intact = 0
                if works_itself:

                    def checked(count: int, name: str) -> None:
                        advance(count, name)
                        if helpers is not None:
                            helpers.check()

                    mine = share(tasks, 0, job.workers)
                    with staging_area.helping(job), copying.beside(job.workers):
                        intact = work(prepared, staging_area, mine, job, token, checked, sole)
                if helpers is not None:
                    helpers.wait()
            finally:
                if helpers is not None:
                    helpers.stop()
            result = finish(
                prepared,
                staging_area,
                job,
                tasks,
                token,
                is_source_checked=True,
                progress=progress if sole is None else (lambda done, total, name: None),  # nothing is read again
                sole=sole,
            )
    if budget is None:
        intact = len({piece.name for piece in journal} & set(result.digests))
    elif journal and not intact:
        reason = "nothing of what was written is intact"
    return dataclasses.replace(result, resumed=intact, restart_reason=reason)


def _why_anew(prepared: Prepared, staging_area: StagingPlace, job: Job, is_resumable: bool) -> str:
    """Return why the run cannot resume, in words."""
    before = staging_area.job()
    if not is_resumable and before is not None and before.plan == job.plan:
        return f"a file of {containers.writer_class(prepared.format).format} is written from its beginning on"
    return "no interrupted run of this very conversion was found"


def adding(progress: Progress, total: int) -> Advance:
    """Return a thread-safe callback that adds to the byte count and reports the total."""
    lock, done = threading.Lock(), 0

    def advance(count: int, name: str) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total, name)

    return advance


@contextlib.contextmanager
def _leftovers(staging_area: StagingPlace, job: Job, is_resumable: bool) -> Iterator[None]:
    """Describe the leftovers of a failed run in its error; delete them if useless for a resume or on a full disk."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DiskFullError) or _is_useless(staging_area, job, is_resumable):
            staging_area.clear()
            raise
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}; {staging_area.leftover}") from None
        error.add_note(staging_area.leftover)
        raise


def _is_useless(staging_area: StagingPlace, job: Job, is_resumable: bool) -> bool:
    """Return whether the staging folder is useless for a resume; False if the store does not answer."""
    try:
        return not staging_area.was_published() and not (is_resumable and staging_area.entries(job.plan))
    except CheckpointError:  # a store that doesn't answer
        return False


@contextlib.contextmanager
def early(request: Request, workers: int | None) -> Iterator[Nursery | None]:
    """Begin a nursery where a conversion may need one: of a store, by several workers."""
    urls = [one for one in (request.source, request.target) if is_url(one)]
    count = (os.cpu_count() or 1) // CORES if workers is None else workers
    if not urls or isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= most():
        yield None
        return
    from .executors.nursery import Nursery

    with Nursery([url.partition(":")[0] for url in urls]) as nursery:
        if workers is not None:
            with contextlib.suppress(TypeError):  # settings that are not JSON are refused elsewhere
                nursery.expect(request, count - 1)
        yield nursery


def start(
    request: Request, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance
) -> Helpers:
    """Start workers of these numbers on this machine."""
    from .executors.nursery import Nursery
    from .executors.processes import Processes

    if Processes.may_fork():
        return Processes(prepared, job, run, indices, advance)
    return Nursery(()).start(request, prepared, job, run, indices, advance)
