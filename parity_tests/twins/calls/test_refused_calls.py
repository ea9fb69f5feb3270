"""A call with a cache that is refused leaves the cache as it was, and both frameworks refuse it in the same words."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import attn_bridge
import jax_attn
import torch_attn
from attn_bridge import masks
from attn_bridge.specs import (
    CrossAttentionConfig,
    DifferentialAttentionConfig,
    GroupedQueryAttentionConfig,
    MultiHeadLatentAttentionConfig,
)

from ...support.calls import cover

X = np.random.default_rng(0).normal(size=(2, 6, 8))

MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grouped": (GroupedQueryAttentionConfig(8, 4, 2), {}),
    "rolling": (GroupedQueryAttentionConfig(8, 4, 2, mask=masks.sliding_window(3)), {"rolling": True}),
    "latent": (MultiHeadLatentAttentionConfig(8, 4, latent_dim=6, nope_dim=4, rope_dim=2, value_dim=4), {}),
    "differential": (DifferentialAttentionConfig(8, 4), {}),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few columns": (
        {"attention_mask": np.ones((2, 1, 1, 3), bool)},
        "attention mask (2, 1, 1, 3) must broadcast to (B, H, T, S) = (2, 4, 1, 6)",
    ),
    "other heads": (
        {"attention_mask": np.ones((2, 3, 1, 6), bool)},
        "attention mask (2, 3, 1, 6) must broadcast to (B, H, T, S) = (2, 4, 1, 6)",
    ),
    "other queries": (
        {"attention_mask": np.ones((2, 1, 2, 6), bool)},
        "attention mask (2, 1, 2, 6) must broadcast to (B, H, T, S) = (2, 4, 1, 6)",
    ),
    "array in a description": (
        {"attention_mask": masks.causal() & np.ones((2, 1, 1, 3), bool)},
        "attention mask (2, 1, 1, 3) must broadcast to (B, H, T, S) = (2, 4, 1, 6)",
    ),
    "padding of another batch": (
        {"attention_mask": masks.padding([6, 5, 6])},
        "lengths of masks.padding (3) must be as many as sequences in the batch (2)",
    ),
    "documents of another batch": (
        {"attention_mask": masks.full() | masks.documents(np.zeros((3, 6), np.int32))},
        "rows of masks.documents (3) must be as many as sequences in the batch (2)",
    ),
    "documents of the new token": (
        {"attention_mask": masks.documents(np.zeros((2, 1), np.int32))},
        "ids (1) must be one per token, got keys up to 6",
    ),
    "positions": (
        {"positions": np.zeros(2, np.int32)},
        "positions must have shape (T,) or (B, T) = (2, 1), got (2,)",
    ),
}


def twins(config: Any) -> list[tuple[Any, Any]]:
    """Return the torch module and its Flax twin in float64, each with what makes its arrays."""
    name = type(config).__name__.removesuffix("Config")
    torch.manual_seed(3)
    module = getattr(torch_attn, name)(config, dtype=torch.float64).eval().requires_grad_(False)
    twin = getattr(jax_attn, name)(config, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    twin.eval()
    attn_bridge.transfer(module, twin)
    return [(module, torch.from_numpy), (twin, jnp.asarray)]


def arrays_of(given: dict[str, Any], wrap: Any) -> dict[str, Any]:
    return {key: wrap(value) if isinstance(value, np.ndarray) else value for key, value in given.items()}


@functools.cache
def begun(label: str) -> list[tuple[Any, Any, Any, np.ndarray]]:
    """Return each twin, what makes its arrays, its cache of five tokens, and what it gives for the sixth."""
    config, options = MODULES[label]
    found = []
    for module, wrap in twins(config):
        _, cache = module(wrap(X[:, :5]), cache=module.init_cache(2, 9, **options))
        found.append((module, wrap, cache, np.asarray(module(wrap(X))[:, 5:])))
    return found


@cover.rotated(("refused", "label"), list(REFUSED), list(MODULES))
def test_a_refused_token_may_be_tried_again(refused, label):
    given, message = REFUSED[refused]
    with jax.enable_x64(True):
        for module, wrap, kept, want in begun(label):
            cache, token = copy.deepcopy(kept), wrap(X[:, 5:])
            with pytest.raises(ValueError, match=re.escape(message)):
                module(token, cache=cache, **arrays_of(given, wrap))
            output, cache = module(token, cache=cache)
            assert int(cache.length) == 6
            np.testing.assert_allclose(np.asarray(output), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("refused", ["longer", "padding of another batch", "another mask", "mask without columns"])
def test_a_refused_context_leaves_the_old_one(refused):
    old = np.random.default_rng(1).normal(size=(2, 4, 5))
    shown = np.array([[True, True, False, True], [False, True, True, True]])
    given = {
        "longer": {"context": np.ones((2, 7, 5))},
        "padding of another batch": {"context": old[:, :3], "attention_mask": masks.padding([1, 2, 3])},
        "another mask": {"context": old[:, :3], "attention_mask": np.ones((2, 1, 2, 3), bool)},
        "mask without columns": {"context": old[:, :3], "attention_mask": np.ones((2, 1), bool)},
    }[refused]
    with jax.enable_x64(True):
        messages = []
        for module, wrap in twins(CrossAttentionConfig(8, 4, d_context=5)):
            x = wrap(X)
            want, cache = module(x, context=wrap(old), attention_mask=wrap(shown), cache=module.init_cache(2, 6))
            with pytest.raises(ValueError, match="must b") as caught:
                module(x, cache=cache, **arrays_of(given, wrap))
            messages.append(str(caught.value))
            again, cache = module(x, cache=cache)
            assert int(cache.length) == 4
            np.testing.assert_allclose(np.asarray(again), np.asarray(want), rtol=0, atol=1e-12)
        assert messages[0] == messages[1]


@pytest.mark.parametrize("name", MODULES)
def test_a_cache_of_the_other_framework_is_refused(name):
    config, options = MODULES[name]
    package = type(config).__name__.removesuffix("Config")
    in_torch = getattr(torch_attn, package)(config)
    in_flax = getattr(jax_attn, package)(config, rngs=nnx.Rngs(0))
    x = X.astype(np.float32)
    for module, array, other in ((in_torch, torch.tensor(x), in_flax), (in_flax, jnp.asarray(x), in_torch)):
        cache = other.init_cache(2, 6, **options)
        with pytest.raises(TypeError, match=rf"init_cache of the module returns, got one of {type(cache).__module__}$"):
            module(array, cache=cache)
