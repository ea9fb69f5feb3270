"""Meta's checkpoints of a model that was split over several devices: each file has a part of every matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ....printable import printable
from ..base import TensorInfo
from ..files import bad, listed
from ..sources import inside
from ..torch_file import TorchReader
from .chunks import Chunks
from .ranks import Agreed, FilesReader

MOST = 8
"""Maximum number of parts: beyond the 8 key heads of Meta's large models, files repeat keys and values."""

# As fairscale cuts them: by outputs in column-parallel layers, by inputs in row-parallel ones.
_AXES = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}
"""Last part of a matrix's name -> the axis along which its parts lie."""


class SplitReader(FilesReader):
    """Several files as one checkpoint, whose matrices are put together as they are read.

    Vectors are in each of the files, and must be the same in all of them.

    Args:
        folder: where the files are.
        files: ``consolidated.00.pth`` and so on -> its file, open.
    """

    def __init__(self, folder: Path, files: Mapping[str, TorchReader]):
        super().__init__(folder, folder, files)
        first, *others = files
        for name in others:
            odd = sorted(files[name].tensors.keys() ^ files[first].tensors.keys())
            if odd:
                raise bad(folder, f"{first} and {name} hold different tensors: {listed(list(map(printable, odd)))}")
        for name, info in files[first].tensors.items():
            same = all((one.tensors[name].dtype, one.tensors[name].shape) == (info.dtype, info.shape)
                       for one in files.values())  # fmt: skip
            if not same:
                raise bad(folder, f"{printable(name)} has several shapes or dtypes in {listed(list(files))}")
            axis = self._axis_of(info)
            self._chunks[name] = self._whole(info, tuple(files)) if axis is None else self._split(info, axis)
        self.tensors = {name: chunks.info for name, chunks in self._chunks.items()}

    def _split(self, info: TensorInfo, axis: int) -> Chunks[Agreed]:
        """Return a matrix whose parts lie one behind the other along an axis."""
        starts = np.zeros((len(self._readers), len(info.shape)), np.int64)
        starts[:, axis] = np.arange(len(starts)) * info.shape[axis]
        shape = tuple(size * (len(starts) if at == axis else 1) for at, size in enumerate(info.shape))
        items = tuple(self._agreed(info, (file,)) for file in self._readers)
        return Chunks(TensorInfo(info.name, info.dtype, shape), starts, starts + np.array(info.shape, np.int64), items)

    def _axis_of(self, info: TensorInfo) -> int | None:
        """Return the axis along which a tensor is split; None for one that each file has whole."""
        if len(info.shape) < 2:
            return None
        stem = info.name.removesuffix(".weight").rpartition(".")[2]
        if stem == "tok_embeddings":  # Llama 3 splits the vocabulary, the ones before it the channels
            norm = next(iter(self._readers.values())).tensors.get("norm.weight")
            return 0 if norm is not None and info.shape[1:] == norm.shape else 1
        if len(info.shape) > 2 or stem not in _AXES:
            raise bad(self.path, f"it is not known how {printable(info.name)} is split over its files")
        return _AXES[stem]


def check_numbers(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a model in parts, of which none may be missing.

    Raises:
        CheckpointError: one is missing, or there are more than can be put together.
    """
    if len(names) > MOST:
        raise bad(folder, f"has {len(names)} parts of one model, {names[0]} to {names[-1]}; at most {MOST} are read")
    wanted = [f"consolidated.{number:02d}.pth" for number in range(len(names))]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise bad(folder, f"these files of it are missing: {listed(missing)}")
    return [inside(folder, name, folder) for name in wanted]
