"""The work of one device among many, in JAX: collectives inside `jax.shard_map`.

The twin is `torch.mesh_mutants.devices`. `jax.shard_map` differentiates collectives, and sums the gradients of an array
that each device holds; a wrong gradient is planted into arrays that pass `enter`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a mesh; without one, a single device.

    Attributes:
        mesh: the mesh.
    """

    mesh: Mesh | None = None

    def size(self, axis: str) -> int:
        """Return how many devices an axis has, 1 if there is no such axis."""
        return 1 if self.mesh is None else dict(self.mesh.shape).get(axis, 1)

    def rank(self, axis: str) -> Any:
        """Return the number of this device on an axis."""
        return lax.axis_index(axis) if self.size(axis) > 1 else 0

    def spec(self, ndim: int, axis: int | None, name: str) -> Any:
        """Return the cut of an array of `ndim` axes along one of them."""
        name_or_none = name if self.size(name) > 1 else None
        return P(*(name_or_none if place == axis else None for place in range(ndim)))

    def place(self, array: Array, axis: int | None) -> Array:
        """Return an array on the devices, one of its axes cut by ``tensor``."""
        if self.mesh is None:
            return array
        return jax.device_put(array, NamedSharding(self.mesh, self.spec(array.ndim, axis, "tensor")))

    def run(
        self,
        body: Callable[..., Array],
        weights: Mapping[str, Array],
        cuts: Mapping[str, int | None],
        tokens: Sequence[Array],
    ) -> Array:
        """Have each device run a body on its parts of weights, and of arrays ``(B, T, ...)``, cut along the tokens."""
        if self.mesh is None:
            return body(weights, *tokens)
        specs = {name: self.spec(one.ndim, cuts[name], "tensor") for name, one in weights.items()}
        inputs = tuple(self.spec(one.ndim, 1, "context") for one in tokens)
        run = jax.shard_map(
            body, mesh=self.mesh, in_specs=(specs, *inputs), out_specs=self.spec(3, 1, "context"), check_vma=False
        )
        return run(dict(weights), *tokens)

    def share(self, x: Array) -> Array:
        """Return an array ``(B, T, ...)`` that every device was given, cut along the tokens."""
        return x

    # ---- in the body

    def row(self, table: np.ndarray, rank: object) -> Array:
        """Return a row of a table of whole numbers."""
        return jnp.asarray(table)[rank]

    def enter(self, x: Array, axes: Sequence[str], how: str = "") -> Array:
        """Return an array that each device along some axes holds: gradients of all of them are summed.

        Args:
            x: the array.
            axes: axes along which devices hold it.
            how: the fault of the gradient: ``averaged``, ``twice`` or ``own``.
        """
        axis = next((one for one in axes if self.size(one) > 1), None)
        if axis is None or not how:
            return x
        factor = {"averaged": 1.0 / self.size(axis), "twice": float(self.size(axis))}.get(how)
        return _scaled(x, self.rank(axis) == 0 if factor is None else factor)

    def total(self, x: Array, axis: str) -> Array:
        """Return the sum over an axis, of which each device makes something else."""
        return lax.psum(x, axis) if self.size(axis) > 1 else x

    def reduce(self, x: Array, axis: str) -> Array:
        """Return the sum over an axis, of which all devices make the same."""
        return self.total(x, axis)

    def gather(self, x: Array, axis: str, dim: int) -> Array:
        """Return the parts of all devices one after another."""
        return lax.all_gather(x, axis, axis=dim, tiled=True) if self.size(axis) > 1 else x

    def move(self, x: Array, axis: str) -> Array:
        """Return the previous device's arrays."""
        size = self.size(axis)
        return lax.ppermute(x, axis, [(one, (one + 1) % size) for one in range(size)]) if size > 1 else x

    def exchange(self, x: Array, axis: str, split: int, concat: int) -> Array:
        """Cut one axis of an array by devices, and put another one together."""
        return lax.all_to_all(x, axis, split, concat, tiled=True) if self.size(axis) > 1 else x


@jax.custom_vjp
def _scaled(x: Array, factor: object) -> Array:
    return x


_scaled.defvjp(lambda x, factor: (x, factor), lambda factor, grad: (grad * jnp.asarray(factor, grad.dtype), None))

detach = lax.stop_gradient
