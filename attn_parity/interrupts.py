"""Handle Ctrl-C at any time: settings that a comparison changed are restored before a signal is handled.

Python runs a signal's handler between any two steps of the main thread, so also halfway through the `__exit__` that
restores a setting; an exception raised at that point leaves the setting changed. Inside `orderly_interrupts`, a signal
that arrives while a context is being entered or left is sent again a moment later, until it arrives between contexts;
so is a signal whose exception Python could only print, as in callbacks of weak references. An interrupt that a library
mistakes for an error of its code, as JAX does in an ``except:`` clause, ends the comparison a little later.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

BETWEEN = frozenset({"__enter__", "__exit__", "enter_context", "__del__", "_take_up"})
"""Functions that must not be left halfway: those of contexts, the frameworks' included; and ``__del__`` and the hook
that prints its exceptions, where Python only prints those that follow, as in callbacks of its garbage collector.
"""

AGAIN = 1e-3
"""Seconds after which a signal that came at a bad time is sent again."""

MAX = 1000
"""Times that a signal is sent again: code that runs for long inside such a function is the user's, and may hang."""

SIGNAL = "_attn_bridge_signal"
"""Attribute of the exception that a handler raised: the signal's number."""

Handler = Callable[[int, FrameType | None], Any]


class orderly_interrupts(contextlib.AbstractContextManager[None]):
    """Hold the context in which signals are handled between contexts; in a thread other than the main one, do nothing.

    It concerns the signals that have a handler in Python, which may raise: SIGINT, and those of timeouts.
    """

    def __init__(self) -> None:
        self._own: dict[int, Handler] = {}
        self._hook = sys.unraisablehook
        self._is_inside = False
        self._orderly: list[_Orderly] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        outside = sys._getframe(1)
        for number in sorted(signal.valid_signals()):
            own = signal.getsignal(number)
            if callable(own) and not isinstance(own, _Orderly):
                self._own[number] = own
                self._orderly.append(_Orderly(own, outside))
                signal.signal(number, self._orderly[-1])
        if self._own:
            self._hook, self._is_inside = sys.unraisablehook, True
            sys.unraisablehook = self._take_up

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, own in sorted(self._own.items(), reverse=True):
            if isinstance(signal.getsignal(number), _Orderly):  # else the user's code has put another one in its place
                signal.signal(number, own)
        self._own.clear()
        if self._is_inside and sys.unraisablehook == self._take_up:  # else the user's code has put one before it
            sys.unraisablehook = self._hook
        self._is_inside = False
        interrupted = any(one.has_interrupted for one in self._orderly)
        self._orderly.clear()
        if interrupted and not _is_interrupt(error):
            raise KeyboardInterrupt

    def _take_up(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Send a signal again if its exception was raised where Python prints exceptions and continues."""
        number = getattr(unraisable.exc_value, SIGNAL, None)
        if self._is_inside and number is not None:
            for interrupt in self._orderly:
                interrupt.has_interrupted = False  # it comes again
            _thread.start_new_thread(_send_later, (number,))
        else:
            self._hook(unraisable)


class _Orderly:
    """Handles a signal as its own handler does, but not while a context is being entered or left.

    Args:
        own: the handler.
        outside: where the contexts began; those around it are not ours to wait for.

    Attributes:
        has_interrupted: whether it raised KeyboardInterrupt, which has to end the comparison.
    """

    def __init__(self, own: Handler, outside: FrameType):
        self._own, self._outside = own, outside
        self._sent = 0
        self.has_interrupted = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self._sent < MAX and self._is_between(frame):
            self._sent += 1
            _thread.start_new_thread(_send_later, (number,))  # takes no lock that the interrupted code might hold
            return None
        self._sent = 0
        try:
            return self._own(number, frame)
        except BaseException as error:
            self.has_interrupted = self.has_interrupted or isinstance(error, KeyboardInterrupt)
            with contextlib.suppress(Exception):  # one that takes no attributes is the user's, too
                setattr(error, SIGNAL, number)
            raise

    def _is_between(self, frame: FrameType | None) -> bool:
        callbacks = [getattr(one, "__code__", None) for one in gc.callbacks]
        while frame is not None and frame is not self._outside:
            if frame.f_code.co_name in BETWEEN or frame.f_code in callbacks:
                return True
            frame = frame.f_back
        return False


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an exception is an interrupt, or was raised because of one."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _send_later(number: int) -> None:
    """Wait `AGAIN` seconds, then send a signal to the main thread."""
    time.sleep(AGAIN)
    signal.pthread_kill(threading.main_thread().ident or 0, number)
