"""The work of one device among many, in torch: collectives with gradients.

The twin is `jax.mesh_mutants.devices`. Each process is a device. Its backward pass has the gradient of the sum over all
devices, as in Megatron-LM (arXiv 1909.08053): entering a part that devices share sums gradients, leaving it sums
values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a mesh; without one, a single device.

    Attributes:
        mesh: the mesh.
    """

    mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: a copy of a module is on the same devices."""
        return self

    def size(self, axis: str) -> int:
        """Return how many devices an axis has, 1 if there is no such axis."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(axis)) if self.mesh is not None and axis in names else 1

    def rank(self, axis: str) -> int:
        """Return the number of this device on an axis."""
        return self.mesh.get_local_rank(axis) if self.mesh is not None and self.size(axis) > 1 else 0

    def placements(self, axis: int | None, name: str) -> list[object]:
        """Return the cut of an array along one of its axes."""
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names or ()
        return [Shard(axis) if one == name and axis is not None else Replicate() for one in names]

    def place(self, tensor: Tensor, axis: int | None) -> Tensor:
        """Return a tensor on the devices, one of its axes cut by ``tensor``."""
        if self.mesh is None:
            return tensor
        return distribute_tensor(tensor, self.mesh, self.placements(axis, "tensor"), src_data_rank=None)

    def run(
        self,
        body: Callable[..., Tensor],
        weights: Mapping[str, Tensor],
        cuts: Mapping[str, int | None],
        tokens: Sequence[Tensor],
    ) -> Tensor:
        """Have each device run a body on its parts of weights, and of tensors ``(B, T, ...)``, cut along the tokens."""
        if self.mesh is None:
            return body(weights, *tokens)
        along = self.placements(1, "context")
        own = {name: _own(one, self.placements(cuts[name], "tensor"), self.mesh) for name, one in weights.items()}
        out = body(own, *(_own(one, along, self.mesh) for one in tokens))
        return DTensor.from_local(out, self.mesh, along, run_check=False)

    def share(self, x: Tensor) -> Tensor:
        """Return an array ``(B, T, ...)`` that every device was given, cut along the tokens."""
        if self.mesh is None or isinstance(x, DTensor):
            return x
        whole = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return whole.redistribute(self.mesh, self.placements(1, "context"))

    # ---- in the body

    def row(self, table: np.ndarray, rank: int) -> Tensor:
        """Return a row of a table of whole numbers."""
        return torch.from_numpy(np.array(table[rank]))

    def enter(self, x: Tensor, axes: Sequence[str], how: str = "") -> Tensor:
        """Return a tensor that each device along some axes holds: gradients of all of them are summed.

        Args:
            x: the tensor.
            axes: axes along which devices hold it.
            how: the fault of the gradient: ``averaged``, ``twice`` or ``own``.
        """
        for number, axis in enumerate(one for one in axes if self.size(one) > 1):
            wrong = how if number == 0 else ""
            if wrong != "own":
                x = _Enter.apply(x, self._group(axis), self.size(axis), wrong)
        return x

    def total(self, x: Tensor, axis: str) -> Tensor:
        """Return the sum over an axis, of which each device makes something else."""
        return self.reduce(self.enter(x, [axis]), axis)

    def reduce(self, x: Tensor, axis: str) -> Tensor:
        """Return the sum over an axis, of which all devices make the same."""
        return _Reduce.apply(x, self._group(axis)) if self.size(axis) > 1 else x

    def gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Return the parts of all devices one after another."""
        return _Gather.apply(x, self._group(axis), dim) if self.size(axis) > 1 else x

    def move(self, x: Tensor, axis: str) -> Tensor:
        """Return the previous device's arrays."""
        return _Move.apply(x, self._group(axis), 1) if self.size(axis) > 1 else x

    def exchange(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        """Cut one axis of a tensor by devices, and put another one together."""
        if self.size(axis) == 1:
            return x
        width = x.shape[split] // self.size(axis)
        return self.gather(x, axis, concat).narrow(split, self.rank(axis) * width, width)

    def _group(self, axis: str) -> Any:
        assert self.mesh is not None
        return self.mesh.get_group(axis)


def _own(tensor: Tensor, placements: list[object], mesh: DeviceMesh) -> Tensor:
    """Return this device's part; its gradient is that part's."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return tensor.redistribute(mesh, placements).to_local(grad_placements=placements)


def _summed(x: Tensor, group: object) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all(x: Tensor, group: object) -> list[Tensor]:
    mine = x.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return parts


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Any, size: int, how: str) -> Tensor:
        ctx.given = group, {"averaged": 1.0 / size, "twice": float(size)}.get(how, 1.0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, factor = ctx.given
        return _summed(grad, group) * factor, None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, group: object) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Any, dim: int) -> Tensor:
        ctx.given = group, dim, x.shape[dim]
        return torch.cat(_all(x, group), dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, width = ctx.given
        return _summed(grad, group).narrow(dim, dist.get_rank(group) * width, width), None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Any, hops: int) -> Tensor:
        ctx.given = group, hops
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        received, mine = torch.empty_like(x, memory_format=torch.contiguous_format), x.detach().contiguous()
        next_rank, before = (dist.get_global_rank(group, one % size) for one in (rank + hops, rank - hops))
        operations = [
            dist.P2POp(dist.isend, mine, next_rank, group),
            dist.P2POp(dist.irecv, received, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, hops = ctx.given
        return _Move.apply(grad, group, -hops), None, None


def detach(x: Tensor) -> Tensor:
    """Return a tensor that no gradient goes through."""
    return x.detach()
