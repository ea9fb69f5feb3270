"""Opens what ``torch.save`` wrote: a file, a folder with an index, and the files of several ranks as one checkpoint."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ....printable import printable
from .. import mistaken
from ..base import CheckpointError, Reader
from ..files import bad, listed
from ..remote import open_all
from ..shards import GONE, ShardedReader, index_of, is_cut, is_numbered, is_stale, note_on_part, note_on_parts
from ..sources import inside
from ..torch_file import TorchReader
from .consolidated import SplitReader, check_numbers
from .ranks import RanksReader, family_of, names_of, rank_in

MODEL = "pytorch_model.bin"
"""The usual name of the one file of a folder."""


class ShardedTorchReader(ShardedReader):
    """A folder of files and an index, as transformers writes it."""

    format: ClassVar[str] = "torch"


def open_torch(path: Path) -> Reader:
    """Open a file, an index, or a folder.

    Raises:
        CheckpointError: the folder has no single checkpoint of torch, or a file is malformed.
    """
    is_folder = path.is_dir()
    run = mistaken.part_of_run(path if is_folder else path.parent)
    if run:
        raise bad(path, f"is of one rank, whose run {run}")
    if not is_folder:
        if path.suffix == ".json":
            return ShardedTorchReader(path.parent, path, TorchReader)
        return _open_file(path)
    names = sorted(one.name for one in path.iterdir() if one.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    names = [name for name in names if not mistaken.STATES.fullmatch(name) and not name.startswith(".")]
    index = index_of(path, ".bin.index.json", "pytorch_model")
    if index is not None and not is_stale(path, index, names):
        reader = ShardedTorchReader(path, index, TorchReader)
        reader.note_others(names, f"{index.name} does not name them")
        return reader
    others = [name for name in names if name != MODEL] if MODEL in names else []
    numbered = [name for name in others if re.fullmatch(r"pytorch_model_[0-9]+\.bin", name)]
    if numbered:
        raise bad(path, f"has several models, as accelerate saves them; name one: {listed([MODEL, *numbered], 5)}")
    names = [MODEL] if MODEL in names else names
    if is_numbered(names):
        return ShardedTorchReader(path, None, TorchReader, tuple(names))
    if len(names) > 1 and all(re.fullmatch(r"consolidated\.[0-9]{2}\.pth", name) for name in names):
        files = open_all(lambda file: TorchReader(file, path), check_numbers(path, names))
        return SplitReader(path, dict(zip(names, files, strict=True)))
    kind = mistaken.run_of(names)
    is_alike = len({family_of(name) for name in names}) == 1
    first = _first_of(path, names) if is_alike or is_cut(names) else None
    if is_alike and first is not None and first.is_of_rank:
        return _with_ranks(path, path, first)
    if first is not None and not kind and is_cut(names):
        parts = {names[0]: first, **_opened(path, names[1:])}
        sizes = [len(part.tensors) for part in parts.values()]
        if sum(sizes) == len({name for part in parts.values() for name in part.tensors}):
            reader = ShardedTorchReader(path, None, lambda file, _: parts[file.name], tuple(names))
            reader.notes += note_on_parts(names)
            return reader
    if kind or first is None or len(names) != 1:
        which = f"name one of them: {listed(list(map(printable, names)), 5)}"
        raise bad(path, kind or f"has {len(names)} files of torch.save and no index; {which}")
    reader = ShardedTorchReader(path, None, lambda *_: first, tuple(names))
    reader.note_others(others, f"{MODEL} is the folder's model")
    reader.note_others([index.name] if index is not None else [], GONE)
    return reader


def _first_of(folder: Path, names: Sequence[str]) -> TorchReader | None:
    """Return the first of files whose names differ by a number, open; None where it alone of several can't be read."""
    try:
        return TorchReader(inside(folder, names[0], folder), folder)
    except CheckpointError:
        if len(names) > 1:
            return None
        raise


def _open_file(path: Path) -> Reader:
    """Return a file, with those of the other ranks if its tensors are parts of theirs."""
    if path.name.startswith("zero_pp_rank_") and (kind := mistaken.run_of([path.name])):  # whose tensors are empty
        raise bad(path, kind)
    part = bad(path, "holds a part of each matrix, whose other parts are next to it; give the folder")
    is_part = mistaken.is_part(path)
    try:
        reader = TorchReader(path)
    except CheckpointError as error:
        raise (part if is_part else error) from None
    if reader.is_of_rank:
        return _with_ranks(path, path.parent, reader)
    if is_part:
        raise part
    reader.notes += note_on_part(path.name)
    return reader


def _with_ranks(path: Path, folder: Path, reader: TorchReader) -> Reader:
    """Open the files of all ranks as one checkpoint: their names differ by the number of the rank alone.

    Args:
        path: that of the user: the folder, or one of the files.
        folder: the folder of the files.
        reader: one of them, open.
    """
    names = names_of((one.name for one in folder.iterdir()), reader.path.name)
    if len(names) == 1 and not reader.parts:
        return reader
    others = _opened(folder, [name for name in names if name != reader.path.name])
    return RanksReader(path, folder, {name: others.get(name, reader) for name in names})


def _opened(folder: Path, names: Sequence[str]) -> dict[str, TorchReader]:
    paths = [inside(folder, name, folder) for name in names]
    return dict(zip(names, open_all(lambda file: TorchReader(file, folder), paths), strict=True))


def open_matching(pattern: Path) -> Reader:
    """Open the files of all ranks whose names match a pattern, such as ``model_world_size_2_rank_*.pt``.

    Raises:
        CheckpointError: no file matches, or they are files of several runs, or of none.
    """
    folder = pattern.parent
    names = [one.name for one in folder.iterdir() if fnmatch.fnmatchcase(one.name, pattern.name)]
    if not names:
        raise bad(pattern, "matches no file")
    names = sorted(names, key=rank_in)
    kinds = {family_of(name) for name in names}
    opened = _opened(folder, names) if len(kinds) == 1 else {}
    if not opened or not all(reader.is_of_rank for reader in opened.values()):
        raise bad(
            pattern,
            f"matches files that are not those of the ranks of one run; name one of them: "
            f"{listed(list(map(printable, names)), 5)}",
        )
    return RanksReader(pattern, folder, opened)
