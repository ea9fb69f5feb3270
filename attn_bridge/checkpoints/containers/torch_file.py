"""Files of ``torch.save``, read and written without torch; their pickles are parsed, never executed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ...printable import printable
from . import mistaken
from .base import MAX_HEADER, TensorInfo, numpy_dtype
from .files import File, bad, check_shape, parse_json
from .pickles import TORCH_DTYPES, Pickler, Strided, read_pickle
from .pickles.flat import DTENSOR
from .sources import OrderedReader
from .strided import StridedTensor, extent
from .writing import dump_json
from .zips import Archive, ArchiveWriter, Member, Window, members

EXTRA = "attn_bridge.json"
"""Member with the metadata, which ``torch.load`` does not look at."""


OLD_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The number that files of torch.save before 1.6 begin with, as a pickle of any protocol since 2 has it."""


def _why_no_archive(file: File | Window) -> str:
    """Return the reason why a file that is not a zip archive can't be read, from its first bytes."""
    start = bytes(file.read(0, min(mistaken.HEAD, file.size)))
    if OLD_MAGIC in start[:32] or b"ustar" in start:
        return (
            "was written by torch.save of torch < 1.6; load it with torch.load(path, weights_only=True) and save "
            "it again with torch.save"
        )
    if start[:1] == b"\x80":
        return (
            "is a pickle that torch.save did not write, and unpickling can run any code; if you trust who made it, "
            "load it with pickle where its library is installed, and save a dict of its arrays with numpy.savez"
        )
    return mistaken.kind_of(file, "torch") or "is no file of torch.save: it is no zip archive"


def open_archive(file: File | Window) -> tuple[bytes, dict[str, Member], str]:
    """Return the pickle of an archive of ``torch.save``, its members, and the prefix of their names.

    Raises:
        CheckpointError: it is another kind of file, or malformed.
    """
    path = file.path
    if bytes(file.read(0, min(2, file.size))) != b"PK":
        raise bad(path, _why_no_archive(file))
    entries = members(file)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        inner = [name for name in entries if re.search(r"\.(pt|pth|bin|ckpt|safetensors|npz|gguf|h5)$", name)]
        other = mistaken.kind_of(file, "torch")
        if any(name.endswith("/models/model.json") for name in entries):
            other = mistaken.INSTEAD[".pt2"]
        elif not pickles and inner:
            other = f"is a zip archive with {printable(inner[0])} in it: unpack it, and convert that"
        raise bad(path, other or f"is no file of torch.save: it has {len(pickles)} members called data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")
    if prefix + "constants.pkl" in entries or prefix + "code/" in entries:
        raise bad(path, "is a TorchScript archive; save its state_dict with torch.save")
    pickle = entries[pickles[0]]
    if pickle.size > MAX_HEADER:
        raise bad(
            path,
            f"its pickle has {pickle.size} bytes; more than {MAX_HEADER} are not read; arrays of NumPy in it are "
            "better saved by numpy.savez, or as tensors (torch.from_numpy)",
        )
    if not pickle.crc and zlib.crc32(pickle.read(0, 1)):  # torch has an option to skip checksums
        for member in entries.values():
            member.checked = False
    order = entries.get(prefix + "byteorder")
    if order is not None and (order.size > 16 or bytes(order.read(0, order.size)).strip() != b"little"):
        raise bad(path, "was written on a big-endian machine; save it again on a little-endian one")
    return bytes(pickle.read(0, pickle.size)), entries, prefix


class Stored(StridedTensor):
    """A tensor in an archive of ``torch.save``, after checks against its storage.

    Args:
        path: named in errors.
        name: its name.
        one: the tensor's entry in the pickle.
        members: the archive.
        prefix: prefix of the names of its members.
    """

    def __init__(self, path: Path, name: str, strided: Strided, members: Mapping[str, Member], prefix: str):
        label = printable(name)
        member = members.get(f"{prefix}data/{strided.storage.key}")
        if member is None:
            raise bad(path, f"the storage {printable(strided.storage.key)} of {label} is missing")
        size = numpy_dtype(strided.storage.dtype or "uint8").itemsize * strided.storage.count
        if size != member.size:
            raise bad(path, f"the storage of {label} is said to have {size} bytes; it has {member.size}")
        shape = check_shape(path, name, strided.shape)
        if (
            not isinstance(strided.strides, tuple)
            or len(strided.strides) != len(shape)
            or any(type(stride) is not int or not 0 <= stride < 1 << 62 for stride in strided.strides)
            or type(strided.offset) is not int
            or strided.offset < 0
        ):
            raise bad(path, f"{label} has strides or an offset that are no natural numbers")
        itemsize = numpy_dtype(strided.dtype).itemsize
        count = TensorInfo(name, "uint8", shape).nbytes
        if count and (strided.offset + extent(shape, strided.strides)) * itemsize > member.size:
            raise bad(path, f"{label} of shape {printable(list(shape))} is larger than its storage")
        # Strides of 0 would let a small file stand for tensors of any size, which fill memory or the target.
        if count > member.size // itemsize:
            raise bad(path, f"{label} of shape {printable(list(shape))} repeats a storage of "
                      f"{member.size // itemsize} elements (torch.Tensor.expand): save it .contiguous()")  # fmt: skip
        begin = strided.offset * itemsize
        info = TensorInfo(name, strided.dtype, shape)
        super().__init__(info, lambda at, length: member.read(begin + at, length), strided.strides)


NANOGPT = "model_args."
"""Prefix of nanoGPT's arguments of a model in its ``ckpt.pt``."""

SIZES = {
    "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
    "vocab_size": "vocab_size",
}  # fmt: skip
"""Size in nanoGPT's arguments -> key of `transformers`."""


def _config_of(values: Mapping[str, object]) -> dict[str, object] | None:
    """Return the config of `transformers` for a file of nanoGPT with biases, as GPT-2 has them; None for other files.

    Args:
        values: the file's plain values by dotted name; arguments of a fork that nanoGPT lacks are not read.
    """
    args = {name.removeprefix(NANOGPT): value for name, value in values.items() if name.startswith(NANOGPT)}
    is_plain = SIZES.keys() <= args.keys() <= {*SIZES, "bias", "dropout"} and args.get("bias") is True
    rate = args.get("dropout", 0.0)
    if not is_plain or any(type(args[key]) is not int for key in SIZES) or type(rate) not in (int, float):
        return None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{key: args[name] for name, key in SIZES.items()},
        "activation_function": "gelu",  # nn.GELU(), not GPT-2's approximation
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), rate),
        "tie_word_embeddings": True,
    }


class TorchReader(OrderedReader[StridedTensor]):
    """One file. Nested dicts give dotted names; `metadata` has the values that are not tensors, by dotted name.

    Tensors that share a storage are each read whole; a tensor that is not in C order is gathered when it is read.

    Attributes:
        parts: name of a DTensor -> the elements that this file has of it, and which they are.
        is_of_rank: whether it is the file of one of several ranks.
    """

    format: ClassVar[str] = "torch"

    def _read_headers(self) -> None:
        path = self.path
        pickle, entries, prefix = open_archive(self._file)
        contents = read_pickle(pickle, path)
        self.metadata, self.unread, self.notes = contents.values, contents.unread, contents.notes()
        extra = entries.get(prefix + EXTRA)
        if extra is not None:
            own = parse_json(extra.read(0, min(extra.size, MAX_HEADER + 1)), path, EXTRA)
            if not isinstance(own, dict):
                raise bad(path, f"{EXTRA} in it is no object")
            self.metadata |= own
        self._stored = {
            name: one if isinstance(one, StridedTensor) else Stored(path, name, one, entries, prefix)
            for name, one in contents.tensors.items()
        }
        self.parts = {
            name: (Stored(path, name, part.local, entries, prefix), part) for name, part in contents.parts.items()
        }
        self.is_of_rank = any(reason.startswith(DTENSOR) for reason in contents.unread.values())
        self._config = _config_of(contents.values)

    @property
    def config(self) -> Mapping[str, object] | None:
        """The config of a file of nanoGPT."""
        return self._config

    def stored(self, name: str) -> StridedTensor:
        """Return a tensor, to be read without regard to others."""
        return self._stored[name]


class TorchWriter(ArchiveWriter):
    """One file: a dict of tensors by name, each with a separate storage, which ``torch.load`` reads and maps.

    `metadata` is stored in a member of the archive that torch ignores and our reader reads.
    """

    format: ClassVar[str] = "torch"

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, object]):
        super().__init__(path, tensors, metadata)
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
        self._first = {"data.pkl": pickle, **({EXTRA: extra} if extra else {}), "byteorder": b"little"}

    def _pickle(self) -> bytes:
        """Return the pickle, in protocol 2 as torch has it."""
        pickler = Pickler()
        # Operations of pickle: } an empty dict, ( a mark, u sets all keys and values since the mark.
        pickler.raw(b"}(")
        for index, info in enumerate(self.tensors.values()):
            pickler.text(info.name)
            pickler.tensor(info, str(index))
        pickler.raw(b"u")
        return pickler.finish()

    def _begin(self) -> Archive:
        archive = Archive(self.path)
        for name, data in self._first.items():
            archive.add(self._prefix + name, data)
        return archive

    def _enter(self, info: TensorInfo) -> None:
        self._zip.begin(f"{self._prefix}data/{self._numbers[info.name]}", info.nbytes)

    def _add_last(self) -> None:
        # Version 3 is that of torch 1.6 and later. The id is a constant, so that the same tensors make the same file.
        self._zip.add(self._prefix + "version", b"3\n")
        self._zip.add(self._prefix + ".data/serialization_id", b"0" * 40)
