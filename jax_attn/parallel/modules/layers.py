"""Modules that know their own part of a computation, where XLA would not share out whole arrays well.

Each is a subclass of the module's class with its name; `parallelize` gives it to the parts of a sharded module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from attn_bridge.specs import MixtureOfExpertsConfig

from ...blocks.mixture_of_experts import MixtureOfExperts
from ...implementations.block_operands import false_of
from ..classes import same_name
from ..sharding import Sharding


def _mixture_of_experts(self: MixtureOfExperts, x: Array) -> Array:
    """Send the device's tokens to its part of every expert: there is one sum over devices, at the end."""
    graph, state = nnx.split(self)
    values = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    return _share_experts(graph, self.config, self.sharding, values, x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _share_experts(
    graph: object, config: MixtureOfExpertsConfig, sharding: Sharding, values: dict[tuple[str, ...], Array], x: Array
) -> Array:
    plan, rows = sharding.plan, {row.rule.flax: row for row in config.parameters}
    specs, added = {}, set()
    for path in values:
        row = rows[".".join(map(str, path))]
        specs[path] = P(*(name if name == plan.tensor else None for name in sharding.of_parameter(row).spec))
        if row.axes == ("embed",) and path[-1] == "bias":  # of what comes out; scales of norms are of what comes in
            added.add(path)
    sums = plan.tensor if plan.size("tensor") > 1 else None
    batch = sharding.divided("fsdp", x.shape[0]) if x.ndim > 2 else None
    tokens = P(*(batch,) * (x.ndim > 2), *(None,) * (x.ndim - 3), sharding.divided("context", x.shape[-2]), None)

    def run(parts: dict[tuple[str, ...], Array], x: Array) -> Array:
        if sums is not None:
            is_first = lax.axis_index(sums) == 0
            parts = {path: jnp.where(is_first, one, 0.0) if path in added else one for path, one in parts.items()}
        # All vary along the same axes of the mesh before some device goes to an expert and others do not: the sums of
        # gradients over devices are outside of that then.
        never = false_of((parts, x))
        parts, x = jax.tree.map(lambda array: jnp.where(never, array, array), (parts, x))
        output: Array = MixtureOfExperts.__call__(nnx.merge(graph, nnx.from_flat_state(parts)), x)
        return output if sums is None else lax.psum(output, sums)

    output: Array = jax.shard_map(run, mesh=sharding.mesh, in_specs=(specs, tokens), out_specs=tokens)(values, x)
    return output


CALLS: dict[type[nnx.Module], Callable[..., Array]] = {
    MixtureOfExperts: _mixture_of_experts,
}
"""Class -> the ``__call__`` on devices, called instead of that of the class."""


@functools.cache
def local_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return the class of a part of a sharded module: its own, or a subclass of it."""
    call = next((own for base, own in CALLS.items() if issubclass(kind, base)), None)
    return kind if call is None else same_name(kind, {"__call__": functools.wraps(kind.__call__)(call)})
