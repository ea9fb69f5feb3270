"""Put a module on a mesh of devices.

The twin is `torch_attn.parallel.parallelize`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

from attn_bridge.sharding import ShardingPlan

from .. import backend
from .entry import sharded_class
from .modules.layers import local_class
from .sharding import Sharding

Module = TypeVar("Module", bound=nnx.Module)


def parallelize(
    module: Module,
    mesh: Mesh,
    *,
    tensor: str | None = None,
    context: str | None = None,
    fsdp: str | None = None,
    method: str = "all_gather",
) -> Module:
    """Share a module out over the devices of a mesh: the same numbers, gradients included, computed by all of them.

    It is called as before, with whole inputs; its output is whole, too, and cut along the tokens by `context`.

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
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be a flax.nnx.Module, got {type(module).__name__}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    plan = ShardingPlan.of(dict(mesh.shape), tensor=tensor, context=context, fsdp=fsdp, method=method)
    for _, child in nnx.iter_modules(module):
        plan.check_module(getattr(child, "sharding", None))
    configs = backend.find_configs(module)
    plan.check(*configs.values())
    sharding = Sharding(mesh, plan)
    rows = {f"{path}.{row.rule.flax}".lstrip("."): row for path, config in configs.items() for row in config.parameters}
    values = {}
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        row = rows.get(".".join(map(str, path)))
        target = sharding.of() if row is None else sharding.of_parameter(row)
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        values[path] = jax.device_put(value, sharding.outside(target, value.ndim))
    nnx.update(module, nnx.from_flat_state(values))
    for _, child in nnx.iter_modules(module):
        if type(child).__module__.partition(".")[0] == "jax_attn":
            child.sharding = sharding
            kind: Any = type(child)
            child.__class__ = local_class(kind)
    module.sharding = sharding
    kind = type(module)
    module.__class__ = sharded_class(kind)
    return module
