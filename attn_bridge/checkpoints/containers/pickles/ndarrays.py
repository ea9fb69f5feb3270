"""Arrays of NumPy and JAX whose elements are in a pickle: found among its placeholders, and read from its bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ....printable import printable
from ..base import TensorInfo
from ..files import DTYPES, check_shape
from ..strided import StridedTensor, c_strides
from .calls import Global, Record

RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
JAX = ("jax._src.array._reconstruct_array", "jax._src.device_array.reconstruct_device_array")
"""Functions that return arrays, by the names that pickles of several versions have for them."""


class UnreadableError(ValueError):
    """An array of objects or records, or one that lacks bytes; the message follows its name."""


@dataclasses.dataclass(frozen=True)
class Pickled:
    """An array as its pickle gives it, unchecked: shape, dtype, whether in Fortran order, and bytes."""

    shape: object
    dtype: object
    fortran: object
    data: object


def array_of(value: object) -> Pickled | None:
    """Return the array that a placeholder represents; None for other values."""
    if not isinstance(value, Record):
        return None
    try:
        if value.name in JAX:
            function, _, state, *_ = value.arguments
            is_known = isinstance(function, Global) and function.name in RECONSTRUCT
            return _of_state(state) if is_known else None
        if value.name in RECONSTRUCT:
            return _of_state(value.state)
        if value.name in BUFFER:
            data, dtype, shape, order = value.arguments
            return Pickled(shape, dtype, order == "F", data)
    except (TypeError, ValueError):  # another number of values than NumPy writes
        return None
    return None


def loaded(path: Path, name: str, pickled: Pickled) -> StridedTensor:
    """Decode a pickled NumPy array; return it under its name.

    Raises:
        UnreadableError: its elements are not numbers, or bytes are missing.
        CheckpointError: its shape is malformed.
    """
    dtype, is_swapped = _dtype_of(pickled.dtype)
    if dtype not in DTYPES:
        raise UnreadableError(f"is an array of {printable(dtype, 40)}, which is no dtype of a tensor")
    info = TensorInfo(name, dtype, check_shape(path, name, pickled.shape))
    if not isinstance(pickled.data, bytes | bytearray) or len(pickled.data) != info.nbytes:
        raise UnreadableError(f"needs {info.nbytes} bytes, which it does not have")
    strides = c_strides(info.shape[::-1])[::-1] if pickled.fortran else c_strides(info.shape)
    data = memoryview(pickled.data)
    return StridedTensor(info, lambda at, count: data[at : at + count], strides, is_swapped=is_swapped)


def _of_state(state: Any) -> Pickled:
    """Return the array of a state as NumPy's reconstruction takes it; another number of values is a ValueError."""
    _, shape, dtype, fortran, data = state
    if isinstance(data, Record) and data.name.endswith(".bytes") and not data.arguments:  # of none, in old protocols
        data = b""
    return Pickled(shape, dtype, fortran, data)


def _dtype_of(value: object) -> tuple[str, bool]:
    """Return the name of a dtype (or a description if invalid), and whether its bytes are swapped."""
    if not isinstance(value, Record) or value.name != "numpy.dtype" or not value.arguments:
        return "an unknown dtype", False
    code = value.arguments[0]
    # Dtypes of ml_dtypes are pickled by their class, those of NumPy by a letter and a size.
    if isinstance(code, Global):
        return code.name.removeprefix("ml_dtypes."), False
    # The state of a dtype begins with its version and the byte order.
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "|"
    if not isinstance(code, str) or code[:1] not in "biufc" or not code[1:].isdecimal() or len(code) > 3:
        return str(code), False
    try:
        return np.dtype(code).name, order == ">"
    except TypeError:
        return code, False
