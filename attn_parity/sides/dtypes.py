"""The precisions that are judged, and NumPy arrays of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Precisions that can be judged: float64 compares the functions, the others the accuracy that each side loses."""

LOW_PRECISIONS = ("float32", "bfloat16", "float16")


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a name; bfloat16 is ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name, name))


def unit_of(dtype: str) -> float:
    """Return the distance from 1 to the next larger number of a dtype, bfloat16 included."""
    return float(ml_dtypes.finfo(dtype).eps)


def width_of(dtype: str) -> int:
    """Return the bytes of a number of a dtype."""
    return int(numpy_dtype(dtype).itemsize)


def is_float(array: Any) -> bool:
    """Return whether a NumPy array holds floating-point numbers, `ml_dtypes` included."""
    return array.dtype.kind == "f" or (array.dtype.kind == "V" and hasattr(ml_dtypes, array.dtype.name))


def class_of(dtype: str) -> str:
    """Return whether the numbers of a dtype are bools, whole numbers or floating-point ones."""
    return "bool" if dtype == "bool" else "whole" if "int" in dtype else "float"


def wide(array: np.ndarray) -> np.ndarray:
    """Return floating-point numbers in float64, and anything else as it is."""
    return array.astype(np.float64) if is_float(array) else array
