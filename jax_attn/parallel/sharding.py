"""The devices that share a module: what `parallelize` puts on every part of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_bridge.sharding import Plan
from attn_bridge.sharding.plan import Role
from attn_bridge.specs import Parameter

from ..implementations import Call
from . import attention, recurrent


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh, and what its axes stand for; equal by value, so that modules of one kind share compiled programs.

    Attributes:
        given: the mesh as it was given: arrays lie on it outside of a call.
        plan: what its axes stand for.
    """

    given: Mesh
    plan: Plan

    @property
    def mesh(self) -> Mesh:
        """The same devices, on axes along which XLA shares arrays out: explicit ones would ask every operation."""
        names = self.given.axis_names
        return Mesh(self.given.devices, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def is_explicit(self) -> bool:
        """Whether shardings are part of the types of arrays outside of a call."""
        return AxisType.Explicit in self.given.axis_types

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself: a copy of a module is on the same devices."""
        return self

    def attend(self, call: Call, implementation: str | None = None) -> Any:
        """Return what `functional.dot_product_attention` does, computed by all devices."""
        return attention.attend(self.mesh, self.plan, call, implementation)

    def recur(
        self, run: recurrent.Run, sequences: tuple[Array, ...], state: Array, chunk_size: int
    ) -> tuple[Array, Array]:
        """Return what ``run(*sequences, state, chunk_size)`` does, computed by all devices."""
        return recurrent.recur(self.mesh, self.plan, run, sequences, state, chunk_size)

    def of(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Return the sharding of an array whose axes are cut by these axes of the mesh, inside of a call."""
        return NamedSharding(self.mesh, P(*axes))

    def outside(self, inside: NamedSharding) -> NamedSharding:
        """Return a sharding as it is outside of a call."""
        return NamedSharding(self.given, inside.spec)

    def divided(self, role: Role, size: int) -> str | None:
        """Return the axis of the mesh that cuts an axis of this size; None where it does not divide."""
        devices = self.plan.size(role)
        name: str | None = getattr(self.plan, role)
        return name if devices > 1 and size % devices == 0 else None

    def of_parameter(self, row: Parameter) -> NamedSharding:
        """Return the sharding of a Flax leaf; the rule says which torch axis each of its axes is."""
        torch_side, flax_side = (side.split() for side in row.rule.pattern.split("->"))
        cuts = dict(zip(torch_side, self.plan.placement(row), strict=True))
        return self.of(*(cuts[letter] for letter in flax_side))
