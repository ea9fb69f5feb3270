"""Bad arguments whose message is JAX's own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge.specs import GroupedQueryAttentionConfig, Rotary


def test_dropout_without_a_random_source_is_refused():
    query = np.ones((1, 2, 1, 3), np.float32)
    with pytest.raises(ValueError, match="dropout") as caught:
        jax_attn.functional.dot_product_attention(query, query, query, dropout=0.5)
    assert str(caught.value) == "dropout (0.5) needs rng: a key, a stream, an nnx.Rngs or a TorchRngs"


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_refuse_what_is_no_array(name):
    with pytest.raises(TypeError, match=r"^x must be a JAX or NumPy array, got str$"):
        getattr(jax_attn, name)(2, rngs=nnx.Rngs(0))("ab")


@pytest.mark.parametrize(("dtype", "last"), [("int64", 2**31), ("int64", -(2**31) - 1), ("uint32", 2**31)])
def test_positions_that_jax_would_cut_to_32_bits_are_refused(dtype, last):
    module = jax_attn.GroupedQueryAttention(GroupedQueryAttentionConfig(8, 2, position=Rotary()), rngs=nnx.Rngs(0))
    x, positions = np.ones((1, 2, 8), np.float32), np.array([0, last]).astype(dtype)
    with pytest.raises(ValueError, match=rf"^an integer \({last}\) must fit in 32 bits without jax_enable_x64$"):
        module(x, positions=positions)
    with jax.enable_x64(True):
        assert np.isfinite(module(x, positions=positions)).all()
