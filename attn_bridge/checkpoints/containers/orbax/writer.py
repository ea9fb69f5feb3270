"""Writes folders of Orbax without TensorStore, as Zarr arrays as they are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from ....printable import printable
from ..base import ORBAX_COMMITTED as COMMITTED
from ..base import ORBAX_METADATA as METADATA
from ..base import Extent, TensorInfo, numpy_dtype
from ..files import bad, check_infos, leads_out, unwritable
from ..writing import PlacedWriter, as_bytes, chunk_shape, dump_json, put, sync_folder
from .ocdbt import MANIFEST, ValueLocation, encode
from .plain import EXTRA, FOREIGN, PlainArray, chunk_ranges

HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"

CHUNK = 1 << 28
"""Bytes of a chunk that we write, where a single row has no more."""

FILE = 1 << 31
"""Bytes of a file of OCDBT, where a single chunk has no more."""

ALIGN = 64
"""Alignment in bytes of chunks in a file of OCDBT."""


class OrbaxWriter(PlacedWriter):
    """A folder that ``StandardCheckpointer().restore`` and ``PyTreeCheckpointer().restore`` read: nested dicts.

    It is of the layout without OCDBT: a folder per tensor, and its elements as they are in one file per chunk of at
    most 256 MiB. Nothing but Python is needed. `metadata` goes into a file of ours.
    """

    format: ClassVar[str] = "orbax"
    use_ocdbt: ClassVar[bool] = False

    def __init__(
        self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object], *, is_share: bool = False
    ):
        super().__init__(path, tensors, metadata, is_share=is_share)
        check_infos(path, tensors)
        self._extra = dump_json(path, self.metadata, sort_keys=True) if metadata else b""
        self._plain: dict[str, PlainArray] = {}
        inner: set[str] = set()
        for info in tensors:
            self._plain[info.name] = self._plan(info)
            parts = info.name.split(".")
            inner.update(".".join(parts[:count]) for count in range(1, len(parts)))
        parents = [printable(name) for name in self._plain if name in inner]
        if parents:
            raise bad(path, f"can't be tensors and have others below them: {', '.join(parents[:9])}")
        if not is_share:
            self._uncommit()
        self._lay_out()

    def _uncommit(self) -> None:
        """Remove the commit marker of a killed run; the marker must not exist before this run is complete."""
        if not isinstance(self.path, os.PathLike):  # in stores the order counts in which the files are published
            return
        try:
            (self.path / COMMITTED).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _lay_out(self) -> None:
        """Make the folders; in this layout file names alone locate chunks."""
        try:
            for folder in () if self._is_share else (self.path, *(plain.folder for plain in self._plain.values())):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from None
        self._begin(
            {f"{name}/{chunk}": plain.size for name, plain in self._plain.items() for chunk in plain.names()}, ()
        )

    def _location(self, name: str, chunk: str) -> tuple[str, int]:
        """Return the file of a chunk, and where in it the chunk begins."""
        return f"{name}/{chunk}", 0

    def _plan(self, info: TensorInfo) -> PlainArray:
        """Return the chunks and folder of an array, after checks of its name and dtype."""
        path, label = self.path, printable(info.name)
        if info.file:
            raise bad(path, "a folder of Orbax has files of its own; tensors can't name one")
        if numpy_dtype(info.dtype).isbuiltin != 1 and info.dtype not in FOREIGN:
            raise bad(path, f"Orbax has no {info.dtype} ({label})")
        # TensorStore's limit of axes.
        if len(info.shape) > 32:
            raise bad(path, f"{label} has {len(info.shape)} axes; Orbax holds 32")
        parts = info.name.split(".")
        # 255 bytes: what file systems take as the name of a folder.
        if not all(parts) or "/" in info.name or len(info.name.encode("utf-8")) > 255:
            raise bad(path, f"{label} can't be the name of a folder: a part is empty, it has a slash, or is too long")
        if leads_out(info.name):
            raise bad(path, f"no array can be named {label}: an unpacker would write it outside of its folder")
        if info.name in ("manifest", "d", "ocdbt", METADATA, "_CHECKPOINT_METADATA", "_sharding", COMMITTED):
            raise bad(path, f"{label} is a name that Orbax keeps for itself")
        chunks = chunk_shape(info.shape, info.itemsize, CHUNK)
        return PlainArray(path / info.name, info.shape, chunks, math.prod(chunks) * info.itemsize)

    def write_range(self, name: str, start: int, data: object) -> None:
        """Write bytes of a tensor, in any order."""
        view = as_bytes(data)
        if self.tensors[name].dtype == "bool" and len(view) and np.frombuffer(view, np.uint8).max() > 1:
            raise bad(self.path, f"{printable(name)} has bools that are neither 0 nor 1, which Orbax would not read")
        super().write_range(name, start, view)

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return the file extents of bytes of a tensor, a chunk at a time."""
        extents = []
        for chunk, begin, end in chunk_ranges(self._plain[name], start, stop) if start < stop else []:
            file, first = self._location(name, chunk)
            extents.append(Extent(file, first + begin, end - begin))
        return extents

    def _array(self, name: str) -> bytes:
        """Return the Zarr metadata of an array."""
        plain, dtype = self._plain[name], numpy_dtype(self.tensors[name].dtype)
        array = {
            "chunks": list(plain.chunks),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(plain.shape),
            "zarr_format": 2,
        }
        return json.dumps(array).encode()

    def _finish_arrays(self) -> None:
        for name, plain in self._plain.items():
            put(plain.folder / ".zarray", self._array(name))
            sync_folder(plain.folder)

    def finish(self) -> None:
        """Write the metadata, flush, and mark the folder as finished."""
        self.flush()
        self._finish_arrays()
        self._describe()
        sync_folder(self.path)
        # Orbax names the folder in it, and reads nothing but its presence; ours has the same bytes wherever it is.
        put(self.path / COMMITTED, b"Checkpoint commit was successful")
        sync_folder(self.path)
        sync_folder(self.path.parent)

    def _describe(self) -> None:
        """Write Orbax's description of the tree, and our metadata."""
        tree = {}
        for name in self._plain:
            parts = name.split(".")
            tree[str(tuple(parts))] = {
                # 2 is a key of a dict; 1 would be a position in a list.
                "key_metadata": [{"key": part, "key_type": 2} for part in parts],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
        if self._extra:
            put(self.path / EXTRA, self._extra)
        description = {
            "tree_metadata": tree,
            "use_ocdbt": self.use_ocdbt,
            "use_zarr3": False,
            # Chunks of zeros are written, too, so that a missing one is damage and not a fill value.
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        put(self.path / METADATA, json.dumps(description).encode())
        step: dict[str, object] = {
            "item_handlers": HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": None,
            "commit_timestamp_nsecs": None,
            "custom_metadata": {},
        }
        put(self.path / "_CHECKPOINT_METADATA", json.dumps(step).encode())


class OcdbtWriter(OrbaxWriter):
    """A folder in Orbax's default layout: few files, and a database (OCDBT) with the location of each chunk.

    TensorStore gives files random names and records the time; here the files have numbers and the time is fixed, so
    that the bytes depend on the arguments alone.
    """

    use_ocdbt: ClassVar[bool] = True

    def _lay_out(self) -> None:
        """Place all chunks, and write the tree with their locations."""
        self._ends: list[int] = [0]
        self._values: dict[bytes, tuple[int, int, int]] = {}
        arrays = {f"{name}/.zarray": self._array(name) for name in self._plain}
        for key, array in arrays.items():
            self._add(key, len(array), 1)
        for name, plain in self._plain.items():
            for chunk in plain.names():
                self._add(f"{name}/{chunk}", plain.size, ALIGN)
        fixed = [(*self._location(*key.rsplit("/", 1)), array) for key, array in arrays.items()]
        sizes = {_file(number): size for number, size in enumerate(self._ends)}
        self._begin(sizes, [*((file, 0, b"") for file in sizes), *fixed])  # also files without an array's description
        if self._is_share:
            return
        places = {key: ValueLocation(_file(file), start, size) for key, (file, start, size) in self._values.items()}
        tree, manifest = encode(places, _file(len(self._ends)))
        put(self.path / _file(len(self._ends)), tree)
        put(self.path / MANIFEST, manifest)
        self._describe()  # so that a resuming run can read an interrupted one

    def _add(self, key: str, size: int, align: int) -> None:
        start = -(-self._ends[-1] // align) * align
        if start and start + size > FILE:
            self._ends.append(0)
            start = 0
        self._ends[-1] = start + size
        self._values[key.encode()] = len(self._ends) - 1, start, size

    def _location(self, name: str, chunk: str) -> tuple[str, int]:
        file, start, _ = self._values[f"{name}/{chunk}".encode()]
        return _file(file), start

    def _finish_arrays(self) -> None:
        sync_folder(self.path / "d")


def _file(number: int) -> str:
    return f"d/{number:032x}"
