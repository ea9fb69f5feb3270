"""Bad arguments whose message is JAX's own."""

from __future__ import annotations

import numpy as np
import pytest

import jax_attn


def test_dropout_without_a_random_source_is_refused():
    query = np.ones((1, 2, 1, 3), np.float32)
    with pytest.raises(ValueError, match="dropout") as caught:
        jax_attn.functional.dot_product_attention(query, query, query, dropout=0.5)
    assert str(caught.value) == "dropout (0.5) needs rng: a key, a stream, an nnx.Rngs or a TorchRngs"
