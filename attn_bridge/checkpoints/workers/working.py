"""A worker: it writes its share of the tasks, reads it back, and notes the digests.

Four steps run concurrently: a chunk is read and rearranged, the previous chunk is hashed and written, and the chunk
before that is read back and compared. A worker that does a whole conversion alone reads nothing back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import quantised
from ..containers.base import CheckpointError, Writer, numpy_dtype
from ..containers.remote import is_remote
from ..elements import CHUNK_AHEAD, Ahead, Elements
from ..manifest import Digest, new_digest
from ..planning.plans import TargetTensor
from ..requests import Prepared
from ..verification import cuts, stamps
from .jobs import Job, JournalEntry, Piece, Task
from .places import StagingPlace
from .places.staging import naming

Advance = Callable[[int, str], None]
"""Called with bytes that were written and read back, or found intact, and the current tensor."""

CHUNK = 1 << 26
"""Maximum bytes of a chunk; four chunks are in memory."""

SPARE = 1 << 26
"""Bytes by which a source tensor that is held as a whole may be larger than a task."""

BLOCK = 1 << 20
"""Bytes that are read back at a time."""


@dataclasses.dataclass
class Open:
    """A piece that is being written."""

    piece: Piece
    target: TargetTensor
    digest: Digest = dataclasses.field(default_factory=new_digest)
    changed: int = 0


@dataclasses.dataclass
class Sole:
    """The single worker of a conversion: one writer writes, and finishes, all of it.

    Attributes:
        writer: of the whole checkpoint.
        budget: bytes that tensors may take in memory.
        entries: pieces that were written, or found intact.
    """

    writer: Writer
    budget: int
    entries: dict[Piece, list[JournalEntry]] = dataclasses.field(default_factory=dict)


def writer_of(prepared: Prepared, staging_area: StagingPlace, *, is_share: bool) -> Writer:
    """Return the writer of a conversion's target: of a worker's share, or of the whole file with its header."""
    infos = [target.info for target in prepared.plan.targets]
    with naming(staging_area.beside(prepared.is_folder)[0], prepared.target, prepared.plan.target_layout):
        return staging_area.writer(prepared.format, infos, prepared.plan.metadata, is_share=is_share)


def work(
    prepared: Prepared,
    staging_area: StagingPlace,
    tasks: Sequence[Task],
    job: Job,
    run: str,
    advance: Advance,
    sole: Sole | None = None,
) -> int:
    """Write tasks except intact pieces of an earlier run, and return the number of those.

    Args:
        prepared: the conversion.
        staging_area: the staging place, entered by the caller.
        tasks: the tasks to write.
        job: its plan selects earlier entries; source tensors larger than its tasks are not loaded whole.
        run: noted with each entry.
        advance: called as bytes are done.
        sole: for the single worker of a conversion, whose writer stays open for the end.

    Raises:
        CheckpointError: the source changed under way, or the disk returns other bytes than were written.
    """
    plan_of = {target.info.name: target for target in prepared.plan.targets}
    files = stamps(prepared.reader)
    writer = writer_of(prepared, staging_area, is_share=True) if sole is None else sole.writer
    pieces = [piece for task in tasks for piece in task.pieces]
    journal = staging_area.entries(job.plan) if writer.random_access else {}
    left = []

    def note(entries: Sequence[JournalEntry]) -> None:
        if writer.random_access:  # a file that is written in order can't be resumed
            staging_area.record(entries)
        if sole is not None:
            sole.entries |= {entry.piece: [entry] for entry in entries}

    try:
        for piece in pieces:
            target = plan_of[piece.name]
            entry = _intact(staging_area, writer, piece, target, journal)
            if entry is None:
                left.append(piece)
                continue
            if entry.run != run:
                note([dataclasses.replace(entry, piece=piece, run=run)])
            advance((piece.stop - piece.start) * target.info.itemsize, piece.name)
        nbytes = sum((piece.stop - piece.start) * plan_of[piece.name].info.itemsize for piece in left)
        staging_area.expect(nbytes, in_one_file=not writer.random_access)
        targets = [(piece, plan_of[piece.name]) for piece in left]
        _write(prepared, staging_area, writer, targets, job.task_bytes, run, advance, note, sole)
        # Digests are of the bytes that were read: a source that changed meanwhile would pass every later check.
        if stamps(prepared.reader, anew=True) != files:
            raise CheckpointError(f"{prepared.reader.path} changed while it was read; convert it again")
        if sole is None:
            writer.flush()
            staging_area.settle()
    except BaseException:
        writer.abort()
        raise
    return len(pieces) - len(left)


def _intact(
    staging_area: StagingPlace,
    writer: Writer,
    piece: Piece,
    target: TargetTensor,
    journal: dict[Piece, list[JournalEntry]],
) -> JournalEntry | None:
    """Return an earlier entry of a piece whose bytes still have its digest, or None."""
    entries = journal.get(piece, [])
    if not entries:
        return None
    try:
        digest = digest_there(staging_area, writer, piece, target.info.itemsize)
    except CheckpointError:
        return None
    return next((entry for entry in entries if entry.digest == digest), None)


def digest_there(staging_area: StagingPlace, writer: Writer, piece: Piece, width: int, *more: Digest) -> str:
    """Return the digest of a piece as stored, and feed its bytes to further digests.

    Raises:
        CheckpointError: the file is missing, or too short.
    """
    digest = new_digest()
    for extent in writer.extents(piece.name, piece.start * width, piece.stop * width):
        for start in range(0, extent.count, BLOCK):
            data = staging_area.read(extent.file, extent.offset + start, min(BLOCK, extent.count - start))
            for hasher in (digest, *more):
                hasher.update(data)
    return digest.hexdigest()


def _write(
    prepared: Prepared,
    staging_area: StagingPlace,
    writer: Writer,
    pieces: Sequence[tuple[Piece, TargetTensor]],
    task_bytes: int,
    run: str,
    advance: Advance,
    note: Callable[[Sequence[JournalEntry]], None],
    sole: Sole | None,
) -> None:
    kept = None if prepared.before is None else prepared.before.kept
    soon = None
    if sole is None:
        is_far = is_remote(prepared.reader.path)
        ranges, coming = itertools.tee(chunks(pieces, min(CHUNK_AHEAD if is_far else CHUNK, task_bytes // 4)))
        elements = Elements(prepared.reader, kept, task_bytes + SPARE)
        if is_far:  # a disk needs no such thing
            needed = ((one.target, start, stop) for one, start, stop in coming)
            soon = Ahead(prepared.reader, elements, needed, task_bytes)
        del coming
    else:
        ranges = within(pieces, sole.budget)
        elements = Elements(prepared.reader, kept, sole.budget)
    reads_back = sole is None and not staging_area.checks_itself
    whole = Whole()
    checks: collections.deque[tuple[Future[None] | None, Any, Open, bool, int, JournalEntry | None]] = (
        collections.deque()
    )

    def read(open_piece: Open, start: int, stop: int) -> tuple[Any, int]:
        where = writer.place(open_piece.piece.name, start * open_piece.target.info.itemsize)
        # a piece of many workers is within its memory
        bounds = (open_piece.piece.start, open_piece.piece.stop) if sole is None else None
        array, count = elements.read(open_piece.target, start, stop, file_offset=where, within=bounds)
        if isinstance(prepared.reader, quantised.Dequantised):
            count += quantised.rounding_losses(prepared.reader, open_piece.target, start, stop)
        return array, count

    def settle() -> None:
        """Wait until the oldest chunk is read back; note its piece if that was its last chunk."""
        check, array, open_piece, is_last, size, entry = checks.popleft()
        if check is not None:
            check.result()
        elements.release(array)
        if is_last:
            note(
                [
                    JournalEntry(open_piece.piece, open_piece.digest.hexdigest(), open_piece.changed, run),
                    *([entry] if entry else []),
                ]
            )
        advance(size, open_piece.piece.name)

    now = next(ranges, None)
    if soon is not None:
        soon.go_on()
    # One thread reads: memory that several ask for in turn is kept for each of them.
    with ThreadPoolExecutor(1, "attn-bridge-read") as reading, ThreadPoolExecutor(2, "attn-bridge-worker") as threads:
        pending = None if now is None else reading.submit(read, *now)
        try:
            while now is not None and pending is not None:
                open_piece, start, stop = now
                array, count = pending.result()
                if soon is not None:
                    soon.taken()
                    soon.go_on()
                now = next(ranges, None)
                pending = None if now is None else reading.submit(read, *now)
                name, width = open_piece.piece.name, open_piece.target.info.itemsize
                bits = array.reshape(-1).view(np.uint8)
                hashing = threads.submit(open_piece.digest.update, bits.data)
                also = (
                    threads.submit(whole.update, open_piece, start, bits.data) if staging_area.checks_itself else None
                )
                writer.write_range(name, start * width, bits.data)
                hashing.result()
                if also is not None:
                    also.result()
                open_piece.changed += count
                is_last = stop == open_piece.piece.stop
                entry = whole.entry(open_piece, run) if is_last else None
                check = (
                    threads.submit(_compare, staging_area, writer, name, start * width, bits) if reads_back else None
                )
                checks.append((check, array, open_piece, is_last, bits.nbytes, entry))
                del bits, array
                # One chunk may be on its way back while the next is written.
                while len(checks) > int(sole is None):
                    settle()
            while checks:
                settle()
        except BaseException:
            for future in (pending, *(check[0] for check in checks)):
                if future is not None:
                    future.cancel()
            raise


class Whole:
    """The digest of a tensor in several pieces, if all of them are written here in order."""

    def __init__(self) -> None:
        self._name, self._stop, self._changed = "", 0, 0
        self._digest = new_digest()

    def update(self, open_piece: Open, start: int, data: Any) -> None:
        """Take the next bytes; they begin with element `start`."""
        if _is_cut(open_piece):
            if start == 0:
                self._name, self._stop, self._changed, self._digest = open_piece.piece.name, 0, 0, new_digest()
            if (open_piece.piece.name, start) == (self._name, self._stop):
                self._digest.update(data)
                self._stop += len(data) // open_piece.target.info.itemsize

    def entry(self, open_piece: Open, run: str) -> JournalEntry | None:
        """Return the entry for a whole tensor after its last piece, else None."""
        if not _is_cut(open_piece) or (open_piece.piece.name, open_piece.piece.stop) != (self._name, self._stop):
            return None
        self._changed += open_piece.changed
        if self._stop * open_piece.target.info.itemsize < open_piece.target.info.nbytes:
            return None
        return JournalEntry(Piece(self._name, 0, self._stop), self._digest.hexdigest(), self._changed, run)


def _is_cut(open_piece: Open) -> bool:
    return (
        open_piece.piece.stop - open_piece.piece.start
    ) * open_piece.target.info.itemsize < open_piece.target.info.nbytes


def chunks(pieces: Sequence[tuple[Piece, TargetTensor]], most: int) -> Iterator[tuple[Open, int, int]]:
    """Yield ranges of elements that take at most `most` bytes, including intermediate results."""
    for piece, target in pieces:
        open_piece = Open(piece, target)
        widest = max(target.info.itemsize, numpy_dtype(target.source_dtype).itemsize)
        cost = 8 if target.is_changed else 2 if target.info.dtype != target.source_dtype else 1
        step = max(1, most // (widest * cost))
        if piece.start == piece.stop:
            yield open_piece, piece.start, piece.stop
        for start in range(piece.start, piece.stop, step):
            yield open_piece, start, min(piece.stop, start + step)


def within(pieces: Sequence[tuple[Piece, TargetTensor]], budget: int) -> Iterator[tuple[Open, int, int]]:
    """Yield whole tensors, or ranges of elements of those that exceed the memory budget in bytes."""
    for piece, target in pieces:
        open_piece = Open(piece, target)
        for start, stop in cuts(target, budget):
            yield open_piece, start, stop


def _compare(staging_area: StagingPlace, writer: Writer, name: str, start: int, data: np.ndarray) -> None:
    """Compare stored bytes with those that were written.

    Raises:
        CheckpointError: they differ.
    """
    done = 0
    for extent in writer.extents(name, start, start + data.nbytes):
        for first in range(0, extent.count, BLOCK):
            count = min(BLOCK, extent.count - first)
            stored_bytes = np.frombuffer(staging_area.read(extent.file, extent.offset + first, count), np.uint8)
            if not _is_same(stored_bytes, data[done : done + count]):
                raise CheckpointError(
                    f"{staging_area.shown}: {name} is not there as it was written, {count} bytes from byte "
                    f"{extent.offset + first} of {extent.file or 'the file'} on: the disk or the memory is at fault"
                )
            done += count
        staging_area.release(extent.file, extent.offset, extent.count)


def _is_same(first: np.ndarray, second: np.ndarray) -> bool:
    """Compare bytes, eight at a time."""
    whole = first.size // 8 * 8
    return np.array_equal(first[:whole].view(np.uint64), second[:whole].view(np.uint64)) and np.array_equal(
        first[whole:], second[whole:]
    )
