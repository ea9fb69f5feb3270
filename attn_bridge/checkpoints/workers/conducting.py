"""One run with one worker or several: it starts them, does a share itself, checks every digest and publishes at once.

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
from ...printable import printable
from .. import containers, copying, manifest
from ..accompanying import accompany, check_kept_aside, config_beside
from ..containers.base import CheckpointError, DiskFullError, Writer
from ..containers.files import listed
from ..containers.remote import is_remote, is_url
from ..elements import Elements
from ..manifest import DIGEST, new_digest
from ..planning.plans import Plan
from ..requests import Prepared, Request
from ..verification import MIN, budget_of, by_digests, check_dropped, check_kept, check_ties, stamps
from .jobs import CORES, Helpers, Job, JournalEntry, Piece, Progress, Result, Task, cut, job_of, most, share, shares
from .places import StagingPlace, place_of
from .places.staging import naming
from .working import SPARE, Advance, Sole, chunks, digest_there, work, writer_of

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


def check(prepared: Prepared) -> None:
    """Refuse what `run` would refuse by headers and paths alone; nothing is written.

    Raises:
        CheckpointError: the target exists or can't be there, its container can't hold a tensor, or a config is wrong.
    """
    staging_area = place_of(prepared.target)
    staging_area.check(prepared.reader, prepared.is_folder)
    if not prepared.options.resume:  # with it, a target that this very conversion has published is no error
        staging_area.check_free(prepared.options.overwrite)
    writer_of(
        prepared, staging_area, is_share=containers.writer_class(prepared.format).random_access
    ).abort()  # all checks are in its constructor, which writes nothing
    check_headers(prepared, staging_area)


def check_headers(prepared: Prepared, staging_area: StagingPlace) -> None:
    """Refuse files next to the target that can't be written: tensors kept aside, and the config.json."""
    kept = staging_area.beside(prepared.is_folder)[2]
    with naming(kept, prepared.target, ""):
        check_kept_aside(prepared.plan, prepared.reader, prepared.before, kept)
    config_beside(prepared.plan, prepared.reader, prepared.config, is_folder=prepared.is_folder)


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

    check_headers(prepared, staging_area)
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


SHOWN = 8
"""Workers that a line names at most."""


def check_source(prepared: Prepared, budget: int) -> None:
    """Refuse faults of a source beyond its headers: unequal tied tensors, a needed tensor left out.

    Raises:
        CheckpointError: the source has such a fault.
    """
    check_ties(prepared.plan, prepared.reader, budget)
    check_dropped(prepared.plan, prepared.reader)
    check_kept(prepared.before)


def missing(job: Job, tasks: Sequence[Task], journal: dict[Piece, list[JournalEntry]]) -> list[str]:
    """Return lines on the workers with unwritten tasks."""
    lines = []
    for index, mine in enumerate(shares(tasks, job.workers)):
        left = [task for task in mine if any(piece not in journal for piece in task.pieces)]
        if left:
            lines.append(f"{index}/{job.workers} ({len(left)} of {len(mine)} tasks)")
    return lines


def finish(
    prepared: Prepared,
    staging_area: StagingPlace,
    job: Job,
    tasks: Sequence[Task],
    run: str,
    *,
    is_source_checked: bool,
    progress: Progress,
    sole: Sole | None = None,
) -> Result:
    """Check every digest, write headers, indexes and accompanying files, and publish.

    Args:
        prepared: the conversion.
        staging_area: the staging place of its tensors, locked by the caller for exclusive use.
        job: the completed job.
        tasks: all of them.
        run: entries of this run were already read back, and are not read again.
        is_source_checked: whether `check_source` was called.
        progress: called with bytes that were read, all bytes, and the current tensor.
        sole: the single worker that wrote everything, if any.

    Raises:
        CheckpointError: something is missing, was changed, or can't be published.
    """
    plan, reader = prepared.plan, prepared.reader
    files = stamps(reader)
    journal = staging_area.entries(job.plan) if sole is None else sole.entries
    budget = job.task_bytes + SPARE if sole is None else sole.budget
    left = missing(job, tasks, journal)
    if left:
        raise CheckpointError(
            f"{staging_area.shown} is not complete: these workers have yet to write: {listed(left, SHOWN)}"
        )
    if not is_source_checked:
        check_source(prepared, budget)
    writer = writer_of(prepared, staging_area, is_share=False) if sole is None else sole.writer
    try:
        digests, changed = _check(prepared, staging_area, writer, job, tasks, journal, run, progress)
        if stamps(reader, anew=True) != files or (sole is None and prepared.identity() != job.plan):
            raise CheckpointError(f"{reader.path} changed while it was read; convert it again")
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    is_folder = prepared.is_folder
    own = config_beside(plan, reader, prepared.config, is_folder=is_folder)
    elements = Elements(reader, None if prepared.before is None else prepared.before.kept, budget)
    places = staging_area.beside(is_folder)
    accompany(plan, reader, elements, prepared.before, *places, digests, own, budget, is_folder=is_folder)
    staging_area.check_free(prepared.options.overwrite)
    staging_area.publish(prepared.is_folder)
    return Result(prepared.target, digests, changed, 0)


def _check(
    prepared: Prepared,
    staging_area: StagingPlace,
    writer: Writer,
    job: Job,
    tasks: Sequence[Task],
    journal: dict[Piece, list[JournalEntry]],
    run: str,
    progress: Progress,
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the digest of each tensor, and how many of its elements a cast changed."""
    by_name: dict[str, list[Piece]] = {}
    for task in tasks:
        for piece in task.pieces:
            by_name.setdefault(piece.name, []).append(piece)
    digests: dict[str, str] = {}
    changed: dict[str, int] = {}
    done, total = 0, prepared.plan.nbytes
    for target in prepared.plan.targets:
        name, pieces = target.info.name, by_name[target.info.name]
        whole, count = new_digest(), 0
        seen = [
            own_entries[-1]
            for piece in pieces
            if (own_entries := [entry for entry in journal[piece] if entry.run == run])
        ]
        at_once = [one for one in journal.get(Piece(name, 0, pieces[-1].stop), ()) if one.run == run]
        if len(pieces) > 1 and at_once and len(seen) == len(pieces):  # a worker of this run wrote all of it, in order
            digests[name], count = at_once[-1].digest, at_once[-1].changed
            if count:
                changed[name] = count
            done += target.info.nbytes
            progress(done, total, f"checking {name}")
            continue
        for piece in pieces:
            own = [entry for entry in journal[piece] if entry.run == run]
            digest = own[-1].digest if own else ""
            if not own or len(pieces) > 1:
                digest = digest_there(
                    staging_area, writer, piece, target.info.itemsize, *([whole] if len(pieces) > 1 else [])
                )
            entry = next((entry for entry in own or journal[piece] if entry.digest == digest), None)
            if entry is None:
                owner = next(
                    number
                    for number, mine in enumerate(shares(tasks, job.workers))
                    if any(piece in task.pieces for task in mine)
                )
                raise CheckpointError(
                    f"{staging_area.shown}: {printable(name)} has other bytes than were written; worker "
                    f"{owner}/{job.workers} has to run again"
                )
            count += entry.changed
            done += (piece.stop - piece.start) * target.info.itemsize
            progress(done, total, f"checking {name}")
        digests[name] = whole.hexdigest() if len(pieces) > 1 else digest
        if count:
            changed[name] = count
    return digests, changed


def check_published(prepared: Prepared, mine: Sequence[Task], task_bytes: int) -> bool:
    """Return whether the target is the output of this conversion: by its manifest, and a share by each of its bytes.

    Args:
        prepared: the conversion.
        mine: the share.
        task_bytes: maximum bytes of a task.
    """
    plan = prepared.plan
    try:
        with containers.open_reader(prepared.target, prepared.format) as target_reader:
            target_manifest = manifest.of(target_reader, prepared.target)
            wanted = {one.info.name: (one.info.dtype, list(one.info.shape)) for one in plan.targets}
            if target_manifest is None or (target_manifest.layout, target_manifest.dtype) != (
                plan.target_layout,
                plan.dtype,
            ):
                return False
            if {name: (one.get("dtype"), one.get("shape")) for name, one in target_manifest.tensors.items()} != wanted:
                return False
            kept = None if prepared.before is None else prepared.before.kept
            elements = Elements(prepared.reader, kept, task_bytes + SPARE)
            targets = {one.info.name: one for one in plan.targets}
            pieces = [(piece, targets[piece.name]) for task in mine for piece in task.pieces]
            for open_piece, start, stop in chunks(pieces, MIN):
                width = open_piece.target.info.itemsize
                array, _ = elements.read(open_piece.target, start, stop)
                same = array.tobytes() == bytes(
                    target_reader.read_range(open_piece.piece.name, start * width, stop * width)
                )
                elements.release(array)
                if not same:
                    return False
    except (CheckpointError, OSError):
        return False
    return True


def is_intact(prepared: Prepared, progress: Progress) -> bool:
    """Return whether an existing target's bytes match its manifest."""
    try:
        with containers.open_reader(prepared.target, prepared.format) as target_reader:
            target_manifest = manifest.of(target_reader, prepared.target)
            return target_manifest is not None and not by_digests(target_reader, target_manifest, progress)
    except CheckpointError:
        return False


def published(prepared: Prepared) -> Result:
    """Return the result for an existing target, from its manifest."""
    with containers.open_reader(prepared.target, prepared.format) as target_reader:
        target_manifest = manifest.of(target_reader, prepared.target)
    tensors = {} if target_manifest is None else target_manifest.tensors
    return Result(prepared.target, {name: one[DIGEST] for name, one in tensors.items()}, {}, len(tensors))
