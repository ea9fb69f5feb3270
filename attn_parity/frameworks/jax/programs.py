"""Programs over a JAX side: several calls of a module in one run, with the module's weights.

The twin is `frameworks.torch.programs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from flax import linen, nnx

from ...sides.function import Function
from ...sides.libraries import Value

Program = Callable[..., Value]
"""``program(target, *args, **kwargs)`` calls the target, and returns arrays."""


class _Programmed(nnx.Module):
    """Calls a program instead of its only submodule."""

    def __init__(self, inner: nnx.Module, program: Program):
        self.inner = inner
        self.program = program

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        return self.program(self.inner, *args, **kwargs)


class _ProgrammedLinen(linen.Module):
    """Calls a program instead of its only submodule."""

    inner: Value
    program: Program

    @linen.compact
    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        return self.program(self.inner, *args, **kwargs)


def programmed(value: Value, program: Program) -> Value:
    """Return a side whose call runs a program over a side.

    Args:
        value: an NNX module, a Linen module with its variables, or a function with its weights.
        program: called with the module, or the function with its weights bound, and the arguments of a call.
    """
    if isinstance(value, Function):
        call = value.call
        return Function(
            lambda weights, *a, **k: program(functools.partial(call, weights), *a, **k), value.weights, "flax"
        )
    if isinstance(value, tuple):
        module, variables = value
        nested = {collection: {"inner": tree} for collection, tree in variables.items()}
        return _ProgrammedLinen(inner=module.clone(parent=None), program=program), nested
    return _Programmed(value, program)


def submodules(value: Value) -> dict[str, Value]:
    """Return path -> submodule, the module itself first; empty for a function, the module alone for Linen."""
    if isinstance(value, Function):
        return {}
    if isinstance(value, tuple):
        return {"": value[0]}
    parts = {".".join(map(str, path)): child for path, child in nnx.iter_modules(value)}
    return dict(sorted(parts.items(), key=lambda item: len(item[0])))


def statistics(target: Value) -> dict[str, Value]:
    """Return the running statistics of a module."""
    if not isinstance(target, nnx.Module):
        return {}
    flat = nnx.to_flat_state(nnx.state(target, nnx.BatchStat))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}
