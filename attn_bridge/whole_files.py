"""Writes a report to a file atomically: the file is complete or absent."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

_pipes: dict[tuple[int, int], int] = {}
"""Device and inode of a pipe -> its descriptor, opened before the work."""


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
