"""What `functional.dot_product_attention` computes, against its formula in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import backends
from .modules import draw, drop_uniform, seeded

backend = backends.fixture(backends.adapters("backend"))


def formula(query, key, value, *, mask=None, bias=0.0, scale=None, softcap=None, sinks=None):
    """Attention in NumPy: scaled, soft-capped, biased, masked; a sink is one more column, dropped after the softmax."""
    group = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, group, 2), np.repeat(value, group, 2)
    scores = np.einsum("bthd,bshd->bhts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(True if mask is None else mask, scores + bias, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))], -1)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (exponentials / exponentials.sum(-1, keepdims=True))[..., : key.shape[1]]
    return np.einsum("bhts,bshd->bthd", weights, value), weights


def operands(seed: int, dtype: Any = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 3 queries of 4 heads, 5 keys and values of 2 heads, values wider than keys; scores of several units."""
    return (
        3 * draw(2, 3, 4, 6, seed=seed, dtype=dtype),
        draw(2, 5, 2, 6, seed=seed + 10, dtype=dtype),
        draw(2, 5, 2, 7, seed=seed + 20, dtype=dtype),
    )


BIAS = draw(4, 3, 5, seed=3, dtype="float64")
MASK = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], bool) & np.array([1, 0], bool)[:, None, None, None]
MASK |= np.eye(3, 5, dtype=bool)
SINKS = np.array([0.5, -1.0, 2.0, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": BIAS},
    "mask": {"mask": MASK},
    "mask and bias": {"mask": MASK, "bias": BIAS[:, :1]},
    "sinks": {"sinks": SINKS},
    "all": {"mask": MASK, "bias": BIAS, "scale": 0.7, "softcap": 1.5, "sinks": SINKS},
}


@pytest.mark.parametrize("label", OPTIONS)
@seeded
def test_every_option_follows_the_formula(backend, label, seed):
    inputs = operands(seed)
    with backend.precision("float64"):
        result = backend.attend(*inputs, **OPTIONS[label], return_weights=True)
    for actual, wanted in zip(result, formula(*inputs, **OPTIONS[label]), strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-13)


def test_scores_are_capped_before_they_are_biased(backend):
    query, key, value = operands(0, "float32")
    bias = BIAS.astype("float32")
    weights = backend.attend(query, key, value, bias=bias, softcap=1.5, return_weights=True)[1]
    scores = np.einsum("bthd,bshd->bhts", query, np.repeat(key, 2, 2)) * 6**-0.5
    other_order = np.exp(1.5 * np.tanh((scores + bias) / 1.5))
    assert np.abs(weights - other_order / other_order.sum(-1, keepdims=True)).max() > 0.1


def test_shared_heads_are_the_heads_repeated(backend):
    query, key, value = operands(0, "float32")
    shared = backend.attend(query, key, value, return_weights=True)
    repeated = backend.attend(query, np.repeat(key, 2, 2), np.repeat(value, 2, 2), return_weights=True)
    for one, two in zip(shared, repeated, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def test_sinks_get_a_gradient(backend):
    *_, of_sinks = backend.attend_gradients(*operands(0, "float32"), sinks=SINKS.astype("float32"))
    assert (np.abs(of_sinks) > 1e-4).all()


@pytest.mark.parametrize(
    ("hidden_by", "sinks"),
    [("bias", None), ("mask", None), ("bias", SINKS.astype("float32"))],
    ids=["bias", "mask", "bias with sinks"],
)
def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(backend, hidden_by, sinks):
    inputs = operands(0, "float32")
    bias = np.zeros((1, 4, 3, 5), "float32")
    bias[0, 1, 2] = -np.inf
    options = {"bias": bias} if hidden_by == "bias" else {"mask": bias == 0}
    context, weights = backend.attend(*inputs, **options, sinks=sinks, return_weights=True)
    assert not weights[:, 1, 2].any()
    assert not context[:, 2, 1].any()
    found = backend.attend_gradients(*inputs, **options, sinks=sinks)
    assert all(np.isfinite(gradient).all() for gradient in found)
    assert not found[0][:, 2, 1].any()
    assert found[0][:, 2, 0].any()


def test_scores_of_ten_thousand_give_no_nan(backend):
    query, key, value = operands(0, "float32")
    query *= np.float32(1e4)
    context, weights = backend.attend(query, key, value, return_weights=True)
    assert np.isfinite(context).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in backend.attend_gradients(query, key, value))


def test_a_nan_is_not_taken_for_a_hidden_row(backend):
    query, key, value = operands(0, "float32")
    query[0, 1, 2] = np.nan
    context, weights = backend.attend(query, key, value, return_weights=True)
    assert np.isnan(weights[0, 2, 1]).all()
    assert np.isnan(context[0, 1, 2]).all()
    assert np.isnan(weights).sum() == weights.shape[-1]


def test_softmax_of_half_precision_runs_in_single(backend):
    inputs = [array.astype("float16") for array in operands(0, "float32")]
    exact = formula(*(array.astype("float64") for array in inputs))[1]
    weights = backend.attend(*inputs, return_weights=True)[1]
    assert weights.dtype == np.float16
    np.testing.assert_allclose(weights, exact, rtol=2**-10, atol=2**-24)


def test_an_implementation_can_be_forced_by_name(backend):
    inputs = operands(0, "float32")
    reasons = backend.unavailable(*inputs)
    assert tuple(reasons) == backend.package.functional.IMPLEMENTATIONS
    for name, reason in reasons.items():
        if reason is None:
            np.testing.assert_allclose(
                backend.attend(*inputs, implementation=name), backend.attend(*inputs), rtol=0, atol=1e-6
            )
        else:
            with pytest.raises(NotImplementedError) as caught:
                backend.attend(*inputs, implementation=name)
            assert str(caught.value) == f"implementation {name!r} does not support this call: {reason}"


def test_the_random_source_decides_what_is_dropped(backend):
    one, other, again = (drop_uniform(backend, 0.25, backend.source(seed)) for seed in (1, 2, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert abs((one == 0).mean() - 0.25) < 5 * (0.25 * 0.75 / one.size) ** 0.5
    np.testing.assert_allclose(one[one != 0], 1 / 24 / 0.75, rtol=1e-6)


def test_a_random_source_moves_on_from_call_to_call(backend):
    rng = backend.source(1)
    assert not np.array_equal(drop_uniform(backend, 0.25, rng), drop_uniform(backend, 0.25, rng))


def test_rate_zero_leaves_the_random_source_alone(backend):
    rng = backend.source(1)
    before = backend.source_state(rng)
    np.testing.assert_allclose(drop_uniform(backend, 0.0, rng), 1 / 24, rtol=1e-6)
    assert backend.source_state(rng) == before
