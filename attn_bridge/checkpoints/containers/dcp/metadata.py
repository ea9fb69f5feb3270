"""Parses the pickled ``.metadata`` of a distributed checkpoint, without executing any of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....printable import printable
from ..base import Extent, TensorInfo
from ..files import bad, check_count, check_dtype, check_name, check_shape
from ..pickles import Machine, Record
from ..pickles.calls import Global
from .chunks import Chunks, check_filled

HOME = "torch.distributed.checkpoint.metadata."

OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata."
"""Where torch before 2.3 had the properties of a tensor."""

STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

INERT = frozenset(
    {
        *(f"{HOME}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata")),
        *(f"{HOME}{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
        *(f"{HOME}_MEM_FORMAT_ENCODING", f"{OLD_HOME}TensorProperties", f"{OLD_HOME}MEM_FORMAT_ENCODING"),
        *(STORAGE_INFO, "torch.serialization._get_layout"),
        *("builtins.getattr", "__builtin__.getattr"),  # as Python 3.11.0 to 3.11.3 pickled members of enumerations
        *(f"{home}.{name}Path" for home in ("pathlib", "pathlib._local") for name in ("Posix", "PurePosix", "Windows")),
    }
)
"""Classes and functions that a ``.metadata`` may name."""

MAX_CHUNKS = 4_000_000
"""More chunks than this in one checkpoint are refused."""


def read_metadata(data: bytes, path: Path) -> tuple[dict[str, Chunks[Extent]], dict[str, Extent]]:
    """Return the tensors by name, and where everything else is stored.

    Args:
        data: the pickle.
        path: named in errors.

    Raises:
        CheckpointError: it is damaged, names anything but its own classes, or its chunks do not fill its tensors.
    """
    whole = Machine(data, path, INERT).run()
    attributes = _state(path, whole, f"{HOME}Metadata", ("state_dict_metadata", "storage_data"))
    entries, stored = attributes["state_dict_metadata"], attributes["storage_data"]
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise bad(path, "has no state_dict_metadata and storage_data")
    if len(stored) > MAX_CHUNKS:
        raise bad(path, f"has {len(stored)} chunks; at most {MAX_CHUNKS} are read")
    check_count(path, len(entries))
    items = _items(path, stored)
    tensors, others = {}, {}
    for name, entry in entries.items():
        check_name(path, name)
        places = items.pop(name, {})
        if isinstance(entry, Record) and entry.name == f"{HOME}BytesStorageMetadata":
            if list(places) != [None]:
                raise bad(path, f"{printable(name)} is stored {len(places)} times, or in chunks")
            others[name] = places[None]
        else:
            tensors[name] = _tensor(path, name, entry, places)
    if items:
        raise bad(path, f"{printable(next(iter(items)))} is stored, and not listed as a tensor or a value")
    return tensors, others


def _state(path: Path, record: Any, kind: str, names: Sequence[str]) -> dict[str, object]:
    """Return the attributes of an object of a class."""
    is_one = isinstance(record, Record) and record.name == kind and not record.arguments
    if not is_one or not isinstance(record.state, dict):
        raise bad(path, f"has {printable(_with_article(record))} where {kind.rpartition('.')[2]} should be")
    if missing := [name for name in names if name not in record.state]:
        raise bad(path, f"has a {kind.rpartition('.')[2]} without {missing[0]}")
    state: dict[str, Any] = record.state
    return state


def _with_article(value: object) -> str:
    """Return the class of a value for an error: ``a TensorStorageMetadata``."""
    return f"a {value.name.rpartition('.')[2]}" if isinstance(value, Record | Global) else f"a {type(value).__name__}"


def _natural(path: Path, label: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise bad(path, f"{label} {printable(repr(value), 60)} is no natural number")
    return value


def _items(path: Path, stored: dict[object, object]) -> dict[str, dict[tuple[int, ...] | None, Extent]]:
    """Return name -> offset of a chunk (None for a value that is not a tensor) -> its location in a file."""
    items: dict[str, dict[tuple[int, ...] | None, Extent]] = {}
    for index, info in stored.items():
        key = _state(path, index, f"{HOME}MetadataIndex", ("fqn",))
        name, offset = check_name(path, key["fqn"]), key.get("offset")
        if offset is not None:
            offset = check_shape(path, name, offset)
        storage_info = _state(path, info, STORAGE_INFO, ("relative_path", "offset", "length"))
        if storage_info.get("transform_descriptors"):
            how = printable(repr(storage_info["transform_descriptors"]), 60)
            raise bad(path, f"{printable(name)} was stored by the extension {how}; save it without extensions")
        file = check_name(path, storage_info["relative_path"])
        start = _natural(path, f"the offset of {printable(name)}", storage_info["offset"])
        size = _natural(path, f"the length of {printable(name)}", storage_info["length"])
        places = items.setdefault(name, {})
        if offset in places:
            raise bad(path, f"the chunk {printable(offset)} of {printable(name)} is stored twice")
        places[offset] = Extent(file, start, size)
    return items


def _tensor(path: Path, name: str, entry: object, places: dict[tuple[int, ...] | None, Extent]) -> Chunks[Extent]:
    label = printable(name)
    attributes = _state(path, entry, f"{HOME}TensorStorageMetadata", ("properties", "size", "chunks"))
    properties = attributes["properties"]
    kinds = (f"{HOME}TensorProperties", f"{OLD_HOME}TensorProperties")
    state = properties.state if isinstance(properties, Record) and properties.name in kinds else None
    # TensorProperties.__getstate__: dtype, layout, requires_grad, memory format, pin_memory.
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], Global):
        raise bad(path, f"{label} has no properties of a tensor")
    dtype = check_dtype(path, name, state[0].name.removeprefix("torch."))
    layout = state[1]
    if not isinstance(layout, Record) or layout.arguments != ("torch.strided",):
        raise bad(path, f"{label} is a sparse tensor, or of another layout than torch.strided")
    shape = check_shape(path, name, attributes["size"])
    if not isinstance(attributes["chunks"], list):
        raise bad(path, f"{label} has no list of chunks")
    starts, stops, items = [], [], []
    for chunk in attributes["chunks"]:
        box = _state(path, chunk, f"{HOME}ChunkStorageMetadata", ("offsets", "sizes"))
        offsets, sizes = (check_shape(path, name, box[one]) for one in ("offsets", "sizes"))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise bad(path, f"{label} has a chunk of {len(sizes)} axes at {len(offsets)}; it has {len(shape)}")
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise bad(path, f"{label} has a chunk that reaches to {printable(ends)}; its shape is {list(shape)}")
        item = places.pop(offsets, None)
        if 0 in sizes:  # of a rank that has no part of it
            continue
        if item is None:
            raise bad(path, f"the chunk {printable(list(offsets))} of {label} is stored nowhere, or listed twice")
        starts.append(offsets)
        stops.append(ends)
        items.append(item)
    if places:
        raise bad(path, f"the chunk {printable(next(iter(places)))} of {label} is stored, and not listed")
    info = TensorInfo(name, dtype, shape)
    axes = (len(items), len(shape))
    made = Chunks(info, np.array(starts, np.int64).reshape(axes), np.array(stops, np.int64).reshape(axes), tuple(items))
    if 0 not in shape:
        check_filled(path, made)
    return made
