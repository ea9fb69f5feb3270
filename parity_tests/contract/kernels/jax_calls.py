"""The adapter of JAX: calls attention with NumPy arrays in and out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_bridge import masks
from jax_attn import functional
from parity_tests.support.calls.attention_calls import Options, draw


@functools.cache
def program(name: str, mask: Any, rest: tuple[tuple[str, Any], ...], names: tuple[str, ...]) -> Any:
    """Return the context and the gradients of every float array as one program: the operations would each compile."""

    def with_gradients(arrays, mask_arrays, weights):
        parts = iter(mask_arrays)
        options = dict(rest) | ({} if mask is None else {"mask": mask.with_arrays(lambda _: next(parts))})

        def attend(query, key, value, *tensors):
            tensors = dict(zip(names, tensors, strict=True))
            return functional.dot_product_attention(query, key, value, implementation=name, **tensors, **options)

        context, pull = jax.vjp(attend, *arrays)
        return context, pull(weights.astype(context.dtype))

    return jax.jit(with_gradients)


def results(inputs: list[np.ndarray], options: Options, name: str, dtype: str) -> list[np.ndarray]:
    """Return the context and the gradients of every float array, all computed in a dtype."""
    if dtype == "float64" and not jax.config.jax_enable_x64:
        with jax.enable_x64(True):
            return results(inputs, options, name, dtype)
    names = tuple(key for key in ("bias", "sinks") if key in options)
    arrays = [jnp.asarray(array, dtype) for array in (*inputs, *(options[key] for key in names))]
    rest = {key: value for key, value in options.items() if key not in (*names, "mask")}
    mask, mask_arrays = masks.as_mask(options["mask"]).separate() if "mask" in options else (None, ())
    shape = (*inputs[0].shape[:3], inputs[2].shape[-1])
    # A source of random numbers is no key of a cache.
    make = program.__wrapped__ if "rng" in rest else program
    found = make(name, mask, tuple(rest.items()), names)(arrays, mask_arrays, draw(*shape, seed=99))
    assert all(one.dtype == dtype for one in jax.tree.leaves(found))
    return [np.asarray(one).astype("float64") for one in jax.tree.leaves(found)]


def attend(*inputs: np.ndarray, name: str, dtype: str = "float32", **options: Any) -> np.ndarray:
    """Return the context of a call."""
    arrays = [jnp.asarray(one).astype(dtype) for one in inputs]
    return np.asarray(functional.dot_product_attention(*arrays, implementation=name, **options)).astype("float64")


def source(seed: int) -> Any:
    """Return what a dropout mask is drawn with."""
    return jax.random.key(seed)


def forget() -> None:
    """Forget what was compiled."""
    program.cache_clear()
    jax.clear_caches()
