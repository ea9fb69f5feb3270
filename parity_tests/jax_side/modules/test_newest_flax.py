"""Layers that Flax has gained or changed since the oldest supported version: `nnx.WeightNorm`'s scales, `nnx.RoPE`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from attn_bridge import checkpoints, parity
from attn_bridge.specs import Rotary
from attn_bridge.weights import Rule, flax_to_torch, torch_to_flax
from jax_attn import backend
from jax_attn.positions import apply_rotary, rotary_tables

RULES = [
    Rule("parametrizations.weight.original0", "scales.('kernel',)", "out 1 -> out"),
    Rule("parametrizations.weight.original1", "layer_instance.kernel", "out d -> d out"),
    Rule("bias", "layer_instance.bias"),
]
X = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)


def weight_norm():
    return nnx.WeightNorm(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))


needs_scales = pytest.mark.skipif(
    isinstance(weight_norm().scales["kernel",], jax.Array), reason="this Flax does not train WeightNorm's scales"
)
needs_rope = pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no nnx.RoPE")


class WeightNorm(nnx.Module):
    """As the paper has it (arXiv 1602.07868): no epsilon under the root."""

    def __init__(self):
        self.layer_instance = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        self.scales = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        kernel = self.layer_instance.kernel[...]
        return x @ (self.scales[...] * kernel / jnp.linalg.norm(kernel, axis=0)) + self.layer_instance.bias[...]


class Attention(nnx.Module):
    """Attention whose queries and keys Flax rotates."""

    def __init__(self, theta):
        rotated = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE(theta))
        self.attention = nnx.MultiHeadAttention(2, 16, attention_fn=rotated, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.attention(x)


class Port(Attention):
    """The same, with rotation by `jax_attn`."""

    def __init__(self, theta):
        def rotated(query, key, value, **options):
            tables = rotary_tables(Rotary(theta), jnp.arange(query.shape[1]), query.shape[-1], query.dtype)
            return nnx.dot_product_attention(
                apply_rotary(query, *tables, "half"), apply_rotary(key, *tables, "half"), value, **options
            )

        self.attention = nnx.MultiHeadAttention(2, 16, attention_fn=rotated, decode=False, rngs=nnx.Rngs(1))


@needs_scales
def test_scales_of_weight_norm_convert_both_ways():
    module = weight_norm()
    module.scales["kernel",][...] = jnp.arange(1.0, 5.0)
    arrays = backend.get_weights(module)
    theirs = flax_to_torch(arrays, RULES)
    assert {name: array.shape for name, array in theirs.items()} == {
        "parametrizations.weight.original0": (4, 1),
        "parametrizations.weight.original1": (4, 6),
        "bias": (4,),
    }
    blank = weight_norm()
    backend.set_weights(blank, torch_to_flax(theirs, RULES))
    x = X[..., :6]
    np.testing.assert_array_equal(blank(x), module(x))
    assert not np.array_equal(module(x), weight_norm()(x))


@needs_scales
def test_orbax_saves_scales_of_weight_norm_by_the_names_of_the_module(tmp_path):
    module = weight_norm()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    checkpoints.convert(tmp_path / "saved", tmp_path / "x.npz", to_layout="same")
    with np.load(tmp_path / "x.npz") as saved:
        assert {name: array.tolist() for name, array in saved.items()} == {
            name: array.tolist() for name, array in backend.get_weights(module).items()
        }


@needs_scales
@pytest.mark.parametrize(("epsilon", "is_equal"), [(0.0, True), (1e-6, False)])
def test_weight_norm_without_epsilon_is_the_formula_of_the_paper(epsilon, is_equal):
    stock = nnx.WeightNorm(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), epsilon=epsilon, rngs=nnx.Rngs(0))
    assert parity.compare(stock, WeightNorm(), [X]).passed is is_equal


@needs_rope
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_flax_rotates_as_we_do(theta):
    tables = rotary_tables(Rotary(theta), jnp.arange(5), 8, jnp.float32)
    heads = X.reshape(2, 5, 2, 8)
    ours = apply_rotary(jnp.asarray(heads), *tables, "half")
    flax = jax.vmap(nnx.RoPE(theta), in_axes=-2, out_axes=-2)(heads)
    np.testing.assert_allclose(flax, ours, rtol=1e-6, atol=1e-6)


@needs_rope
@pytest.mark.parametrize(("theta", "is_equal"), [(1e4, True), (5e5, False)])
def test_attention_with_rope_is_judged(theta, is_equal):
    assert parity.compare(Attention(1e4), Port(theta), [X]).passed is is_equal
