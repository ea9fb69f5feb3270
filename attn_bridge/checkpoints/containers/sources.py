"""The files of a source: every reader opens them here, and none of them leads out of the source's folder."""

from __future__ import annotations

import errno
from pathlib import Path

from ...printable import printable
from .files import File, bad, check_name
from .links import LinkError, resolve_below
from .remote import RemotePath


def inside(folder: Path, name: object, named_by: object) -> Path:
    """Return the path of a file that an index or metadata names; `open_file` checks its links again as it opens it.

    Raises:
        CheckpointError: it is named as a file of another folder, or is a link out of its folder.
    """
    name = check_name(named_by, name)
    path = Path(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or path.as_posix() != name:
        raise bad(named_by, f"the file {printable(name)} is not named as one of its folder")
    try:
        resolve_below(folder, folder / path)
    except LinkError as error:
        raise bad(named_by, f"the file {printable(name)} {error}") from None
    return folder / path


def open_file(path: Path, folder: Path | None) -> File:
    """Return a file of a source that is read by position, local or in a store.

    Args:
        path: the file.
        folder: the source's folder, which no link may lead out of but the hub cache's own; None where the file is the
            source, as the user names it.

    Raises:
        CheckpointError: it does not exist, is not a file, leads out of the folder, or can't be read.
    """
    if isinstance(path, RemotePath):
        from .remote.files import RemoteFile

        return RemoteFile(path)
    return File(path, folder)


def read_file(path: Path, folder: Path, most: int) -> bytes:
    """Return the bytes of a small file of a source, such as its config.

    Raises:
        CheckpointError: as `open_file`, or it has more than `most` bytes.
    """
    file = open_file(path, folder)
    if file.size > most:
        raise bad(path, f"has {file.size} bytes; at most {most} are read")
    data = bytes(file.read(0, file.size))
    file.close()
    return data


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; pathlib raises an error for a name that is too long, which no folder can have."""
    try:
        return path.is_dir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
