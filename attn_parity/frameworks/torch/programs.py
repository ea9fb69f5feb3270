"""Programs over a torch side: several calls of a module in one run, with the module's weights.

The twin is `frameworks.jax.programs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from ...sides.function import Function
from ...sides.libraries import Value

Program = Callable[..., Value]
"""``program(target, *args, **kwargs)`` calls the target, and returns arrays."""

STATISTICS = ("running_mean", "running_var")
"""Buffers of running statistics."""


class _Programmed(nn.Module):
    """Calls a program instead of its only submodule."""

    def __init__(self, inner: nn.Module, program: Program):
        super().__init__()
        self.inner = inner
        self.program = program

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        return self.program(self.inner, *args, **kwargs)


def programmed(value: Value, program: Program) -> Value:
    """Return a side whose call runs a program over a side.

    Args:
        value: a module, or a function with its weights.
        program: called with the module, or the function with its weights bound, and the arguments of a call.
    """
    if isinstance(value, Function):
        call = value.call
        return Function(lambda weights, *a, **k: program(functools.partial(call, weights), *a, **k), value.weights)
    modes = {name: child.training for name, child in value.named_modules()}
    made = _Programmed(value, program)
    assert all(child.training == modes[name] for name, child in value.named_modules()), "modes stay"
    return made


def submodules(value: Value) -> dict[str, Value]:
    """Return path -> submodule, the module itself first; empty for a function."""
    return {} if isinstance(value, Function) else dict(value.named_modules())


def statistics(target: Value) -> dict[str, Value]:
    """Return copies of the running statistics of a module."""
    buffers = target.named_buffers() if isinstance(target, nn.Module) else ()
    return {name: one.clone() for name, one in buffers if name.rpartition(".")[2] in STATISTICS}
