"""What dropout of attention modules does: what it drops and scales, when, and which random numbers it takes."""

from __future__ import annotations

import numpy as np
import pytest

from ..support.calls.bad_calls import D_IN
from . import backends
from .modules import EYES, HEADS, MHA, WRAPPER, draw, every_causal, make, make_transparent

backend = backends.fixture(backends.adapters("backend"))


@pytest.mark.parametrize(("name", "rate"), [("CausalAttention", 0.25), (WRAPPER, 0.5), (MHA, 0.25)])
def test_training_drops_the_expected_share_and_scales_the_rest(backend, name, rate):
    (heads,) = HEADS.get(name, (1,))
    context, weights = backend.run_eagerly(make_transparent(backend, name, rate), EYES)
    batch, tokens, _ = context.shape
    left = context.reshape(batch, tokens, heads, tokens).transpose(0, 2, 1, 3)
    weights = weights.reshape(left.shape)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6, err_msg="weights come as they are before dropout")
    visible = np.broadcast_to(np.tri(tokens, dtype=bool), weights.shape)
    kept = left[visible] != 0
    np.testing.assert_allclose(left[visible][kept], weights[visible][kept] / (1 - rate), rtol=1e-5)
    assert abs(1 - kept.mean() - rate) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
    spread = (rate / (1 - rate) * (weights**2).sum(-1).mean() / (batch * heads * tokens)) ** 0.5
    assert abs(left.sum(-1).mean() - 1.0) < 5 * spread, "the mean is kept"
    last_rows = (left[:, :, -1] != 0).reshape(-1, tokens)
    assert len(np.unique(last_rows, axis=0)) == batch * heads, "every sequence and head draws for itself"


@every_causal
def test_evaluation_drops_nothing(backend, name):
    x = draw(2, 5, D_IN)
    module = make(backend, name, dropout=0.5)
    for one, two, plain in zip(
        *(backend.run_eagerly(each, x) for each in (module, module, make(backend, name))), strict=True
    ):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, plain)


@every_causal
def test_training_calls_differ_and_a_seed_repeats_them(backend, name):
    def call(seed, times):
        module = make_transparent(backend, name, 0.25, seed)
        return [backend.output_eagerly(module, EYES) for _ in range(times)]

    first, second = call(seed=7, times=2)
    np.testing.assert_array_equal(first, *call(seed=7, times=1))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, *call(seed=8, times=1))


@every_causal
@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.5, False)], ids=["rate zero", "evaluation"])
def test_without_dropout_no_random_number_is_drawn(backend, name, rate, training):
    module = make(backend, name, dropout=rate)
    module.train() if training else module.eval()
    before = backend.random_state(module)
    backend.output_eagerly(module, draw(2, 5, D_IN))
    assert backend.random_state(module) == before
