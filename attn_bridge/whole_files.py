"""Reads a file that a user names, within limits, and writes a report atomically: complete or absent."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON document: only its reader knows the types of its values."""

_pipes: dict[tuple[int, int], int] = {}
"""Device and inode of a pipe -> its descriptor, opened before the work."""


MAX_READ = 1 << 28
"""Bytes of the largest file that is read whole: reports of large models have some 20 MB, and /dev/zero has no end."""

_BLOCK = 1 << 20
"""Bytes that are read at a time."""


def read(path: str | Path, most: int = MAX_READ) -> bytes:
    """Return the content of a file, or of a pipe that has a writer, such as a shell's ``<(command)``.

    Raises:
        OSError: it can't be read, is a pipe without a writer (which would wait forever), or has more than `most` bytes;
            `strerror` is the reason.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        block = stream.read(_BLOCK)  # None: a writer exists, and has written nothing yet
        if is_pipe and block == b"":
            raise OSError(errno.ESPIPE, "it is a pipe that nothing writes to", str(path))
        if is_pipe:
            os.set_blocking(descriptor, True)
        content = bytearray(block or b"")
        while (block is None or block) and len(content) <= most:
            block = stream.read(_BLOCK)
            content += block or b""
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(content)


def check_regular(path: Path) -> None:
    """Refuse a path that is not a regular file.

    Raises:
        ValueError: it is missing, a folder, a pipe or a device.
    """
    if path.is_file():
        return
    kind = "is a folder, not a file" if path.is_dir() else "is a pipe or a device, not a file"
    raise ValueError(f"{path} {kind if path.exists() else 'does not exist'}")


def read_text(path: str | Path, most: int = MAX_READ) -> str:
    """Return the text of a UTF-8 file; see `read`.

    Raises:
        OSError: as `read`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read(path, most).decode("utf-8")


def hold_pipe(path: Path) -> int | None:
    """Open a pipe or socket for writing, and keep it open, so that its reader stays; None for any other file.

    Raises:
        ValueError: it has no reader, so that writing would wait for one.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        return None
    key = status.st_dev, status.st_ino
    if key not in _pipes:
        try:
            _pipes[key] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: it is a pipe that nothing reads") from error
        os.set_blocking(_pipes[key], True)
    return _pipes[key]


def write_pipe(path: Path, text: str) -> bool:
    """Write `text` to a pipe, and close it; return False if the path is not a pipe.

    Raises:
        ValueError: it has no reader, or the reader closes it early.
    """
    descriptor = hold_pipe(path)
    if descriptor is None:
        return False
    del _pipes[next(key for key, value in _pipes.items() if value == descriptor)]
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {_reason(error)}") from error
    return True


def checked(path: str | Path | None) -> Path | None:
    """Return the file to write, None for None; call it before the work, so that a bad path costs no time.

    Raises:
        ValueError: the path is a folder, or a pipe without a reader, or its folder is missing.
    """
    if path is None:
        return None
    if hold_pipe(Path(path)) is not None:
        return Path(path)  # links to pipes of a shell's own lead to no path
    try:
        target = Path(path).resolve()  # a link keeps pointing to its file
        if target.is_symlink():  # a path that is still a link leads to itself
            raise ValueError(f"{path} cannot be written: it is a link to itself")
        if target.is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder")
        if not target.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {Path(path).parent}")
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be written: {_reason(error)}") from error
    return target


def write(target: Path | None, text: str) -> None:
    """Write `text` to a temporary file next to `target` and rename it, so that a reader never sees half a file.

    Raises:
        ValueError: the file system refuses; an existing file is unchanged.
    """
    if target is None:
        return
    sibling = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            if not write_pipe(target, text):
                target.write_text(text, encoding="utf-8")
            return
        sibling.write_text(text, encoding="utf-8", newline="\n")
        if target.exists():
            shutil.copymode(target, sibling)
        sibling.replace(target)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {_reason(error)}") from error
    finally:
        sibling.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
