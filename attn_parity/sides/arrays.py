"""NumPy arrays of the precisions that are judged, and those too large to be held several times.

A run of a block of 856 million parameters in float64 would hold 7 GB of weights and 7 GB of gradients. A large weight
stays in its own precision until an operation reads it, and a large gradient goes to a file without a name as it comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import tempfile

import ml_dtypes
import numpy as np

Array = np.ndarray

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Precisions that can be judged: float64 compares the functions, the others the accuracy that each side loses."""

LOW_PRECISIONS = ("float32", "bfloat16", "float16")

LARGE = 1 << 25
"""Elements from which on an array is held once, in its own precision."""

PIECE = 1 << 24
"""Bytes that are written at a time."""


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a name; bfloat16 is ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name, name))


def unit_of(dtype: str) -> float:
    """Return the distance from 1 to the next larger number of a dtype, bfloat16 included."""
    return float(ml_dtypes.finfo(dtype).eps)


def width_of(dtype: str) -> int:
    """Return the bytes of a number of a dtype."""
    return int(numpy_dtype(dtype).itemsize)


def is_float(array: Array) -> bool:
    """Return whether a NumPy array holds floating-point numbers, `ml_dtypes` included."""
    return array.dtype.kind == "f" or (array.dtype.kind == "V" and hasattr(ml_dtypes, array.dtype.name))


def class_of(dtype: str) -> str:
    """Return whether the numbers of a dtype are bools, whole numbers or floating-point ones."""
    return "bool" if dtype == "bool" else "whole" if "int" in dtype else "float"


def wide(array: np.ndarray) -> np.ndarray:
    """Return floating-point numbers in float64, and anything else as it is."""
    return array.astype(np.float64) if is_float(array) else array


# ---- large arrays


def is_large(array: Array) -> bool:
    """Return whether an array is held once."""
    return int(array.size) >= LARGE


@dataclasses.dataclass(frozen=True, eq=False)
class LargeWeight:
    """A large weight that counts as float64; every operation that reads it promotes it again."""

    array: Array

    dtype = np.dtype(np.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def ndim(self) -> int:
        """Its number of axes."""
        return self.array.ndim

    def promoted(self) -> Array:
        """Return it in float64."""
        return self.array.astype(np.float64)


def lends(array: Array, dtype: str | None) -> bool:
    """Return whether a weight that is wanted in `dtype` is lent."""
    return dtype == "float64" and is_large(array) and is_float(array) and array.dtype != np.float64


def spilled(array: Array) -> Array:
    """Return a large array as one whose memory is a file without a name; the array itself where it can't be written."""
    if not is_large(array) or mapping_of(array) is not None:
        return array
    turned = array.ndim == 2 and array.T.flags.c_contiguous and not array.flags.c_contiguous
    flat = np.ascontiguousarray(array.T if turned else array)
    raw = flat.reshape(-1).view(np.uint8)
    with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix="attn-bridge-", buffering=0) as file:
        for start in range(0, raw.size, PIECE):
            piece = raw[start : start + PIECE]
            if file.write(piece.data) != piece.size:
                return array
        mapped = np.asarray(np.memmap(file, flat.dtype, "r", shape=flat.shape))
        return mapped.T if turned else mapped
    return array


def release(*arrays: Array | None) -> None:
    """Give the memory back that was needed to read arrays on disk."""
    for array in arrays:
        mapping = None if array is None else mapping_of(array)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)


def mapping_of(array: object) -> mmap.mmap | None:
    """Return the file that an array's memory is, if it is one."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array
