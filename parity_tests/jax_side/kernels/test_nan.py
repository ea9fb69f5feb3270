"""NaN in a query or a key comes out of JAX's attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from attn_bridge import masks
from jax_attn import functional

from ...support.calls import cover
from .attention_calls import operands


@cover.rotated(("tokens", "is_causal"), [1, 7, 16, 70], [False, True])
def test_nan_is_not_lost(tokens, is_causal):
    mask = masks.causal() if is_causal else None
    allowed = np.tri(tokens, dtype=bool) if is_causal else np.ones((tokens, tokens), bool)
    query, key, value = (jnp.asarray(one, jnp.float32) for one in operands(queries=tokens, keys=tokens))
    lost = jnp.isnan(functional.dot_product_attention(query.at[1, -1, 2].set(jnp.nan), key, value, mask=mask))
    assert lost[1, -1, 2].all()
    assert int(lost.sum()) == value.shape[-1], "no other row"
    for place in {0, tokens - 1}:
        bad = key.at[0, place, 1].set(jnp.nan)
        lost = np.isnan(functional.dot_product_attention(query, bad, value, mask=mask))
        assert lost[0, :, 2:][allowed[:, place]].all(), "in the heads that share the key"
        assert not lost[1].any()
        assert not lost[0, :, :2].any()
        assert not lost[0][~allowed[:, place]].any(), "nobody else sees it"
