"""Interrupts that come where Python would drop what they raise."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import sys
import time
import warnings
import weakref

import pytest

from attn_parity.interrupts import orderly_interrupts


class Sending:
    """Something whose end is interrupted."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        self.is_gone = True


class Ending:
    """Something that ends at once."""


def waiting(work):
    """Do something, and wait for the interrupt that came meanwhile."""
    with orderly_interrupts():
        work()
        time.sleep(10.0)


@pytest.fixture
def only_collected_here():
    """Garbage is collected when a test asks for it, not before; that of earlier tests is none of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_interrupt_while_garbage_is_collected_is_not_lost(only_collected_here):
    sent = []

    def collected(phase, info):
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(collected)
    try:
        with pytest.raises(KeyboardInterrupt):
            waiting(gc.collect)
    finally:
        gc.callbacks.remove(collected)
    assert sent


def test_an_interrupt_while_an_exception_is_printed_is_not_lost(monkeypatch):
    class Failing:
        def __del__(self):
            raise ValueError("is printed")

    printed = []

    def hook(unraisable):
        signal.raise_signal(signal.SIGINT)
        printed.append(str(unraisable.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", hook)
    with pytest.raises(KeyboardInterrupt):
        waiting(Failing)
    assert printed == ["is printed"]


def test_an_interrupt_while_something_ends_is_not_lost():
    with pytest.raises(KeyboardInterrupt):
        waiting(Sending)


def test_an_interrupt_in_a_weak_reference_callback_is_raised():
    with pytest.raises(KeyboardInterrupt):
        waiting(lambda: weakref.finalize(Ending(), signal.raise_signal, signal.SIGINT))


def test_an_interrupt_that_is_sent_again_ends_what_follows_once():
    def compared():
        with orderly_interrupts():
            weakref.finalize(Ending(), signal.raise_signal, signal.SIGINT)
        time.sleep(10.0)

    with pytest.raises(KeyboardInterrupt):
        compared()
    try:
        time.sleep(0.2)
    except KeyboardInterrupt:
        pytest.fail("it came twice")


@pytest.mark.parametrize("becomes", [None, ValueError("arguments can't be compared")], ids=["nothing", "another error"])
def test_an_interrupt_that_a_library_swallows_is_raised(becomes):
    """JAX tries things in several places, and goes on whatever they raise."""

    def library():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        if becomes is not None:
            raise becomes

    with pytest.raises(KeyboardInterrupt), orderly_interrupts():
        library()
    with orderly_interrupts():  # and is forgotten then
        pass


def test_an_error_caused_by_an_interrupt_is_kept():
    def stopped():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ValueError("stopped") from error

    with pytest.raises(ValueError, match="stopped"), orderly_interrupts():
        stopped()


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that takes no attributes."""

    number: int


def test_the_exception_of_a_handler_stays_what_it_is():
    def handler(number, frame):
        raise FrozenError(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(FrozenError), orderly_interrupts():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_hook_of_the_user_leads_on_to_that_before(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_type))
    with orderly_interrupts():
        inner = sys.unraisablehook
        sys.unraisablehook = lambda unraisable: inner(unraisable)
    weakref.finalize(Ending(), int, "no number")
    assert printed == [ValueError]


def test_other_unraisable_errors_are_printed(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_type))
    before = sys.unraisablehook
    with orderly_interrupts():
        weakref.finalize(Ending(), int, "no number")
    assert printed == [ValueError]
    assert sys.unraisablehook is before
