"""Pickled trees of NumPy and JAX arrays, such as parameters of Haiku: read whole, and nothing of them is executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ....printable import printable
from ..base import Array, Reader, TensorInfo, numpy_dtype
from ..files import DTYPES, bad, check_count, check_name, check_range, check_shape
from ..sources import open_file
from .calls import Global, Record
from .flat import MAX_DEPTH, SHOWN, NotPlainError, Plain
from .machine import Machine

MAX_BYTES = 1 << 31
"""Bytes of a file: all of it is in memory while it is read."""

RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
JAX = ("jax._src.array._reconstruct_array", "jax._src.device_array.reconstruct_device_array")
"""Functions that return arrays, by the names that pickles of several versions have for them."""

MAPPINGS = (
    *(f"haiku._src.data_structures.{name}" for name in ("FlatMapping", "FlatMap", "frozendict")),
    "flax.core.frozen_dict.FrozenDict",
)
"""Classes of dicts that can't be changed, which are pickled as a call with a dict."""


@dataclasses.dataclass(frozen=True)
class Pickled:
    """An array: its shape, dtype, order, and bytes."""

    shape: Any
    dtype: Any
    fortran: Any
    data: Any


class PickledReader(Reader):
    """One file; names are the keys joined by dots, lists and tuples are numbered. `metadata` has plain values.

    Args:
        path: the file.
        folder: the folder that no link may lead out of; None where the user names the file.
    """

    format: ClassVar[str] = "pickle"

    def __init__(self, path: Path, folder: Path | None = None):
        self.path = path
        file = open_file(path, folder)
        try:
            if file.size > MAX_BYTES:
                raise bad(path, f"has {file.size} bytes; pickles of at most {MAX_BYTES} are read")
            data = bytes(file.read(0, file.size))
        finally:
            file.close()
        self._plain = Plain(path, len(data))
        self._arrays: dict[str, Array] = {}
        self.tensors, self.metadata = {}, {}
        skipped: dict[str, str] = {}
        for name, value in self._leaves(Machine(data, path, placeholders=True).run(), "", 0):
            pickled = _array_of(value)
            if pickled is not None and not name:
                raise bad(path, "is a single array without a name; save a dict of arrays, and convert that")
            if pickled is not None:
                self._place(check_name(path, name), pickled)
                continue
            try:
                self.metadata[name] = self._plain.value(value, name)
            except NotPlainError as error:
                skipped[name] = error.kind
        check_count(path, len(self.tensors))
        if not self.tensors:
            first = next((f"; {printable(name) or 'it'} is {printable(kind)}" for name, kind in skipped.items()), "")
            of_torch = any(kind.startswith("torch.") for kind in skipped.values())
            raise bad(path, f"holds no array of NumPy or JAX{first}{'; torch.save saves tensors' * of_torch}")
        if skipped:
            shown = ", ".join(f"{printable(name)} ({printable(kind)})" for name, kind in list(skipped.items())[:SHOWN])
            more = f" and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
            self.notes = (f"skipped, as they are neither arrays nor plain values: {shown}{more}",)

    def _leaves(self, value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield dotted name and value of all leaves; a list or tuple without arrays is a leaf."""
        value = _plain_dict(value)
        self._plain.count(name, depth)
        if depth > MAX_DEPTH:
            raise bad(self.path, f"{printable(name)} is nested too deeply")
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        if not items or (isinstance(value, list | tuple) and not any(map(_may_hold_arrays, value))):
            yield name, value
            return
        for key, inner in items:
            if not isinstance(key, str | int):
                raise bad(self.path, f"{printable(name)} has a key that is neither text nor a number")
            yield from self._leaves(inner, f"{name}.{key}" if name else str(key), depth + 1)

    def _place(self, name: str, pickled: Pickled) -> None:
        shown = printable(name)
        if name in self.tensors:
            raise bad(self.path, f"{shown} comes twice")
        dtype, is_swapped = _dtype_of(pickled.dtype)
        if dtype not in DTYPES:
            raise bad(self.path, f"{shown} is an array of {printable(dtype, 40)}, which is no dtype of a tensor")
        info = TensorInfo(name, dtype, check_shape(self.path, name, pickled.shape))
        if not isinstance(pickled.data, bytes | bytearray) or len(pickled.data) != info.nbytes:
            raise bad(self.path, f"{shown} needs {info.nbytes} bytes, which it does not have")
        array = np.frombuffer(pickled.data, numpy_dtype(dtype))
        array = array.byteswap() if is_swapped else array
        array = array.reshape(info.shape[::-1]).T if pickled.fortran else array.reshape(info.shape)
        self.tensors[name] = info
        self._arrays[name] = array

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        check_range(self.path, self.tensors[name], start, stop)
        array = self._arrays[name] = np.ascontiguousarray(self._arrays[name])
        return array.reshape(-1).view(np.uint8).data[start:stop]


def _may_hold_arrays(value: Any) -> bool:
    return isinstance(_plain_dict(value), dict | list | tuple) or _array_of(value) is not None


def _plain_dict(value: Any) -> Any:
    """Return the dict that a class of `MAPPINGS` would be made of, and any other value as it is."""
    is_mapping = isinstance(value, Record) and value.name in MAPPINGS and value.state is None and not value.items
    if is_mapping and len(value.arguments) == 1 and isinstance(value.arguments[0], dict):
        return value.arguments[0]
    return value


def _array_of(value: Any) -> Pickled | None:
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


def _of_state(state: Any) -> Pickled:
    _, shape, dtype, fortran, data = state
    if isinstance(data, Record) and data.name.endswith(".bytes") and not data.arguments:  # of none, in old protocols
        data = b""
    return Pickled(shape, dtype, fortran, data)


def _dtype_of(value: Any) -> tuple[str, bool]:
    """Return the name of a dtype (or a description if invalid), and whether its bytes are swapped."""
    if not isinstance(value, Record) or value.name != "numpy.dtype" or not value.arguments:
        return "an unknown dtype", False
    code = value.arguments[0]
    if isinstance(code, Global):
        return code.name.removeprefix("ml_dtypes."), False
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "|"
    if not isinstance(code, str) or code[:1] not in "biufc" or not code[1:].isdecimal() or len(code) > 3:
        return str(code), False
    try:
        return np.dtype(code).name, order == ">"
    except TypeError:
        return code, False
