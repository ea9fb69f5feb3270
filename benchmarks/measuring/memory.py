"""Memory of this process and machine, as the system counts it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def begin_peak() -> int | None:
    """Reset the peak of this process's resident memory to the present value, and return it; None if impossible.

    Freed memory is returned to the system first, so that it does not hide later allocations. Garbage is not freed:
    collect it before.
    """
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _field("self/status", "VmRSS")
    except OSError:
        return None


def peak() -> int:
    """Return the largest resident memory since `begin_peak`, in bytes."""
    return _field("self/status", "VmHWM")


def resident() -> int:
    """Return the resident memory of this process, in bytes; a huge number where that can't be known."""
    try:
        return _field("self/status", "VmRSS")
    except OSError:
        return 1 << 62


def free_memory() -> int:
    """Return the bytes of memory that can be taken; a huge number where that can't be known."""
    try:
        return _field("meminfo", "MemAvailable")
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 1 << 62


def _field(file: str, name: str) -> int:
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{file} has no {name}")
