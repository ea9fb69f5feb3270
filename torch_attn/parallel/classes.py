"""Classes made for sharded modules, and how their inputs are cut."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from attn_bridge.sharding.plan import Role

from .devices import ROLES, Cut, Devices


def same_name(kind: type[nn.Module], members: dict[str, object]) -> type[nn.Module]:
    """Return a subclass of a module's class that bears its name."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), names | members)


def tokens_cut(sharding: Devices, x: Tensor) -> Cut:
    """Return how vectors ``(..., T, D)`` are cut: by tokens and by sequences of the batch, where they divide."""
    tokens = x.ndim - 2
    return {
        "context": tokens if sharding.divides("context", x.shape[tokens]) else None,
        "fsdp": 0 if tokens and sharding.divides("fsdp", x.shape[0]) else None,
    }


def cut_of(sharding: Devices, x: DTensor) -> dict[Role, int | None]:
    """Return how a tensor is cut."""
    axes: dict[Role, int | None] = {}
    for role in ROLES:
        axis = sharding.axis(role)
        placement = None if axis is None else x.placements[axis]
        axes[role] = placement.dim if isinstance(placement, Shard) else None
    return axes
