"""How threads share the work of a call, whoever calls: each takes the next task until none is left."""

from __future__ import annotations

from typing import Any

from .. import words
from ..compiler.language import Array, Value
from .softmax import QUERIES

_TASKS_PER_THREAD = 4
"""Tasks that a thread should find at least, as they are not all of one length."""


def divide(job: Array, kernel: Any, sequences: Value, threads: Value) -> tuple[Value, Value]:
    """Fill in how the work of a call on so many sequences is cut; return the tasks, and the bytes a thread works in."""
    code = job.code
    heads = sequences // job[words.SPAN] * job[words.HEADS if kernel.PER_HEAD else words.KEY_HEADS]
    parts = code.value(1)
    if kernel.PER_HEAD:
        blocks = (job[words.QUERIES] + (QUERIES - 1)) // QUERIES
        wanted = (threads * _TASKS_PER_THREAD + heads - 1) // heads
        parts = code.least(blocks, code.largest(wanted, 1))
    tasks, room = heads * parts, kernel.room(job)
    job[words.PARTS], job[words.TASKS], job[words.ROOM] = parts, tasks, room
    return tasks, room


def take_tasks(job: Array, kernel: Any) -> None:
    """Write what a thread does that works on a job: tasks of a kernel, as long as there are some that nobody took."""
    code = job.code
    memory = job[words.MEMORY] + job[words.ROOM] * code.fetch_and_add(job.at(words.WORKERS), 1)
    with code.repeat() as leave_if:
        task = code.fetch_and_add(job.at(words.NEXT), 1)
        leave_if(task >= job[words.TASKS])
        kernel.run(code, job, task, memory)
        code.fetch_and_add(job.at(words.DONE), 1)
