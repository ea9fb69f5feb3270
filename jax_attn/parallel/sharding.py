"""The devices that share a module: what `parallelize` puts on every part of it."""

from __future__ import annotations

import dataclasses
from typing import Self

from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_bridge.sharding import ShardingPlan
from attn_bridge.sharding.plan import Role
from attn_bridge.specs import Parameter

from ..implementations import KernelCall
from ..signatures.attention import Output
from . import attention
from .schemes import recurrent


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh, and the roles of its axes; equal by value, so that modules of one kind share compiled programs.

    Attributes:
        outside_mesh: the mesh as given, which shards arrays outside of a call.
        plan: the roles of the axes.
    """

    outside_mesh: Mesh
    plan: ShardingPlan

    @classmethod
    def on(cls, mesh: Mesh, **names: object) -> Self:
        """Return the sharding of a mesh; `names` are those of `ShardingPlan.of`: tensor, context, fsdp, method."""
        return cls(mesh, ShardingPlan.of(dict(mesh.shape), **names))

    @property
    def mesh(self) -> Mesh:
        """The same devices, on axes along which XLA shares arrays out: explicit ones would ask every operation."""
        names = self.outside_mesh.axis_names
        return Mesh(self.outside_mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def is_explicit(self) -> bool:
        """Whether shardings are part of the types of arrays outside of a call."""
        return AxisType.Explicit in self.outside_mesh.axis_types

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself: a copy of a module is on the same devices."""
        return self

    def attend(self, call: KernelCall, implementation: str | None = None) -> Output:
        """Like `functional.dot_product_attention`, computed by all devices."""
        return attention.attend(self.mesh, self.plan, call, implementation)

    def recur(
        self, run: recurrent.Run, sequences: tuple[Array, ...], state: Array, chunk_size: int
    ) -> tuple[Array, Array]:
        """Like ``run(*sequences, state, chunk_size)``, computed by all devices."""
        return recurrent.recur(self.mesh, self.plan, run, sequences, state, chunk_size)

    def of(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Return the sharding of an array whose axes are cut by these axes of the mesh, inside of a call.

        It is written as XLA writes those of results: else a step whose cache comes back would be compiled twice.
        """
        while axes and axes[-1] is None:
            axes = axes[:-1]
        return NamedSharding(self.mesh, P(*axes))

    def outside(self, inside: NamedSharding, axes: int = 0) -> NamedSharding:
        """Return a sharding for use outside of a call, of an array with `axes` axes; explicit meshes name them all."""
        missing = axes - len(inside.spec) if self.is_explicit else 0
        return NamedSharding(self.outside_mesh, P(*inside.spec, *(None,) * missing))

    def divided(self, role: Role, size: int) -> str | None:
        """Return the axis of the mesh that cuts an axis of this size; None where it does not divide."""
        devices = self.plan.size(role)
        name: str | None = getattr(self.plan, role)
        return name if devices > 1 and size % devices == 0 else None

    def of_parameter(self, row: Parameter) -> NamedSharding:
        """Return the sharding of a Flax leaf; the rule maps each of its axes to a torch axis."""
        torch_side, flax_side = (side.split() for side in row.rule.pattern.split("->"))
        cuts = dict(zip(torch_side, self.plan.placement(row), strict=True))
        return self.of(*(cuts[letter] for letter in flax_side))
