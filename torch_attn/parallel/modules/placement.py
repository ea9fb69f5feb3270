"""The parameters of a module onto a mesh, each where the plan puts it; their names stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from attn_bridge.specs import Parameter

from ...differential_attention import DifferentialAttention
from ..devices import Devices
from .layers import local_class


def place(module: nn.Module, rows: Mapping[str, Parameter], sharding: Devices) -> None:
    """Move parameters and buffers onto the devices, and give every module of ours their description.

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
            child._parameters[name] = made[id(tensor)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = sharding.shared(buffer)
    mixing = [child for child in module.modules() if isinstance(child, DifferentialAttention)]
    mixed = {id(part) for child in mixing for part in child.modules()}
    for child in module.modules():
        if type(child).__module__.partition(".")[0] == "torch_attn" or isinstance(child, nn.Linear):
            whole_heads = id(child) in mixed
            child.sharding = dataclasses.replace(sharding, whole_heads=whole_heads)
            child.__class__ = local_class(type(child))  # type: ignore[arg-type]  # a class can be hashed


def _shared(parameter: Tensor, row: Parameter | None, sharding: Devices) -> nn.Parameter:
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

    def __init__(self, placements: tuple[Placement, ...]):
        self.placements = placements

    def __call__(self, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        placements = list(gradient.placements)
        for axis, placement in enumerate(self.placements):  # one by one: DTensor warns of two sums at once
            if placements[axis] != placement:
                placements[axis] = placement
                gradient = gradient.redistribute(placements=placements)
        return gradient
