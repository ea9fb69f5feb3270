"""Put a module on a mesh of devices.

The twin is `jax_attn.parallel.parallelize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from attn_bridge.sharding import ShardingPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module,
    mesh: DeviceMesh,
    *,
    tensor: str | None = None,
    context: str | None = None,
    fsdp: str | None = None,
    method: str = "all_gather",
) -> Module:
    """Share a module out over the devices of a mesh: the same numbers, gradients included, computed by all of them.

    It is called as before, with whole inputs, the same on every rank; its output is whole, too, a `DTensor`, and cut
    along the tokens by `context`.

    Args:
        module: one of ours, or a module that contains some of ours. It is changed.
        mesh: devices, on axes with names.
        tensor: axis that shares heads, hidden units of feed-forward layers and the vocabulary.
        context: axis that shares the tokens of a sequence.
        fsdp: axis that shares the other parameters, and the sequences of a batch if their number divides.
        method: how queries meet keys of other devices: ``"all_gather"``, ``"ring"`` or ``"ulysses"``.

    Returns:
        The module.

    Raises:
        TypeError: an object that is not a module, a mesh or a name.
        ValueError: an axis that the mesh does not have, sizes that do not divide, a module that contains none of ours
            or is on a mesh already; nothing was moved.
    """
    # Imported here: torch.distributed.tensor takes a second, which who has one device does not wait for.
    from torch.distributed.device_mesh import DeviceMesh

    from .. import backend
    from .entry import enter_by
    from .modules.placement import place
    from .sharding import Sharding

    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=False))
    plan = ShardingPlan.of(sizes, tensor=tensor, context=context, fsdp=fsdp, method=method)
    for child in module.modules():
        plan.check_module(getattr(child, "sharding", None))
    configs = backend.find_configs(module)
    plan.check(*configs.values())
    sharding = Sharding(mesh, plan)
    rows = {
        f"{path}.{row.rule.torch}".lstrip("."): row for path, config in configs.items() for row in config.parameters
    }
    place(module, rows, sharding)
    enter_by(module, sharding)
    return module
