"""Opening a file of a folder for reading so that no link leads out of that folder.

In: the folder, which the user names and which may be a link itself, and a path below it. Out: a descriptor. `files`
calls it for every file of a source; stores have no links.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags of files: a pipe is opened without a wait for its other end, and refused then."""

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY
"""Flags of folders on the way: with O_PATH, one that may be entered need not be readable."""

_IS_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
"""Errors of opening a link with O_NOFOLLOW: ENOTDIR together with O_DIRECTORY, EMLINK on FreeBSD."""


class LinkError(Exception):
    """A path is a link out of its folder; the message is the end of a sentence about the file."""


def resolve(path: Path) -> Path:
    """Return where a path leads to, after all links.

    Raises:
        OSError: it is a link to itself.
    """
    try:
        target = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    if target.is_symlink():  # how Python 3.13 and later resolve a loop
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def resolve_below(folder: Path, path: Path) -> tuple[Path, Path]:
    """Return where a file of a folder really is, and the folder that holds it.

    The hub's cache is the only exception where a link may lead out: from ``snapshots/<revision>`` to the ``blobs`` of
    the same repository.

    Raises:
        LinkError: it is somewhere else.
    """
    try:
        root, real = resolve(folder), resolve(path)
    except OSError as error:
        why = "has too long a name" if error.errno == errno.ENAMETOOLONG else "is a link to itself"
        raise LinkError(why) from None
    if real.is_relative_to(root):
        return real, root
    for above in root.parents:
        if above.name == "snapshots" and real.parent == above.parent / "blobs":
            return real, real.parent
    raise LinkError("is a link out of its folder; put a copy of the file there")


def open_below(folder: Path, path: Path) -> int:
    """Open a file of a folder for reading, and return the descriptor.

    Links within the folder are followed. The opened file is the one that was checked: each folder on the way is opened
    without following links, so that a link created in the meantime is refused.

    Raises:
        LinkError: the path leads out of the folder.
        OSError: the file does not exist, or can't be opened.
    """
    parts = path.relative_to(folder).parts
    if ".." in parts:
        raise LinkError("is not named as one of its folder")
    try:
        return _open_without_links(folder, parts)
    except OSError as error:
        if error.errno not in _IS_LINK:
            raise
    real, root = resolve_below(folder, path)
    return _open_without_links(root, real.relative_to(root).parts)


def _open_without_links(folder: Path, parts: tuple[str, ...]) -> int:
    current = os.open(folder, _FOLDER)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        return os.open(parts[-1], READING | os.O_NOFOLLOW, dir_fd=current)
    finally:
        os.close(current)
