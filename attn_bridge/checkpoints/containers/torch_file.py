"""What ``torch.save`` writes, read and written without torch; nothing of its pickle is executed."""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...printable import printable
from .base import MOST_HEADER, Reader, TensorInfo, Writer, numpy_dtype
from .files import File, bad, check_count, check_infos, check_name, check_range, check_shape, parse_json
from .shards import ShardedReader, index_of
from .strided import c_strides, extent, gather, is_c_order
from .writing import InOrder, dump_json, sync_folder
from .zips import Archive, Member, members

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Class of a storage in the module torch -> NumPy name of its dtype."""

CLASSES = {dtype: name for name, dtype in STORAGES.items()}

TORCH_DTYPES = frozenset({*STORAGES.values(), "uint16", "uint32", "uint64"}) | {
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}
"""What a tensor of torch may be made of."""

EXTRA = "attn_bridge.json"
"""Member with the metadata, which ``torch.load`` does not look at."""

MOST_DEPTH = 64
"""Dicts within dicts."""


@dataclasses.dataclass(frozen=True)
class Global:
    """A name that the pickle refers to."""

    name: str


@dataclasses.dataclass(frozen=True)
class Storage:
    """Where the elements of tensors are: `dtype` is "" for one of bytes."""

    dtype: str
    key: str
    count: int


@dataclasses.dataclass(frozen=True)
class Strided:
    """A tensor: its storage, and where in it."""

    storage: Storage
    dtype: str
    offset: Any
    shape: Any
    strides: Any


GLOBALS = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in STORAGES),
        *(f"torch.{name}" for name in TORCH_DTYPES),
    }
)
"""All that a pickle may refer to."""


class Unpickler:
    """Reads the pickle of tensors in dicts; whatever else a pickle can do, and any other name, is refused by name.

    Its memory is bounded by the pickle's length.

    Args:
        data: the pickle.
        path: named in errors.
    """

    def __init__(self, data: bytes, path: Path):
        self._data = data
        self._path = path
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the dict.

        Raises:
            CheckpointError: it is damaged, or does something else.
        """
        while True:
            code = self._take(1)[0]
            if code == 0x2E:  # STOP
                return self._pop()
            step = STEPS.get(code)
            if step is None:
                raise self._bad(f"its pickle has the operation {code:#04x}, which is refused")
            step(self)

    def _bad(self, reason: str) -> Exception:
        return bad(self._path, reason)

    def _take(self, count: int) -> bytes:
        stop = self._at + count
        if count < 0 or stop > len(self._data):
            raise self._bad("its pickle is cut off")
        data = self._data[self._at : stop]
        self._at = stop
        return data

    def _number(self, form: str) -> int:
        (number,) = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))
        return int(number)

    def _line(self) -> str:
        stop = self._data.find(b"\n", self._at, self._at + 1000)
        if stop < 0:
            raise self._bad("its pickle is damaged")
        return self._text(self._take(stop + 1 - self._at)[:-1])

    def _text(self, data: bytes) -> str:
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._bad("its pickle has text that is not UTF-8") from None

    def _pop(self) -> Any:
        if not self._stack or (self._marks and len(self._stack) <= self._marks[-1]):
            raise self._bad("its pickle is damaged")
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _top(self) -> Any:
        value = self._pop()
        self._push(value)
        return value

    def _pop_mark(self) -> list[Any]:
        if not self._marks:
            raise self._bad("its pickle is damaged")
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._bad("its pickle is damaged")
        self._push(self._memo[index])

    def _tuple(self, count: int) -> None:
        self._push(tuple(reversed([self._pop() for _ in range(count)])))

    def _set(self, items: list[Any]) -> None:
        into = self._top()
        if not isinstance(into, dict) or len(items) % 2:
            raise self._bad("its pickle is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                raise self._bad(f"a key of its dicts is of the type {type(key).__name__}")
            into[key] = value

    def _extend(self, items: list[Any]) -> None:
        into = self._top()
        if not isinstance(into, list):
            raise self._bad("its pickle is damaged")
        into.extend(items)

    def _global(self, module: str, name: str) -> None:
        known = f"{module}.{name}"
        if known not in GLOBALS:
            raise self._bad(f"its pickle refers to {printable(known)}, which is refused")
        self._push(Global(known))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._bad("its pickle is damaged")
        self._global(module, name)

    def _persistent(self) -> None:
        found = self._pop()
        if (
            not isinstance(found, tuple)
            or len(found) != 5
            or found[0] != "storage"
            or not isinstance(found[1], Global)
            or type(found[2]) is not str
            or type(found[4]) is not int
        ):
            raise self._bad("its pickle refers to something outside that is no storage")
        kind = found[1].name
        dtype = "" if kind == "torch.storage.UntypedStorage" else STORAGES.get(kind.removeprefix("torch."))
        if dtype is None:
            raise self._bad(f"its pickle has a storage of the class {printable(kind)}")
        self._push(Storage(dtype, found[2], found[4]))

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise self._bad("its pickle calls something that is no function")
        self._push(self._call(function.name.rpartition(".")[2], arguments))

    def _call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        count = len(arguments)
        if function == "OrderedDict" and count <= 1:
            into: dict[Any, Any] = {}
            pairs = arguments[0] if arguments else []
            if isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
                self._push(into)
                self._set([part for pair in pairs for part in pair])
                return self._pop()
        elif function == "Size" and count == 1 and isinstance(arguments[0], list | tuple):
            return tuple(arguments[0])
        elif function == "_rebuild_parameter" and count == 3 and isinstance(arguments[0], Strided):
            return arguments[0]
        elif function in ("_rebuild_tensor_v2", "_rebuild_tensor_v3") and isinstance(
            arguments[0] if count else 0, Storage
        ):
            storage = arguments[0]
            wide = function.endswith("v3")
            if count in ((7, 8) if wide else (6, 7)):
                dtype = storage.dtype
                if wide:
                    given = arguments[6]
                    dtype = given.name.removeprefix("torch.") if isinstance(given, Global) else ""
                if dtype not in TORCH_DTYPES or (wide and storage.dtype):
                    raise self._bad("its pickle has a tensor whose dtype is not known")
                if count == (8 if wide else 7) and arguments[-1]:
                    raise self._bad("its pickle has a conjugated, negated or otherwise marked tensor")
                return Strided(storage, dtype, *arguments[1:4])
        raise self._bad(f"its pickle calls {function} in a way that is refused")

    def _build(self) -> None:
        state, into = self._pop(), self._top()
        if not isinstance(into, dict) or not isinstance(state, dict):
            raise self._bad("its pickle gives attributes to something that is no OrderedDict")

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._top()

    def _long(self, count: int) -> None:
        if count > 64:
            raise self._bad("its pickle has a number of more than 64 bytes")
        self._push(int.from_bytes(self._take(count), "little", signed=True))


STEPS: dict[int, Callable[[Unpickler], object]] = {
    0x80: lambda one: one._take(1),  # PROTO
    0x95: lambda one: one._take(8),  # FRAME
    ord("}"): lambda one: one._push({}),
    ord("]"): lambda one: one._push([]),
    ord(")"): lambda one: one._push(()),
    ord("("): lambda one: one._marks.append(len(one._stack)),
    ord("N"): lambda one: one._push(None),
    0x88: lambda one: one._push(True),
    0x89: lambda one: one._push(False),
    ord("K"): lambda one: one._push(one._number("B")),
    ord("M"): lambda one: one._push(one._number("H")),
    ord("J"): lambda one: one._push(one._number("i")),
    0x8A: lambda one: one._long(one._number("B")),
    0x8B: lambda one: one._long(one._number("I")),
    ord("G"): lambda one: one._push(struct.unpack(">d", one._take(8))[0]),
    0x8C: lambda one: one._push(one._text(one._take(one._number("B")))),
    ord("X"): lambda one: one._push(one._text(one._take(one._number("I")))),
    0x8D: lambda one: one._push(one._text(one._take(one._number("Q")))),
    ord("t"): lambda one: one._push(tuple(one._pop_mark())),
    0x85: lambda one: one._tuple(1),
    0x86: lambda one: one._tuple(2),
    0x87: lambda one: one._tuple(3),
    ord("a"): lambda one: one._extend([one._pop()]),
    ord("e"): lambda one: one._extend(one._pop_mark()),
    ord("s"): lambda one: one._set([one._pop(), one._pop()][::-1]),
    ord("u"): lambda one: one._set(one._pop_mark()),
    ord("q"): lambda one: one._memoize(one._number("B")),
    ord("r"): lambda one: one._memoize(one._number("I")),
    0x94: lambda one: one._memoize(len(one._memo)),
    ord("h"): lambda one: one._get(one._number("B")),
    ord("j"): lambda one: one._get(one._number("I")),
    ord("0"): lambda one: one._pop(),
    ord("c"): lambda one: one._global(one._line(), one._line()),
    0x93: lambda one: one._stack_global(),
    ord("Q"): lambda one: one._persistent(),
    ord("R"): lambda one: one._reduce(),
    ord("b"): lambda one: one._build(),
}
"""Operations of a pickle, by their byte."""


def flatten(path: Path, found: Any, most: int) -> tuple[dict[str, Strided], dict[str, Any]]:
    """Return the tensors of nested dicts by dotted name, and what else is there.

    Args:
        path: named in errors.
        found: what the pickle holds.
        most: values beyond which it is refused; since each takes a byte of a pickle, more are the same ones again.
    """
    if isinstance(found, Strided):
        raise bad(path, "holds a single tensor, not a dict of them")
    if not isinstance(found, dict):
        raise bad(path, f"holds a {type(found).__name__}, not a dict of tensors")
    tensors: dict[str, Strided] = {}
    others: dict[str, Any] = {}
    nodes = 0

    def plain(value: Any, name: str, depth: int) -> Any:
        nonlocal nodes
        nodes += 1
        if nodes > most or depth > MOST_DEPTH:
            raise bad(path, f"{printable(name)} is nested too deeply or repeated too often")
        if isinstance(value, Strided):
            raise bad(path, f"{printable(name)} is a list with tensors; only dicts of them are read")
        if isinstance(value, list | tuple):
            return [plain(one, name, depth + 1) for one in value]
        if isinstance(value, dict):
            whole = {str(key): plain(one, name, depth + 1) for key, one in value.items()}
            if len(whole) < len(value):
                raise bad(path, f"{printable(name)} has a key as a number and as text")
            return whole
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise bad(path, f"{printable(name)} is neither a tensor nor a plain value: {printable(repr(value), 60)}")

    def walk(value: Any, name: str, depth: int) -> None:
        nonlocal nodes
        nodes += 1
        if nodes > most or depth > MOST_DEPTH:
            raise bad(path, f"{printable(name)} is nested too deeply or repeated too often")
        if isinstance(value, dict) and (value or not name):
            for key, one in value.items():
                part = str(key)
                if not part:
                    raise bad(path, f"a key in {printable(name) or 'its dict'} is empty")
                walk(one, f"{name}.{part}" if name else part, depth + 1)
            return
        check_name(path, name)
        if name in tensors or name in others:
            raise bad(path, f"{printable(name)} comes twice")
        if isinstance(value, Strided):
            tensors[name] = value
        else:
            others[name] = plain(value, name, depth)

    walk(found, "", 0)
    check_count(path, len(tensors))
    return tensors, others


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
        if pickle.size > MOST_HEADER:
            raise bad(path, f"its pickle has {pickle.size} bytes; more than {MOST_HEADER} are not read")
        if not pickle.crc and zlib.crc32(pickle.read(0, 1)):  # torch can be told to compute no checksums
            for member in found.values():
                member.checked = False
        order = found.get(prefix + "byteorder")
        if order is not None and (order.size > 16 or bytes(order.read(0, order.size)).strip() != b"little"):
            raise bad(path, "was written on a big-endian machine; save it again on a little-endian one")
        held = Unpickler(bytes(pickle.read(0, pickle.size)), path).load()
        tensors, self.metadata = flatten(path, held, most=pickle.size)
        extra = found.get(prefix + EXTRA)
        if extra is not None:
            own = parse_json(extra.read(0, min(extra.size, MOST_HEADER + 1)), path, EXTRA)
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
        if len(pickle) > MOST_HEADER:
            raise bad(path, f"its pickle would have {len(pickle)} bytes; more than {MOST_HEADER} are not read")
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
