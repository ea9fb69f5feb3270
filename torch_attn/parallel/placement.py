"""The parameters of a module onto a mesh, each where the plan puts it; their names stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from attn_bridge.specs import Parameter

from ..differential_attention import DifferentialAttention
from .layers import local_class
from .sharding import Sharding


def place(module: nn.Module, rows: Mapping[str, Parameter], sharding: Sharding) -> None:
    """Put parameters and buffers on the devices, and tell every part of ours about them.

    Args:
        module: changed in place.
        rows: name of a parameter -> its row; all others are whole on every device.
        sharding: the devices.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
    made: dict[int, Tensor] = {}
    for path, child in module.named_modules():
        for name, tensor in child._parameters.items():
            if tensor is None:
                continue
            if id(tensor) not in made:
                row = rows.get(f"{path}.{name}".lstrip("."), rows.get(names[id(tensor)]))
                made[id(tensor)] = _shared(tensor, row, sharding)
            child._parameters[name] = made[id(tensor)]  # type: ignore[assignment]  # one that was one is one again
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = sharding.shared(buffer)
    mixing = [child for child in module.modules() if isinstance(child, DifferentialAttention)]
    mixed = {id(part) for child in mixing for part in child.modules()}
    for child in module.modules():
        if type(child).__module__.partition(".")[0] == "torch_attn" or isinstance(child, nn.Linear):
            whole_heads = id(child) in mixed
            child.sharding = dataclasses.replace(sharding, whole_heads=whole_heads)  # type: ignore[assignment]  # read by `functional.attention_arguments`
            child.__class__ = local_class(type(child))


def _shared(parameter: Tensor, row: Parameter | None, sharding: Sharding) -> nn.Parameter:
    placements = [Replicate()] * sharding.mesh.ndim if row is None else sharding.of_parameter(row)
    with torch.no_grad():
        # Every rank has the same numbers: nothing is sent.
        shared = distribute_tensor(parameter.detach(), sharding.mesh, placements, src_data_rank=None)
    made = nn.Parameter(shared, requires_grad=parameter.requires_grad)
    if made.requires_grad:
        made.register_hook(_Collected(made.placements))
    return made


class _Collected:
    """Hook that puts a gradient where its parameter is, once for all uses: each device may have a summand only."""

    def __init__(self, placements: tuple[object, ...]):
        self.placements = placements

    def __call__(self, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        return gradient.redistribute(placements=self.placements)  # type: ignore[arg-type]
