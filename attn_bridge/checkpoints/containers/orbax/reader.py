"""Reads folders of Orbax: uncompressed ones directly, all others through TensorStore."""

from __future__ import annotations

import bisect
import contextlib
import importlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ....printable import printable
from ..base import MAX_HEADER, Array, CheckpointError, Reader, TensorInfo
from ..base import ORBAX_COMMITTED as COMMITTED
from ..base import ORBAX_ITEMS as ITEMS
from ..base import ORBAX_METADATA as METADATA
from ..files import (
    File,
    bad,
    boxes,
    check_count,
    check_dtype,
    check_name,
    check_range,
    check_shape,
    listed,
    parse_json,
)
from ..remote import RemotePath, is_remote, sizes_in, survey
from ..sources import inside, open_file, read_file
from .ocdbt import CompressedError, ValueLocation, decode
from .plain import EXTRA, FOREIGN, PlainArray, chunk_ranges

MAX_CHUNK = 1 << 35
"""Bytes of a chunk, which has to be read whole."""

MAX_CLAIM = 1 << 42
"""Bytes of an array that TensorStore reads."""

MAX_ZEROS, MAX_RATIO = 1 << 30, 1 << 15
"""Bytes that arrays may claim without any in the folder, since zeros need none, and for each byte that it holds.

Zstandard, which compresses most of what Orbax can, makes 128 KiB of four bytes at most.
"""

UNLISTED = -1
"""Size of a chunk that its store does not list; it is checked when the chunk is read."""

CACHE = 1 << 26
"""Bytes of decompressed chunks that TensorStore keeps for the next part of an array."""

BATCH = 256
"""Tensors that are looked up at a time."""


class OrbaxReader(Reader):
    """A folder of StandardCheckpointer or PyTreeCheckpointer, or a step of a CheckpointManager.

    Names are the keys of the tree joined by dots. `metadata` is the one that our writer stored, or else Orbax's data
    besides arrays: {"custom": its custom metadata, "empty": {name: kind of an empty node}}, each only if not empty.
    """

    format: ClassVar[str] = "orbax"
    random_access: ClassVar[bool] = False

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise bad(path, "is not a folder, as Orbax writes it")
        if not (path / METADATA).is_file():
            item = next((one for one in ITEMS if (path / one / METADATA).is_file()), None)
            path = path if item is None else inside(path, item, path)
        self._folder = path
        self._check_finished()
        description = self._read_json(METADATA)
        if not isinstance(description, dict) or not isinstance(description.get("tree_metadata"), dict):
            raise bad(path / METADATA, "has no tree_metadata")
        self._ocdbt = description.get("use_ocdbt", True) is True
        self._zarr3 = description.get("use_zarr3", False) is True
        self._stores: dict[str, Any] = {}
        self._plain: dict[str, PlainArray] = {}
        self._files: dict[Path, File] = {}
        self._used = {path / METADATA}
        self._places: dict[bytes, ValueLocation] | None = None
        self._claimed = self._unpacked = 0
        if self._ocdbt:
            with contextlib.suppress(CompressedError):
                self._places, used = decode(path, self.path)
                self._used |= used
        self._size = 0
        self._is_full = description.get("store_array_data_equal_to_fill_value") is True
        self._tensorstore: Any = None
        self._keys: list[bytes] | None = None
        self.tensors = {}
        self.metadata = {"custom": description["custom_metadata"]} if description.get("custom_metadata") else {}
        check_count(path, len(description["tree_metadata"]))
        names = self._names(description["tree_metadata"])
        if (path / EXTRA).is_file():
            own = self._read_json(EXTRA)
            if not isinstance(own, dict):
                raise bad(path / EXTRA, "is no object")
            self.metadata = own
            self._used.add(path / EXTRA)
        if not self._ocdbt:
            survey(path, "/.zarray")
        left = [name for name in names if not self._open_plain(name)]
        num_bytes = sum(file.size for file in self._files.values())
        if self._claimed > num_bytes:
            raise bad(path, f"its arrays claim {self._claimed} bytes; the files that they lie in have {num_bytes}")
        for begin in range(0, len(left), BATCH):
            self._open(left[begin : begin + BATCH])
        self.tensors = {name: self.tensors[name] for name in names}

    def _check_finished(self) -> None:
        """Refuse a folder of Google's store that Orbax takes for an unfinished save: neither it nor its step is marked.

        In every other place Orbax renames folders when they are finished, and needs no marker to read them.
        """
        if not isinstance(self.path, RemotePath) or self.path.protocol not in ("gs", "gcs"):
            return
        if not any((folder / COMMITTED).is_file() for folder in (self._folder, self._folder.parent)):
            raise bad(
                self.path,
                f"is an unfinished save of Orbax: {COMMITTED}, which Orbax writes last, is missing",
            )

    def _read_json(self, name: str) -> object:
        path = inside(self._folder, name, self._folder)
        return parse_json(read_file(path, self.path, MAX_HEADER), path, "file")

    def _names(self, tree: Mapping[str, object]) -> list[str]:
        """Return the names of all arrays, and note the empty nodes."""
        path = self._folder / METADATA
        names: dict[str, None] = {}
        empty, texts = {}, []
        for entry in tree.values():
            keys = entry.get("key_metadata") if isinstance(entry, dict) else None
            value = entry.get("value_metadata") if isinstance(entry, dict) else None
            if (
                not isinstance(keys, list)
                or not isinstance(value, dict)
                or not all(isinstance(one, dict) and isinstance(one.get("key"), str) for one in keys)
            ):
                raise bad(path, "has an entry without key_metadata and value_metadata")
            parts = [one["key"] for one in keys]
            wrong = [part for part in parts if not part or "." in part]
            if wrong or not parts:
                raise bad(path, f"the key {printable(repr(parts))} is empty or has a dot")
            name = check_name(path, ".".join(parts))
            kind = value.get("value_type")
            if name in names or name in empty:
                raise bad(path, f"{printable(name)} comes twice")
            if value.get("skip_deserialize") is True:
                empty[name] = kind if isinstance(kind, str) else ""
            elif kind == "string":
                texts.append(printable(name))
            else:
                names[name] = None
        if texts:
            self.notes = (f"skipped, as they are texts: {listed(texts, 3)}",)
        if empty:
            self.metadata["empty"] = empty
        return list(names)

    def _open_plain(self, name: str) -> bool:
        """Note an array that can be read without TensorStore, and return whether it is one."""
        if self._zarr3 or "/" in name or (self._ocdbt and self._places is None):
            return False
        path = self._folder / name / ".zarray"
        if self._places is None:
            if not inside(self._folder, f"{name}/.zarray", self._folder).is_file():
                return False
            location = ValueLocation(f"{name}/.zarray", 0, path.stat().st_size)
        elif f"{name}/.zarray".encode() in self._places:
            location = self._places[f"{name}/.zarray".encode()]
        else:
            return False
        if location.size > 1 << 16:
            raise bad(path, f"has {location.size} bytes; more than {1 << 16} are not read")
        meta = parse_json(self._value(location, 0, location.size), path, "file")
        if not isinstance(meta, dict) or meta.get("compressor") or meta.get("filters") or meta.get("order") != "C":
            return False
        dtype = meta.get("dtype")
        if not isinstance(dtype, str) or meta.get("zarr_format") != 2 or meta.get("dimension_separator", ".") != ".":
            return False
        if re.fullmatch(r"[<|][biufc][0-9]{1,2}", dtype):
            try:
                dtype = np.dtype(dtype).name
            except TypeError:
                return False
        elif dtype not in FOREIGN:
            return False
        shape = check_shape(path, name, meta.get("shape"))
        chunks = check_shape(path, name, meta.get("chunks"))
        if len(chunks) != len(shape) or 0 in chunks:
            raise bad(path, f"has chunks {printable(list(chunks))} for the shape {printable(list(shape))}")
        # Chunks that are cut along one axis, with whole axes behind it, are contiguous bytes of the array; others need
        # TensorStore to put them together.
        split = next((axis for axis, size in enumerate(chunks) if size > 1), len(chunks))
        if (
            any(size != whole for size, whole in zip(chunks[split + 1 :], shape[split + 1 :], strict=True))
            and 0 not in shape
        ):
            return False
        info = TensorInfo(name, check_dtype(path, name, dtype), shape)
        plain = PlainArray(path.parent, shape, chunks, math.prod(chunks) * info.itemsize)
        if info.nbytes:
            count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
            self._check_chunks(plain, name, count)
        self.tensors[name] = info
        self._plain[name] = plain
        if self._places is None:
            self._used.add(path)
        return True

    def _value(self, location: ValueLocation, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a value, or of a file as it is."""
        if not location.file:
            return location.inline[start:stop]
        path = self._folder / location.file
        if path not in self._files:
            self._files[path] = open_file(inside(self._folder, location.file, self._folder), self.path)
        return self._files[path].read(location.start + start, stop - start)

    def _check_chunks(self, plain: PlainArray, name: str, count: int) -> None:
        """Refuse an array that lacks chunks, or that claims more than its files hold."""
        shape = printable(list(plain.shape))
        if self._places is None:
            sizes = {chunk: size for chunk, size in sizes_in(plain.folder).items() if chunk != ".zarray"}
            if count > len(sizes):
                raise bad(plain.folder, f"has {len(sizes)} chunks; its shape {shape} needs {count}")
            for chunk in plain.names():
                if chunk not in sizes:
                    raise bad(plain.folder, f"lacks the chunk {chunk} of {count} that its shape {shape} needs")
                # Zarr writes chunks at the edge whole, so every file has the same size.
                if sizes[chunk] not in (plain.size, UNLISTED):
                    raise bad(plain.folder / chunk, f"has {sizes[chunk]} bytes; a chunk has {plain.size}")
            return
        if count > len(self._places):
            raise bad(self._folder, f"{printable(name)} has less than the {count} chunks that its shape {shape} needs")
        for chunk in plain.names():
            location = self._places.get(f"{name}/{chunk}".encode())
            if location is None:
                raise bad(self._folder, f"the chunk {chunk} of {printable(name)} is missing")
            if location.size != plain.size:
                raise bad(
                    self._folder, f"the chunk {chunk} of {printable(name)} has {location.size} bytes, not {plain.size}"
                )
            if not location.file:
                continue
            if self._folder / location.file not in self._files:
                self._value(location, 0, 0)
            self._used.add(self._folder / location.file)
            self._claimed += location.size
            if location.start + location.size > self._files[self._folder / location.file].size:
                raise bad(self._folder / location.file, f"ends before the chunk {chunk} of {printable(name)}")

    def _open(self, names: list[str]) -> None:
        """Open arrays through TensorStore, and check their declared sizes."""
        if self._tensorstore is None and not is_remote(self._folder):
            self._check_files()
        for name in [] if self._ocdbt else names:
            inside(self._folder, name, self._folder)
        if is_remote(self._folder):
            raise bad(
                self._folder,
                f"{printable(names[0])} is compressed or laid out for TensorStore, which reads it from a local folder "
                "alone; copy it to one first",
            )
        ts = self._tensorstore = tensorstore(self._folder)
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE}})
        base = str(self._folder.resolve()) + "/"
        opening = []
        for name in names:
            if self._ocdbt:
                where = {"driver": "ocdbt", "base": {"driver": "file", "path": base}, "path": f"{name}/"}
            else:
                where = {"driver": "file", "path": f"{base}{name}/"}
            spec: dict[str, Any] = {
                "driver": "zarr3" if self._zarr3 else "zarr",
                "kvstore": where,
                # The folder may have been written again since TensorStore cached it: only what is read from now on
                # counts.
                "recheck_cached_metadata": "open",
            }
            spec["recheck_cached_data"] = "open"
            opening.append((name, self._ask(ts.open, spec, open=True, read=True, context=context)))
        failed = [(name, error) for name, future in opening if (error := future.exception()) is not None]
        if failed:  # all are waited for: nothing reads any more when a folder is refused
            name, error = failed[0]
            raise bad(self._folder, f"{printable(name)} can't be opened: {_first_line(error)}") from None
        for name, future in opening:
            store = future.result()
            info = TensorInfo(
                name,
                check_dtype(self._folder, name, str(store.dtype.name)),
                check_shape(self._folder, name, list(store.shape)),
            )
            chunk = math.prod(store.chunk_layout.read_chunk.shape or ()) * info.itemsize
            if chunk > MAX_CHUNK or info.nbytes > MAX_CLAIM:
                raise bad(self._folder, f"{printable(name)} claims {info.nbytes} bytes in chunks of {chunk}")
            self._unpacked += info.nbytes
            if self._unpacked > MAX_ZEROS and self._unpacked > MAX_ZEROS + MAX_RATIO * self._held():
                raise bad(
                    self._folder, f"its arrays claim {self._unpacked} bytes or more; its files have {self._held()}"
                )
            self.tensors[name] = info
            self._stores[name] = store
            if self._is_full and info.nbytes:
                whole = store.chunk_layout.write_chunk.shape or info.shape
                needed = math.prod(-(-size // one) for size, one in zip(info.shape, whole, strict=True))
                num_chunks = self._count_values(name)
                if num_chunks < needed:
                    raise bad(self._folder, f"{printable(name)} has {num_chunks} chunks; its shape needs {needed}")

    def _held(self) -> int:
        """Return how many bytes the files of the folder have."""
        if not self._size:
            self._size = sum(one.stat().st_size for one in self._folder.rglob("*") if one.is_file())
        return self._size

    def _check_files(self) -> None:
        """Refuse links out of the folder, which TensorStore would follow, and pipes, which it would wait for."""
        for path in self._folder.rglob("*"):
            if path.is_symlink():
                inside(self._folder, path.relative_to(self._folder).as_posix(), self._folder)
            if not path.is_file() and not path.is_dir():
                raise bad(path, "is not a file")

    def _count_values(self, name: str) -> int:
        """Return how many chunks of an array are there."""
        if not self._ocdbt:
            folder = self._folder / name
            return sum(one.is_file() and one.name not in (".zarray", "zarr.json") for one in folder.rglob("*"))
        if self._keys is None:
            base = {"driver": "file", "path": str(self._folder.resolve()) + "/"}
            where = {"driver": "ocdbt", "base": base}
            keys = self._ask(lambda: self._tensorstore.KvStore.open(where).result().list().result())
            self._keys = sorted(key for key in keys if not key.endswith((b"/.zarray", b"/zarr.json")))
        first = bisect.bisect_left(self._keys, f"{name}/".encode())
        # Keys are sorted, so the chunks of an array are neighbours.
        return bisect.bisect_left(self._keys, f"{name}0".encode()) - first  # 0 follows the slash

    def _ask(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call TensorStore, whose errors are of several kinds."""
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise bad(self._folder, f"can't be read: {_first_line(error)}") from None

    def files(self) -> list[Path]:
        """Return all files of the folder: most layouts have no index of files."""
        if self._tensorstore is None:
            plains = self._plain.values() if self._places is None else ()
            chunks = [one for plain in plains for one in plain.folder.iterdir()]
            return sorted({*self._used, *chunks})
        return sorted(one for one in self._folder.rglob("*") if one.is_file())

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array; whole chunks are read for them, unless these are not compressed."""
        info = self.tensors[name]
        check_range(self._folder, info, start, stop)
        if start == stop:
            return b""
        if name in self._plain:
            return self._read_plain(name, start, stop)
        first, last = start // info.itemsize, -(-stop // info.itemsize)
        parts: list[memoryview] = []
        for box in boxes(info.shape, first, last):
            got: Array = self._ask(lambda box=box: self._stores[name][box].read(order="C").result())
            parts.append(np.ascontiguousarray(got).reshape(-1).view(np.uint8).data)
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        return data[start - first * info.itemsize : stop - first * info.itemsize]

    def _read_plain(self, name: str, start: int, stop: int) -> bytes | memoryview:
        plain = self._plain[name]
        parts: list[bytes | memoryview] = []
        for chunk, begin, end in chunk_ranges(plain, start, stop):
            if self._places is not None:
                parts.append(self._value(self._places[f"{name}/{chunk}".encode()], begin, end))
                continue
            path = plain.folder / chunk
            location = ValueLocation(f"{name}/{chunk}", 0, plain.size)
            self._value(location, 0, 0)
            if self._files[path].size != plain.size:
                raise bad(path, f"has {self._files[path].size} bytes; a chunk has {plain.size}")
            parts.append(self._value(location, begin, end))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close all stores and files."""
        self._stores.clear()
        for file in self._files.values():
            file.close()


def tensorstore(path: Path) -> Any:
    """Import TensorStore.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("tensorstore")
    except ImportError:
        raise bad(path, "reading Orbax's folders needs TensorStore: pip install orbax-checkpoint") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return printable(str(error).partition(" [tensorstore_spec")[0].partition("\n")[0], 300)
