"""The devices that share a module: what `parallelize` puts on every part of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_bridge.sharding import Plan
from attn_bridge.specs import Parameter

from ..implementations import Call
from . import attention


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh, and what its axes stand for; equal by value, so that modules of one kind share compiled programs."""

    mesh: Mesh
    plan: Plan

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself: a copy of a module is on the same devices."""
        return self

    def attend(self, call: Call, implementation: str | None = None) -> Any:
        """Return what `functional.dot_product_attention` does, computed by all devices."""
        return attention.attend(self.mesh, self.plan, call, implementation)

    def of(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Return the sharding of an array whose axes are cut by these axes of the mesh."""
        return NamedSharding(self.mesh, P(*axes))

    def of_parameter(self, row: Parameter) -> NamedSharding:
        """Return the sharding of a Flax leaf; the rule says which torch axis each of its axes is."""
        torch_side, flax_side = (side.split() for side in row.rule.pattern.split("->"))
        cuts = dict(zip(torch_side, self.plan.placement(row), strict=True))
        return self.of(*(cuts[letter] for letter in flax_side))
