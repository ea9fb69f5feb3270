"""What happens when XLA calls a kernel, and how its threads share the work.

A call becomes a job: a block of words that all threads work from, each taking the next task until none is left.
The thread that XLA called on works along, and returns when all tasks are done; a thread that starts later than that
finds nothing to do, and the last to look at a job gives its memory back.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm

from . import flash_backward, flash_forward, words
from .compiling import compiled, entry, inlined
from .interface import (
    API,
    ARGUMENTS,
    ARRAY_DATA,
    ATTRIBUTES,
    BUFFER_DATA,
    CONTEXT,
    COUNT_OF_ARGUMENTS,
    DESTROY_ERROR,
    MAKE_ERROR,
    RESOURCE_EXHAUSTED,
    RESULTS,
    SCHEDULE,
    answers_a_question,
    ask,
    count_threads,
    no_memory,
    product_of_sizes,
)
from .memory import load_word
from .softmax import QUERIES
from .system import address_by_name, address_of, call_function, fetch_and_add, free, let_others_run, malloc, words_at

_FORWARD_TASK, _BACKWARD_TASK = "attn_bridge_flash_forward_task", "attn_bridge_flash_backward_task"

_TASKS_PER_THREAD = 4
"""Tasks that a thread should find at least, as they are not all of one length."""


@compiled
def _begin(frame, arrays, address):
    """Fill in the job of a call: its shape, and where its arrays are."""
    job = words_at(address, words.END)
    job[:] = 0
    shape = load_word(load_word(load_word(frame + ATTRIBUTES)) + ARRAY_DATA)
    for word in range(words.SHAPE_END):
        job[word] = load_word(shape + 8 * word)
    arguments, results = load_word(frame + ARGUMENTS), load_word(frame + RESULTS)
    given = load_word(frame + COUNT_OF_ARGUMENTS)
    if job[words.SINKS]:  # the last of the arguments
        given -= 1
        job[words.SINK] = load_word(load_word(arguments + 8 * given) + BUFFER_DATA)
    for place, word in enumerate(arrays):
        buffer = load_word(arguments + 8 * place) if place < given else load_word(results + 8 * (place - given))
        job[word] = load_word(buffer + BUFFER_DATA)
    return job, product_of_sizes(load_word(arguments), 3)


@compiled
def _release(job):
    if fetch_and_add(job.ctypes.data + 8 * words.HOLDERS, -1) == 1:
        free(job.ctypes.data)


def _worker(kernel: Any) -> Any:
    """Return what a thread does that works on a job: tasks of a kernel, as long as there are some that nobody took."""
    run = kernel.run

    @inlined
    def work(data):
        job = words_at(address_of(data), words.END)
        memory = job[words.MEMORY] + job[words.ROOM] * fetch_and_add(job.ctypes.data + 8 * words.WORKERS, 1)
        task = fetch_and_add(job.ctypes.data + 8 * words.NEXT, 1)
        while task < job[words.TASKS]:
            run(job, task, memory)
            fetch_and_add(job.ctypes.data + 8 * words.DONE, 1)
            task = fetch_and_add(job.ctypes.data + 8 * words.NEXT, 1)
        _release(job)
        return 0

    return work


def _answer(kernel: Any, arrays: tuple[int, ...], task_name: str) -> Any:
    """Return what a thread does that XLA calls on.

    Args:
        kernel: a module with the function ``room`` of a job, the bytes that a thread works in.
        arrays: the words of a job for the arguments and then the results of a call.
        task_name: how the function is known that works on a job.
    """
    room, per_head = kernel.room, kernel.PER_HEAD
    address_of_task = address_by_name(task_name)

    @compiled
    def answer(data):
        frame = address_of(data)
        if answers_a_question(frame):
            return 0
        api, context = load_word(frame + API), load_word(frame + CONTEXT)
        address = malloc(8 * words.END)
        job, sequences = _begin(frame, arrays, address)
        threads = max(1, count_threads(job, api, context))
        heads = sequences * (job[words.HEADS] if per_head else job[words.KEY_HEADS])
        job[words.PARTS] = 1
        if per_head:
            blocks = (job[words.QUERIES] + QUERIES - 1) // QUERIES
            job[words.PARTS] = min(blocks, max(1, -(-_TASKS_PER_THREAD * threads // heads)))
        job[words.TASKS] = heads * job[words.PARTS]
        job[words.ROOM] = room(job)
        helpers = max(0, min(threads, job[words.TASKS]) - 1)
        job[words.MEMORY] = malloc(job[words.ROOM] * (1 + helpers))
        if job[words.MEMORY] == 0:
            error = ask(job, api, MAKE_ERROR, 28, no_memory(), RESOURCE_EXHAUSTED, 0)
            free(address)
            return error
        # One more than will look at it: this thread, which still waits for the others when it has worked on it.
        job[words.HOLDERS] = 2 + helpers
        for _ in range(helpers):
            error = ask(job, api, SCHEDULE, 40, context, address_of_task(), address)
            if error != 0:  # no thread is to be had: this one does it all
                ask(job, api, DESTROY_ERROR, 24, error, 0, 0)
                fetch_and_add(address + 8 * words.HOLDERS, -1)
        call_function(address_of_task(), address)
        while fetch_and_add(address + 8 * words.DONE, 0) < job[words.TASKS]:
            let_others_run()
        free(job[words.MEMORY])
        _release(job)
        return 0

    return answer


_work_forward, _work_backward = _worker(flash_forward), _worker(flash_backward)
_answer_forward = _answer(
    flash_forward,
    (words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL),
    _FORWARD_TASK,
)
_answer_backward = _answer(
    flash_backward,
    (
        *(words.QUERY, words.KEY, words.VALUE, words.CONTEXT, words.TOP, words.TOTAL, words.D_CONTEXT, words.D_TOTAL),
        *(words.D_QUERY, words.D_KEY, words.D_VALUE, words.SLOPE),
    ),
    _BACKWARD_TASK,
)


def _flash_forward_task(data):
    return _work_forward(data)


def _flash_forward_call(data):
    return _answer_forward(data)


def _flash_backward_task(data):
    return _work_backward(data)


def _flash_backward_call(data):
    return _answer_backward(data)


@functools.cache
def forward() -> Any:
    """Return the function that XLA calls for attention forward, compiled or read from disk."""
    return _load(_flash_forward_task, _flash_forward_call, _FORWARD_TASK)


@functools.cache
def backward() -> Any:
    """Return the function that XLA calls for the gradients of attention."""
    return _load(_flash_backward_task, _flash_backward_call, _BACKWARD_TASK)


def _load(task: Any, call: Any, task_name: str) -> Any:
    task = entry(task)
    llvm.add_symbol(task_name, task.address)
    call = entry(call)
    _ALIVE.extend((task, call))
    return call.ctypes


_ALIVE: list[Any] = []
"""Compiled functions: XLA may call them until the process ends."""
