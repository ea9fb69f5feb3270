"""`jax_attn.compat.MultiHeadAttention` gives what Flax's own layer gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_attn import compat

B, T = 2, 5
SIZES = {
    "plain": {},
    "grouped, normalised": {"num_kv_heads": 2, "normalize_qk": True, "qkv_features": 16},
    "other widths": {"qkv_features": 12, "out_features": 6, "in_kv_features": 8, "use_bias": False},
    "dropout": {"dropout_rate": 0.5, "deterministic": False},
    "dropout per head": {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False, "num_kv_heads": 2},
}
MASK = np.tril(np.ones((T, T), bool))[None, None] & (np.arange(T) != np.array([[1], [3]]))[:, None, None]
MASK[..., 0] = True
CALLS = {"none": {}, "mask": {"mask": MASK}, "causal": {"is_causal": True}}


def pair(**options):
    """Return the stock layer and ours with its state."""
    options = {"num_heads": 4, "in_features": 8, "decode": False, **options}
    stock = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))
    ours = compat.MultiHeadAttention(**options, rngs=nnx.Rngs(1))
    nnx.update(ours, nnx.state(stock))
    return stock, ours


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def results(layer, x, **options):
    """Return the output and all gradients."""

    def loss(layer, x):
        output = layer(x, x[:, ::-1], **options)
        return (output * jnp.cos(jnp.arange(output.size).reshape(output.shape))).sum(), output

    ((_, output), gradients) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return jax.tree.leaves((output, gradients))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_the_stock_layer(sizes, call):
    stock, ours = pair(**SIZES[sizes])
    expected, got = (results(layer, draw(B, T, 8), **CALLS[call]) for layer in (stock, ours))
    assert len(got) == len(expected)
    for ours_, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours_, theirs, rtol=1e-4, atol=1e-5)


def test_sown_weights_are_those_of_the_stock_layer():
    for layers in (pair(), pair(num_kv_heads=2, dropout_rate=0.5, deterministic=False)):
        x, states = draw(B, T, 8), []
        for layer in layers:
            output, sown = nnx.capture(layer, nnx.Intermediate)(x, mask=MASK, sow_weights=True)
            states.append([output, *jax.tree.leaves(sown)])
        (expected, got) = states
        assert len(got) == len(expected) == 2
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_axes_of_the_batch_may_be_none_or_many():
    stock, ours = pair()
    for shape in ((T, 8), (2, 3, T, 8)):
        mask = MASK[0, 0] if len(shape) == 2 else np.stack([MASK[:, 0, None]] * 3, 1)
        x = draw(*shape)
        expected = stock(x[None], mask=mask[None, None])[0] if len(shape) == 2 else stock(x, mask=mask)
        np.testing.assert_allclose(ours(x, mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_decoding_token_by_token_is_that_of_the_stock_layer():
    layers, x = pair(num_kv_heads=2), draw(B, T, 8)
    for layer in layers:
        layer.init_cache(x.shape)
    for at in range(T):
        expected, got = (layer(x[:, at : at + 1], decode=True) for layer in layers)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_rngs_and_deterministic_of_a_call_come_first():
    stock, ours = pair(dropout_rate=0.5)
    x = draw(B, T, 8)
    np.testing.assert_allclose(ours(x, deterministic=True), stock(x, deterministic=True), rtol=1e-4, atol=1e-5)
    expected, got = (layer(x, deterministic=False, rngs=nnx.Rngs(dropout=7)) for layer in (stock, ours))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_query_without_keys_gets_zeros():
    _, ours = pair(use_bias=False)
    assert not ours(draw(B, T, 8), mask=jnp.zeros((B, 1, T, T), bool)).any()


def test_precision_is_a_name_or_a_member_of_jax():
    x = draw(B, T, 4, 2)
    for precision in ("highest", jax.lax.Precision.HIGHEST):
        program = jax.make_jaxpr(lambda x, p=precision: compat.dot_product_attention(x, x, x, precision=p))(x)
        assert "HIGHEST" in str(program)
    with pytest.raises(TypeError, match=r"^precision must be a name or a jax.lax.Precision, got int$"):
        compat.dot_product_attention(x, x, x, precision=3)
