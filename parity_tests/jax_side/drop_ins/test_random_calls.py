"""Random options and calls of `jax_attn.compat.MultiHeadAttention` give what Flax's own layer gives."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn import compat


class Sink:
    """A module that keeps nothing of what is sown."""

    def sow(self, *_: object) -> None:
        """Pass over it."""


@functools.wraps(nnx.dot_product_attention)
def wide_attention(*arguments, module=None, **options):
    """Compute Flax's attention where its softmax has the dtype of the scores: as if it were to sow them."""
    return nnx.dot_product_attention(*arguments, module=module or Sink(), **options)


stock_layer = functools.partial(nnx.MultiHeadAttention, attention_fn=wide_attention)


def chosen(rng, *values):
    return values[rng.integers(len(values))]


def draw_options(rng):
    """Return the arguments of a layer, but for its source of numbers."""
    heads, depth = int(chosen(rng, 1, 2, 4)), int(chosen(rng, 2, 3, 4))
    options = {
        "num_heads": heads,
        "in_features": heads * depth,
        "use_bias": bool(rng.random() < 0.6),
        "normalize_qk": bool(rng.random() < 0.4),
        "keep_rngs": bool(rng.random() < 0.5),
        "param_dtype": jnp.float64,
        "decode": False,
    }
    if rng.random() < 0.5:
        options |= {"qkv_features": heads * int(chosen(rng, 2, 5))}
    if rng.random() < 0.5:
        options |= {"out_features": int(chosen(rng, 3, 6))}
    if rng.random() < 0.3 and heads % 2 == 0:
        options |= {"num_kv_heads": heads // 2}
    if rng.random() < 0.4:
        options |= {"dropout_rate": 0.4, "broadcast_dropout": bool(rng.random() < 0.5)}
    if rng.random() < 0.4:
        options |= {
            "kernel_init": nnx.initializers.normal(0.7),
            "bias_init": nnx.initializers.normal(0.3),
            "out_kernel_init": nnx.initializers.constant(0.2),
        }
    return options


def draw_call(rng, options):
    """Return inputs and options of a call; instead of `rngs` their seed."""
    batch, queries, keys = (int(rng.integers(1, 5)) for _ in range(3))
    width, count = options["in_features"], int(chosen(rng, 1, 2, 3))
    keys = queries if count == 1 else keys
    leading = chosen(rng, (), (batch,), (batch, 2))
    shapes = [(*leading, queries, width), (*leading, keys, width), (*leading, keys, width)]
    call = {"deterministic": bool(rng.random() < 0.5) or "dropout_rate" not in options}
    if not call["deterministic"]:
        call["rngs"] = int(rng.integers(100))
    if rng.random() < 0.5:
        mask = rng.random((*leading, chosen(rng, 1, options["num_heads"]), queries, keys)) < 0.6
        mask[..., 0] = True
        call["mask"] = jnp.asarray(mask)
    if rng.random() < 0.3:
        call["is_causal"] = True
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes[:count]], call


def copied(rng, layer):
    return chosen(rng, lambda one: one, copy.deepcopy, nnx.clone, lambda one: pickle.loads(pickle.dumps(one)))(layer)


def drawn(call):
    """Return the options of a call with a source of numbers in place of its seed."""
    return {name: nnx.Rngs(dropout=value) if name == "rngs" else value for name, value in call.items()}


def results(layer, inputs, call):
    """Return the output and all gradients."""

    def loss(layer, inputs):
        output = layer(*inputs, **drawn(call))
        return (output * jnp.cos(jnp.arange(output.size).reshape(output.shape))).sum(), output

    (_, output), gradients = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, inputs)
    return jax.tree.leaves((output, gradients))


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


SEEDS = [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.full) for seed in range(40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_call_gives_what_the_stock_layer_gives(seed):
    rng = np.random.default_rng(seed)
    options = draw_options(rng)
    with jax.enable_x64(True):
        stock, ours = (kind(**options, rngs=nnx.Rngs(seed)) for kind in (stock_layer, compat.MultiHeadAttention))
        assert_same(jax.tree.leaves(nnx.state(ours, nnx.Param)), jax.tree.leaves(nnx.state(stock, nnx.Param)))
        ours = copied(rng, ours)
        inputs, call = draw_call(rng, options)
        assert_same(results(ours, inputs, call), results(stock, inputs, call))


@pytest.mark.parametrize("seed", range(4))
def test_random_decoding_is_that_of_the_stock_layer(seed):
    rng = np.random.default_rng(seed)
    options = {**draw_options(rng), "decode": True}
    with jax.enable_x64(True):
        layers = [kind(**options, rngs=nnx.Rngs(seed)) for kind in (stock_layer, compat.MultiHeadAttention)]
        x = jnp.asarray(rng.normal(size=(2, 4, options["in_features"])))
        for layer in layers:
            layer.init_cache(x.shape, jnp.float64)
        for at in range(x.shape[1]):
            token = x[:, at : at + 1]
            stock, ours = (layer(token, deterministic=True) for layer in layers)
            np.testing.assert_allclose(ours, stock, rtol=1e-10, atol=1e-12)
        assert_same(*(jax.tree.leaves(nnx.state(layer, nnx.Cache)) for layer in layers))


@pytest.mark.parametrize("seed", range(4))
def test_random_weights_are_sown_as_by_the_stock_layer(seed):
    rng = np.random.default_rng(seed)
    options = draw_options(rng)
    with jax.enable_x64(True):
        layers = [kind(**options, rngs=nnx.Rngs(seed)) for kind in (stock_layer, compat.MultiHeadAttention)]
        inputs, call = draw_call(rng, options)
        sown = []
        for layer in layers:
            output = nnx.capture(layer, nnx.Intermediate)(*inputs, **drawn(call), sow_weights=True)
            sown.append(jax.tree.leaves(output))
        assert len(sown[0]) == 2
        assert_same(*sown)
