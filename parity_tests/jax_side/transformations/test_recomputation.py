"""Gradients of dropout under `nnx.remat`, `nnx.scan` and compilation, with NNX's streams and with a `TorchRngs`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_attn
from jax_attn.random import TorchRngs

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6)).astype("float32"))
SOURCES = {"streams": nnx.Rngs, "torch": TorchRngs}


def build(source):
    module = jax_attn.MultiHeadAttention(6, 6, 8, 0.5, 2, rngs=SOURCES[source](3))
    module.train()
    return module


def weigh(outputs):
    return (outputs * jnp.cos(jnp.arange(outputs.size)).reshape(outputs.shape)).sum()


def step(source, call):
    """Return the gradients, and the output of the next call, which tells where draws continue."""
    module = build(source)
    gradients = nnx.grad(lambda module: weigh(call(module, X)))(module)
    return [*map(np.asarray, jax.tree.leaves(gradients)), np.asarray(module(X))]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def once(module, x):
    return module(x)


def twice(module, x):
    return module(module(x))


def scanned(module, x):
    @nnx.scan(length=2, in_axes=(nnx.Carry,), out_axes=nnx.Carry)
    def apply(carry):
        module, x = carry
        return module, module(x)

    return apply((module, x))[1]


def merged(module, x):
    graphdef, state = nnx.split(module)
    return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state, copy=True)(x))(state, x)


@pytest.mark.parametrize(
    ("source", "call", "plain"),
    [
        ("streams", nnx.remat(once), once),
        ("streams", nnx.jit(nnx.remat(once)), once),
        ("streams", scanned, twice),
        ("torch", nnx.jit(once), once),
        ("torch", scanned, twice),
        ("torch", nnx.jit(scanned), twice),
    ],
    ids=["remat", "jit of remat", "scan", "torch jit", "torch scan", "torch jit of scan"],
)
def test_transformed_dropout_gives_the_gradients_of_plain_calls(source, call, plain):
    assert_same(step(source, call), step(source, plain))


def test_compiled_gradients_draw_once():
    module, plain = build("torch"), build("torch")
    found = nnx.jit(nnx.grad(lambda module: weigh(module(X))))(module)
    expected = nnx.grad(lambda module: weigh(module(X)))(plain)
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))
    np.testing.assert_allclose(module(X), plain(X), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "call",
    [nnx.remat(once), merged, nnx.jit(nnx.remat(once)), nnx.remat(nnx.jit(once)), nnx.remat(scanned)],
    ids=["remat", "checkpoint", "jit", "remat of jit", "remat of scan"],
)
def test_remat_refuses_the_generator_of_torch(call):
    with pytest.raises(NotImplementedError) as caught:
        step("torch", call)
    assert str(caught.value) == (
        "TorchRngs draws no masks under jax.checkpoint or nnx.remat, which would draw others when it recomputes; use "
        "nnx.Rngs for dropout, or module.eval()"
    )


def test_mapped_calls_share_a_mask_of_torch():
    same = jnp.broadcast_to(X[:1], (3, 1, 5, 6))
    module = build("torch")
    found = jax.vmap(lambda x: module(x))(same)
    np.testing.assert_allclose(found, np.broadcast_to(build("torch")(X[:1]), found.shape), rtol=1e-5, atol=2e-6)
