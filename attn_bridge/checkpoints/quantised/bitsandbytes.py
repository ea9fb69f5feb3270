"""bitsandbytes: codes of 4 bits with a scale for each block of numbers, or int8 with a scale for each row.

Sources: codes of 4 bits, and scales that are quantised again, QLoRA (arXiv 2305.14314); int8, LLM.int8() (arXiv
2208.07339).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ...printable import printable
from ...whole_files import JsonObject
from ..containers.base import Array, Reader, TensorInfo
from ..containers.files import bad, parse_json
from ..containers.strided import c_strides
from .pairs import TiledTensor, partner
from .source import Source

STATE = ".quant_state.bitsandbytes__"
ABSMAX, TABLE, NESTED_ABSMAX, NESTED_TABLE = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
"""Suffixes of a weight's name in the names of its tables and scales."""

KINDS = ("nf4", "fp4")
STORAGE = ("uint8", "bfloat16", "float16", "float32", "float64")
"""Dtypes that the bytes of 4-bit codes are stored as (``bnb_4bit_quant_storage``, which FSDP needs)."""

SCB, FORMAT = ".SCB", ".weight_format"
"""Endings of the row scales of int8, and of the number that selects their memory order."""

LARGEST = 127.0
"""The int8 value of the largest number of a row, which is its scale."""

MOST = 1 << 16
"""Maximum bytes of the JSON that describes a weight."""


@dataclasses.dataclass(frozen=True)
class FourBitTensor(TiledTensor):
    """A weight of 4-bit codes, the high half of a byte first.

    Attributes:
        table: name of the table from codes to numbers.
        count: numbers of a block, which share a scale.
        nested: names of the scales and table of quantised scales; () if scales are float32.
        nested_count: quantised scales that share a scale.
        offset: added to quantised scales.
        width: bytes of codes that an element of the file holds.
    """

    table: str
    count: int
    nested: tuple[str, ...]
    nested_count: int
    offset: float
    width: int

    def tile(self, source: Source, rows: range, left: int, right: int) -> tuple[Array, Array]:
        """Return the numbers of codes, and scales, of a rectangle."""
        columns = self.file_shape[-1]
        if rows.step == 1 and (left, right) == (0, columns):
            values, scales = self._run(source, rows.start * columns, rows.stop * columns)
        else:
            parts = [self._run(source, row * columns + left, row * columns + right) for row in rows]
            values, scales = (np.concatenate(both) for both in zip(*parts, strict=True))
        return values.reshape(len(rows), -1), scales.reshape(len(rows), -1)

    def _run(self, source: Source, start: int, stop: int) -> tuple[Array, Array]:
        first, last, width = start // 2, -(-stop // 2), self.width
        stored = source.elements(self.numbers, first // width, -(-last // width)).view(np.uint8)
        codes = stored[first % width :][: last - first]
        nibbles = np.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[start - 2 * first : stop - 2 * first]
        block = np.arange(start, stop) // self.count
        scales = self._scales(source, int(block[0]), int(block[-1]) + 1)
        return source.whole(self.table).astype(np.float64)[nibbles], scales.astype(np.float64)[block - block[0]]

    def _scales(self, source: Source, start: int, stop: int) -> Array:
        """Return scales in float32, rounded as bitsandbytes rounds them: after the product, and after the sum."""
        stored = source.elements(self.scales, start, stop)
        if not self.nested:
            return stored
        scales, table = (source.whole(name) for name in self.nested)
        of = np.arange(start, stop) // self.nested_count
        product: Array = table[stored] * scales[of] + np.float32(self.offset)
        return product


@dataclasses.dataclass(frozen=True)
class Int8Tensor(TiledTensor):
    """A weight of int8, whose rows have a scale each."""

    def tile(self, source: Source, rows: range, left: int, right: int) -> tuple[Array, Array]:
        """Return numbers as shares of the largest, and scales, of a rectangle."""
        numbers = source.matrix(self.numbers, rows, left, right).astype(np.float64)
        scales = source.whole(self.scales)[np.arange(rows.start, rows.stop, rows.step)].astype(np.float64)
        return numbers * scales[:, None] / LARGEST, np.ones((1, 1))


def find(reader: Reader) -> list[FourBitTensor | Int8Tensor]:
    """Return the weights of bitsandbytes; of each with 4 bits the JSON that describes it is read.

    Raises:
        CheckpointError: tensors that don't go together.
    """
    tensors = reader.tensors
    weights: list[FourBitTensor | Int8Tensor] = []
    for name in tensors:
        stem, joint, kind = name.rpartition(STATE)
        if joint and stem:
            weights.append(_four_bit(reader, stem, kind, name))
        elif name.endswith(SCB):
            weights.append(_int8(reader, name.removesuffix(SCB), tensors[name]))
    return weights


def _wanted(path: Path, tensors: Mapping[str, TensorInfo], name: str, whose: str, dtypes: Iterable[str]) -> TensorInfo:
    info = partner(path, tensors, name, whose)
    if info.dtype not in dtypes:
        raise bad(path, f"{printable(name)} must be {' or '.join(dtypes)}, got {info.dtype}")
    return info


def _four_bit(reader: Reader, stem: str, kind: str, state: str) -> FourBitTensor:
    path, tensors = reader.path, reader.tensors
    if kind not in KINDS:
        raise bad(
            path, f"{printable(stem)} is quantised by bitsandbytes as {printable(kind, 40)}, not {' or '.join(KINDS)}"
        )
    numbers = _wanted(path, tensors, stem, state, STORAGE)
    table = _wanted(path, tensors, stem + TABLE, stem, ("float32",))
    quant_state = _state(reader, state, stem)
    is_nested = "nested_blocksize" in quant_state
    absmax = _wanted(path, tensors, stem + ABSMAX, stem, ("uint8",) if is_nested else ("float32",))
    shape = tuple(quant_state["shape"])
    count, blocks = math.prod(shape), -(-math.prod(shape) // quant_state["blocksize"])
    sizes = {numbers: -(-count // (2 * numbers.itemsize)), absmax: blocks, table: 16}
    nested: tuple[str, ...] = ()
    if is_nested:
        scales, others = (
            _wanted(path, tensors, stem + ending, stem, ("float32",)) for ending in (NESTED_ABSMAX, NESTED_TABLE)
        )
        sizes |= {scales: -(-blocks // quant_state["nested_blocksize"]), others: 256}
        nested = (scales.name, others.name)
    for info, size in sizes.items():
        if math.prod(info.shape) != size:
            raise bad(path, f"{printable(info.name)} must have {size} elements for a weight {shape} in blocks of "
                      f"{quant_state['blocksize']}, got {info.shape}")  # fmt: skip
    return FourBitTensor(
        stem,
        shape,
        stem,
        absmax.name,
        kind,
        shape,
        c_strides(shape),
        (1, quant_state["blocksize"]),
        numbers.file,
        (absmax.name, table.name, *nested, state),
        f"bitsandbytes, 4 bit ({kind})",
        table=table.name,
        count=quant_state["blocksize"],
        nested=nested,
        nested_count=quant_state.get("nested_blocksize", 1),
        offset=quant_state.get("nested_offset", 0.0),
        width=numbers.itemsize,
    )


def _state(reader: Reader, name: str, stem: str) -> JsonObject:
    """Return bitsandbytes' description of a weight, after checks."""
    info = reader.tensors[name]
    if info.dtype != "uint8" or info.nbytes > MOST:
        raise bad(reader.path, f"{printable(name)} must be at most {MOST} bytes of JSON")
    document = parse_json(reader.read_range(name, 0, info.nbytes), reader.path, name)
    shape = document.get("shape") if isinstance(document, dict) else None
    sizes = [document.get("blocksize"), document.get("nested_blocksize", 1)] if isinstance(document, dict) else [None]
    offset = document.get("nested_offset", 0.0) if isinstance(document, dict) else None
    if (
        not isinstance(shape, list)
        or len(shape) < 2
        or not all(type(size) is int and size >= 0 for size in shape)
        or not all(type(size) is int and size > 0 for size in sizes)
        or not isinstance(offset, int | float)
        or not abs(offset) <= sys.float_info.max
    ):
        excerpt = printable(json.dumps(document), 80)
        raise bad(reader.path, f"{printable(name)} must give shape and blocksize of {printable(stem)}, got {excerpt}")
    described: JsonObject = document
    return described


def _int8(reader: Reader, stem: str, scales: TensorInfo) -> Int8Tensor:
    path, tensors = reader.path, reader.tensors
    numbers = _wanted(path, tensors, stem + ".weight", scales.name, ("int8",))
    if len(numbers.shape) != 2 or scales.dtype != "float32" or math.prod(scales.shape) != numbers.shape[0]:
        raise bad(path, f"{printable(scales.name)} must have one float32 for each row of {printable(numbers.name)} "
                  f"{numbers.shape}, got {scales.dtype} {scales.shape}")  # fmt: skip
    form = stem + FORMAT if stem + FORMAT in tensors else ""
    if form and (tensors[form].nbytes > MOST or reader.read(form).any()):
        raise bad(path, f"{printable(form)} must be 0, rows one after the other; other orders are of its kernels alone")
    return Int8Tensor(
        numbers.name,
        numbers.shape,
        numbers.name,
        scales.name,
        "int8",
        numbers.shape,
        c_strides(numbers.shape),
        (1, numbers.shape[1]),
        numbers.file,
        (scales.name, form) if form else (scales.name,),
        "bitsandbytes, 8 bit",
    )
