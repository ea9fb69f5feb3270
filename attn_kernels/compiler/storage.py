"""Keeps machine code on disk, so that the next process loads it instead of compiling it again.

A file is named by a digest of all that its code depends on: the processor and its features, LLVM, the options of the
compiler and the assembly. Processes may share the folder: a file appears whole or not at all, and a damaged one is
compiled again. A folder that other users can write to is not read, as its code would run as the user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path

VARIABLE = "ATTN_KERNELS_CACHE"
"""Environment variable that names the folder; empty keeps nothing."""

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path | None:
    """Return the folder of machine code: that of `VARIABLE`, else a folder in the user's caches; None for none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    try:
        import platformdirs
    except ImportError:  # llvmlite is there for another package, without the extra
        return None
    path = platformdirs.user_cache_path("attn_kernels", appauthor=False)
    return path if path.is_absolute() else None  # a user without a home has ~ itself


def name_of(*parts: str) -> str:
    """Return the name of the file whose code depends on `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return f"{digest.hexdigest()}.o"


def read(name: str) -> bytes | None:
    """Return the machine code of a file; None if it is missing or damaged, or others could have written it."""
    where = folder()
    if where is None:
        return None
    try:
        if not _is_private(where):
            return None
        content = (where / name).read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(name: str, code: bytes) -> None:
    """Keep machine code under a name, in one step; without a folder that can be written, nothing happens."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):  # read-only, full, or removed meanwhile: the code is compiled again next time
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(where):
            return
        with tempfile.NamedTemporaryFile(dir=where, prefix="part-", delete=False) as part:
            try:
                part.write(hashlib.sha256(code).digest() + code)
                part.close()
                Path(part.name).replace(where / name)
            except OSError:
                Path(part.name).unlink(missing_ok=True)
                raise


def _is_private(where: Path) -> bool:
    """Return whether a folder is the user's, and no one else's to write; Windows keeps caches so."""
    if sys.platform == "win32":
        return True
    status = where.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
