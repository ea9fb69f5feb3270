"""The layer, the model and the inputs that uses of JAX are tried with, and the table that they join."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

import jax_attn
from attn_bridge import specs

from .table import Uses

USES = Uses()
CONFIG = specs.GroupedQueryAttentionConfig(8, 4, num_kv_heads=2, position=specs.Rotary(), dropout=0.2)
BLOCK = specs.DecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), specs.FeedForwardConfig(8, 12), specs.RMSNormConfig(8)
)
MODEL = specs.DecoderConfig(11, 8, (BLOCK, BLOCK), specs.RMSNormConfig(8))
X, IDS = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("f4"), np.array([[3, 1, 4, 1], [5, 9, 2, 6]], "i4")
PADDING = np.array([[False, False, True, True, True], [True] * 5])
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def layer(seed: int = 0, **options: Any) -> Any:
    module = jax_attn.GroupedQueryAttention(CONFIG, rngs=nnx.Rngs(seed), **options)
    module.eval()
    return module


def model() -> Any:
    module = jax_attn.DecoderModel(MODEL, rngs=nnx.Rngs(0))
    module.eval()
    return module


def loss(module: Any, x: Any = X) -> Any:
    return (module(x) ** 2).sum()


def same_slopes(call: Any) -> None:
    """Check that a way of calling gives the gradients of plain calls."""
    plain, found = nnx.grad(loss)(layer()), nnx.grad(lambda module: (call(module) ** 2).sum())(layer())
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert_close(one, wanted, atol=1e-4)
