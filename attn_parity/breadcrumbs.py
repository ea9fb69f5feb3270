"""Notes on the activity of this process, in memory shared with the process that explains its end."""

from __future__ import annotations

import contextlib
import json
import mmap
from typing import TypedDict

SIZE = 1 << 16
"""Bytes of the memory: notes are a few paths and words."""

_LENGTH = 4
"""Bytes in front of the notes that hold their length."""

_memory: mmap.mmap | None = None


class Notes(TypedDict, total=False):
    """Notes of the child process for its parent.

    Attributes:
        status: exit status, once the command has finished its work.
        phase: side and phase under way, as in `watch.phase`; absent before user code runs.
        names: label of a side -> its name in messages.
        sources: label of a side -> the file of its code.
    """

    status: int
    phase: tuple[str, str]
    names: dict[str, str]
    sources: dict[str, str]


_notes: Notes = {}


def share() -> None:
    """Have the notes shared with the processes that are forked from here on."""
    global _memory
    _memory = mmap.mmap(-1, SIZE)


def note(
    *,
    status: int | None = None,
    phase: tuple[str, str] | None = None,
    names: dict[str, str] | None = None,
    sources: dict[str, str] | None = None,
) -> None:
    """Replace notes; where no process reads them, do nothing."""
    if _memory is None:
        return
    if status is not None:
        _notes["status"] = status
    if phase is not None:
        _notes["phase"] = phase
    if names is not None:
        _notes["names"] = names
    if sources is not None:
        _notes["sources"] = sources
    data = json.dumps(_notes).encode()
    if len(data) <= SIZE - _LENGTH:
        _memory[: _LENGTH + len(data)] = len(data).to_bytes(_LENGTH, "big") + data


def read() -> Notes:
    """Return the notes, also those of a process that has ended; nothing where it ended while it wrote them."""
    notes: Notes = {}
    if _memory is not None:
        with contextlib.suppress(ValueError):
            notes = json.loads(_memory[_LENGTH : _LENGTH + int.from_bytes(_memory[:_LENGTH], "big")])
    return notes
