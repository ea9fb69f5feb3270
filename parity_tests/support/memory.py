"""How much memory some code takes, as Python and NumPy ask for it."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


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
