"""torch's random numbers in Flax, and whether this JAX still draws the vectors stored."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_attn
from attn_bridge import rng
from jax_attn import functional
from jax_attn.dropout import Dropout
from jax_attn.random import TorchRngs
from parity_tests.goldens import make_random_vectors, random_vectors

KEEP = rng.TorchGenerator(0).bernoulli((4, 3, 5), 0.5)
"""Four masks as torch draws them one after the other."""


def masks(count: int, draw) -> np.ndarray:
    return np.stack([np.asarray(draw(jnp.ones((3, 5)))) != 0 for _ in range(count)])


@pytest.mark.optimized
def test_this_jax_draws_what_it_drew():
    assert random_vectors.check("jax", make_random_vectors.draw_with_jax) == len(random_vectors.jax_cases())


def test_flax_draws_what_torch_drew():
    def draw(case):
        rngs = TorchRngs(case["seed"])
        if case["function"] == "linear":
            layer = jax_attn.linear.Linear(case["d_in"], case["d_out"], rngs=rngs)
            return np.concatenate([np.asarray(layer.kernel[...]).T.ravel(), np.asarray(layer.bias[...])])
        if case["function"] == "bernoulli":
            return np.asarray(rngs.bernoulli(case["p"], case["shape"]))
        if case["function"] == "randn":
            return np.asarray(rngs.normal(case["shape"]))
        if case["dtype"] == "float64":
            return None  # JAX narrows it
        return np.asarray(rngs.uniform(case["shape"], case.get("low", 0.0), case.get("high", 1.0), case["dtype"]))

    assert random_vectors.check("torch", draw) == len(random_vectors.torch_cases()) - 2 * len(random_vectors.SEEDS)


def test_all_streams_and_forks_are_one_generator():
    rngs = TorchRngs(3)
    assert rngs.params() is rngs.dropout.fork() is rngs["noise"] is rngs() is rngs.default is rngs
    first = rngs.uniform((4,))
    assert not np.array_equal(first, rngs.uniform((4,)))
    assert np.array_equal(first, rngs.manual_seed(3).uniform((4,)))


def test_masks_go_on_with_the_generator_eager_and_compiled():
    rngs = TorchRngs(0)
    drop = Dropout(0.5, rngs=rngs)
    np.testing.assert_array_equal(masks(4, drop), KEEP)
    compiled = nnx.jit(lambda module, x: module(x))
    rngs.manual_seed(0)
    np.testing.assert_array_equal(masks(4, lambda x: compiled(drop, x)), KEEP)
    plain = jax.jit(lambda x: drop(x))
    rngs.manual_seed(0)
    np.testing.assert_array_equal(np.concatenate([masks(2, plain), masks(2, drop)]), KEEP)


def test_seeding_waits_for_what_is_still_running():
    rngs = TorchRngs(0)
    slow = jax.jit(lambda x: functional_drop(jnp.linalg.matrix_power(x, 30), rngs))
    for _ in range(3):
        slow(jnp.eye(400))
        rngs.manual_seed(0)
        np.testing.assert_array_equal(np.asarray(rngs.bernoulli(0.5, (4, 3, 5))), KEEP)


def functional_drop(x, rngs):
    return Dropout(0.5, rngs=rngs)(x)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_see_the_mask_of_their_call(transform):
    rngs = TorchRngs(0)
    drop = Dropout(0.5, rngs=rngs)
    gradient = transform(jax.grad(lambda x: drop(x).sum()))
    np.testing.assert_array_equal(masks(4, gradient), KEEP)


def test_a_scan_draws_at_every_step():
    drop = Dropout(0.5, rngs=TorchRngs(0))
    _, found = jax.lax.scan(lambda carry, x: (carry, drop(x)), 0, jnp.ones((4, 3, 5)))
    np.testing.assert_array_equal(np.asarray(found) != 0, KEEP)


def test_rate_0_and_eval_mode_draw_nothing():
    rngs = TorchRngs(0)
    x = jnp.ones((3, 5))
    assert (Dropout(0.0, rngs=rngs)(x) == x).all()
    drop = Dropout(0.5, rngs=rngs)
    drop.eval()
    assert (drop(x) == x).all()
    drop.train()
    np.testing.assert_array_equal(masks(4, drop), KEEP)


def test_clones_share_the_generator_and_deep_copies_have_their_own():
    module = jax_attn.CausalAttention(3, 3, 4, 0.5, rngs=TorchRngs(0))
    assert nnx.clone(module).dropout.rngs is module.dropout.rngs
    assert nnx.merge(*nnx.split(module)).dropout.rngs is module.dropout.rngs
    copied = copy.deepcopy(module)
    x = jnp.ones((4, 3))
    assert np.array_equal(copied(x), module(x))
    assert jax.tree.leaves(nnx.state(module, nnx.RngState)) == []


def test_functional_attention_takes_the_generator():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 3))
    first, again, other = (
        functional.dot_product_attention(x, x, x, dropout=0.5, rng=TorchRngs(seed)) for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert not (first == other).all()


def test_seeds_and_weights_are_refused_inside_a_trace():
    rngs = TorchRngs(0)
    message = r"^TorchRngs must be {} outside jax\.jit, jax\.eval_shape and other traces(\n|$)"
    with pytest.raises(RuntimeError, match=message.format("seeded")):
        nnx.eval_shape(lambda: jax_attn.SelfAttention_v2(3, 2, rngs=TorchRngs(0)))
    with pytest.raises(RuntimeError, match=message.format("seeded")):
        jax.jit(lambda: rngs.manual_seed(1).bernoulli())()
    for make in (jax_attn.SelfAttention_v1, jax_attn.SelfAttention_v2):
        with pytest.raises(RuntimeError, match=message.format("asked for weights")):
            nnx.jit(lambda make=make: make(3, 2, rngs=rngs))()


def test_what_torch_can_not_give_is_refused():
    rngs = TorchRngs(0)
    with pytest.raises(TypeError, match="TorchRngs"):
        nnx.Linear(3, 2, rngs=rngs)
    with pytest.raises(TypeError, match="TorchRngs"):
        nnx.Dropout(0.5, rngs=rngs)
    with pytest.raises(NotImplementedError, match=r"in float32 only, got bfloat16$"):
        jax_attn.embedding.Embedding(5, 4, rngs=rngs, param_dtype=jnp.bfloat16)
    with pytest.raises(AttributeError, match="manual_sed"):
        rngs.manual_sed(3)
    with pytest.raises(ValueError, match=r"^seed \(-9223372036854775809\) must be from "):
        TorchRngs(-(2**63) - 1)
