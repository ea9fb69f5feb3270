"""Interrupts that come where Python would drop what they raise."""

from __future__ import annotations

import gc
import signal
import time

import pytest

from attn_bridge.parity.interrupts import orderly_interrupts


class Sending:
    """Something whose end is interrupted."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        self.is_gone = True


def waiting(work):
    """Do something, and wait for the interrupt that came meanwhile."""
    with orderly_interrupts():
        work()
        time.sleep(10.0)


def test_an_interrupt_while_garbage_is_collected_is_not_lost():
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


def test_an_interrupt_while_something_ends_is_not_lost():
    with pytest.raises(KeyboardInterrupt):
        waiting(Sending)
