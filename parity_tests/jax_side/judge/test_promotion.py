"""What is JAX's own about promotion to float64: stock layers, traces, loops, variables, NumPy indices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from attn_parity.frameworks.jax.running.promotion import promoted
from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.subject import Arguments

from ...contract.judge.jax_promotion import BF16, F16, F32, Module
from ...contract.judge.promotion import THIRD, X, third

ROUNDED = {
    "full": lambda x: x * jnp.full(3, THIRD, F32),
    "array": lambda x: x * jnp.array([THIRD] * 3, F32),
    "float32()": lambda x: x * jnp.float32(THIRD),
}
"""Constants that JAX rounds itself when they are made, before any operation."""


@pytest.mark.parametrize("way", ROUNDED)
@pytest.mark.xfail(reason="JAX rounds a Python number to a dtype without an operation that could be lifted")
def test_a_constant_is_as_precise_as_it_was_written(way):
    found = subject_of(Module(ROUNDED[way])).run({}, Arguments((X,)), dtype="float64").outputs[0]
    np.testing.assert_allclose(found, third(X), rtol=1e-14)


STOCK = {
    "Linear": (lambda **low: nnx.Linear(3, 4, rngs=nnx.Rngs(0), **low), X[None]),
    "LinearGeneral": (lambda **low: nnx.LinearGeneral(3, (2, 2), rngs=nnx.Rngs(0), **low), X[None]),
    "Conv": (lambda **low: nnx.Conv(3, 4, (2,), rngs=nnx.Rngs(0), **low), np.stack([X, 2 * X])[None]),
    "Embed": (lambda **low: nnx.Embed(5, 3, rngs=nnx.Rngs(0), **low), np.array([[1, 4]])),
    "LayerNorm": (lambda **low: nnx.LayerNorm(3, rngs=nnx.Rngs(0), **low), X[None]),
    "RMSNorm": (lambda **low: nnx.RMSNorm(3, rngs=nnx.Rngs(0), **low), X[None]),
    "GroupNorm": (lambda **low: nnx.GroupNorm(6, 3, rngs=nnx.Rngs(0), **low), np.stack([X, X**2], 1).reshape(1, 6)),
    "BatchNorm": (lambda **low: nnx.BatchNorm(3, rngs=nnx.Rngs(0), **low), X[None]),
    "MultiHeadAttention": (
        lambda **low: nnx.MultiHeadAttention(1, 3, decode=False, rngs=nnx.Rngs(0), **low),
        np.stack([X, X**2])[None],
    ),
}


@pytest.mark.parametrize("layer", STOCK)
def test_the_dtype_of_a_stock_layer_is_lifted(layer):
    build, x = STOCK[layer]
    results = []
    for low in ({}, {"dtype": BF16}):
        module = build(**low)
        subject, dtype = subject_of(module), module.dtype if hasattr(module, "dtype") else None
        random = np.random.default_rng(2)
        weights = {name: random.uniform(0.5, 1.5, size=one.shape) for name, one in subject.parameters().items()}
        results.append(subject.run(weights, Arguments((x,)), dtype="float64").outputs[0])
        assert getattr(module, "dtype", None) == dtype
    assert results[1].dtype == np.float64
    np.testing.assert_allclose(results[1], results[0], rtol=1e-14)


@jax.jit
def halved(x):
    return (x * THIRD).astype(BF16).astype(x.dtype)


def test_lifted_and_plain_traces_are_cached_apart():
    with jax.enable_x64(True):
        rounded = halved(jnp.asarray(X))
        with promoted():
            np.testing.assert_allclose(halved(jnp.asarray(X)), third(X), rtol=1e-14)
        np.testing.assert_array_equal(halved(jnp.asarray(X)), rounded)
        halved.clear_cache()
        with promoted():
            halved(jnp.asarray(X))
        np.testing.assert_array_equal(halved(jnp.asarray(X)), rounded)


@pytest.mark.parametrize(("carried", "most"), [(lambda x: x[0], 4), (lambda x: np.float32(0.0), 1000)])
def test_a_loop_with_a_liftable_carry_is_traced_once(carried, most):
    seen = []

    def step(total, one):
        seen.append(one)
        return total + third(one).astype(F32), one * THIRD

    def function(x):
        total, each = lax.scan(step, carried(x), jnp.repeat(x, 100))
        return total - carried(x), each.sum()

    outputs = subject_of(Module(function)).run({}, Arguments((X,)), dtype="float64").outputs
    for found in outputs:
        np.testing.assert_allclose(found, 100 * third(X).sum(), rtol=1e-12)
    assert 0 < len(seen) <= most


def test_variables_other_than_weights_are_lifted_and_restored():
    class Holder(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.asarray([1.3, -0.4, 0.9], BF16))
            self.table = nnx.Variable(jnp.asarray([0.1, 0.2, 0.3], F32))
            self.count = nnx.Variable(jnp.array([1, 2, 3]))

        def __call__(self, x):
            self.table[...] = self.table[...] * 2
            return x.astype(F16) * self.weight[...].astype(F32) + self.table[...] + self.count[...]

    module = Holder()
    values = {name: np.array(getattr(module, name)[...]) for name in ("weight", "table", "count")}
    subject = subject_of(module)
    found = subject.run(subject.weights(), Arguments((X,)), [np.ones(3)], dtype="float64")
    expected = X * values["weight"].astype(float) + 2.0 * values["table"].astype(float) + values["count"]
    np.testing.assert_allclose(found.outputs[0], expected, rtol=1e-15)
    np.testing.assert_allclose(found.parameter_gradients["weight"], X, rtol=1e-15)
    for name, value in values.items():
        kept = np.array(getattr(module, name)[...])
        assert kept.dtype == value.dtype
        assert np.array_equal(kept, value)


def test_numpy_indices_stay_int32_after_a_float64_run():
    """JAX remembers what a NumPy array became, and would give int64 to code that runs without x64 later."""
    index = np.arange(6).reshape(2, 3)

    def look_up(table):
        return table[index] + jnp.asarray(index)[..., None]

    table = np.ones((7, 2), np.float32)
    with promoted():
        jax.make_jaxpr(look_up)(table.astype(np.float64))
    assert jax.eval_shape(look_up, table).dtype == jnp.float32
    assert jnp.asarray(index).dtype == jnp.int32
