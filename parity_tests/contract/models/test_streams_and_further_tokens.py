"""Hyper-connections and blocks that predict further tokens: the formula, refusals and caches, in every backend."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge.backends import as_numpy
from attn_bridge.reference import hyper_connection as reference
from attn_bridge.specs import (
    DecoderBlockConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    HyperConnectionConfig,
    LayerNormConfig,
    TokenPredictionConfig,
)

from .. import backends

backend = backends.fixture(backends.adapters("backend"))

STREAMS = HyperConnectionConfig(6, 3, iterations=2, eps=0.05, norm_eps=0.2)
BLOCK = DecoderBlockConfig(
    GroupedQueryAttentionConfig(8, 8, 2), FeedForwardConfig(8, 12, "gelu", gated=False, bias=True), LayerNormConfig(8)
)


def drawn(config, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {row.rule.torch: random.normal(size=row.shape).astype("f4") for row in config.parameters}


def connection(backend, config):
    arrays = drawn(config)
    module = backend.build("HyperConnection", config=config)
    backend.load(module, arrays)
    return module, arrays


@pytest.mark.parametrize("config", [STREAMS, STREAMS.replace(iterations=1), STREAMS.replace(streams=1)], ids=str)
@pytest.mark.parametrize("shape", [(2, 4), (3,), ()], ids=str)
def test_a_connection_reads_and_writes_streams_as_its_formula(backend, config, shape):
    module, arrays = connection(backend, config)
    random = np.random.default_rng(1)
    streams = random.normal(size=(*shape, config.streams, 6)).astype("f4")
    output = random.normal(size=(*shape, 6)).astype("f4")
    parts = module.read(backend.as_argument(streams))
    expected = reference.read(config, arrays, streams)
    for part, right in zip(parts, expected, strict=True):
        np.testing.assert_allclose(as_numpy(part), right, rtol=0, atol=1e-5)
    written = module.write(backend.as_argument(streams), backend.as_argument(output), *parts[1:])
    right = reference.write(streams, output, *expected[1:])
    np.testing.assert_allclose(as_numpy(written), right, rtol=0, atol=1e-5 * np.abs(right).max())


def test_the_last_connection_reads_alone(backend):
    config = STREAMS.replace(writes=False)
    module, arrays = connection(backend, config)
    streams = np.random.default_rng(1).normal(size=(2, 4, 3, 6)).astype("f4")
    x, shares, mixing = module.read(backend.as_argument(streams))
    np.testing.assert_allclose(as_numpy(x), reference.read(config, arrays, streams)[0], rtol=0, atol=1e-5)
    assert shares is None
    assert mixing is None


def test_many_iterations_make_rows_and_columns_sum_to_one(backend):
    module, _ = connection(backend, HyperConnectionConfig(6, 3, iterations=200))
    streams = np.random.default_rng(2).normal(size=(5, 3, 6)).astype("f4")
    mixing = as_numpy(module.read(backend.as_argument(streams))[2])
    for axis in (-1, -2):
        np.testing.assert_allclose(mixing.sum(axis), 1.0, rtol=0, atol=1e-4)
    assert np.abs(mixing - 1 / 3).max() > 0.2


@pytest.mark.parametrize("shape", [(2, 6), (2, 4, 6), (3, 5)], ids=str)
def test_other_streams_are_refused(backend, shape):
    module, _ = connection(backend, STREAMS)
    with pytest.raises(ValueError, match=r"^streams must have shape \(\.\.\., 3, 6\) by streams and emb_dim, got \("):
        module.read(backend.as_argument(np.zeros(shape, "f4")))
    with pytest.raises(TypeError, match=r"^streams must have a floating-point dtype, got int32$"):
        module.read(backend.as_argument(np.zeros((3, 6), "i4")))


def prediction(backend):
    config = TokenPredictionConfig(BLOCK)
    arrays = drawn(config)
    module = backend.build("TokenPrediction", config=config)
    backend.load(module, arrays)
    return module, arrays


def states_and_tokens() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.normal(size=(2, 5, 8)).astype("f4") for _ in range(2)]


def test_states_and_following_tokens_go_through_the_block(backend):
    module, arrays = prediction(backend)
    states, following = states_and_tokens()
    normed = [backend.output(norm, x) for norm, x in ((module.token_norm, following), (module.state_norm, states))]
    expected = backend.output(module.trf_block, np.concatenate(normed, -1) @ arrays["projection.weight"].T)
    got = module(backend.as_argument(states), backend.as_argument(following))
    np.testing.assert_allclose(as_numpy(got), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_cached_predictions_are_those_of_the_full_pass(backend):
    module, _ = prediction(backend)
    states, following = states_and_tokens()
    full = as_numpy(module(backend.as_argument(states), backend.as_argument(following)))
    cache, parts = module.init_cache(2, 5), []
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        got, cache = module(backend.as_argument(states[:, part]), backend.as_argument(following[:, part]), cache=cache)
        parts.append(as_numpy(got))
    np.testing.assert_allclose(np.concatenate(parts, 1), full, rtol=0, atol=1e-5 * np.abs(full).max())


def test_tokens_of_another_shape_are_refused(backend):
    module, _ = prediction(backend)
    states, following = states_and_tokens()
    with pytest.raises(ValueError, match=r"^following \(2, 4, 8\) must have the shape of x \(2, 5, 8\)$"):
        module(backend.as_argument(states), backend.as_argument(following[:, 1:]))
