"""Recurrent classes in the ways that the others are called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge.specs import VARIANTS

from ...contract import modules

CONFIGS = {variant.name: variant.examples[0].config for variant in VARIANTS if variant.name in modules.RECURRENT}


EAGER = ("GatedConvolution", "LinearAttention")
"""Classes that are called eagerly too, each operation of which is compiled alone; `make full` calls all."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(
            pytest.param(name, "in one program", marks=[pytest.mark.full] if name in modules.ALIKE else [])
            for name in CONFIGS
        ),
        *(pytest.param(name, "eagerly", marks=[] if name in EAGER else [pytest.mark.full]) for name in CONFIGS),
    ],
)
def test_a_batch_without_rows_gives_none(name, way):
    module = getattr(jax_attn, name)(CONFIGS[name], rngs=nnx.Rngs(0))
    x = jnp.zeros((0, 70, CONFIGS[name].d_in))
    compiled = nnx.jit if way == "in one program" else lambda function: function
    gradient = compiled(nnx.grad(lambda module, x: module(x).sum()))(module, x)
    assert compiled(lambda module, x: module(x))(module, x).shape == (0, 70, CONFIGS[name].d_out)
    assert not gradient.W_query.kernel.any()


@pytest.mark.parametrize("name", ["GatedDeltaNet", "LinearAttention"])
def test_a_cache_keeps_its_dtypes_in_a_loop(name):
    """Weights of bfloat16 promote to inputs of float32, and the carry of `jax.lax.scan` must not change its types."""
    module = getattr(jax_attn, name)(CONFIGS[name], rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    x = jnp.asarray(modules.draw(2, 4, CONFIGS[name].d_in))

    @jax.jit
    def decode(x):
        def step(cache, token):
            output, cache = module(token[:, None], cache=cache)
            return cache, output[:, 0]

        return jax.lax.scan(step, module.init_cache(2, 4), jnp.moveaxis(x, 1, 0))[1]

    np.testing.assert_allclose(jnp.moveaxis(decode(x), 0, 1), nnx.jit(type(module).__call__)(module, x), 2e-2, 2e-2)
