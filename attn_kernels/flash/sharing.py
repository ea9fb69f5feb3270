"""Sharing of a call's work among threads, for any caller: each takes the next task until none is left."""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler.language import Array, Code, Value
from .softmax import QUERIES

_TASKS_PER_THREAD = 4
"""Tasks that a thread should find at least, as they are not all of one length."""


def divide(job: Array, kernel: Any, sequences: Value, threads: Value) -> tuple[Value, Value, Value]:
    """Write into a job how many tasks a call on `sequences` sequences is divided into, and the workspace of each.

    Returns:
        The number of tasks, the bytes of a thread's workspace, and the bytes of the tasks' shared results.
    """
    job[words.TASKS], job[words.ROOM] = tasks, room = kernel.cut(job, sequences, threads), kernel.room(job)
    return tasks, room, kernel.shared(job, sequences)


def cut_query_heads(job: Array, sequences: Value, threads: Value) -> Value:
    """Divide the work by query heads, and those into parts of their queries; return the number of tasks."""
    code = job.code
    heads = sequences // job[words.SPAN] * job[words.HEADS]
    blocks = (job[words.QUERIES] + (QUERIES - 1)) // QUERIES
    wanted = (threads * _TASKS_PER_THREAD + heads - 1) // heads
    parts = code.least(blocks, code.largest(wanted, 1))
    job[words.PARTS] = parts
    return heads * parts


def cut_key_heads(job: Array, sequences: Value, threads: Value) -> Value:
    """Divide the work by key heads; return the number of tasks."""
    job[words.PARTS] = job.code.value(1)
    return sequences // job[words.SPAN] * job[words.KEY_HEADS]


def share_nothing(job: Array, sequences: Value) -> Value:
    """Return the bytes of shared results, for tasks that write their results directly: 0."""
    return job.code.value(0)


def finish_nothing(code: Code, job: Array, sequences: Value) -> None:
    """Emit the final step for tasks that write their results directly: nothing."""


def take_tasks(job: Array, kernel: Any) -> None:
    """Emit the loop of a thread that works on a job: it takes tasks of a kernel until none is left."""
    code = job.code
    memory = job[words.MEMORY] + job[words.ROOM] * code.fetch_and_add(job.at(words.WORKERS), 1)
    with code.repeat() as leave_if:
        task = code.fetch_and_add(job.at(words.NEXT), 1)
        leave_if(task >= job[words.TASKS])
        kernel.run(code, job, task, memory)
        code.fetch_and_add(job.at(words.DONE), 1)
