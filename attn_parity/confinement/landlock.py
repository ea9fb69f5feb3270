"""Linux's Landlock: a process gives up writing outside some folders, for itself and all that it starts.

Source: https://docs.kernel.org/userspace-api/landlock.html, from which the numbers are taken. Landlock does not cover
changes of modes, times and owners of files.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

# System calls have these numbers on every architecture, from Linux 5.13 on.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
"""Flag of the first system call that asks for the version of the interface."""

_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
"""Of prctl: required before a process restricts itself."""

_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Write to files, remove them and folders, and make files of every kind."""

_SIGNALS_AND_SOCKETS = 0b11
"""Scopes: signals and abstract sockets reach only processes that are restricted in the same way."""

# Versions of the interface, which refuses the bits of later ones.
_FIRST_WITH_REFER, _FIRST_WITH_TRUNCATE, _FIRST_WITH_SCOPES = 2, 3, 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's interface, 0 without Landlock."""
    if sys.platform != "linux":
        return 0
    try:
        return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))
    except (OSError, AttributeError):  # a libc without syscall
        return 0


def restrict(writable: Iterable[str | Path]) -> None:
    """Refuse writes of this process, and of those that it starts, outside some folders; devices can be written.

    Args:
        writable: folders that exist.

    Raises:
        OSError: the kernel refuses; see `version`.
    """
    number = version()
    writes = _WRITES | (_REFER if number >= _FIRST_WITH_REFER else 0)
    writes |= _TRUNCATE if number >= _FIRST_WITH_TRUNCATE else 0
    scopes = _SIGNALS_AND_SOCKETS if number >= _FIRST_WITH_SCOPES else 0
    # An older kernel refuses a structure that is longer than it knows and not zero there.
    ruleset = _Ruleset(writes, 0, scopes)
    rules = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), 0)
    try:
        for folder in writable:
            _allow(rules, folder, writes)
        _allow(rules, "/dev", writes & (_WRITE_FILE | _TRUNCATE))
        if Path("/dev/shm").is_dir():
            _allow(rules, "/dev/shm", writes)  # shared memory of worker processes
        if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl refuses")
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, folder: str | Path, writes: int) -> None:
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(writes, descriptor)
        _call(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
