"""Results of the functions and classes in pickles of ``torch.save``, computed without calling them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from types import UnionType
from typing import Any

import numpy as np

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

QUANTISED = frozenset(f"torch.{kind}Storage" for kind in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4"))
"""Classes of storages with quantised elements."""

TORCH_DTYPES = frozenset({*STORAGES.values(), "uint16", "uint32", "uint64"}) | {
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}
"""NumPy names of the dtypes that tensors of torch may have."""

_OTHER_DTYPES = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("complex32", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
}

_SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")

NAMES = frozenset(
    f"torch.{name}" for name in (*TORCH_DTYPES, *_OTHER_DTYPES, *_SCHEMES, "per_channel_affine_float_qparams")
)
"""Names that are plain values: dtypes, and schemes of quantisation."""

_PLAIN_CLASSES = frozenset(
    f"torch.{name}" for name in ("Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer", "nn.Parameter")
)
"""Classes of tensors whose elements are those of their storage."""


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
    strides: object


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """A placeholder for an object: the class or function, its arguments, and the state and items to set.

    Nothing is called.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[object] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class Members:
    """The members of a set, in the order of the pickle."""

    items: list[object]


@dataclasses.dataclass(eq=False, slots=True)
class Key:
    """A key of a dict that is neither text nor a number."""

    value: object


class Refused(Exception):  # noqa: N818 - it is a verdict on arguments, turned into an error that names the file
    """The arguments of a call are invalid."""


class MarkedError(Refused):
    """A tensor whose elements are the conjugated or negated ones of its storage."""


Count = Callable[[Any], None]
"""Counts values that are copied."""


def call(name: str, arguments: tuple[object, ...], count: Count) -> Any:
    """Return the result of a function of `CALLS`.

    Args:
        name: dotted name.
        arguments: its arguments.
        count: called with every list that is copied.

    Raises:
        Refused: ``torch.save`` does not write such arguments.
    """
    return CALLS[name](arguments, count)


def _pairs(arguments: tuple[object, ...], count: Count) -> dict[object, object]:
    pairs = arguments[0] if arguments else []
    if len(arguments) > 1 or not isinstance(pairs, list):
        raise Refused
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise Refused
    count(pairs)
    return {as_key(key): value for key, value in pairs}


def _counter(arguments: tuple[object, ...], count: Count) -> dict[object, object]:
    (counts,) = _exactly(arguments or ({},), dict)
    count(counts)
    return dict(counts)


def as_key(key: object) -> Hashable:
    """Return a key that compares as Python's does where it is text or a number, and as itself alone elsewhere.

    Raises:
        Refused: Python takes no such key.
    """
    if isinstance(key, float) and not math.isfinite(key):
        raise Refused
    if key is None or type(key) in (str, int, bool, float, Record):
        return key
    if isinstance(key, list | dict | Strided | Storage):
        raise Refused
    return Key(key)


def _exactly(arguments: tuple[object, ...], *kinds: type | UnionType) -> tuple[Any, ...]:
    """Return arguments of these types, as many as there are types."""
    if len(arguments) != len(kinds) or any(
        not isinstance(value, kind) for value, kind in zip(arguments, kinds, strict=True)
    ):
        raise Refused
    return arguments


def _size(arguments: tuple[object, ...], count: Count) -> tuple[object, ...]:
    (sizes,) = _exactly(arguments, list | tuple)
    count(sizes)
    return tuple(sizes)


def _set(arguments: tuple[object, ...], count: Count) -> Members:
    (members,) = _exactly(arguments or ([],), list | tuple)
    count(members)
    return Members(list(members))


def _encode(arguments: tuple[object, ...], count: Count) -> bytes:
    # Protocol 2 has no bytes: Python writes them as text, a character per byte, and the call that encodes it.
    text, encoding = _exactly(arguments, str, str)
    if encoding not in ("latin1", "latin-1"):
        raise Refused
    count(text)
    try:
        return bytes(text.encode("latin1"))
    except UnicodeEncodeError:
        raise Refused from None


def _bytes(arguments: tuple[object, ...], count: Count) -> bytes:
    if len(arguments) == 2:
        return _encode(arguments, count)
    (value,) = _exactly(arguments or (b"",), bytes)
    return bytes(value)


def _complex(arguments: tuple[object, ...], count: Count) -> complex:
    real, imaginary = _exactly(arguments, int | float, int | float)
    return complex(real, imaginary)


def _device(arguments: tuple[object, ...], count: Count) -> str:
    if len(arguments) == 1:
        return str(_exactly(arguments, str)[0])
    kind, number = _exactly(arguments, str, int | None)
    return str(kind if number is None else f"{kind}:{number}")


def _layout(arguments: tuple[object, ...], count: Count) -> str:
    return str(_exactly(arguments, str)[0])


def _scalar(arguments: tuple[object, ...], count: Count) -> int | float | bool:
    """Return a NumPy scalar as the number that it is."""
    dtype, data = _exactly(arguments, Record, bytes)
    code = dtype.arguments[0] if dtype.name == "numpy.dtype" and dtype.arguments else None
    if code not in ("f2", "f4", "f8", "b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8))):
        raise Refused
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    if order not in ("<", ">", "|", "=") or len(data) != int(code[1:]):
        raise Refused
    number = np.frombuffer(data, np.dtype(code).newbyteorder("<" if order in "|=" else order))[0].item()
    return bool(number) if code == "b1" else number


def _first(arguments: tuple[object, ...], count: Count) -> Strided:
    if not arguments or not isinstance(arguments[0], Strided):
        raise Refused
    return arguments[0]


def _moved(arguments: tuple[object, ...], count: Count) -> Strided:
    """Return a tensor of another device as it was before the copy to that device."""
    data: Strided
    data, dtype, *_ = _exactly(arguments, Strided, Global, object, object)
    if dtype.name != f"torch.{data.dtype}":
        raise Refused
    return data


def _typed(arguments: tuple[object, ...], count: Count) -> Strided:
    """Return a tensor with the dtype of its storage: (storage, offset, shape, strides, requires_grad, hooks, marks)."""
    if len(arguments) not in (4, 6, 7) or not isinstance(arguments[0], Storage):
        raise Refused
    return _tensor(arguments[0], arguments[0].dtype, arguments[1:4], arguments[6:])


def _untyped(arguments: tuple[object, ...], count: Count) -> Strided:
    """Return a tensor whose storage is one of bytes, with its dtype behind the hooks."""
    if len(arguments) not in (7, 8) or not isinstance(arguments[0], Storage):
        raise Refused
    dtype = arguments[6].name.removeprefix("torch.") if isinstance(arguments[6], Global) else ""
    return _tensor(arguments[0], "" if arguments[0].dtype else dtype, arguments[1:4], arguments[7:])


def _tensor(storage: Storage, dtype: str, where: tuple[object, ...], marks: tuple[object, ...]) -> Strided:
    if dtype not in TORCH_DTYPES:
        raise Refused("has a tensor whose dtype is not known")
    if any(marks):
        raise MarkedError
    return Strided(storage, dtype, *where)


def _of_class(arguments: tuple[object, ...], count: Count) -> object:
    """Return a tensor with attributes: (function, class, arguments, attributes)."""
    function, kind, inner, _ = _exactly(arguments, Global, Global, tuple, object)
    if kind.name not in _PLAIN_CLASSES or function.name not in CALLS:
        raise Refused
    return _first((call(function.name, inner, count),), count)


CALLS: dict[str, Callable[[tuple[Any, ...], Count], Any]] = {
    "collections.OrderedDict": _pairs,
    "collections.Counter": _counter,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch.nn.parameter.Parameter": _first,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _moved,
    "torch._utils._rebuild_tensor": _typed,
    "torch._utils._rebuild_tensor_v2": _typed,
    "torch._utils._rebuild_tensor_v3": _untyped,
    "torch._tensor._rebuild_from_type_v2": _of_class,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    "_codecs.encode": _encode,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""Function or class by name -> a function that computes its result."""

GLOBALS = frozenset({*CALLS, *NAMES, *(f"torch.{name}" for name in STORAGES), "torch.storage.UntypedStorage"}) | {
    "torch.Tensor"
}
"""All supported names."""

_DATA = (
    *("torch._utils._rebuild", "torch._tensor._rebuild", "torch.distributed.tensor.", "torch.distributed._tensor."),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy._core.numeric._frombuffer"),
    *("numpy.core.numeric._frombuffer", "numpy.ma.core._mareconstruct", "torch.storage._load_from_bytes"),
    *("jax._src.array._reconstruct_array", "jax._src.device_array.reconstruct_device_array"),
)
"""Prefixes of the names of functions that return tensors or arrays."""


def holds_data(value: object, count: Callable[[], None]) -> bool:
    """Return whether a value contains a tensor, a storage or an array, at any depth.

    Args:
        value: of a pickle.
        count: called at every step.
    """
    left, seen = [value], set()
    while left:
        value = left.pop()
        if isinstance(value, Strided | Storage) or (isinstance(value, Record) and value.name.startswith(_DATA)):
            return True
        if not isinstance(value, dict | list | tuple | Record | Members | Key) or id(value) in seen:
            continue
        count()
        seen.add(id(value))
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, Record):
            left += [value.arguments, value.state, value.items]
        else:
            left += value.items if isinstance(value, Members) else [value.value] if isinstance(value, Key) else value
    return False
