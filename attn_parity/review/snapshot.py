"""Files of a folder by size, time and mode: to detect changes without reading contents."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

Snapshot = Mapping[str, tuple[int, ...]]
"""Path -> size, times of the last changes, inode and mode of a file or folder."""

_MODE = -1


def take(folder: Path, leave_out: Path | None = None) -> Snapshot:
    """Return the state of every file and folder in a folder; links are not followed."""
    return dict(_walk(str(folder), "", None if leave_out is None else str(leave_out)))


def changed(before: Snapshot, after: Snapshot, *, modes_only: bool = False) -> list[str]:
    """Return the paths that differ, sorted; with `modes_only` those in both whose mode differs."""
    if modes_only:
        return sorted(path for path in before.keys() & after.keys() if before[path][_MODE] != after[path][_MODE])
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _walk(folder: str, prefix: str, leave_out: str | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # removed meanwhile, or not readable
        return
    for entry in entries:
        if entry.path == leave_out:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        path = prefix + entry.name
        if stat.S_ISDIR(status.st_mode):
            # A folder's times change with the files in it, which are listed themselves.
            yield path, (0, 0, 0, status.st_ino, status.st_mode)
            yield from _walk(entry.path, f"{path}/", leave_out)
        else:
            yield path, (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode)
