"""Float64 for any JAX code, as it is: while it is traced, every request for a lower precision asks for float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from ....sides.patching import replaced

_LOW: dict[np.dtype, np.dtype] = {
    **dict.fromkeys(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)), np.dtype(np.float64)),
    np.dtype(np.complex64): np.dtype(np.complex128),
}
_OPAQUE = ("pallas_call", "pure_callback", "io_callback", "ffi_call", "custom_call")
_PARAMETERS = ("new_dtype", "dtype", "preferred_element_type", "out_dtype")

_PROMOTED = jax.make_user_context(False)  # JAX keeps what it traces within this context apart from all else


@contextlib.contextmanager
def promoted() -> Iterator[None]:
    """Enter a context in which operations that request a lower precision run in float64.

    It covers cases that a module's dtype does not: a softmax fixed to float32, a frozen dtype of a stock layer. Other
    threads are unaffected.
    """

    def _build(bind: Callable[..., object]) -> Callable[..., object]:
        def _promoted_bind(self: core.Primitive, *args: ArrayLike, **params: object) -> object:
            args = tuple([_own(arg) for arg in args])
            if self.name == "bitcast_convert_type":  # the bits of integers read as floats: no precision is asked for
                return _widen(bind(self, *args, **params))
            # `_widen` binds a conversion itself, so that widening the operand of one would never end; its `new_dtype`
            # is promoted below. The code behind opaque operations is made for its dtypes.
            if self.name != "convert_element_type" and self.name not in _OPAQUE:
                args = tuple([_widen(arg) for arg in args])
            params = {name: _promote(name, value) for name, value in params.items()}
            try:
                return bind(self, *args, **params)
            except TypeError:  # int32 of the code next to int64, which x64 makes of a plain `jnp.arange`
                same = _of_one_width(args)
                if same is None:
                    raise
                return bind(self, *same, **params)

        return _promoted_bind

    with replaced(core.Primitive, "bind", _build), jax.enable_x64(True), _PROMOTED(True):
        yield


def _own(arg: ArrayLike) -> ArrayLike:
    """Return a NumPy array as a copy: JAX caches the conversion, and would give int64 to code that runs without x64."""
    return arg.copy() if type(arg) is np.ndarray else arg


def _widen(arg: ArrayLike) -> ArrayLike:
    dtype = getattr(arg, "dtype", None)
    is_low = dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype) in _LOW
    return jnp.asarray(arg, _LOW[np.dtype(dtype)]) if is_low else arg


def _of_one_width(args: tuple[ArrayLike, ...]) -> tuple[ArrayLike, ...] | None:
    """Return the operands with all signed integers as int64; None if they have one width already."""
    widths = {np.dtype(arg.dtype) for arg in args if _is_signed(arg)}
    if len(widths) < 2:
        return None
    return tuple([jnp.asarray(arg, np.int64) if _is_signed(arg) else arg for arg in args])


def _is_signed(arg: object) -> bool:
    dtype = getattr(arg, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.signedinteger)


def _promote(name: str, value: DTypeLike | None) -> object:
    if name not in _PARAMETERS or value is None:
        return value
    try:
        return _LOW.get(np.dtype(value), value)
    except TypeError:  # the dtype of random keys, which NumPy doesn't know
        return value
