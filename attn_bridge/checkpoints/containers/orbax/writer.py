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
from ..base import Extent, TensorInfo, Writer, numpy_dtype
from ..files import bad, check_infos, check_range, leads_out, unwritable
from ..remote.targets import open_target, put
from ..writing import TargetFile, as_bytes, chunk_shape, dump_json, sync_folder
from .ocdbt import MANIFEST, ValueLocation, encode
from .plain import EXTRA, FOREIGN, PlainArray, chunk_ranges

HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"

CHUNK = 1 << 28
"""Bytes of a chunk that we write, where a single row has no more."""

FILE = 1 << 31
"""Bytes of a file of OCDBT, where a single chunk has no more."""

ALIGN = 64
"""Alignment in bytes of chunks in a file of OCDBT."""


class OrbaxWriter(Writer):
    """A folder that ``StandardCheckpointer().restore`` and ``PyTreeCheckpointer().restore`` read: nested dicts.

    It is of the layout without OCDBT: a folder per tensor, and its elements as they are in one file per chunk of at
    most 256 MiB. Nothing but Python is needed. `metadata` goes into a file of ours.
    """

    format: ClassVar[str] = "orbax"
    random_access: ClassVar[bool] = True
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
        self._open: tuple[Path, TargetFile] | None = None
        self._lay_out()
        if not is_share:
            self._uncommit()
            self._begin()

    def _uncommit(self) -> None:
        """Remove the commit marker of a killed run; the marker must not exist before this run is complete."""
        if not isinstance(self.path, os.PathLike):  # in stores the order counts in which the files are published
            return
        try:
            (self.path / COMMITTED).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _lay_out(self) -> None:
        """Assign offsets to chunks; in this layout file names alone locate them."""

    def _begin(self) -> None:
        """Make the folders."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for plain in self._plain.values():
                plain.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _place(self, name: str, chunk: str) -> tuple[Path, int, int]:
        """Return the file of a chunk, where in it the chunk begins, and the bytes of the file."""
        plain = self._plain[name]
        return plain.folder / chunk, 0, plain.size

    def _lead(self, name: str, chunk: str) -> bytes:
        """Return the bytes in front of a chunk in its file, back to the previous chunk."""
        return b""

    def _plan(self, info: TensorInfo) -> PlainArray:
        """Return the chunks and folder of an array, after checks of its name and dtype."""
        path, label = self.path, printable(info.name)
        if info.file:
            raise bad(path, "a folder of Orbax has files of its own; tensors can't name one")
        if numpy_dtype(info.dtype).isbuiltin != 1 and info.dtype not in FOREIGN:
            raise bad(path, f"Orbax has no {info.dtype} ({label})")
        if len(info.shape) > 32:
            raise bad(path, f"{label} has {len(info.shape)} axes; Orbax holds 32")
        parts = info.name.split(".")
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
        check_range(self.path, self.tensors[name], start, start + len(view))
        if self.tensors[name].dtype == "bool" and len(view) and np.frombuffer(view, np.uint8).max() > 1:
            raise bad(self.path, f"{printable(name)} has bools that are neither 0 nor 1, which Orbax would not read")
        plain, done = self._plain[name], 0
        for chunk, begin, end in chunk_ranges(plain, start, start + len(view)) if len(view) else []:
            path, first, size = self._place(name, chunk)
            if self._open is None or self._open[0] != path:
                self.abort()
                self._open = path, open_target(path, size, past_cache=not self._is_share)
            if self._is_share and not begin and self._open[1].joins:
                before = self._lead(name, chunk)
                self._open[1].write(first - len(before), before)
            self._open[1].write(first + begin, view[done : done + end - begin])
            done += end - begin

    def extents(self, name: str, start: int, stop: int) -> list[Extent]:
        """Return the file extents of bytes of a tensor, a chunk at a time."""
        extents = []
        for chunk, begin, end in chunk_ranges(self._plain[name], start, stop) if start < stop else []:
            path, first, _ = self._place(name, chunk)
            extents.append(Extent(path.relative_to(self.path).as_posix(), first + begin, end - begin))
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
        self.abort()
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
                "key_metadata": [{"key": part, "key_type": 2} for part in parts],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
        if self._extra:
            put(self.path / EXTRA, self._extra)
        description = {
            "tree_metadata": tree,
            "use_ocdbt": self.use_ocdbt,
            "use_zarr3": False,
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

    def flush(self) -> None:
        """Flush the open file and close it."""
        self.abort()

    def abort(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open[1].sync()
            self._open[1].close()
            self._open = None


class OcdbtWriter(OrbaxWriter):
    """A folder in Orbax's default layout: few files, and a database (OCDBT) with the location of each chunk.

    TensorStore gives files random names and records the time; here the files have numbers and the time is fixed, so
    that the bytes depend on the arguments alone.
    """

    use_ocdbt: ClassVar[bool] = True

    def _lay_out(self) -> None:
        """Place all chunks."""
        self._sizes: list[int] = [0]
        self._values: dict[bytes, tuple[int, int, int]] = {}
        self._arrays = {name: self._array(name) for name in self._plain}
        for name, array in self._arrays.items():
            self._add(f"{name}/.zarray", len(array), 1)
        self._leads: dict[str, bytes] = {}
        before = b"".join(self._arrays.values())
        for name, plain in self._plain.items():
            for chunk in plain.names():
                number, end = len(self._sizes), self._sizes[-1]
                self._add(f"{name}/{chunk}", plain.size, ALIGN)
                start = self._values[f"{name}/{chunk}".encode()][1]
                is_new = len(self._sizes) != number
                self._leads[f"{name}/{chunk}"] = b"" if is_new else before + bytes(start - end)
                before = b""

    def _lead(self, name: str, chunk: str) -> bytes:
        """Return the bytes in front of a chunk in its file, back to the previous chunk."""
        return self._leads[f"{name}/{chunk}"]

    def _begin(self) -> None:
        """Write the tree with the locations of all chunks."""
        places = {key: ValueLocation(_file(file), start, size) for key, (file, start, size) in self._values.items()}
        tree, manifest = encode(places, _file(len(self._sizes)))
        for number, size in enumerate(self._sizes):
            open_target(self.path / _file(number), size).close()
        for name, array in self._arrays.items():
            file, start, _ = self._values[f"{name}/.zarray".encode()]
            target = open_target(self.path / _file(file), self._sizes[file])
            target.fill(start, array)
            target.close()
        put(self.path / _file(len(self._sizes)), tree)
        put(self.path / MANIFEST, manifest)
        self._describe()  # so that a resuming run can read an interrupted one

    def _add(self, key: str, size: int, align: int) -> None:
        start = -(-self._sizes[-1] // align) * align
        if start and start + size > FILE:
            self._sizes.append(0)
            start = 0
        self._sizes[-1] = start + size
        self._values[key.encode()] = len(self._sizes) - 1, start, size

    def _place(self, name: str, chunk: str) -> tuple[Path, int, int]:
        file, start, _ = self._values[f"{name}/{chunk}".encode()]
        return self.path / _file(file), start, self._sizes[file]

    def _finish_arrays(self) -> None:
        for number, size in enumerate(self._sizes):
            target = open_target(self.path / _file(number), size)
            target.sync()
            target.close()
        sync_folder(self.path / "d")


def _file(number: int) -> str:
    return f"d/{number:032x}"
