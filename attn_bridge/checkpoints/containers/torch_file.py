"""What ``torch.save`` writes, read and written without torch; nothing of its pickle is executed."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...printable import printable
from .base import MAX_HEADER, Reader, TensorInfo, Writer, numpy_dtype
from .files import (
    File,
    bad,
    c_strides,
    check_infos,
    check_range,
    check_shape,
    extent,
    gather,
    is_c_order,
    parse_json,
)
from .pickles import STORAGES, TORCH_DTYPES, Strided, read_pickle
from .shards import ShardedReader, index_of
from .splits import SplitReader, check_numbers
from .writing import InOrder, dump_json, sync_folder
from .zips import Archive, Member, members

CLASSES = {dtype: name for name, dtype in STORAGES.items()}
"""NumPy name of a dtype -> class of its storage."""

EXTRA = "attn_bridge.json"
"""Member with the metadata, which ``torch.load`` does not look at."""


class TorchReader(Reader):
    """One file. Nested dicts give dotted names; `metadata` has what is no tensor, by dotted name.

    Tensors that share a storage are each read whole; one that does not lie in C order is gathered when it is read.
    """

    format: ClassVar[str] = "torch"

    def __init__(self, path: Path):
        self.path = path
        self._file = File(path)
        start = bytes(self._file.read(0, min(4, self._file.size)))
        if start[:2] != b"PK":
            old = start[:1] == b"\x80" or b"ustar" in bytes(self._file.read(0, min(512, self._file.size)))
            how = (
                "was written by torch.save of torch < 1.6; load it with torch.load(path, weights_only=True) and save "
                "it again with torch.save"
            )
            raise bad(path, how if old else "is no file of torch.save: it is no zip archive")
        found = members(self._file)
        pickles = [name for name in found if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise bad(path, f"is no file of torch.save: it has {len(pickles)} members called data.pkl")
        prefix = pickles[0].removesuffix("data.pkl")
        if prefix + "constants.pkl" in found or prefix + "code/" in found:
            raise bad(path, "is a TorchScript archive; save its state_dict with torch.save")
        pickle = found[pickles[0]]
        if pickle.size > MAX_HEADER:
            raise bad(path, f"its pickle has {pickle.size} bytes; more than {MAX_HEADER} are not read")
        if not pickle.crc and zlib.crc32(pickle.read(0, 1)):  # torch can be told to compute no checksums
            for member in found.values():
                member.checked = False
        order = found.get(prefix + "byteorder")
        if order is not None and (order.size > 16 or bytes(order.read(0, order.size)).strip() != b"little"):
            raise bad(path, "was written on a big-endian machine; save it again on a little-endian one")
        tensors, self.metadata = read_pickle(bytes(pickle.read(0, pickle.size)), path)
        extra = found.get(prefix + EXTRA)
        if extra is not None:
            own = parse_json(extra.read(0, min(extra.size, MAX_HEADER + 1)), path, EXTRA)
            if not isinstance(own, dict):
                raise bad(path, f"{EXTRA} in it is no object")
            self.metadata |= own
        self.tensors = {}
        self._places: dict[str, tuple[Strided, Member]] = {}
        for name, one in tensors.items():
            self._place(name, one, found.get(f"{prefix}data/{one.storage.key}"))
        self._gathered: tuple[str, memoryview] = ("", memoryview(b""))

    def _place(self, name: str, one: Strided, member: Member | None) -> None:
        """Check a tensor against its storage."""
        shown = printable(name)
        if member is None:
            raise bad(self.path, f"the storage {printable(one.storage.key)} of {shown} is missing")
        size = numpy_dtype(one.storage.dtype or "uint8").itemsize * one.storage.count
        if size != member.size:
            raise bad(self.path, f"the storage of {shown} is said to have {size} bytes; it has {member.size}")
        shape = check_shape(self.path, name, one.shape)
        if (
            not isinstance(one.strides, tuple)
            or len(one.strides) != len(shape)
            or any(type(stride) is not int or not 0 <= stride < 1 << 62 for stride in one.strides)
            or type(one.offset) is not int
            or one.offset < 0
        ):
            raise bad(self.path, f"{shown} has strides or an offset that are no natural numbers")
        itemsize = numpy_dtype(one.dtype).itemsize
        count = TensorInfo(name, "uint8", shape).nbytes
        if count > member.size // itemsize or (
            count and (one.offset + extent(shape, one.strides)) * itemsize > member.size
        ):
            raise bad(self.path, f"{shown} of shape {printable(list(shape))} is larger than its storage")
        self.tensors[name] = TensorInfo(name, one.dtype, shape)
        self._places[name] = one, member

    def files(self) -> list[Path]:
        """Return the file."""
        return [self.path]

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        one, member = self._places[name]
        begin = one.offset * info.itemsize
        if is_c_order(info.shape, one.strides):
            return member.read(begin + start, stop - start) if stop > start else b""
        if self._gathered[0] != name:
            self._gathered = ("", memoryview(b""))
            dtype = numpy_dtype(f"V{info.itemsize}")
            whole = gather(lambda at, count: member.read(begin + at, count), dtype, info.shape, one.strides)
            self._gathered = name, whole.reshape(-1).view("uint8").data
        return self._gathered[1][start:stop]

    def close(self) -> None:
        """Close the file."""
        self._gathered = ("", memoryview(b""))
        self._file.close()


class ShardedTorchReader(ShardedReader):
    """A folder of files and an index, as transformers writes it."""

    format: ClassVar[str] = "torch"


def open_torch(path: Path) -> Reader:
    """Open a file, an index, or a folder.

    Raises:
        CheckpointError: it is none of them, or malformed.
    """
    if not path.is_dir():
        if path.name.endswith(".index.json"):
            return ShardedTorchReader(path.parent, path, TorchReader)
        return TorchReader(path)
    index = index_of(path, ".bin.index.json", "pytorch_model")
    if index is not None:
        return ShardedTorchReader(path, index, TorchReader)
    names = sorted(one.name for one in path.iterdir() if one.suffix in (".bin", ".pt", ".pth"))
    names = ["pytorch_model.bin"] if "pytorch_model.bin" in names else names
    if len(names) > 1 and all(re.fullmatch(r"consolidated\.[0-9]{2}\.pth", name) for name in names):
        return SplitReader(path, names, [TorchReader(one) for one in check_numbers(path, names)])
    if len(names) != 1:
        raise bad(path, f"has {len(names)} files of torch.save and no index; name one of them")
    return ShardedTorchReader(path, None, TorchReader, tuple(names))


class TorchWriter(Writer):
    """One file: a dict of tensors by name, each with a storage of its own, which ``torch.load`` reads and maps.

    `metadata` goes into a member of the archive that torch does not look at and our reader does.
    """

    format: ClassVar[str] = "torch"

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any]):
        super().__init__(path, tensors, metadata)
        check_infos(path, tensors)
        for info in tensors:
            if info.file:
                raise bad(path, "a checkpoint of torch is written as one file; choose safetensors for several")
            if info.dtype not in TORCH_DTYPES:
                raise bad(path, f"torch has no {info.dtype} ({printable(info.name)})")
        pickle = self._pickle()
        if len(pickle) > MAX_HEADER:
            raise bad(path, f"its pickle would have {len(pickle)} bytes; more than {MAX_HEADER} are not read")
        extra = dump_json(path, self.metadata, sort_keys=True) if metadata else b""
        self._prefix = "archive/"
        self._numbers = {name: number for number, name in enumerate(self.tensors)}
        self._order = InOrder(path, self.tensors)
        self._zip = Archive(path)
        self._zip.add(self._prefix + "data.pkl", pickle)
        if extra:
            self._zip.add(self._prefix + EXTRA, extra)
        self._zip.add(self._prefix + "byteorder", b"little")

    def _pickle(self) -> bytes:
        """Return the pickle, in protocol 2 as torch has it."""
        memo: dict[str, int] = {}

        def remembered(code: str) -> bytes:
            """Return a name or text, written out once."""
            if code in memo:
                return b"h" + bytes([memo[code]])
            memo[code] = len(memo)
            module, _, name = code.rpartition(".")
            written = f"c{module}\n{name}\n".encode() if module else text(code)
            return written + b"q" + bytes([memo[code]])

        def text(value: str) -> bytes:
            raw = value.encode("utf-8")
            return b"X" + struct.pack("<I", len(raw)) + raw

        def number(value: int) -> bytes:
            if value < 1 << 31:
                return b"J" + struct.pack("<i", value)
            raw = value.to_bytes(9, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw

        def numbers(values: Sequence[int]) -> bytes:
            return b"(" + b"".join(map(number, values)) + b"t"

        parts = [b"\x80\x02}("]
        for index, info in enumerate(self.tensors.values()):
            count = info.nbytes // info.itemsize
            typed = info.dtype in CLASSES
            kind = f"torch.{CLASSES[info.dtype]}" if typed else "torch.storage.UntypedStorage"
            storage = remembered("storage") + remembered(kind) + text(str(index)) + remembered("cpu")
            storage += number(count if typed else info.nbytes)
            parts += [
                text(info.name),
                remembered(f"torch._utils._rebuild_tensor_{'v2' if typed else 'v3'}"),
                b"((" + storage + b"tQ" + number(0) + numbers(info.shape) + numbers(c_strides(info.shape)),
                b"\x89" + remembered("collections.OrderedDict") + b")R",
                b"" if typed else remembered(f"torch.{info.dtype}"),
                b"tR",
            ]
        return b"".join([*parts, b"u."])

    def write_range(self, name: str, start: int, data: Any) -> None:
        """Write the next bytes of a tensor."""
        for info in self._order.take(name, start, memoryview(data).nbytes):
            self._zip.begin(f"{self._prefix}data/{self._numbers[info.name]}", info.nbytes)
        self._zip.append(data)

    def finish(self) -> None:
        """Write what comes last, flush and close."""
        for info in self._order.rest():
            self._zip.begin(f"{self._prefix}data/{self._numbers[info.name]}", info.nbytes)
        self._zip.add(self._prefix + "version", b"3\n")
        self._zip.add(self._prefix + ".data/serialization_id", b"0" * 40)
        self._zip.finish()
        sync_folder(self.path.parent)

    def abort(self) -> None:
        """Close without finishing."""
        self._zip.abort()
