"""What workers have in common: the job, by which they know that they write the same, and what they note of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ..digests import KEY
from ..planning.tasks import Piece
from ..requests import Prepared

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, all bytes, and the tensor at hand."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a conversion did.

    Attributes:
        target: path of what was written.
        digests: name -> digest of its bytes.
        changed: name -> how many of its elements a cast changed.
        resumed: how many tensors an earlier, interrupted run had written.
        restart_reason: why a run that was to go on where an earlier one stopped did not; "" if it did, or was not to.
    """

    target: Path
    digests: dict[str, str]
    changed: dict[str, int]
    resumed: int
    restart_reason: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """One conversion that several workers carry out.

    Attributes:
        plan: what is written, of which files of the source, and in which container; a digest.
        source: path of the source, for messages.
        workers: how many share the tasks.
        task_bytes: bytes of a task, at most.
        options: what the plan was asked for, as the command line has it, for messages.
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
        """Return the job as it is stored."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self | None:
        """Return a job as it was stored, or None where that is damaged."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def difference(self, other: Job) -> str:
        """Say what another job has that this one has not; "" where nothing."""
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
class Entry:
    """What a worker notes of elements that it wrote and read back.

    Attributes:
        piece: which elements.
        digest: of their bytes.
        changed: how many of them a cast changed.
        run: by which run that was found; one that trusts itself need not read them again.
    """

    piece: Piece
    digest: str
    changed: int
    run: str

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of a journal."""
        found = {"name": self.piece.name, "start": self.piece.start, "stop": self.piece.stop, KEY: self.digest}
        return {**found, "changed": self.changed, "run": self.run}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Self:
        """Return a line of a journal.

        Raises:
            KeyError: it is none.
        """
        return cls(Piece(line["name"], line["start"], line["stop"]), line[KEY], line["changed"], line["run"])
