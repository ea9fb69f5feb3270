"""Modules without initial weights, for those whose weights come from elsewhere: nothing is drawn for them.

JAX has `nnx.eval_shape` for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.types import Device


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Make modules whose parameters have no memory, and draw nothing for them: their weights come from elsewhere."""
    with torch.device("meta"), _Undrawn():
        yield


def give_memory(module: nn.Module, device: Device = None) -> None:
    """Give parameters and buffers of `undrawn` memory, as `to_empty` does, which imports all of torch's FSDP first."""
    device = torch.get_default_device() if device is None else device
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device)
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=device)


class _Undrawn(TorchFunctionMode):
    """Leaves out what fills a tensor; on the meta device that takes torch a second of imports, for nothing."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in (Tensor.uniform_, Tensor.normal_) or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
