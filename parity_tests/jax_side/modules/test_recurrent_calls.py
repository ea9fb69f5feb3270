"""Recurrent classes in the ways that the others are called."""

from __future__ import annotations

import jax.numpy as jnp
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
