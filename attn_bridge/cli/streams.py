"""The process's standard streams: closed ones are occupied, and output that can't be written is reported once."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CAUSES = {errno.EBADF: "is closed", errno.ENOSPC: "is full", errno.EDQUOT: "is full"}


class Descriptor(io.FileIO):
    """A standard stream that drops failed writes: a long conversion must not end because of a progress line.

    Args:
        number: the descriptor; it stays open.

    Attributes:
        lost: the first error of a write.
    """

    def __init__(self, number: int):
        super().__init__(number, "w", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes, or drop them after an error.

        Raises:
            BrokenPipeError: the reader of stdout has gone; once, so that the command ends.
        """
        try:
            return super().write(data)
        except OSError as error:
            is_first, self.lost = self.lost is None, self.lost or error
            if is_first and isinstance(error, BrokenPipeError) and self.fileno() == 1:
                raise
            return memoryview(data).nbytes

    def report(self) -> str:
        """Return why output was lost, in one line; "" if none was, or if its reader closed the pipe."""
        if self.lost is None or isinstance(self.lost, BrokenPipeError):
            return ""
        return f"stdout {_CAUSES.get(self.lost.errno or 0, 'fails')} ({self.lost.strerror}): output was lost"


def protect() -> Descriptor:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that record lost output, and return stdout's.

    A closed descriptor is opened on the null device the wrong way round: writes fail as before, and no file that is
    opened later gets its number, which C code and child processes take for the standard stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # os.open takes the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY), True)
    output = Descriptor(1)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(output, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(Descriptor(2), sys.stderr)
    return output


def _text(descriptor: Descriptor, old: TextIO | None) -> io.TextIOWrapper:
    """Return a text stream with the encoding and buffering of the previous one."""
    if not isinstance(old, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(descriptor), encoding="utf-8", errors="backslashreplace")
    with contextlib.suppress(OSError):
        old.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
