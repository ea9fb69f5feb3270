"""Calls of attention in JAX, drawn, and how the results of an implementation are held to those of the reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_bridge import masks
from jax_attn import functional

FLOAT32 = 3e-6
"""Error allowed beside that of the reference, as part of the largest value: a few units in the last place."""

Options = dict[str, Any]


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def operands(batch=2, queries=70, keys=70, heads=4, key_heads=2, width=8, value_width=8, seed=0) -> list[np.ndarray]:
    """Return query, key and value; they differ in size."""
    shapes = ((queries, heads, width), (keys, key_heads, width), (keys, key_heads, value_width))
    return [draw(batch, *shape, seed=10 * seed + n) * (1.0 + n) for n, shape in enumerate(shapes)]


def some(*shape: int, seed: int, share: float = 0.7) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < share


def numbers(*shape: int, seed: int) -> np.ndarray:
    """Return numbers of documents, negative ones among them."""
    return np.random.default_rng(seed).integers(-2, 3, shape)


def per_head(batch: int, heads: int, queries: int, keys: int, seed: int) -> np.ndarray:
    """Return a mask of its own for every head, with rows that hide every key."""
    mask = some(batch, heads, queries, keys, seed=seed)
    mask[0, 1, 2] = mask[-1, 0, queries - 1] = False
    return mask


def padding(batch: int, keys: int, seed: int) -> np.ndarray:
    """Return a mask of keys; the first sequence has none."""
    mask = some(batch, keys, seed=seed)
    mask[0] = False
    return mask


CASES: dict[str, tuple[Options, Any]] = {
    "no mask": ({}, lambda seed: {}),
    "no mask, odd sizes": ({"queries": 201, "keys": 333}, lambda seed: {}),
    "causal": ({}, lambda seed: {"mask": masks.causal()}),
    "causal, long": ({"queries": 400, "keys": 400, "batch": 1}, lambda seed: {"mask": masks.causal()}),
    "causal, many blocks": (
        {"queries": 1100, "keys": 1100, "batch": 1, "heads": 2, "key_heads": 1},
        lambda seed: {"mask": masks.causal()},
    ),
    "causal, more keys": ({"keys": 300}, lambda seed: {"mask": masks.causal()}),
    "causal, fewer keys": ({"keys": 5}, lambda seed: {"mask": masks.causal()}),
    "causal after cached keys": ({"queries": 5, "keys": 300}, lambda seed: {"mask": masks.causal().offset(295)}),
    "one token after cached keys": ({"queries": 1, "keys": 140}, lambda seed: {"mask": masks.causal().offset(139)}),
    "one token": ({"queries": 1, "keys": 1}, lambda seed: {"mask": masks.causal()}),
    "padding": ({"keys": 300}, lambda seed: {"mask": padding(2, 300, seed)}),
    "one padding for all": ({}, lambda seed: {"mask": some(1, 70, seed=seed)}),
    "causal with padding": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.causal() & padding(2, 300, seed)},
    ),
    "per head": ({"keys": 140}, lambda seed: {"mask": per_head(2, 4, 70, 140, seed)}),
    "per head, all keys": ({}, lambda seed: {"mask": some(1, 4, 70, 1, seed=seed)}),
    "all hidden": ({}, lambda seed: {"mask": np.zeros((1, 1, 1, 1), bool)}),
    "either mask": ({"keys": 140}, lambda seed: {"mask": masks.causal() | padding(2, 140, seed)}),
    "bias": ({"keys": 300}, lambda seed: {"bias": draw(1, 4, 70, 300, seed=seed), "scale": 0.3}),
    "bias of keys, causal": ({}, lambda seed: {"bias": draw(70, seed=seed), "mask": masks.causal()}),
    "bias, per head": ({}, lambda seed: {"bias": draw(2, 1, 70, 70, seed=seed), "mask": per_head(2, 4, 70, 70, seed)}),
    "bias of rows": ({}, lambda seed: {"bias": draw(70, 1, seed=seed), "sinks": draw(4, seed=seed)}),
    "bias that hides": ({}, lambda seed: {"bias": np.where(per_head(2, 4, 70, 70, seed), 0.5, -np.inf)}),
    "wider value": ({"value_width": 12}, lambda seed: {"mask": masks.causal()}),
    "head_dim 1": ({"width": 1, "value_width": 1}, lambda seed: {"mask": masks.causal()}),
    "head_dim 40": ({"width": 40, "value_width": 40}, lambda seed: {"mask": masks.causal()}),
    "head_dim 256": ({"width": 256, "value_width": 256}, lambda seed: {"mask": masks.causal()}),
    "own key heads": ({"key_heads": 4}, lambda seed: {"mask": masks.causal()}),
    "one key head": ({"heads": 6, "key_heads": 1, "queries": 300, "keys": 300}, lambda seed: {"mask": masks.causal()}),
    "window": ({"queries": 400, "keys": 400}, lambda seed: {"mask": masks.sliding_window(37)}),
    "window of one": ({}, lambda seed: {"mask": masks.sliding_window(1)}),
    "window past the keys": ({"queries": 300, "keys": 50}, lambda seed: {"mask": masks.sliding_window(7)}),
    "window with padding": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.sliding_window(7) & padding(2, 300, seed)},
    ),
    "chunks": ({"queries": 300, "keys": 300}, lambda seed: {"mask": masks.chunked(70)}),
    "prefix": ({"queries": 200, "keys": 300}, lambda seed: {"mask": masks.prefix(130), "softcap": 3.0}),
    "chunks or windows": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.chunked(70) | masks.sliding_window(40)},
    ),
    "documents": (
        {"queries": 300, "keys": 300},
        lambda seed: {"mask": masks.documents(np.sort(numbers(2, 300, seed=seed))) & masks.causal()},
    ),
    "documents in any order, with padding": (
        {"queries": 150, "keys": 130},
        lambda seed: {"mask": masks.documents(numbers(1, 150, seed=seed)) & padding(2, 130, seed)},
    ),
    "two bands": (
        {"queries": 512, "keys": 512, "batch": 1},
        lambda seed: {"mask": masks.sliding_window(7) | masks.sliding_window(9).offset(0, keys=390)},
    ),
    "softcap": ({}, lambda seed: {"softcap": 2.0, "mask": masks.causal(), "bias": draw(4, 1, 70, seed=seed)}),
    "sinks": (
        {},
        lambda seed: {"sinks": 3 * draw(4, seed=seed), "mask": masks.sliding_window(3) & padding(2, 70, seed)},
    ),
}
"""Sizes, and the options of a call for a seed."""


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


def hold(label: str, seed: int, dtype: str, unit: float, name: str = "blocked") -> None:
    """Hold an implementation to twice the error of the reference, and some units in the last place."""
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes, seed=seed), choose(seed)
    inputs = [np.asarray(jnp.asarray(one, dtype)).astype("float64") for one in inputs]
    options = {
        k: np.asarray(jnp.asarray(v, dtype), "float64") if k in ("bias", "sinks") else v for k, v in options.items()
    }
    hold_call(inputs, options, dtype, unit, name)


def hold_call(inputs: list[np.ndarray], options: Options, dtype: str, unit: float, name: str) -> None:
    """Hold an implementation to twice the error of the reference in a call, and some units in the last place."""
    with jax.enable_x64(True):
        exact = results(inputs, options, "reference", "float64")
    plain, found = (results(inputs, options, one, dtype) for one in ("reference", name))
    # Gradients of scores cancel, exactly where there is one key only; those of the value don't.
    scale = max(np.abs(one).max() for one in exact)
    for got, want, other in zip(found, exact, plain, strict=True):
        allowed = 2.0 * np.abs(other - want).max() + unit * scale
        np.testing.assert_allclose(got, want, rtol=0.0, atol=allowed)


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
