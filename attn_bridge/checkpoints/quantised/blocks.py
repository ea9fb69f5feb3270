"""GGUF's quantised types: blocks of numbers with their scales in them, dequantised by the `gguf` package."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..containers.base import Array, CheckpointError, Reader, TensorInfo
from ..containers.strided import c_strides
from .pairs import TiledTensor
from .source import Source


@dataclasses.dataclass(frozen=True)
class BlockTensor(TiledTensor):
    """A tensor whose rows are blocks."""

    def tile(self, source: Source, rows: range, left: int, right: int) -> tuple[Array, Array]:
        """Return the numbers of a rectangle as the package computes them, in float32, and a scale of 1."""
        numbers, size = sizes_of(self.kind)
        first, last = left // numbers, -(-right // numbers)
        width = self.file_shape[-1] // numbers * size
        data = np.ascontiguousarray(source.rectangle(self.numbers, width, rows, first * size, last * size))
        with np.errstate(all="ignore"):
            made = dequantiser(self.kind)(data)
        return made[:, left - first * numbers : right - first * numbers].astype(np.float64), np.ones((1, 1))


def find(reader: Reader) -> list[BlockTensor]:
    """Return the quantised tensors of a GGUF file.

    Raises:
        CheckpointError: a tensor is quantised, and the package is not installed.
    """
    tensors = [_tensor(info) for info in reader.tensors.values() if info.blocks]
    if tensors:
        dequantiser(tensors[0].kind)
    return tensors


def _tensor(info: TensorInfo) -> BlockTensor:
    numbers, size = sizes_of(info.blocks)
    shape = (*info.shape[:-1], info.shape[-1] // size * numbers)
    words, strides = f"GGUF {info.blocks}", c_strides(shape)
    return BlockTensor(info.name, shape, info.name, "", info.blocks, shape, strides, (1, numbers), info.file, (), words)


def sizes_of(kind: str) -> tuple[int, int]:
    """Return the numbers in a block of a type, and its bytes."""
    from ..containers.gguf.reader import BLOCKS  # of no use to other containers

    return next((numbers, size) for name, numbers, size in BLOCKS.values() if name == kind)


def dequantiser(kind: str) -> Callable[[Array], Array]:
    """Return a function from bytes of a type to float32.

    Raises:
        CheckpointError: the package is not installed, or does not support the type.
    """
    try:
        package: Any = importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(
            "quantised tensors of GGUF need the gguf package: pip install 'attn-bridge[gguf]'"
        ) from None
    code = package.GGMLQuantizationType[kind]
    return lambda data: cast(Array, package.dequantize(data, code))
