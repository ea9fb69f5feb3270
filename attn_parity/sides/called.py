"""The framework that a function's code calls: what a side without weights is told by.

Comes in: a function. Goes out: the frameworks that it, or functions that it calls, names. Nothing is run or imported.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from attn_bridge.backends import _ARRAY_HOMES, Framework

_LIBRARIES: dict[str, Framework] = {
    **_ARRAY_HOMES,
    **dict.fromkeys(("torch_attn", "torchvision", "torchaudio"), "torch"),
    **dict.fromkeys(("jax_attn", "flax", "optax", "equinox", "haiku"), "flax"),
}
"""Top package that code calls -> framework."""

_MAX_CALLEES = 200
"""Most functions that are searched for calls of a framework."""


def frameworks_called(call: Any) -> set[Framework]:
    """Return the frameworks that the code of a function uses, itself or through functions that it calls."""
    frameworks: set[Framework] = set()
    seen: set[int] = set()
    waiting = [call]
    while waiting and len(seen) < _MAX_CALLEES:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        framework = _library(value)
        if framework is not None:
            frameworks.add(framework)
        else:
            waiting += _used_by(value)
    return frameworks


def _library(value: Any) -> Framework | None:
    """Return the framework that a module, class, function or object comes from; `jax.jit` makes functions of JAX."""
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    homes = [home, type(value).__module__]
    return next((_LIBRARIES[top] for one in homes if one and (top := str(one).partition(".")[0]) in _LIBRARIES), None)


def _wrapped(value: Any) -> Any:
    """Return the function inside a partial, a bound method, or what a decorator (jax.jit, torch.compile) made."""
    names = ("__wrapped__", "__func__", *(("func",) if isinstance(value, functools.partial) else ()))
    return next((one for name in names if (one := getattr(value, name, None)) is not None), None)


def _used_by(value: Any) -> Iterator[Any]:
    """Yield the functions, classes and modules that the code of a function names."""
    inner = _wrapped(value)
    if inner is not None:
        yield inner
        return
    code = getattr(value, "__code__", None)
    if code is None:
        if callable(value) and not isinstance(value, (type, types.ModuleType)):
            yield from (one for one in [type(value).__call__] if hasattr(one, "__code__"))
        return
    for cell in value.__closure__ or ():
        try:
            yield from _called(cell.cell_contents)
        except ValueError:  # a variable that is not assigned yet
            continue
    names = _names(code)
    for name in names:
        if name in value.__globals__:
            target = value.__globals__[name]
            yield from _called(target)
            is_own = isinstance(target, types.ModuleType) and _library(target) is None
            if is_own:  # a module of the user's: what is taken from it
                for one in names:
                    yield from _called(getattr(target, one, None))
        elif name in ("torch", "jax"):  # imported inside the function
            yield types.ModuleType(name)


def _called(value: Any) -> Iterator[Any]:
    if callable(value) or isinstance(value, types.ModuleType) or _library(value) is not None:
        yield value


def _names(code: types.CodeType) -> list[str]:
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))
