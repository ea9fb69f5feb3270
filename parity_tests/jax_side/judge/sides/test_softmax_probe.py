"""Probes of attention: a softmax by its log-sum-exp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_parity.frameworks.jax.subject import subject_of
from attn_parity.sides.function import Function
from attn_parity.sides.subject import Arguments

from .modules import NO_TABLES, UNIT, X, normal, relative


def by_hand(scores):
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_row(row):
    weights = jnp.exp(row - jax.lax.stop_gradient(row.max()))
    return weights / weights.sum()


SHOWN = np.arange(12) < 9
SOFTMAXES = {
    "jax.nn": jax.nn.softmax,
    "nnx": nnx.softmax,
    "by hand": by_hand,
    "row by row": lambda scores: jax.lax.map(by_row, scores),
    "jit": lambda scores: jax.jit(jax.nn.softmax)(scores),
    "vmap": jax.vmap(jax.nn.softmax),
    "checkpoint": lambda scores: jax.checkpoint(by_hand)(scores),
    "cond": lambda scores: jax.lax.cond(scores[0, 0] > 1e9, jnp.sin, by_hand, scores),
    "where": lambda scores: jax.nn.softmax(scores, where=SHOWN),
    "hidden": lambda scores: jax.nn.softmax(jnp.where(SHOWN, scores, -jnp.inf)),
    "zeroed": lambda scores: (
        jnp.where(SHOWN, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        / jnp.where(SHOWN, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0).sum(-1, keepdims=True)
    ),
    "dot_product_attention": None,
}


def attended(name):
    softmax = SOFTMAXES[name]
    if softmax is None:
        return lambda w, q, k, v: jax.nn.dot_product_attention(
            (q * w)[None, :, None], k[None, :, None], v[None, :, None], scale=0.25
        )[0, :, 0]
    return lambda w, q, k, v: softmax((q * w) @ k.T * 0.25) @ v


@pytest.mark.parametrize("name", sorted(set(SOFTMAXES) - {"zeroed"}))
def test_a_softmax_is_computed_from_its_log_sum_exp(name):
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(n, 16)).astype(np.float32) for n in (4, 12, 12))
    query, key = query * 6, key * 6  # scores of 50 and more
    subject, arguments = subject_of(Function(attended(name), jnp.ones(16))), Arguments((query, key, value))
    weights, cotangents = subject.weights(), [random.normal(size=(4, 16)).astype(np.float32)]
    exact = subject.run(weights, arguments, cotangents, dtype="float64")
    found = subject.run(weights, arguments, cotangents, mode="logsumexp")
    assert found.moved == 1
    largest = np.abs(query @ key.T).max() / 4
    assert largest > 50
    assert relative(found.outputs[0], exact.outputs[0]) < largest * UNIT
    for one, other in zip(found.input_gradients, exact.input_gradients, strict=True):
        assert relative(one, other) < 12 * largest * UNIT
    same = subject.run(weights, arguments, cotangents, mode="logsumexp", dtype="float64")
    assert relative(same.outputs[0], exact.outputs[0]) < 1e-13
    for one, other in zip(same.input_gradients, exact.input_gradients, strict=True):
        assert relative(one, other) < 1e-11


def test_the_log_sum_exp_loses_precision_with_its_size():
    """One key far ahead: the weights are 1 and nearly 0, and the plain formula loses next to nothing."""
    scores = (normal(64, 8) * 0.5 + 60.3).astype(np.float32)
    value = normal(8, 5)
    losses = {}
    for mode in ("eager", "logsumexp"):
        subject = subject_of(Function(lambda w, s, v: jax.nn.softmax(s * w) @ v, jnp.ones(8)))
        run = subject.run(subject.weights(), Arguments((scores, value)), [normal(64, 5)], mode=mode)
        exact = subject.run(subject.weights(), Arguments((scores, value)), dtype="float64")
        losses[mode] = relative(run.outputs[0], exact.outputs[0])
    assert losses["eager"] < 4 * UNIT
    assert 6 * UNIT < losses["logsumexp"] < 64 * UNIT


def test_other_uses_of_exp_and_sum_stay():
    def others(weights, x):
        exponentials = jnp.exp(x - x.max())
        wrong_rows = exponentials / exponentials.sum(0)[None, :, None][..., :4, :].reshape(1, 3, 4)[:, :, ::-1]
        return jax.nn.log_softmax(x * weights) + jax.nn.logsumexp(x, keepdims=True) + wrong_rows

    subject = subject_of(Function(others, jnp.ones(4)))
    run = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 4)], mode="logsumexp")
    plain = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 4)])
    assert run.moved == 0
    np.testing.assert_array_equal(run.outputs[0], plain.outputs[0])


@pytest.mark.parametrize("layer", ["attention"])
def test_stock_attention_is_found(layer):
    subject = subject_of(NO_TABLES[layer]())
    found = subject.run(subject.weights(), Arguments((X,)), [normal(2, 3, 4)], mode="logsumexp")
    assert found.moved == 1
