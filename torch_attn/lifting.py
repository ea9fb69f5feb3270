"""Float64 for any torch code, as it is: while it runs, every request for a lower precision asks for float64.

The twin is `jax_attn.lifting`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = (torch.float32, torch.bfloat16, torch.float16)
_NAMED = {Tensor.float, Tensor.half, Tensor.bfloat16}
_MOST_DEPTH = 4


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Hold the context in which operations that are asked for a lower precision run in float64.

    It covers what a module's own dtype can't: a softmax that is fixed to float32, a tensor that is a plain attribute.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Lift():
            yield
    finally:
        torch.set_default_dtype(default)


class _Lift(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and isinstance(args[1], torch.dtype):
            return func(*args, **(kwargs or {}))  # the bits of integers read as floats: no precision is asked for
        if func in _NAMED:
            func = Tensor.double
        args = tuple([_lift(value) for value in args])
        return func(*args, **{name: _lift(value) for name, value in kwargs.items()} if kwargs else {})


def _lift(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.to(torch.float64) if value.dtype in _LOW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOW else value
    if type(value) in (list, tuple) and depth < _MOST_DEPTH:
        return type(value)([_lift(one, depth + 1) for one in value])
    return value
