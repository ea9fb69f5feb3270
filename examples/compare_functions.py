"""Compare a torch function with a JAX function: each takes a tree of weights, and the inputs."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from attn_bridge import parity

WIDTH, HEADS = 8, 2


def torch_attention(weights: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Attend with `torch`'s fused kernel; x is ``(B, T, WIDTH)``."""
    b, t, _ = x.shape
    split = [(x @ weights[name]).view(b, t, HEADS, -1).transpose(1, 2) for name in ("query", "key", "value")]
    context = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True)
    return context.transpose(1, 2).reshape(b, t, WIDTH) @ weights["out"]


def jax_attention(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Attend by the formula."""
    query, key, value = ((x @ weights[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bthc,bshc->bhts", query, key) / jnp.sqrt(WIDTH / HEADS)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights_after = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhts,bshc->bthc", weights_after, value).reshape(x.shape) @ weights["out"]


def main() -> None:
    """Compare the two and print the report; exit with 1 unless they are equal."""
    random = np.random.default_rng(0)
    names = ("query", "key", "value", "out")
    weights = {name: random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for name in names}
    first = parity.function(torch_attention, {name: torch.from_numpy(array) for name, array in weights.items()})
    second = parity.function(jax_attention, {name: jnp.asarray(array) for name, array in weights.items()})
    report = parity.compare(first, second, random.normal(size=(2, 5, WIDTH)).astype(np.float32))
    print(report)
    sys.exit(not report.passed)


if __name__ == "__main__":
    main()
