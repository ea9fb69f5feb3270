"""Files of a model's folder beside its weights and config: of its tokenizer, of generation, of processors of inputs.

`find` lists those of a source when a conversion is planned, and `copy` writes them beside the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..printable import printable
from . import configs
from .containers.base import CheckpointError
from .containers.files import PIECE, File, bad
from .containers.remote import is_remote
from .containers.remote.targets import open_target
from .containers.sources import inside, open_file

KNOWN = re.compile(
    r"(special_tokens_map|added_tokens|vocab|normalizer|tekken)\.json|vocab\.txt|merges\.txt"
    r"|tokenizer(_config)?\.json|[\w.-]+\.model(\.v[0-9]+)?|[\w.-]+\.tiktoken|chat_template\.(jinja|json)"
    r"|generation_config\.json|(\w+_)?(pre)?processor_config\.json"
)
"""Names of these files."""

MAX_BYTES = 1 << 28
"""Bytes of such a file, at most; the largest tokenizers that are published have 35 MB."""

MAX_FILES = 100
"""Files of the kind that are copied, at most: a tokenizer has a handful."""


def folder_of(source: Path) -> Path:
    """Return the folder of a model: the source, or the one that a file is in."""
    return source if source.is_dir() else source.parent


def find(source: Path, *, is_folder: bool, has_config: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the files to copy, in order, and notes on those that are not copied.

    Args:
        source: file or folder. What is next to a single file goes along only where a config.json says that it is one
            model's folder.
        is_folder: whether the target is a folder with room for them.
        has_config: whether the target gets a config.json; where it does not, Meta's params.json goes along.
    """
    folder = folder_of(source)
    is_model = source.is_dir()
    if not is_model and not is_remote(source):  # servers of single files may not list a folder
        is_model = any((folder / name).is_file() for name in (configs.CONFIG, configs.PARAMS))
    if not is_model:
        return (), ()
    # Folders of Orbax hold a folder per tensor, of any name.
    names = sorted(path.name for path in folder.iterdir() if KNOWN.fullmatch(path.name) and not path.is_dir())
    if is_folder and not has_config and not (folder / configs.CONFIG).is_file() and (folder / configs.PARAMS).is_file():
        names.append(configs.PARAMS)
    problems = {name: "the target has no room for files beside its weights" for name in names if not is_folder}
    for name in names[MAX_FILES:]:
        problems[name] = f"there are more than {MAX_FILES} of its kind"
    for name in names:
        if name not in problems:
            try:
                _opened(folder, name).close()
            except CheckpointError as error:
                problems[name] = str(error)
    return tuple(name for name in names if name not in problems), tuple(_notes(problems))


def _opened(folder: Path, name: str) -> File:
    """Open a file of the folder; close it after use.

    Raises:
        CheckpointError: a link leads out of the folder, it is not a plain file, or it is too large.
    """
    file = open_file(inside(folder, name, folder), folder)
    if file.size > MAX_BYTES:
        file.close()
        raise bad(file.path, f"has {file.size} bytes; at most {MAX_BYTES} are copied")
    return file


def _notes(problems: dict[str, str]) -> Iterable[str]:
    """Yield a line for each reason."""
    for reason in dict.fromkeys(problems.values()):
        names = [printable(name) for name, why in problems.items() if why == reason]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        yield f"not copied: {shown}: {reason}"


def copy(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files of the source's folder into the target's, in memory of one piece, and flush them.

    Raises:
        CheckpointError: one changed since `find`, or can't be read or written.
    """
    folder = folder_of(source)
    for name in names:
        file = _opened(folder, name)
        written = open_target(target / name, file.size)
        try:
            for start in range(0, file.size, PIECE):
                written.write(start, file.read(start, min(PIECE, file.size - start)))
            written.sync()
        finally:
            written.close()
            file.close()
