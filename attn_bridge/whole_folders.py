"""Writes a folder atomically: it is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that is full, or of a limit; they come without the name of a file."""


def check_new(path: str | Path, what: str = "folder") -> Path:
    """Return the path if a folder can be written there: it is empty or missing, and its parent is writable.

    Raises:
        ValueError: it can't; the message begins with `what`.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{what} {path} exists and is no folder")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{what} {path} exists and is not empty; give another one")
    around = path.absolute().parent
    if not around.is_dir() or not os.access(around, os.W_OK):
        raise ValueError(f"{what} {path} cannot be written")
    return path.absolute()


@contextlib.contextmanager
def new(path: str | Path, what: str = "folder") -> Iterator[Path]:
    """Yield a temporary folder next to `path` that is renamed to it on success, and removed otherwise.

    Raises:
        ValueError: as `check_new`, the disk is full, or another process wrote the folder meanwhile.
    """
    target = check_new(path, what)
    sibling = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        sibling.mkdir()
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be written: {error.strerror}") from error
    try:
        yield sibling
        if target.is_dir():
            target.rmdir()
        sibling.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.is_dir():
            raise ValueError(f"{what} {path} was written meanwhile by another run; give another one") from error
        if error.errno not in _FULL:
            raise
        raise ValueError(f"{what} {path} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(sibling, ignore_errors=True)
