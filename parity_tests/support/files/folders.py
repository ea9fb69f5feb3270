"""Temporary folders for results that a process caches: they are removed when the process ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

_BASE = tempfile.TemporaryDirectory(prefix="parity-tests-")


def new_folder(prefix: str) -> Path:
    """Create an empty folder that lasts as long as the process."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_BASE.name))
