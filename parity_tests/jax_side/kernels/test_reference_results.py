"""Every implementation computes what the reference does: results, gradients, hidden rows, dropout."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_bridge import masks
from jax_attn import functional
from jax_attn.implementations import block_operands

from ...support.calls import cover
from .attention_calls import CASES, FLOAT32, arrays, draw, hold, operands, results

BLOCKS = (
    *("no mask, odd sizes", "causal, long", "causal, fewer keys", "causal after cached keys", "one token", "padding"),
    *("causal with padding", "per head", "all hidden", "either mask", "bias, per head", "bias of rows", "two bands"),
    *("bias that hides", "wider value", "one key head", "window past the keys", "prefix", "chunks or windows"),
    *("documents in any order, with padding", "softcap", "sinks"),
)
"""Cases that differ in which blocks there are, or in what is done to their scores."""


@cover.some("label", list(CASES), BLOCKS)
def test_blocked_matches_the_reference(label):
    for seed in (0, 1):
        hold(label, seed, "float32", FLOAT32)


@cover.some(
    "label",
    [
        "no mask, odd sizes",
        "causal",
        "causal with padding",
        "per head",
        "bias, per head",
        "one key head",
        "window",
        "softcap",
        "sinks",
    ],
    always=["no mask, odd sizes", "causal with padding", "bias, per head", "window", "sinks"],
)
def test_rolled_loops_match_the_reference(label, rolled):
    hold(label, 2, "float32", FLOAT32)


@cover.some(
    "label",
    ["causal", "sinks", "bias, per head", "window with padding", "one key head"],
    always=["sinks", "bias, per head"],
)
def test_blocked_matches_the_reference_in_float16(label):
    hold(label, 0, "float16", float(jnp.finfo("float16").eps))


@cover.some(
    "label",
    [
        "causal",
        "causal, long",
        "softcap",
        "sinks",
        "bias, per head",
        "window with padding",
        "one key head",
        "head_dim 40",
        "all hidden",
    ],
    always=["causal, long", "softcap", "bias, per head"],
)
def test_blocked_matches_the_reference_in_bfloat16(label, narrow):
    hold(label, 0, "bfloat16", float(jnp.finfo("bfloat16").eps))


@cover.some("label", ["softcap", "sinks", "head_dim 40", "window with padding"], ["sinks", "head_dim 40"])
def test_rolled_loops_match_the_reference_in_bfloat16(label, rolled):
    hold(label, 0, "bfloat16", float(jnp.finfo("bfloat16").eps))


@cover.rotated(("of_keys", "of_values", "loops"), [(3.0, 3.0), (0.0, 30.0), (10.0, 30.0)], ["rolled", "unrolled"])
def test_bfloat16_gradients_keep_precision_when_keys_share_a_part(of_keys, of_values, loops, narrow, request):
    if loops == "rolled":
        request.getfixturevalue("rolled")
    inputs = operands(queries=300, keys=300, batch=1)
    inputs = [one + shift for one, shift in zip(inputs, (0.0, of_keys, of_values), strict=True)]
    inputs = [np.asarray(jnp.asarray(one, "bfloat16")).astype("float64") for one in inputs]
    options = {"mask": masks.causal()}
    with jax.enable_x64(True):
        exact = results(inputs, options, "reference", "float64")
    plain, found = (results(inputs, options, name, "bfloat16") for name in ("reference", "blocked"))
    for got, want, other in zip(found, exact, plain, strict=True):
        assert np.abs(got - want).max() <= 1.5 * np.abs(other - want).max() + 2.0**-9 * np.abs(want).max()


@cover.some("scale", [0.0, -0.3, -0.25, 1e-40], always=[0.0, -0.3])
def test_any_finite_scale_is_taken(scale, narrow):
    inputs = [jnp.asarray(one, "bfloat16") for one in operands(queries=140, keys=140)]
    found, want = (
        functional.dot_product_attention(*inputs, scale=scale, implementation=name).astype("float32")
        for name in ("blocked", "reference")
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=2.0**-7 * np.abs(want).max())


def test_bfloat16_products_stay_narrow_where_the_processor_has_them(narrow):
    inputs = [jnp.asarray(one, jnp.bfloat16) for one in operands()]
    call = functools.partial(functional.dot_product_attention, implementation="blocked")

    jaxpr = str(jax.make_jaxpr(lambda *inputs: call(*inputs))(*inputs))
    assert ("bf16[70,70]" in jaxpr) == narrow  # the weights, rounded for their product
    mixed = str(jax.make_jaxpr(lambda *inputs: call(*inputs))(inputs[0], inputs[1].astype(jnp.float32), inputs[2]))
    assert "bf16[70,70]" not in mixed


@cover.some(
    "label",
    ["causal, long", "softcap", "sinks", "bias, per head", "window with padding"],
    always=["softcap", "window with padding"],
)
def test_blocked_is_really_float64(label):
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes), choose(0)
    with jax.enable_x64(True):
        found, exact = (results(inputs, options, name, "float64") for name in ("blocked", "reference"))
    for got, want in zip(found, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=0.0, atol=1e-13 * max(np.abs(one).max() for one in exact))


@pytest.mark.parametrize(
    "label", ["padding", "per head", "all hidden", "bias that hides", "window past the keys", "sinks"]
)
def test_hidden_rows_give_zeros_without_gradient(label):
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes), choose(0)
    bias, mask = options.get("bias"), options.get("mask")
    batch, queries, heads, _ = inputs[0].shape
    allowed = np.ones((1, 1, 1, 1), bool)
    if mask is not None:
        positions = np.arange(1000)
        allowed = masks.as_mask(mask).allowed(positions[:queries, None], positions[None, : inputs[1].shape[1]])
    if bias is not None:
        allowed = allowed & (bias > -np.inf)
    hidden = ~np.broadcast_to(allowed, (batch, heads, queries, inputs[1].shape[1])).any(-1).swapaxes(1, 2)
    assert hidden.any()
    context, *gradients = results(inputs, options, "blocked", "float32")
    assert not context[hidden].any()
    assert not gradients[0][hidden].any()
    assert all(np.isfinite(one).all() for one in gradients)


@pytest.mark.parametrize("name", ["cpu_flash", "blocked"])
def test_scores_of_10_000_are_finite(name):
    inputs = operands(queries=300, keys=300)
    for got in results([50 * inputs[0], 50 * inputs[1], inputs[2]], {"mask": masks.causal()}, name, "float32"):
        assert np.isfinite(got).all()


def test_rows_that_only_fill_a_block_up_give_no_gradient():
    """Their weights would be as large as the exponential of the bias."""
    inputs, options = operands(queries=130, keys=129), {"bias": np.where(np.arange(129) == 3, 100.0, 0.0)}
    found, want = (results(inputs, options, name, "float32") for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-4 * max(1.0, np.abs(wanted).max()))


def test_scores_of_minus_a_billion_in_a_row_have_gradients():
    """The way in which many models hide a row; adding a number to a row changes no gradient but rounds its scores."""
    inputs = operands(queries=130, keys=130)
    bias = np.zeros((1, 1, 130, 130))
    bias[:, :, 5] = bias[:, :, 129] = np.finfo("float32").min / 2
    found, want = (results(inputs, {"bias": bias}, name, "float32") for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-5 * np.abs(wanted).max())


KEYS = (jax.random.key(5), jax.random.PRNGKey(6))
"""A typed and a raw one."""


@cover.rotated(("name", "queries"), ["few_queries", "cpu_flash", "blocked", "reference"], [1, 140])
def test_a_query_of_nan_gives_nan(name, queries):
    query, key, value = arrays(queries=queries, keys=140)
    for sinks in (None, jnp.ones(4)):
        found = functional.dot_product_attention(
            query.at[0, 0].set(jnp.nan), key, value, sinks=sinks, implementation=name
        )
        assert np.isnan(found[0, 0]).all()
        assert not np.isnan(found[1]).any()


@cover.rotated(
    ("label", "key", "loops"),
    [(label, key) for key in KEYS for label in ("causal, more keys", "padding")],
    ["written out", "rolled"],
)
def test_dropout_drops_the_weights_that_the_reference_drops(label, key, loops, request):
    if loops == "rolled":
        request.getfixturevalue("rolled")
    sizes, choose = CASES[label]
    inputs, options = operands(**sizes), {**choose(0), "dropout": 0.3, "rng": key}
    found, want = (results(inputs, options, name, "float32") for name in ("blocked", "reference"))
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("make", [lambda: nnx.Rngs(7), lambda: nnx.Rngs(dropout=8).dropout], ids=["rngs", "stream"])
def test_dropout_counts_as_the_reference_does(make):
    inputs, (one, two) = arrays(), (make(), make())
    for _ in range(2):
        found, want = (
            functional.dot_product_attention(*inputs, dropout=0.4, rng=rng, implementation=name)
            for rng, name in ((one, "blocked"), (two, "reference"))
        )
        np.testing.assert_allclose(found, want, rtol=0.0, atol=1e-5)


def test_places_beyond_32_bits_have_their_own_dropout():
    words = jnp.asarray([1, 77_777, 2**32 - 1], jnp.uint32)
    for factor in (1, 300, 65_537, 2**31 + 12_345):
        high, low = block_operands.multiply(words, factor)
        whole = [int(word) * factor for word in words]
        assert [int(one) for one in high] == [one >> 32 for one in whole]
        assert [int(one) for one in low] == [one & 0xFFFFFFFF for one in whole]


@pytest.mark.parametrize("fast", ["cpu_flash", "blocked"])
def test_a_part_common_to_all_keys_costs_no_precision(fast):
    """Gradients of a row's scores add up to zero; what rounding leaves of that is multiplied with the common part."""
    ratios = []
    for seed in range(3):
        query, key, value, cotangent = (draw(1, 1024, 2, 16, seed=10 * seed + n) for n in range(4))
        key, value = (one + 4.0 * draw(16, seed=50 + 2 * seed + n) for n, one in enumerate((key, value)))
        held = [one.astype(np.float32) for one in (query, key, value, cotangent + 1.0)]

        def gradient(dtype: Any, name: str, held: list[np.ndarray] = held) -> np.ndarray:
            query, key, value, cotangent = (jnp.asarray(one, dtype) for one in held)

            def loss(query):
                options = {"mask": masks.causal(), "implementation": name}
                return (functional.dot_product_attention(query, key, value, **options) * cotangent).sum()

            return np.asarray(jax.grad(loss)(query), np.float64)

        with jax.enable_x64(True):
            exact = gradient(jnp.float64, "reference")
        errors = [np.square(gradient(jnp.float32, name) - exact).mean() ** 0.5 for name in (fast, "reference")]
        ratios.append(errors[0] / errors[1])
    assert np.mean(ratios) < 1.6, "of the reference, which adds up what it rounded; the context's gave 2 and more"
