"""Modules over many devices: `parallelize` shares a module's parameters, heads and tokens out over a mesh.

The twin is `jax_attn.parallel`.
"""

from .parallelize import parallelize

__all__ = ["parallelize"]
