"""The devices that share a module, and how tensors lie on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from attn_bridge.sharding import ShardingPlan
from attn_bridge.sharding.plan import Role
from attn_bridge.specs import Parameter

from ..shards import is_sharded

ROLES: tuple[Role, ...] = ("tensor", "context", "fsdp")

Cut = Mapping[Role, int | None]
"""Role -> the axis of a tensor that it cuts; None or absent if it cuts none."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh, and the roles of its axes.

    Attributes:
        mesh: the devices.
        plan: the roles of the axes.
        whole_heads: whether the outputs of heads go to all devices, for a module that mixes all heads.
    """

    mesh: DeviceMesh
    plan: ShardingPlan
    whole_heads: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself: a copy of a module is on the same devices."""
        return self

    def axis(self, role: Role) -> int | None:
        """Return the number of the mesh's axis with a role; None if no axis has it."""
        name = getattr(self.plan, role)
        return None if name is None else [axis for axis, _ in self.plan.mesh].index(name)

    def rank(self, role: Role) -> int:
        """Return this device's place along an axis."""
        axis = self.axis(role)
        return 0 if axis is None else self.mesh.get_local_rank(axis)

    def group(self, role: Role) -> ProcessGroup:
        """Return the devices along an axis."""
        return self.mesh.get_group(self.axis(role))

    def placements(self, cut: Cut, otherwise: Mapping[Role, Placement] | None = None) -> tuple[Placement, ...]:
        """Return where a tensor lies that is cut so; `otherwise` is for the axes that do not cut it."""
        placements: list[Placement] = [Replicate() for _ in self.plan.mesh]
        for role in ROLES:
            axis, number = self.axis(role), cut.get(role)
            if axis is not None and self.plan.size(role) > 1:
                placements[axis] = Shard(number) if number is not None else (otherwise or {}).get(role, Replicate())
        return tuple(placements)

    def of_parameter(self, row: Parameter) -> tuple[Placement, ...]:
        """Return the placements of a parameter."""
        cuts = self.plan.placement(row)
        return tuple(Shard(cuts.index(name)) if name in cuts else Replicate() for name, _ in self.plan.mesh)

    def divides(self, role: Role, size: int) -> bool:
        """Return whether an axis of this size is cut."""
        devices = self.plan.size(role)
        return devices > 1 and size % devices == 0

    def shared(self, tensor: Tensor) -> DTensor:
        """Return a tensor that every rank has as one that they share."""
        if is_sharded(tensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def cut(self, tensor: Tensor, cut: Cut) -> DTensor:
        """Return a tensor, cut so."""
        return self.shared(tensor).redistribute(self.mesh, self.placements(cut))

    def local(self, tensor: Tensor, cut: Cut, working: Iterable[Role]) -> Tensor:
        """Return this device's part of a tensor, for a computation that every device does its part of.

        Args:
            tensor: shared or whole.
            cut: how it is cut.
            working: roles that share the computation: along their axes, gradients of whole tensors are parts of a sum.
        """
        sums: dict[Role, Placement] = {role: Partial() for role in working}
        lies = self.placements(cut)
        # Of a parameter that lies so already, the hook of `placement` collects the gradient of all uses at once.
        is_there = is_sharded(tensor) and isinstance(tensor, nn.Parameter) and tensor.placements == lies
        shared = tensor if is_there else self.cut(tensor, cut)
        return shared.to_local(grad_placements=self.placements(cut, sums))

    def joined(self, part: Tensor, cut: Cut, sums: Iterable[Role] = ()) -> DTensor:
        """Return the tensor of which every device made a part, or, along `sums`, a summand."""
        placements = self.placements(cut, {role: Partial() for role in sums})
        joined = DTensor.from_local(part.contiguous(), self.mesh, placements, run_check=False)
        return joined.redistribute(self.mesh, self.placements(cut)) if sums else joined

    def slice_of(self, role: Role, size: int, is_cut: bool) -> slice:
        """Return which part of an axis is this device's."""
        if not is_cut:
            return slice(0, size)
        part = size // self.plan.size(role)
        start = self.rank(role) * part
        return slice(start, start + part)


def as_scores(tensor: Tensor) -> Tensor:
    """Return an operand of the scores with four axes; a mask of two is ``(B, S)``."""
    if tensor.dtype == torch.bool and tensor.ndim == 2:
        return tensor[:, None, None, :]
    return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
