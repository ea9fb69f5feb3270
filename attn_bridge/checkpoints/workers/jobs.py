"""Data of workers: tasks of a plan, the job that identifies their common plan, and journal entries."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from ...backends import usable_cores
from ...whole_files import JsonObject
from .. import containers
from ..containers.base import CheckpointError, TensorInfo
from ..manifest import DIGEST
from ..planning.plans import Plan
from ..requests import Prepared

USUAL = 256 << 20
"""Default maximum bytes of a task; a worker takes twice as much memory."""

PER_WORKER = 2
"""Minimum tasks per worker: none writes more than its share and a task."""

PACKS = 4
"""Divisor of the task size for small tensors: it makes shares more equal without cutting tensors."""

LEAST = 1 << 12
"""Minimum bytes of a task: a page."""

CORES = 4
"""Processor cores per worker: it reads, rearranges, hashes and writes concurrently."""

BASE = 200 << 20
"""Bytes of memory that a worker takes besides twice its task."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start:stop`` of a target tensor, in C order."""

    name: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A unit of a worker's work.

    Attributes:
        nbytes: its bytes.
        pieces: tensors, or parts of tensors that are larger than a task.
    """

    nbytes: int
    pieces: tuple[Piece, ...]


def size_of(plan: Plan, workers: int = 1, task_bytes: int | None = None) -> int:
    """Return the maximum bytes of a task: `task_bytes`, or fewer if several workers would get unequal shares.

    Raises:
        CheckpointError: a number is too small, or not whole.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise CheckpointError(f"workers ({workers!r}) must be a whole number of at least 1")
    if task_bytes is not None and task_bytes < LEAST:
        raise CheckpointError(f"task-bytes ({task_bytes}) must be at least {LEAST} bytes")
    size = USUAL if task_bytes is None else task_bytes
    if workers > 1:
        size = min(size, -(-plan.nbytes // (PER_WORKER * workers)))
    return max(size, LEAST)


def cut(plan: Plan, size: int, workers: int = 1) -> list[Task]:
    """Return tasks of at most `size` bytes (and an element), in the order of the plan."""
    pack = min(size, -(-plan.nbytes // (PER_WORKER * PACKS * workers))) if workers > 1 else size
    tasks: list[Task] = []
    pieces: list[Piece] = []
    num_bytes = 0
    for target in plan.targets:
        for piece in _cut(target.info, size):
            count = (piece.stop - piece.start) * target.info.itemsize
            if pieces and num_bytes + count > pack:
                tasks.append(Task(num_bytes, tuple(pieces)))
                pieces, num_bytes = [], 0
            pieces.append(piece)
            num_bytes += count
    if pieces:
        tasks.append(Task(num_bytes, tuple(pieces)))
    return tasks


def _cut(info: TensorInfo, size: int) -> Iterator[Piece]:
    """Cut a tensor that is larger than a task, between its rows where those are small: boxes stay boxes."""
    width, whole = info.itemsize, math.prod(info.shape)
    if whole * width <= size:
        yield Piece(info.name, 0, whole)
        return
    rows = (math.prod(info.shape[axis:]) for axis in range(1, len(info.shape)))
    unit = next((row for row in rows if row * width <= size // 8), 1)
    if unit == 1 and size // 8 >= LEAST:
        unit = LEAST // width
    most = max(size // width // unit * unit, 1)
    count = -(-whole // most)
    step = min(most, -(-whole // count // unit) * unit)  # of one size, but for the last
    for start in range(0, whole, step):
        yield Piece(info.name, start, min(whole, start + step))


def shares(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """Return the tasks of each of `count` workers: consecutive tasks, with about equal bytes for all."""
    total, before = sum(task.nbytes for task in tasks), 0
    worker_tasks: list[list[Task]] = [[] for _ in range(count)]
    for task in tasks:
        middle = 2 * before + task.nbytes
        worker_tasks[min(count - 1, middle * count // (2 * total)) if total else 0].append(task)
        before += task.nbytes
    return worker_tasks


def share(tasks: Sequence[Task], index: int, count: int) -> list[Task]:
    """Return the tasks of worker `index` (from 0) of `count`."""
    return shares(tasks, count)[index]


def tasks_of(plan: Plan, format: str, workers: int, task_bytes: int | None) -> list[JsonObject]:
    """Return tasks with the target locations of their bytes, one entry per contiguous range.

    Args:
        plan: the plan to cut.
        workers: how many share them.
        task_bytes: maximum bytes of a task; None: the default.
        format: container of the target; in a sequential container, offsets are not available.
    """
    kind = containers.writer_class(format)
    infos = [target.info for target in plan.targets]
    writer = kind(Path(plan.source.name), infos, plan.metadata, is_share=True) if kind.random_access else None
    by_name = {info.name: info for info in infos}
    descriptions = []
    for task in cut(plan, size_of(plan, workers, task_bytes), workers):
        entries: list[JsonObject] = []
        for piece in task.pieces:
            width, start = by_name[piece.name].itemsize, piece.start
            if writer is None or start == piece.stop:
                entries.append(_entry(piece.name, start, piece.stop, width, by_name[piece.name].file, None))
                continue
            for extent in writer.extents(piece.name, start * width, piece.stop * width):
                stop = start + extent.count // width
                entries.append(_entry(piece.name, start, stop, width, extent.file, extent.offset))
                start = stop
        descriptions.append({"bytes": task.nbytes, "tensors": entries})
    return descriptions


def _entry(name: str, start: int, stop: int, width: int, file: str, offset: int | None) -> dict[str, object]:
    where = {"file": file, "offset": offset}
    return {"name": name, "start": start, "stop": stop, "bytes": (stop - start) * width, **where}


Progress = Callable[[int, int, str], None]
"""Called with the bytes done, all bytes, and the current tensor."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a conversion.

    Attributes:
        target: path of the target.
        digests: name -> digest of its bytes.
        changed: name -> how many of its elements a cast changed.
        resumed: how many tensors an earlier, interrupted run had written.
        restart_reason: why a run with `resume` started from the beginning; "" if it resumed, or `resume` was off.
    """

    target: Path
    digests: dict[str, str]
    changed: dict[str, int]
    resumed: int
    restart_reason: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """One conversion that several workers share.

    Attributes:
        plan: digest of the plan, the source's files, and the container.
        source: path of the source, for messages.
        workers: how many share the tasks.
        task_bytes: maximum bytes of a task.
        options: the options of the plan in the form of the command line, for messages.
    """

    plan: str
    source: str
    workers: int
    task_bytes: int
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, prepared: Prepared, workers: int, task_bytes: int) -> Self:
        """Return the job of a conversion."""
        plan = prepared.plan
        options = {"--format": prepared.format, "--dtype": plan.dtype or "of the source"}
        options |= {"--from": plan.source_layout or "same", "--to": plan.target_layout or "same"}
        return cls(prepared.identity(), str(plan.source), workers, task_bytes, options)

    def to_json(self) -> bytes:
        """Return the job in its stored form."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self | None:
        """Return a stored job, or None if it is damaged."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def difference(self, other: Job) -> str:
        """Return the differences of another job from this one, in words; "" if equal."""
        if self.plan != other.plan:
            named = [f"{name} {said}, not {self.options.get(name)}" for name, said in sorted(other.options.items())
                     if said != self.options.get(name)]  # fmt: skip
            more = f"with {', '.join(named)}" if named else "to be written in another way or of other files"
            return f"of {other.source}, {more}"
        if self.workers != other.workers:
            return f"with {other.workers} workers, not {self.workers}"
        if self.task_bytes != other.task_bytes:
            return f"with tasks of {other.task_bytes} bytes, not {self.task_bytes}"
        return ""


@dataclasses.dataclass(frozen=True, slots=True)
class JournalEntry:
    """A journal entry on elements that a worker wrote and read back.

    Attributes:
        piece: which elements.
        digest: of their bytes.
        changed: how many of them a cast changed.
        run: the run that recorded the entry, which does not need to read its own elements again.
    """

    piece: Piece
    digest: str
    changed: int
    run: str

    def to_json(self) -> JsonObject:
        """Return it as a line of a journal."""
        fields = {"name": self.piece.name, "start": self.piece.start, "stop": self.piece.stop, DIGEST: self.digest}
        return {**fields, "changed": self.changed, "run": self.run}

    @classmethod
    def from_json(cls, line: JsonObject) -> Self:
        """Return the entry of a journal line.

        Raises:
            KeyError: a key is missing.
        """
        return cls(Piece(line["name"], line["start"], line["stop"]), line[DIGEST], line["changed"], line["run"])


class Helpers(Protocol):
    """Workers of a run that do shares of its tasks in other processes."""

    def check(self) -> None:
        """Raise the first error of a worker."""

    def wait(self) -> None:
        """Wait until all workers have ended, and raise the first error."""

    def stop(self) -> None:
        """End all of them."""


def most() -> int:
    """Return the maximum number of workers on this machine."""
    return 8 * max(8, usable_cores())


def job_of(prepared: Prepared, workers: int, task_bytes: int | None, max_memory: int | None = None) -> Job:
    """Return the job of a conversion by `workers` workers.

    Raises:
        CheckpointError: a number is not valid, the memory is too little, or a path exists in this process only.
    """
    plan = prepared.plan
    size = size_of(plan, workers, task_bytes)
    alone = next((one for one in (plan.source, prepared.target) if str(one).startswith("memory:")), None)
    if alone is not None and workers > 1:
        raise CheckpointError(f"{alone} is in the memory of this process, where no other of {workers} workers finds it")
    if max_memory is not None:
        room = (max_memory // workers - BASE) // 2
        if room < 1 << 20:
            raise CheckpointError(
                f"max-memory ({max_memory}) is too little for {workers} workers: each takes {BASE} bytes and two tasks"
            )
        size = size_of(plan, workers, min(size, room))
    return Job.of(prepared, workers, size)
