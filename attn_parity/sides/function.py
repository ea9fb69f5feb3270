"""A side that is a pure function with its weights: any torch or JAX library whose modules are not nn.Module or NNX.

`function` makes a side; ``frameworks/*/subject.py`` runs it, for the framework of its arrays. Without arrays, the
framework is the one that the function's code names; nothing is run or imported to find out.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from attn_bridge.backends import _ARRAY_HOMES, PACKAGES, Framework

from .trees import flatten


@dataclasses.dataclass(frozen=True)
class Function:
    """A pure function ``call(weights, *inputs)`` and the tree of arrays that it takes as its weights.

    `named` is the framework that the caller gave; None reads it off the weights, or, without weights, off the code.
    `layers` has the layers of a library's module: path in the tree -> the layer, whose settings are read.
    """

    call: Callable[..., Any]
    weights: Any
    named: Framework | None = None
    layers: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def framework(self) -> Framework:
        """The framework of the arrays; without any, the framework that the code calls.

        Raises:
            TypeError: the framework cannot be determined, or the arrays belong to both.
        """
        leaves = {home for _, leaf in flatten(self.weights, _is_array) if (home := _home(leaf)) is not None}
        if len(leaves) > 1:
            raise TypeError("weights must be arrays of one framework, got tensors of torch and arrays of JAX")
        if self.named is not None and leaves <= {self.named}:
            return self.named
        if self.named is not None:
            raise TypeError(f"framework ({PACKAGES[self.named][1]}) must be that of the weights")
        if leaves:
            return leaves.pop()
        if others := flatten(self.weights, _is_anything):
            path, leaf = others[0]
            kind = "a NumPy array" if type(leaf).__module__ == "numpy" else type(leaf).__name__
            raise TypeError(f"weights{path} must be a tensor of torch or an array of JAX, got {kind}")
        called = frameworks_called(self.call)
        if len(called) != 1:
            reason = "calls torch and JAX" if called else "calls neither torch nor JAX by name"
            raise TypeError(
                f"weights hold no arrays, and the function {reason}; give framework='torch' or framework='jax'"
            )
        return called.pop()


def function(call: Callable[..., object], weights: object, *, framework: str | None = None) -> Function:
    """Return a side of a comparison: a pure function and its weights.

    Args:
        call: ``call(weights, *inputs)`` returns an array, or a tuple, list, mapping or dataclass of arrays.
        weights: dicts, lists, tuples and dataclasses of torch tensors or of JAX arrays, at any depth; ``{}`` for a
            function without weights, such as a loss, an activation or a mask.
        framework: ``torch`` or ``jax``; None takes that of the weights, or, without weights, the framework that the
            function's code calls.

    Raises:
        TypeError: `call` can't be called, `weights` are not arrays of one framework, or neither they nor the code show
            the framework.
        ValueError: `framework` is not one of the two.

    Example:
        >>> import torch
        >>> loss = function(lambda _, x, y: torch.nn.functional.mse_loss(x, y), {})
        >>> loss.framework
        'torch'
    """
    if not callable(call):
        raise TypeError(f"call must be a function of the weights and the inputs, got {type(call).__name__}")
    names: dict[str, Framework] = {"torch": "torch", "jax": "flax", "flax": "flax"}
    if framework is not None and framework not in names:
        raise ValueError(f"framework ({framework}) must be torch or jax")
    made = Function(call, weights, None if framework is None else names[framework])
    made.framework  # noqa: B018 - so that the error comes here, and not where the function is run
    return made


def _home(value: object) -> Framework | None:
    homes = (base.__module__.partition(".")[0] for base in type(value).__mro__)
    return next((_ARRAY_HOMES[home] for home in homes if home in _ARRAY_HOMES), None)


def _is_array(value: object) -> bool:
    return _home(value) is not None and hasattr(value, "dtype") and hasattr(value, "shape")


def _is_anything(value: object) -> bool:
    return value is not None and not isinstance(value, (Mapping, tuple, list))


_LIBRARIES: dict[str, Framework] = {
    **_ARRAY_HOMES,
    **dict.fromkeys(("torch_attn", "torchvision", "torchaudio"), "torch"),
    **dict.fromkeys(("jax_attn", "flax", "optax", "equinox", "haiku"), "flax"),
}
"""Top package that code calls -> framework."""

_MAX_CALLEES = 200
"""Most functions that are searched for calls of a framework."""


def frameworks_called(call: object) -> set[Framework]:
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


def _library(value: object) -> Framework | None:
    """Return the framework that a module, class, function or object comes from; `jax.jit` makes functions of JAX."""
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    homes = [home, type(value).__module__]
    return next((_LIBRARIES[top] for one in homes if one and (top := str(one).partition(".")[0]) in _LIBRARIES), None)


def _wrapped(value: object) -> object:
    """Return the function inside a partial, a bound method or a decorated function (jax.jit, torch.compile)."""
    names = ("__wrapped__", "__func__", *(("func",) if isinstance(value, functools.partial) else ()))
    return next((inner for name in names if (inner := getattr(value, name, None)) is not None), None)


def _used_by(value: Any) -> Iterator[object]:
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
    for name in names.used:
        if name in value.__globals__:
            target = value.__globals__[name]
            yield from _called(target)
            is_own = isinstance(target, types.ModuleType) and _library(target) is None
            if is_own:  # a module of the user's: what is taken from it
                for attribute in names.attributes:
                    yield from _called(getattr(target, attribute, None))
    for name in names.imported:  # inside the function
        if name.partition(".")[0] in ("torch", "jax"):
            yield types.ModuleType(name)


def _called(value: object) -> Iterator[object]:
    if callable(value) or isinstance(value, types.ModuleType) or _library(value) is not None:
        yield value


class _Names(NamedTuple):
    """Names that code uses: globals, imported modules, and attributes (which are not globals of the same name)."""

    used: list[str]
    imported: list[str]
    attributes: list[str]


def _names(code: types.CodeType) -> _Names:
    names = _Names([], [], [])
    of_kinds = {"LOAD_GLOBAL": names.used, "LOAD_NAME": names.used, "IMPORT_NAME": names.imported}
    for step in dis.get_instructions(code):
        if step.opcode in dis.hasname:
            of_kinds.get(step.opname, names.attributes).append(step.argval)
    for inner in (one for one in code.co_consts if isinstance(one, types.CodeType)):
        for mine, theirs in zip(names, _names(inner), strict=True):
            mine += theirs
    return names
