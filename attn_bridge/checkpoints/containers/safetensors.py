"""safetensors: a JSON header and packed bytes; one file, or a folder of them with an index."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...printable import printable
from ...whole_files import JsonObject
from .base import MAX_HEADER, Extent, Reader, TensorInfo
from .files import bad, check_count, check_infos, check_name, check_shape, listed, parse_json
from .remote import is_remote
from .shards import GONE, NUMBERED, ShardedReader, index_of, is_stale, note_on_part, share
from .sources import FileReader, inside
from .writing import PlacedWriter, dump_json, put, sync_folder

SMALL = ("F4", "F6_E2M3", "F6_E3M2")
"""Dtypes whose elements are smaller than a byte."""

NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Name in a header -> NumPy name."""

CODES = {name: code for code, name in NAMES.items()}

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(diffusion_pytorch_)?model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
"""Names that `transformers` and `diffusers` give to the file of a model, or to its parts."""

ORIGINAL = ("consolidated", "open_clip_")
"""Beginnings of the names of the same model's files under the names of its maker, Mistral or open_clip, in the same
folder."""

SAME = "the folder's other files are the same model"
"""Reason why files are not read."""

VARIANT = re.compile(
    r"(diffusion_pytorch_)?model(-[0-9]{5}-of-[0-9]{5})?\.(?P<variant>[\w-]+?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors"
)
"""Names of the same model's files in another form (``model.fp16.safetensors``), which those libraries read by
``variant="fp16"`` alone."""

VARIANT_INDEX = re.compile(r"(diffusion_pytorch_)?model\.safetensors\.index\.[\w-]+\.json")
"""Names of the indexes of such files."""

ENDING = ".safetensors"

OF_RANKS = re.compile(r"rank\d+\.safetensors")
"""Names of the files of TensorRT-LLM, each with a part of the weights."""

RANK = "shard-"
"""Beginning of the names of files that have one rank's pieces: ``shard-00001-model-00001-of-00001.safetensors``."""

PIECES = "DCP_SHARDING_INFO"
"""Key of ``__metadata__`` under which torch.distributed.checkpoint writes where in its tensor each piece begins."""


class SafetensorsReader(FileReader):
    """One file; `tensors` are in the order of their bytes, `metadata` is its ``__metadata__``."""

    format: ClassVar[str] = "safetensors"

    def _read_headers(self) -> None:
        path = self.path
        if self._file.size < 8:
            raise bad(path, f"is no safetensors file: it has {self._file.size} bytes")
        # Eight bytes, little-endian: the length of the JSON behind them.
        (length,) = struct.unpack("<Q", self._file.read(0, 8))
        if length > MAX_HEADER or 8 + length > self._file.size:
            from .mistaken import kind_of

            other = kind_of(self._file, self.format)
            if other:
                raise bad(path, other)
        if length > MAX_HEADER:
            raise bad(path, f"its header claims {length} bytes; more than {MAX_HEADER} are not read")
        if 8 + length > self._file.size:
            raise bad(path, f"its header claims {length} bytes; the file has {self._file.size}")
        header = parse_json(self._file.read(8, length), path, "header")
        if not isinstance(header, dict):
            raise bad(path, "its header is no object")
        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(isinstance(one, str) for one in self.metadata.values()):
            raise bad(path, "__metadata__ of its header must map strings to strings")
        check_count(path, len(header))
        _check_whole(path, self.metadata.get(PIECES, ""))
        self._place(header, 8 + length)
        self._share()

    def _place(self, header: dict[str, object], begin: int) -> None:
        """Check every entry, and that together they cover the rest of the file."""
        extents: list[tuple[int, int, TensorInfo]] = []
        for name, entry in header.items():
            check_name(self.path, name)
            if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
                raise bad(self.path, f"the entry of {printable(name)} is not dtype, shape and data_offsets")
            code = entry["dtype"]
            if code in SMALL:
                raise bad(
                    self.path,
                    f"{printable(name)} has the dtype {code}, whose numbers are smaller than a byte, and is not read: "
                    "convert the model that it was made of, or save its bytes (view(torch.uint8))",
                )
            if not isinstance(code, str) or code not in NAMES:
                raise bad(self.path, f"{printable(name)} has the unknown dtype {printable(code)}")
            info = TensorInfo(name, NAMES[code], check_shape(self.path, name, entry["shape"]))
            offsets = entry["data_offsets"]
            if not isinstance(offsets, list) or [type(one) for one in offsets] != [int, int]:
                raise bad(self.path, f"the data_offsets of {printable(name)} are not two integers")
            start, stop = offsets
            if stop - start != info.nbytes:
                raise bad(self.path, f"{printable(name)} needs {info.nbytes} bytes; its offsets hold {stop - start}")
            extents.append((start, stop, info))
        # The format allows no holes: bytes that no tensor names could be a second file, of another format.
        # Only by offsets: a tensor without elements begins where another does, and headers have no order.
        extents.sort(key=lambda extent: extent[:2])
        end, before = 0, "the header"
        for start, stop, info in extents:
            if start != end:
                how = "overlap" if start < end else f"leave a hole of {start - end} bytes"
                raise bad(self.path, f"{printable(before)} and {printable(info.name)} {how}")
            self.tensors[info.name] = info
            self._pieces[info.name] = ((self._file, begin + start, info.nbytes),)
            end, before = stop, info.name
        if begin + end != self._file.size:
            raise bad(self.path, f"its tensors end at byte {begin + end}; the file has {self._file.size}")

    def _share(self) -> None:
        """Add the names that ``__metadata__`` has of tensors stored under another name, as `save_model` leaves them."""
        self.shared, notes = share(self.path, self.tensors, self.metadata)
        self.notes = (*self.notes, *notes)
        for name, stored in self.shared.items():
            self._pieces[name] = self._pieces[stored]


def _check_whole(path: Path, offsets: str) -> None:
    """Refuse a file with pieces of tensors, by the JSON that its metadata has on their offsets.

    Pieces of the first rank have the offsets of whole tensors; the files of other ranks next to it show the difference.
    """
    document = parse_json(offsets.encode(), path, PIECES) if offsets else {}
    entries = document.items() if isinstance(document, dict) else ()
    _, joint, rest = path.name.removeprefix(RANK).partition("-")
    is_first = bool(entries and joint and path.name.startswith(RANK)) and not is_remote(path)
    is_part = is_first and any(
        one.name != path.name and one.name.startswith(RANK) and one.name.endswith(f"-{rest}")
        for one in path.parent.iterdir()
    )
    for name, entry in entries:
        at = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if isinstance(at, list) and (any(at) or is_part):
            raise bad(
                path,
                f"has a piece of {printable(name)}: torch's HuggingFaceStorageWriter saved each rank's part "
                "(save_distributed=True); join them by consolidate_safetensors_files of "
                "torch.distributed.checkpoint._consolidate_hf_safetensors, or save with enable_consolidation=True",
            )


class ShardedSafetensorsReader(ShardedReader):
    """A folder; without an index, all of its ``.safetensors`` files."""

    format: ClassVar[str] = "safetensors"


def open_safetensors(path: Path) -> Reader:
    """Open a file, an index, or a folder.

    Raises:
        CheckpointError: the path has no safetensors files, or a malformed one.
    """
    if not path.is_dir():
        if path.suffix == ".json":
            return ShardedSafetensorsReader(path.parent, path, SafetensorsReader)
        if OF_RANKS.fullmatch(path.name) and not is_remote(path):
            _check_run(path, [one.name for one in path.parent.iterdir()])
        single = SafetensorsReader(path)
        single.notes += note_on_part(path.name)
        return single
    index = index_of(path, ".safetensors.index.json", "model")
    names = tuple(sorted(one.name for one in path.iterdir() if one.suffix == ENDING and not one.name.startswith(".")))
    _check_run(path, names)
    chosen, left_out = _without_original(names)
    if left_out and index is not None and index.name.startswith(ORIGINAL):
        index = None
    if index is None or is_stale(path, index, names):
        if not names:
            raise bad(path, "has no .safetensors files")
        _check_variants(path, chosen)
        chosen, others = _of_usual_name(path, chosen)
        reader = ShardedSafetensorsReader(path, None, SafetensorsReader, chosen)
        reader.note_others(left_out, SAME)
        reader.note_others(others, f"{chosen[0]} is the folder's model")
        reader.note_others([index.name] if index is not None else [], GONE)
        return reader
    reader = ShardedSafetensorsReader(path, index, SafetensorsReader)
    reader.note_others(left_out, SAME)
    reader.note_others((name for name in names if name not in left_out), f"{index.name} does not name them")
    return reader


def _of_usual_name(path: Path, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files to read of a folder without an index, and others next to a file of a model's usual name."""
    usual = tuple(name for name in names if SHARD.fullmatch(name))
    if len([name for name in usual if not NUMBERED.fullmatch(name)]) != 1:
        return names, ()
    others = tuple(name for name in names if name not in usual)
    models = [name for name in others if re.fullmatch(r"model_[0-9]+\.safetensors", name)]
    if models:
        raise bad(path, f"has several models, as accelerate saves them; name one: {listed([usual[0], *models], 5)}")
    return usual, others


def _check_variants(path: Path, names: Sequence[str]) -> None:
    """Refuse the files of several variants of a model."""
    hits = [hit for name in names if (hit := VARIANT.fullmatch(name))]
    if len({hit["variant"] for hit in hits}) > 1:
        indexes = [one.name for one in path.iterdir() if VARIANT_INDEX.fullmatch(one.name)]
        choices = sorted([*indexes, *(hit[0] for hit in hits if not NUMBERED.fullmatch(hit[0]))])
        raise bad(path, f"has several variants of a model; name one of them: {listed(list(map(printable, choices)))}")


def _check_run(path: Path, names: Sequence[str]) -> None:
    """Refuse files that each have a part of the weights."""
    of_ranks = [name for name in names if OF_RANKS.fullmatch(name)]
    if of_ranks:
        from .mistaken import run_of

        kind = run_of(of_ranks)
        if kind:
            raise bad(path, kind)


def _without_original(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of a folder to read, and those with the same model in its maker's names or another variant."""
    originals = tuple(name for name in names if name.startswith(ORIGINAL) or VARIANT.fullmatch(name))
    others = tuple(name for name in names if name not in originals)
    return (others, originals) if any(map(SHARD.fullmatch, others)) else (names, ())


class SafetensorsWriter(PlacedWriter):
    """One file if no tensor names a shard, otherwise a folder of the shards and an index.

    Tensors are written in the given order; if that would misalign a tensor for its dtype, they are sorted by the size
    of their dtype, largest first (the official library's order except for names). A folder gets an index if it has
    several files or `metadata` has ``"index"``. `metadata` has the form of the readers': files that the official
    library wrote with at most one key of metadata, and indexes of the hub's libraries, are reproduced byte for byte.
    """

    format: ClassVar[str] = "safetensors"

    def __init__(
        self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any], *, is_share: bool = False
    ):
        super().__init__(path, tensors, metadata, is_share=is_share)
        check_infos(path, tensors)
        groups: dict[str, list[TensorInfo]] = {}
        for info in tensors:
            if info.dtype not in CODES:
                raise bad(path, f"safetensors has no {info.dtype} ({printable(info.name)})")
            groups.setdefault(info.file, []).append(info)
        self._folder = bool(groups) and "" not in groups
        if not self._folder and set(groups) > {""}:
            raise bad(path, "some tensors name a file and some don't")
        own = metadata.get("files", {}) if self._folder else {"": metadata}
        self._starts: dict[str, int] = {}
        sizes, headers = {}, []
        for file, infos in (groups or {"": []}).items():
            if file:
                inside(path, file, path)
                if not file.endswith(ENDING):
                    raise bad(path, f"the file {printable(file)} has to end with {ENDING}")
            header, sizes[file] = self._lay_out(infos, own.get(file, {}))
            headers.append((file, 0, header))
        self._index = self._folder and (len(groups) > 1 or "index" in metadata)
        self._begin(sizes, headers)

    def _lay_out(self, infos: list[TensorInfo], metadata: Mapping[str, object]) -> tuple[bytes, int]:
        """Return a file's header and its size, and note where its tensors begin."""
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
            raise bad(self.path, "the metadata of a safetensors file has to be texts by name")
        end = 0
        for info in infos:
            # All widths are powers of two: behind wider numbers each start is a multiple of the own width, so that
            # sorting aligns all.
            if end % min(info.itemsize, 8):
                infos = sorted(infos, key=lambda info: -info.itemsize)
                break
            end += info.nbytes
        header: JsonObject = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        end = 0
        for info in infos:
            if info.name == "__metadata__":
                raise bad(self.path, "no tensor of a safetensors file can be named __metadata__")
            header[info.name] = {
                "dtype": CODES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [end, end + info.nbytes],
            }
            self._starts[info.name] = end
            end += info.nbytes
        text = dump_json(self.path, header, ensure_ascii=False, separators=(",", ":"))
        # Spaces after the JSON are allowed, and let the tensors begin at a multiple of 8 for readers that map them.
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise bad(self.path, f"a header would have {len(text)} bytes; more than {MAX_HEADER} are not read")
        begin = 8 + len(text)
        for info in infos:
            self._starts[info.name] += begin
        return struct.pack("<Q", len(text)) + text, begin + end

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return the file extent of bytes of a tensor."""
        extent = Extent(self.tensors[name].file, self._starts[name] + start, stop - start)
        return [extent] if start < stop else []

    def finish(self) -> None:
        """Flush all files, then write the index."""
        self.flush()
        if self._index:
            weights = {name: info.file for name, info in self.tensors.items()}
            size = sum(info.nbytes for info in self.tensors.values())
            index = {"metadata": {**self.metadata.get("index", {}), "total_size": size}, "weight_map": weights}
            put(self.path / INDEX, dump_json(self.path, index, indent=2, sort_keys=True) + b"\n")
        folders = {(self.path / file).parent for file in self._sizes}
        for folder in sorted({*folders, self.path.parent}):
            sync_folder(folder)
