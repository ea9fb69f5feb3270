"""Attention of JAX's and Flax's own, as `mutate` draws it: zeros for a query that sees no key."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attn_bridge import masks
from fault_lab.adapters import load_mutants
from jax_attn.implementations import KernelCall, reference

from ..attention_calls import operands

KERNELS = load_mutants("flax", "kernels").KERNELS


@pytest.mark.parametrize("name", ["jax.nn", "nnx"])
def test_a_query_that_sees_no_key_gets_zeros(name):
    query, key, value = (jnp.asarray(one, jnp.float32) for one in operands(queries=6, keys=6))
    mask = masks.causal().restrict(jnp.arange(6) >= jnp.array([[0], [2]]))
    call = KernelCall(query, key, value, mask, None, query.shape[-1] ** -0.5, None, None, 0.0, None, False)
    assert KERNELS[name].unsupported(call) is None
    found = np.asarray(KERNELS[name].attend(call))
    assert not found[1, :2].any()
    np.testing.assert_allclose(found, reference.attend(call), rtol=0, atol=1e-5)
