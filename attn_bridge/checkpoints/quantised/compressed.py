"""compressed-tensors, ModelOpt, torchao: small integers or floating point numbers along rows, with scales by blocks.

The codes of a row are one stream of bits, the lowest bit of the first byte first: in words of int32 (``weight_packed``
of integers), in bytes (FP4 and FP6), or a byte each (int8). A weight is ``scale * (code - zero)``. The float8 scales of
NVFP4 are divided by a scale of the whole tensor, or multiplied in ModelOpt. torchao has a byte each of int8 or float8,
and has the class of each tensor, and its rows and columns per scale, in the metadata of its safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...printable import printable
from ..containers.base import Array, Reader, TensorInfo
from ..containers.files import bad
from ..containers.strided import c_strides
from .packed import SCALE_DTYPES, WORD, check_groups
from .pairs import TiledTensor, block_structure, partner
from .schemes import scheme_of, weights_of
from .source import Source
from .tables import E2M1, E2M3, E8M0, float8_values

PACKED, PLAIN, SCALE = ".weight_packed", ".weight", ".weight_scale"
ZEROS, GROUPS, SHAPE = ".weight_zero_point", ".weight_g_idx", ".weight_shape"
OVERALL, OF_MODELOPT = ".weight_global_scale", ".weight_scale_2"
"""Endings of the names of a quantised layer's tensors; the last one is ModelOpt's."""

OF_NUMBERS = (ZEROS, GROUPS, SHAPE, OVERALL, OF_MODELOPT)

QDATA, TORCHAO_SCALE, TORCHAO_ZEROS = "_qdata", "_scale", "_zero_point"
"""Endings of the names of the parts of a parameter of torchao: ``X._weight_qdata`` is of ``X.weight``."""

CLASSES = {
    "Int8Tensor": ("int8",), "IntxUnpackedToInt8Tensor": ("int8",), "Float8Tensor": ("float8_e4m3fn", "float8_e5m2")
}  # fmt: skip
"""Class of torchao that is read -> the dtypes of its numbers."""

OF_STACKS = "; experts in one tensor are read of MXFP4 and float8: convert the model that it was made of"

INTEGERS = "integers"

FLOATS = {
    ("float8_e4m3fn", 8): ("NVFP4", 4),
    ("uint8", 16): ("MXFP4", 4),
    ("uint8", 24): ("MXFP6", 6),
}
"""Dtype of the scales and bytes that share a scale -> name of the format, and bits of a number."""


@dataclasses.dataclass(frozen=True)
class CompressedTensor(TiledTensor):
    """A matrix of compressed-tensors or ModelOpt.

    Attributes:
        bits: of a number.
        row_bytes: bytes of a row of numbers.
        zeros: name of the tensor of zero points, or "".
        groups: name of the tensor with the group of each column; "" where groups follow each other.
        overall: name of the tensor's scale of scales, or "".
    """

    bits: int
    row_bytes: int
    zeros: str = ""
    groups: str = ""
    overall: str = ""

    def tile(self, source: Source, rows: range, left: int, right: int) -> tuple[Array, Array]:
        """Return numbers without their zero points, and scales, of a rectangle."""
        high, wide = self.block
        lines = np.arange(rows.start, rows.stop, rows.step) // high
        columns = source.whole(self.groups)[left:right] if self.groups else np.arange(left, right) // wide
        top, first, last = int(lines[0]), int(columns.min()), int(columns.max()) + 1
        down = range(top, int(lines[-1]) + 1)
        index = (lines - top)[:, None], columns - first
        stored = source.matrix(self.scales, down, first, last)[index]
        start = left * self.bits // 8
        data = source.rectangle(self.numbers, self.row_bytes, rows, start, -(-right * self.bits // 8))
        codes = unpacked(data, left * self.bits - start * 8, right - left, self.bits)
        if self.kind in CLASSES["Float8Tensor"]:
            return float8_values(self.kind)[codes], stored.astype(np.float64)
        if self.kind != INTEGERS:
            return self._floats(source, codes, stored)
        is_whole = self.numbers.endswith((PLAIN, QDATA))
        values = codes.view(np.int8) if is_whole else codes.astype(np.int16) - (1 << self.bits - 1)
        zeros = self._zeros(source, down, first, last)[index] if self.zeros else 0
        return values.astype(np.float64) - zeros, stored.astype(np.float64)

    def _floats(self, source: Source, codes: Array, scales: Array) -> tuple[Array, Array]:
        """Return the numbers of FP4 or FP6, and scales; of NVFP4 rounded to float32 as libraries round: twice."""
        values = (E2M1 if self.bits == 4 else E2M3)[codes]
        if scales.dtype == np.uint8:
            return values, E8M0[scales]
        overall = source.whole(self.overall).reshape(()).astype(np.float32)
        with np.errstate(all="ignore"):
            single = scales.astype(np.float32)
            single = single * overall if self.overall.endswith(OF_MODELOPT) else single / overall
            return (values.astype(np.float32) * single).astype(np.float64), np.ones((1, 1))

    def _zeros(self, source: Source, rows: range, left: int, right: int) -> Array:
        """Return the zero points of blocks, which int32 has packed along columns."""
        zeros = source.whole(self.zeros)
        zeros = zeros.reshape(-1, zeros.shape[-1] if zeros.ndim > 1 else 1)[:, left:right]
        if zeros.dtype == np.int8:
            return zeros[rows.start : rows.stop].astype(np.float64)
        stream = np.ascontiguousarray(zeros.T).view(np.uint8)
        codes = unpacked(stream, 0, rows.stop, self.bits)[:, rows.start :].T
        return codes.astype(np.float64) - (1 << self.bits - 1)


def unpacked(data: Array, start: int, count: int, bits: int) -> Array:
    """Return `count` numbers of up to 8 bits from each row of bytes, from bit `start` on."""
    at = start + np.arange(count) * bits
    padded = np.concatenate([data, np.zeros((len(data), 1), np.uint8)], axis=1).astype(np.uint16)
    window = padded[:, at // 8] | padded[:, at // 8 + 1] << 8
    return (window >> (at % 8).astype(np.uint16) & (1 << bits) - 1).astype(np.uint8)


def find(reader: Reader, config: Mapping[str, object]) -> list[CompressedTensor]:
    """Return the matrices of compressed-tensors or ModelOpt that are not float8.

    Args:
        reader: the checkpoint.
        config: the model's config.json.

    Raises:
        CheckpointError: tensors that don't match each other.
    """
    tensors = []
    for name, info in reader.tensors.items():
        stem = name.removesuffix(PACKED).removesuffix(PLAIN)
        is_plain = name.endswith(PLAIN) and stem + SCALE in reader.tensors and info.dtype in ("int8", "uint8")
        if name.endswith(PACKED) or is_plain:
            tensors.append(_tensor(reader, stem, info, config))
        elif name.endswith(QDATA) and "._" in name:
            tensors.append(_of_torchao(reader, info))
    return tensors


def _of_torchao(reader: Reader, numbers: TensorInfo) -> CompressedTensor:
    path, stem = reader.path, numbers.name.removesuffix(QDATA)
    above, _, own = stem.rpartition("._")
    name = f"{above}.{own}"
    kind, values = described(reader.metadata, numbers.file, name)
    if kind not in CLASSES or stem + TORCHAO_SCALE not in reader.tensors:
        why = f"its metadata says {printable(kind, 40)}" if kind else "its metadata has no class for it"
        has_none = kind.startswith("Int4")  # Int4Tensor and its kin, in the order of a kernel, don't have the method
        remedy = "convert the model that it was made of" if has_none else "save its dequantize()"
        raise bad(path, f"{printable(numbers.name)} is of torchao, of which {', '.join(CLASSES)} are read; {why}; "
                  f"{remedy}")  # fmt: skip
    scales, zeros = reader.tensors[stem + TORCHAO_SCALE], reader.tensors.get(stem + TORCHAO_ZEROS)
    block, shape = values.get("block_size"), numbers.shape
    sizes = [one for one in block if type(one) is int and one > 0] if isinstance(block, list) else []
    is_fit = sizes == block and len(sizes) == len(shape) > 1
    sizes = [min(one, max(size, 1)) for one, size in zip(sizes, shape, strict=True)] if is_fit else []
    high = _rows_of(shape[:-1], sizes[:-1]) if is_fit else 0
    if not high or numbers.dtype not in CLASSES[kind] or scales.dtype not in SCALE_DTYPES:
        raise bad(path, f"{printable(numbers.name)} {numbers.dtype} {shape} with {scales.dtype} scales for blocks of "
                  f"{printable(repr(block), 40)} is no matrix of {kind}; save its dequantize()")  # fmt: skip
    wanted = tuple(-(-size // one) for size, one in zip(shape, sizes, strict=True))
    others = [one for one in (scales, zeros) if one is not None]
    if any(one.shape != wanted for one in others) or (zeros is not None and zeros.dtype != "int8"):
        got = " and ".join(f"{one.dtype} {one.shape}" for one in others)
        raise bad(path, f"{printable(scales.name)} and its zero points (int8) must have the shape {wanted} to go with "
                  f"{printable(numbers.name)} {shape}, got {got}")  # fmt: skip
    form = INTEGERS if numbers.dtype == "int8" else numbers.dtype
    return CompressedTensor(
        name, shape, numbers.name, scales.name, form, shape, c_strides(shape), (high, sizes[-1]), numbers.file,
        tuple(one.name for one in others), f"torchao, {form}", bits=8, row_bytes=shape[-1],
        zeros="" if zeros is None else zeros.name,
    )  # fmt: skip


def _rows_of(sizes: Sequence[int], block: Sequence[int]) -> int:
    """Return how many rows, counted over all matrices of a stack, share a scale; 0 unless they follow each other."""
    first = next((axis for axis, one in enumerate(block) if one > 1), len(block) - 1)
    is_even = first == 0 or sizes[first] % block[first] == 0
    is_whole = all(max(size, 1) == one for size, one in zip(sizes[first + 1 :], block[first + 1 :], strict=True))
    return math.prod(block) if is_even and is_whole else 0


def described(metadata: Mapping[str, object], file: str, name: str) -> tuple[str, dict[str, object]]:
    """Return the class that torchao names for a tensor in a file's metadata, and its values; "" without any."""
    files = metadata.get("files")
    own = files.get(file, {}) if isinstance(files, Mapping) else metadata
    try:
        document = json.loads(str(own.get(name, "{}")))
    except (ValueError, RecursionError):
        return "", {}
    document = document if isinstance(document, dict) else {}
    kind, values = document.get("_type"), document.get("_data")
    return kind if isinstance(kind, str) else "", values if isinstance(values, dict) else {}


def undescribed(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata of a file, or of several, without torchao's descriptions of tensors."""
    files = metadata.get("files")
    if isinstance(files, Mapping):
        return {**metadata, "files": {file: undescribed(own) for file, own in files.items()}}
    if "tensor_names" not in metadata:
        return dict(metadata)
    return {name: text for name, text in metadata.items() if name != "tensor_names" and '"_type"' not in str(text)}


def _tensor(reader: Reader, stem: str, numbers: TensorInfo, config: Mapping[str, object]) -> CompressedTensor:
    path, tensors = reader.path, reader.tensors
    endings = (SCALE, ZEROS, GROUPS, OVERALL, OF_MODELOPT, SHAPE)
    parts = {ending: tensors[stem + ending] for ending in endings if stem + ending in tensors}
    scales = partner(path, tensors, stem + SCALE, numbers.name)
    wanted = {"int32": SCALE_DTYPES, "int8": SCALE_DTYPES, "uint8": ("float8_e4m3fn", "uint8")}
    if len(numbers.shape) != 2 or scales.dtype not in wanted.get(numbers.dtype, ()):
        raise bad(path, f"{printable(numbers.name)} {numbers.dtype} {numbers.shape} and {printable(scales.name)} "
                  f"{scales.dtype} {scales.shape} are not a matrix of int32, int8 or uint8 and its scales"
                  f"{OF_STACKS if len(numbers.shape) > 2 else ''}")  # fmt: skip
    if numbers.dtype == "uint8":
        return _of_floats(path, stem, numbers, parts)
    return _of_integers(reader, stem, numbers, parts, config)


def _of_floats(path: Path, stem: str, numbers: TensorInfo, parts: Mapping[str, TensorInfo]) -> CompressedTensor:
    scales = parts[SCALE]
    rows, count = numbers.shape
    groups = scales.shape[1] if len(scales.shape) == 2 and scales.shape[0] == rows else 0
    kind, bits = FLOATS.get((scales.dtype, count // max(groups, 1)), ("", 0))
    if not kind or count % groups:
        raise bad(path, f"{printable(scales.name)} {scales.shape} and {printable(numbers.name)} {numbers.shape} "
                  "fit neither NVFP4 (8 bytes to a float8) nor MXFP4 (16 to an exponent) or MXFP6 (24)")  # fmt: skip
    overall = [parts[ending] for ending in (OVERALL, OF_MODELOPT) if ending in parts]
    if len(overall) != (kind == "NVFP4") or any(one.dtype != "float32" or math.prod(one.shape) != 1 for one in overall):
        count_word = "one scale" if kind == "NVFP4" else "no scale"
        raise bad(path, f"{printable(numbers.name)} is {kind}, which has {count_word} of float32 for all, {OVERALL} or "
                  f"{OF_MODELOPT}")  # fmt: skip
    if ZEROS in parts or GROUPS in parts:
        raise bad(path, f"{printable(numbers.name)} is {kind}, which has neither zero points nor orders")
    columns = count * 8 // bits
    return CompressedTensor(
        stem + PLAIN, (rows, columns), numbers.name, scales.name, kind, (rows, columns), (columns, 1),
        (1, columns // groups), numbers.file, _names(parts), kind, bits=bits, row_bytes=count,
        overall=overall[0].name if overall else "",
    )  # fmt: skip


def _of_integers(
    reader: Reader, stem: str, numbers: TensorInfo, parts: Mapping[str, TensorInfo], config: Mapping[str, object]
) -> CompressedTensor:
    path, scales = reader.path, parts[SCALE]
    rows, columns = shape = _shape(reader, numbers, parts.get(SHAPE))
    bits = 8 if numbers.dtype == "int8" else _bits(path, numbers, columns, config)
    block = _block(reader, shape, scales, parts.get(GROUPS), config)
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    zeros = parts.get(ZEROS)
    if zeros is not None:
        packed = {"int8": (scales.shape,), "int32": ((-(-blocks[0] * bits // WORD), blocks[1]),)}
        if zeros.shape not in packed.get(zeros.dtype, ()):
            raise bad(path, f"{printable(zeros.name)} must have int8 {scales.shape} or int32 {packed['int32'][0]} to "
                      f"go with {printable(scales.name)}, got {zeros.dtype} {zeros.shape}")  # fmt: skip
    if OVERALL in parts or OF_MODELOPT in parts:
        raise bad(path, f"{printable(numbers.name)} is of integers, which have no scale of scales")
    return CompressedTensor(
        stem + PLAIN, shape, numbers.name, scales.name, INTEGERS, shape, c_strides(shape), block, numbers.file,
        _names(parts), f"compressed-tensors, {bits} bit", bits=bits, row_bytes=numbers.shape[1] * numbers.itemsize,
        zeros=zeros.name if zeros is not None else "", groups=parts[GROUPS].name if GROUPS in parts else "",
    )  # fmt: skip


def _names(parts: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Return the names of the tensors that go with the numbers."""
    return tuple(info.name for info in parts.values())


def _shape(reader: Reader, numbers: TensorInfo, size: TensorInfo | None) -> tuple[int, int]:
    """Return rows and columns; those of packed words are in a tensor next to them."""
    if numbers.dtype == "int8":
        return numbers.shape[0], numbers.shape[1]
    if size is None or size.shape != (2,) or size.dtype not in ("int32", "int64"):
        got = "none" if size is None else f"{size.dtype} {size.shape}"
        raise bad(reader.path, f"{printable(numbers.name)} needs two whole numbers {SHAPE} beside it, got {got}")
    rows, columns = (int(number) for number in reader.read(size.name))
    if rows != numbers.shape[0] or not 0 <= columns <= numbers.shape[1] * WORD:
        raise bad(reader.path, f"{printable(size.name)} must be the shape of {printable(numbers.name)} {numbers.shape} "
                  f"unpacked, got ({rows}, {columns})")  # fmt: skip
    return rows, columns


def _bits(path: Path, numbers: TensorInfo, columns: int, config: Mapping[str, object]) -> int:
    """Return the bits of a number: by the words of a row, and by config.json where it has them."""
    words = numbers.shape[1]
    fitting = [bits for bits in range(1, 9) if -(-columns * bits // WORD) == words]
    named = {weights.get("num_bits") for weights in weights_of(scheme_of(config))}
    fitting = [bits for bits in fitting if bits in named] if named else fitting
    # Old versions leave bits of a word unused where a number would lie in two words.
    if len(fitting) != 1 or (WORD % fitting[0] and words > 1 and -(-columns // (WORD // fitting[0])) == words):
        raise bad(path, f"{printable(numbers.name)} {numbers.shape} for {columns} columns fits no one number of bits "
                  "of config.json, packed without gaps")  # fmt: skip
    return fitting[0]


def _block(
    reader: Reader, shape: tuple[int, int], scales: TensorInfo, groups: TensorInfo | None, config: Mapping[str, object]
) -> tuple[int, int]:
    """Return rows and columns per scale."""
    path = reader.path
    rows, columns = max(shape[0], 1), max(shape[1], 1)
    structure = block_structure(config, shape, scales.shape)
    count = scales.shape[1] if len(scales.shape) == 2 else 0
    even = [(1, columns // count)] if count and columns % count == 0 else []
    for high, wide in [(rows, columns), (1, columns), *([structure] if structure else []), *even]:
        if scales.shape == (-(-rows // high), -(-columns // wide)) or (
            math.prod(scales.shape) == 1 == -(-rows // high) * -(-columns // wide)
        ):
            break
    else:
        raise bad(path, f"{printable(scales.name)} {scales.shape} has no scale for all, for each row, or for each "
                  f"block of config.json of {shape}")  # fmt: skip
    if groups is not None and (groups.shape != (shape[1],) or groups.dtype not in ("int32", "int64") or high != 1):
        raise bad(path, f"{printable(groups.name)} must have one int32 for each of {shape[1]} columns in groups, got "
                  f"{groups.dtype} {groups.shape}")  # fmt: skip
    if groups is not None:
        check_groups(reader, groups.name, columns, wide)
    return high, wide
