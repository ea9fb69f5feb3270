"""Meshes of devices, described without a framework: the shards of each parameter.

`ShardingPlan` assigns axes of the mesh to tensor, context and fsdp, places parameters by the logical axes of the specs,
and refuses sizes that do not divide before anything is moved. `sequences` divides a sequence among devices.
"""

from .plan import METHODS, ShardingPlan
from .sequences import Turn, pieces_of, turns

__all__ = ["METHODS", "ShardingPlan", "Turn", "pieces_of", "turns"]
