"""Recurrent classes in the ways that the others are called."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

import jax_attn
from attn_bridge.specs import VARIANTS

NAMES = (
    "LinearAttention",
    "LightningAttention",
    "GatedConvolution",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "Mamba",
    "Mamba2",
)
CONFIGS = {variant.name: variant.examples[0].config for variant in VARIANTS if variant.name in NAMES}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_rows_gives_none(name):
    module = getattr(jax_attn, name)(CONFIGS[name], rngs=nnx.Rngs(0))
    x = jnp.zeros((0, 70, CONFIGS[name].d_in))
    gradient = nnx.grad(lambda module, x: module(x).sum())(module, x)
    assert module(x).shape == (0, 70, CONFIGS[name].d_out)
    assert not gradient.W_query.kernel.any()
