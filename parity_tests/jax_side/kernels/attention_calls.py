"""Calls of attention in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_bridge import masks
from jax_attn import functional
from parity_tests.contract.kernels.jax_calls import program, results
from parity_tests.support.calls import attention_calls
from parity_tests.support.calls.attention_calls import CASES, FLOAT32, Options, draw, operands, padding, some

__all__ = ["CASES", "FLOAT32", "draw", "operands", "padding", "program", "results", "some"]


def hold(label: str, seed: int, dtype: str, unit: float, name: str = "blocked") -> None:
    """Hold an implementation to twice the error of the reference, and some units in the last place."""
    attention_calls.hold(results, label, seed, dtype, unit, name)


def hold_call(inputs: list[np.ndarray], options: Options, dtype: str, unit: float, name: str) -> None:
    """Hold an implementation to twice the error of the reference in a call, and some units in the last place."""
    attention_calls.hold_call(results, inputs, options, dtype, unit, name)


def loss(name: str) -> Any:
    def of(query, key, value):
        options = {"mask": masks.causal(), "softcap": 3.0, "implementation": name}
        return (functional.dot_product_attention(query, key, value, **options) ** 2).sum()

    return of


def arrays(**sizes: int) -> list[jax.Array]:
    return [jnp.asarray(one, "float32") for one in operands(**sizes)]


def attend(*inputs: Any, name: str = "cpu_flash", **options: Any) -> Any:
    """Return the context that one implementation computes."""
    return functional.dot_product_attention(*inputs, implementation=name, **options)


def squared(name: str, **options: Any) -> Any:
    """Return a function of query, key and value, whose gradients depend on all that they are."""
    return lambda *inputs: (attend(*inputs, name=name, **options) ** 2).sum()
