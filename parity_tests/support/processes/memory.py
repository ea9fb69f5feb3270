"""How much memory some code takes: as Python and NumPy ask for it, or as the system gives it."""

from __future__ import annotations

import dataclasses
import importlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

from attn_bridge.checkpoints.containers.orbax import reader
from benchmarks.measuring.memory import begin_peak, peak


@dataclasses.dataclass
class Peak:
    """What code held at most.

    Attributes:
        bytes: above what was held when it began; known once it has ended.
    """

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Watch the memory of a process whose frameworks run threads of their own.

    It goes on being traced: where such a thread asks for memory while tracing is stopped, CPython 3.11 is ended by
    SIGSEGV (python/cpython issue 128679).
    """
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, found = tracemalloc.get_traced_memory()[0], Peak()
    try:
        yield found
    finally:
        found.bytes = tracemalloc.get_traced_memory()[1] - before


@contextmanager
def traced_memory() -> Iterator[Peak]:
    """Watch the memory that Python and NumPy ask for, where no thread but Python's own asks for any.

    A process traced before stays so; another one is as fast afterwards as it was.

    Raises:
        AssertionError: TensorStore is called, whose threads do (see `peak_memory`): `resident_memory` watches those.
    """
    was_traced = tracemalloc.is_tracing()
    refused = AssertionError("TensorStore's threads are not to be traced: use resident_memory")
    try:
        with mock.patch.object(reader, "tensorstore", side_effect=refused), peak_memory() as found:
            yield found
    finally:
        if not was_traced:
            tracemalloc.stop()


@contextmanager
def resident_memory() -> Iterator[Peak]:
    """Watch what the system gives to this process, TensorStore's threads included.

    Memory that is asked for and never written to does not count, and nothing does but on Linux.
    """
    with suppress(ImportError):
        importlib.import_module("tensorstore")  # a hundred MiB by itself
    before, found = begin_peak(), Peak()
    try:
        yield found
    finally:
        found.bytes = 0 if before is None else peak() - before
