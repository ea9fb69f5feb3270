"""Files of the ranks of a run as one checkpoint: DTensors that each rank saved its own part of by ``torch.save``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from ....printable import printable
from ..base import TensorInfo
from ..files import bad, check_count, check_shape, listed
from ..pickles.dtensors import RankPart, number_of, runs_of
from ..pickles.flat import PLACED
from ..sources import Latest, OrderedTensor
from ..strided import StridedTensor
from ..torch_file import Stored, TorchReader
from .chunks import ChunkedReader, Chunks, check_filled

SHOWN = 8
"""Missing ranks that an error names."""

_NUMBERS = (re.compile(r".*rank[_.-]?(\d+)", re.IGNORECASE), re.compile(r".*?(\d+)\D*$"))
"""Where the number of a rank is in a file's name: behind the word rank, or else last of all numbers."""


def _number(name: str) -> tuple[int, int, int]:
    """Return where the number of a rank begins and ends in a file's name, and the number; -1 where there is none."""
    hit = next((hit for pattern in _NUMBERS if (hit := pattern.match(name))), None)
    return (len(name), len(name), -1) if hit is None else (hit.start(1), hit.end(1), int(hit[1]))


def family_of(name: str) -> str:
    """Return a file's name without the number of its rank, in which the names of all ranks are alike."""
    start, stop, _ = _number(name)
    return f"{name[:start]}*{name[stop:]}"


class FilesReader(ChunkedReader["Agreed"]):
    """Files of ``torch.save`` that hold parts of the same tensors.

    Args:
        path: the folder, or the file of it that the user names.
        folder: the folder.
        files: name -> its file, open.
    """

    format: ClassVar[str] = "torch"

    def __init__(self, path: Path, folder: Path, files: Mapping[str, TorchReader]):
        self.path, self._folder, self._readers = path, folder, dict(files)
        self._chunks: dict[str, Chunks[Agreed]] = {}
        self._latest = Latest[Agreed]()
        self.metadata = {"files": {name: reader.metadata for name, reader in files.items()}}
        self.unread = {name: reason for reader in files.values() for name, reason in reader.unread.items()}
        self.notes = tuple(dict.fromkeys(note for reader in files.values() for note in reader.notes))

    def _agreed(self, info: TensorInfo, files: Iterable[str]) -> Agreed:
        return Agreed(self._folder, info, {file: self._readers[file].stored(info.name) for file in files})

    def _whole(self, info: TensorInfo, files: Iterable[str]) -> Chunks[Agreed]:
        """Return a tensor that each file has whole."""
        starts = np.zeros((1, len(info.shape)), np.int64)
        stops = np.array([info.shape], np.int64).reshape(starts.shape)
        return Chunks(info, starts, stops, (self._agreed(info, files),))

    def _stored(self, whole: Chunks[Agreed], number: int) -> OrderedTensor:
        """Return a chunk of a tensor."""
        return self._latest.of(whole.items[number])

    def files(self) -> list[Path]:
        """Return all files."""
        return [path for reader in self._readers.values() for path in reader.files()]

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()


class RanksReader(FilesReader):
    """Files of all ranks; a tensor that several ranks have the same part of must have the same numbers in all.

    Args:
        path: the folder, or the file of it that the user names.
        folder: the folder.
        files: name -> its file, open.

    Raises:
        CheckpointError: the part of a rank is missing, or the files contradict each other.
    """

    def __init__(self, path: Path, folder: Path, files: Mapping[str, TorchReader]):
        super().__init__(path, folder, files)
        parts: dict[str, dict[str, tuple[Stored, RankPart]]] = {}
        copies: dict[str, list[str]] = {}
        for file, reader in files.items():
            for name, part in reader.parts.items():
                parts.setdefault(name, {})[file] = part
            for name in reader.tensors:
                copies.setdefault(name, []).append(file)
        self.unread = {name: reason for name, reason in self.unread.items() if name not in parts}
        self.notes = (f"put together from the files of {len(files)} ranks", *self.notes)
        check_count(folder, len(parts) + len(copies))
        ambiguous = next((name for name in parts if name in copies), None)
        if ambiguous is not None:
            raise bad(folder, f"{printable(ambiguous)} is a DTensor in some of its files, and none in others")
        for name in dict.fromkeys(name for reader in files.values() for name in (*reader.tensors, *reader.parts)):
            self._chunks[name] = (
                self._put_together(name, parts[name]) if name in parts else self._same(name, copies[name])
            )
        self.tensors = {name: chunks.info for name, chunks in self._chunks.items()}

    def _same(self, name: str, files: Sequence[str]) -> Chunks[Agreed]:
        infos = {file: self._readers[file].tensors[name] for file in files}
        self._check_alike(name, {file: (info.dtype, info.shape) for file, info in infos.items()})
        return self._whole(infos[files[0]], files)

    def _put_together(self, name: str, parts: Mapping[str, tuple[Stored, RankPart]]) -> Chunks[Agreed]:
        stored, part = next(iter(parts.values()))
        self._check_alike(
            name,
            {
                file: (stored.info.dtype, part.shape, part.mesh, part.placements)
                for file, (stored, part) in parts.items()
            },
        )
        info = TensorInfo(name, stored.info.dtype, check_shape(self._folder, name, part.shape))
        # A rank of one mesh and that of another, such as the next group of tensor parallelism, have the same part.
        by_rank: dict[tuple[int, ...], list[str]] = {}
        for file, (_, other_part) in parts.items():
            by_rank.setdefault(other_part.rank, []).append(file)
        self._check_ranks(part, by_rank)
        boxes: dict[tuple[tuple[int, int], ...], dict[str, StridedTensor]] = {}
        for rank, held_by in by_rank.items():
            axes = runs_of(part, rank)
            if any(len(runs) > 1 for runs in axes):
                reason = PLACED.format("whose parts do not lie together").removeprefix("it ")
                raise bad(self._folder, f"{printable(name)} {reason}")
            box = tuple(runs[0] if runs else (0, 0) for runs in axes)
            sizes = tuple(stop - start for start, stop in box)
            for file in held_by:
                stored = parts[file][0]
                if stored.info.shape != sizes and not (0 in sizes and 0 in stored.info.shape):
                    raise bad(
                        self._folder,
                        f"{printable(name)} has the part {printable(list(stored.info.shape))} in "
                        f"{printable(file)}; by its mesh and placements it is {list(sizes)}",
                    )
                if 0 not in sizes:
                    boxes.setdefault(box, {})[file] = stored
        edges = np.array(list(boxes), np.int64).reshape(len(boxes), len(info.shape), 2)
        items = tuple(Agreed(self._folder, info, copies) for copies in boxes.values())
        chunks = Chunks(info, edges[..., 0], edges[..., 1], items)
        if 0 not in info.shape:
            check_filled(self._folder, chunks)
        return chunks

    def _check_alike(self, name: str, described: Mapping[str, object]) -> None:
        if len(set(described.values())) > 1:
            files = listed([printable(file) for file in described], 3)
            raise bad(self._folder, f"{printable(name)} has several shapes, dtypes or placements in {files}")

    def _check_ranks(self, part: RankPart, by_rank: Mapping[tuple[int, ...], Sequence[str]]) -> None:
        """Refuse files of too few ranks: of those that hold the same part, a single one suffices."""

        # Replicas along an axis of the mesh hold the same part: only the coordinates along axes that cut the tensor
        # count.
        def held(rank: Sequence[int]) -> tuple[int, ...]:
            return tuple(at for at, placement in zip(rank, part.placements, strict=True) if placement.axis is not None)

        present = {held(rank) for rank in by_rank}
        sharded_sizes = [
            size for size, placement in zip(part.mesh, part.placements, strict=True) if placement.axis is not None
        ]
        if len(present) == math.prod(sharded_sizes):
            return
        every = itertools.product(*map(range, part.mesh))
        missing = [rank for rank in every if held(rank) not in present]
        total = math.prod(part.mesh)
        descriptions = []
        for rank in missing[:SHOWN]:
            number = number_of(rank, part.mesh)
            at = f" at {printable(list(rank))} of its mesh {list(part.mesh)}" if len(part.mesh) > 1 else ""
            file = self._name_of(number, part, by_rank)
            descriptions.append(f"rank {number}{at}{f' ({file})' if file else ''}")
        rest = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise bad(
            self._folder,
            f"has the parts of {len(by_rank)} of {total} ranks; missing: {', '.join(descriptions)}{rest}; "
            "put the files of all ranks into one folder",
        )

    @staticmethod
    def _name_of(number: int, part: RankPart, by_rank: Mapping[tuple[int, ...], Sequence[str]]) -> str:
        """Return the name that the file of a rank has, if the other names are numbered as their ranks are."""
        if any(_number(file)[2] != number_of(rank, part.mesh) for rank, files in by_rank.items() for file in files):
            return ""
        name = next(iter(by_rank.values()))[0]
        start, stop, _ = _number(name)
        return printable(f"{name[:start]}{number:0{stop - start}}{name[stop:]}")


class Agreed:
    """A part of a tensor that files hold, which all must have the same numbers."""

    def __init__(self, folder: Path, info: TensorInfo, copies: Mapping[str, StridedTensor]):
        self._folder, self.info, self._copies = folder, info, dict(copies)

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of its elements in C order.

        Raises:
            CheckpointError: the files differ.
        """
        first, *others = self._copies.items()
        data = first[1].read(start, stop)
        for file, copy in others:
            if bytes(copy.read(start, stop)) != bytes(data):
                files = f"{printable(first[0])} and {printable(file)}"
                raise bad(
                    self._folder,
                    f"{printable(self.info.name)} holds different numbers in several of its files, {files}; --drop "
                    "leaves it out",
                )
        return data

    def release(self) -> None:
        """Free the copies in C order."""
        for copy in self._copies.values():
            copy.release()


def rank_in(name: str) -> tuple[int, str]:
    """Return the key by which the names of files are put into the order of their ranks."""
    return _number(name)[2], name


def names_of(names: Iterable[str], name: str) -> list[str]:
    """Return the names of the files of all ranks, of which one is given, in the order of their ranks."""
    return sorted((other for other in names if family_of(other) == family_of(name)), key=rank_in)
