"""The end of a conversion by workers: every digest is checked, then everything is published at once."""

from __future__ import annotations

from collections.abc import Sequence

from ...printable import printable
from .. import containers, manifest
from ..accompanying import accompany, config_beside
from ..containers.base import CheckpointError, Writer
from ..containers.files import listed
from ..elements import Elements
from ..manifest import DIGEST, new_digest
from ..requests import Prepared
from ..verification import MIN, by_digests, check_dropped, check_kept, check_ties, stamps
from .jobs import Job, JournalEntry, Piece, Progress, Result, Task, shares
from .places import StagingPlace
from .working import SPARE, Sole, chunks, digest_there, writer_of

SHOWN = 8
"""Workers that a line names at most."""


def check_source(prepared: Prepared, budget: int) -> None:
    """Refuse faults of a source beyond its headers: unequal tied tensors, a needed tensor left out, a wrong config.

    Raises:
        CheckpointError: the source has such a fault.
    """
    check_ties(prepared.plan, prepared.reader, budget)
    check_dropped(prepared.plan, prepared.reader)
    check_kept(prepared.before)
    config_beside(prepared.plan, prepared.reader, prepared.config, is_folder=prepared.is_folder)


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
