"""A module's own code on a device's part of everything: its parameters are lent to it for a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import Shard

from attn_bridge.sharding.plan import Role

from .devices import Devices


def local_parameters(module: nn.Module, sharding: Devices, working: Iterable[Role]) -> dict[str, Tensor]:
    """Return the device's part of every parameter of a module, those that fsdp cuts whole."""
    axis, working = sharding.axis("tensor"), list(working)
    parts: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        placement = None if axis is None else parameter.placements[axis]
        cut = placement.dim if isinstance(placement, Shard) else None
        parts[name] = sharding.local(parameter, {"tensor": cut}, working)
    return parts


@contextlib.contextmanager
def on_parts(module: nn.Module, parts: Mapping[str, Tensor], **attributes: object) -> Iterator[None]:
    """Replace parameters of a module by other tensors inside the context, and set attributes."""
    former = {name: getattr(module, name) for name in attributes}
    lent = []
    try:
        for name, tensor in parts.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)._parameters
            lent.append((owner, leaf, owner[leaf]))
            owner[leaf] = tensor
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for owner, leaf, parameter in lent:
            owner[leaf] = parameter
        for name, value in former.items():
            setattr(module, name, value)


class _Touched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, result: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(one.shape, one.dtype, one.device) for one in others]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
        return gradient, *zeros


def touched(result: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Return a result whose gradient reaches others as zeros, whether it needs them or not."""
    touched: Tensor = _Touched.apply(result, *others)
    return touched
