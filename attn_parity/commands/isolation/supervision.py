"""Run commands with user code in a child process: a crash becomes one line, and the child's exit status is passed on.

The command is forked before it loads a library. Its parent waits, passes signals on, and takes the activity of a
crashed child from notes in shared memory (`breadcrumbs`) and from the stack that `faulthandler` writes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

from ... import breadcrumbs, stack, watch

COMMANDS = ("compare", "digest", "dump", "laws", "logprobs")
"""Commands that run user code in their own process."""

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a command by default, and that other processes send on purpose."""

ROUNDS = 100
"""Most rounds of 10 ms in which leftover processes are ended: one may start another between two looks."""

_is_supervised = False

STATUS = 2
"""Exit status of a command whose process user code ended."""


def begin(arguments: Sequence[str]) -> None:
    """Fork a command that runs user code, and return in the child; the parent ends as the child does.

    Other commands, systems other than Linux, and those that allow no further process go on in this process.
    """
    if sys.platform != "linux" or not arguments or arguments[0] not in COMMANDS or "--separate" in arguments:
        return
    stacks = os.fdopen(os.memfd_create("stack"), "w+b")
    signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
    parent = os.getpid()
    breadcrumbs.share()
    watch.adopt_orphans()
    try:
        child = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))
        return
    if child:
        _attend(child, stacks)
    global _is_supervised
    _is_supervised = True
    _end_with(parent)
    watch.adopt_orphans()
    faulthandler.enable(stacks, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))


def finish(status: int) -> None:
    """Note the exit status: nothing that happens while the interpreter ends changes it."""
    breadcrumbs.note(status=status)


def end_started() -> None:
    """End the processes that user code started, also those that their parents left; nothing without supervision."""
    if not _is_supervised:
        return
    watch.end_descendants(ROUNDS)


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent has ended."""
    watch.end_with_parent()
    if os.getppid() != parent:
        os._exit(STATUS)


def _attend(child: int, stacks: IO[bytes]) -> NoReturn:
    """Wait for the child, and end as it did."""
    status, received = _wait(child)
    notes = breadcrumbs.read()
    if "status" in notes:
        os._exit(notes["status"])
    watch.end_children()  # user code ended the process before it could end those that it started
    if -status in received:
        signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    stacks.seek(0)
    line = crash(status, notes, stacks.read().decode("utf-8", "replace"))
    with contextlib.suppress(OSError):
        os.write(2, f"error: {' '.join(line.split())}\n".encode("utf-8", "replace"))
    os._exit(STATUS)


def _wait(child: int) -> tuple[int, set[int]]:
    """Return the child's exit status (negative: the signal that ended it), and the signals that came meanwhile."""
    received: set[int] = set()
    while True:
        about = signal.sigwaitinfo((*FORWARDED, signal.SIGCHLD))
        if about.si_signo != signal.SIGCHLD:
            received.add(about.si_signo)
            if about.si_pid:  # the kernel sends those of a terminal to the child as well
                os.kill(child, about.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), received


def crash(status: int, notes: breadcrumbs.Notes, text: str) -> str:
    """Return the line on a process that ended before its command did.

    Args:
        status: its exit status; negative: the signal that ended it.
        notes: its notes.
        text: the stack that `faulthandler` wrote; "" for none.
    """
    lines = stack.dumped(text)
    sources = {label: Path(file) for label, file in notes.get("sources", {}).items()}
    line = stack.user_line(lines, sources)
    side, what = notes.get("phase", ("", ""))
    side = side or stack.side_of(stack.outermost_call(lines), line, sources)
    name = watch.named_side(side, notes.get("names", {})) if what else "the command"
    doing = f" while {stack.doing(what, lines)}" if what else ""
    return f"{name} {_ended(status)}{doing}{f': {stack.place(line)}' if line else ''}"


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended the process (exit status {status})"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{'was killed' if name == 'SIGKILL' else 'crashed'} ({name}{'; out of memory?' * (name == 'SIGKILL')})"
