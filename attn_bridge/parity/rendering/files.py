"""Writing a report: into a file that is whole or not there at all."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path


def checked(path: str | Path | None) -> Path | None:
    """Return the file that is to be written, None for none; call it before the work, so that a bad path costs none.

    Raises:
        ValueError: the path is a folder, or its folder is missing.
    """
    if path is None:
        return None
    try:
        target = Path(path).resolve()  # a link goes on pointing to its file
        if target.is_symlink():  # what is still a link now leads nowhere but to itself
            raise ValueError(f"{path} cannot be written: it is a link to itself")
        if target.is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder")
        if not target.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {Path(path).parent}")
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be written: {_reason(error)}") from error
    return target


def write(target: Path | None, text: str) -> None:
    """Write `text` beside `target` and move it there, so that a reader never meets half a file.

    Raises:
        ValueError: the file system refuses; what stood there stands there still.
    """
    if target is None:
        return
    sibling = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
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
