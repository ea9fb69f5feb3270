"""A sharded module under `jax.vmap`, beside the plain one, in a process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_bridge.specs import GroupedQueryAttentionConfig, Rotary


def mapped(method: str) -> dict[str, float]:
    """Return the largest differences of outputs and gradients, run one operation at a time and compiled."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from attn_parity.frameworks.jax import meshes
    from jax_attn import GroupedQueryAttention
    from jax_attn.parallel import parallelize

    mesh = meshes.simulate({"tensor": 2, "context": 4}, 0, None)  # type: ignore[arg-type]  # no folder is used
    jax.config.update("jax_enable_x64", True)
    config = GroupedQueryAttentionConfig(16, 8, 4, 4, position=Rotary())
    plain, sharded = (GroupedQueryAttention(config, dtype=jnp.float64, rngs=nnx.Rngs(0)) for _ in range(2))
    parallelize(sharded, mesh, tensor="tensor", context="context", method=method)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 16, 16)))

    def outputs(module: Any, x: Any) -> Any:
        return jax.vmap(module)(x)

    def gradients(module: Any, x: Any) -> Any:
        return jax.grad(lambda x: jnp.sin(outputs(module, x)).sum())(x)

    found = {}
    for name, function in (("outputs", outputs), ("gradients", gradients)):
        wanted = np.asarray(function(plain, x))
        for how, run in (("one by one", function), ("compiled", jax.jit(function))):
            found[f"{name}, {how}"] = float(np.abs(np.asarray(run(sharded, x)) - wanted).max())
    return found
