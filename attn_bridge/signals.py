"""Holds keyboard interrupts back while processes start or end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold keyboard interrupts back until the context ends, and from processes that are started in it.

    Those processes inherit the blocked signal. It does not suffice in this process: the system delivers a signal to any
    thread that does not block it, such as those of OpenBLAS, and Python then runs its handler in the main thread.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if callable(handler):
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what it held back comes now, and is held by the handler
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
