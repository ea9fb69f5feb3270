"""Positions, ids, labels and documents in every integer dtype: no difference wraps around, and no id is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attn_bridge.masks import causal, documents, full
from attn_bridge.specs import (
    Alibi,
    DecoderBlockConfig,
    DecoderConfig,
    FeedForwardConfig,
    GroupedQueryAttentionConfig,
    LayerNormConfig,
    RelativeBias,
    Rotary,
)
from attn_bridge.specs.grouped_query_attention import Temperature

from ...support.calls.bad_calls import D_IN
from .. import backends
from ..modules import draw, draw_weights, make

backend = backends.fixture(backends.adapters("backend"))

CONFIGS = {
    "rotary": GroupedQueryAttentionConfig(8, 2, position=Rotary()),
    "alibi": GroupedQueryAttentionConfig(8, 2, position=Alibi(), mask=full()),
    "relative bias": GroupedQueryAttentionConfig(8, 2, position=RelativeBias(6, 5, bidirectional=True), mask=full()),
    "temperature": GroupedQueryAttentionConfig(8, 2, temperature=Temperature(0.7, 2, 1)),
}
POSITIONS = np.array([[0, 1, 2, 3, 4], [3, 7, 20, 126, 127]], "int32")
WIDE_IDS = np.array([[7, 7, 7 + 2**32, 7 + 2**32], [2**40, 2**41, 2**41, -1]])


DTYPES = ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"]


def numbers(array):
    return np.asarray(array.detach() if hasattr(array, "detach") else array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_positions_may_have_any_integer_dtype(backend, name, dtype):
    config = CONFIGS[name]
    module = backend.build("GroupedQueryAttention", config=config)
    backend.load(module, draw_weights(config, 0))
    module.eval()
    x = backend.as_argument(draw(2, 5, 8))
    found, wanted = (module(x, positions=backend.as_argument(POSITIONS.astype(kind))) for kind in (dtype, "int32"))
    np.testing.assert_array_equal(numbers(found), numbers(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [200, 256, 300])
def test_ids_and_labels_may_have_any_integer_dtype(backend, vocabulary, dtype):
    block = DecoderBlockConfig(
        GroupedQueryAttentionConfig(8, 2, position=Rotary()), FeedForwardConfig(8, 12), LayerNormConfig(8)
    )
    model = backend.build("DecoderModel", config=DecoderConfig(vocabulary, 8, (block,), LayerNormConfig(8)))
    model.eval()
    ids = np.array(
        [[0, 1, 99, 127, 44]] if dtype == "int8" else [[0, 156, 199, 127, 44]], "int32"
    )  # 156: -100 in uint8
    np.testing.assert_array_equal(backend.output(model, ids.astype(dtype)), backend.output(model, ids))
    given = [backend.as_argument(ids.astype(kind)) for kind in (dtype, "int32")]
    losses = [model(each, labels=each)[0] for each in given]
    np.testing.assert_array_equal(*map(numbers, losses))


@pytest.mark.parametrize("ids", [WIDE_IDS, WIDE_IDS.tolist(), WIDE_IDS.astype("uint64")])
def test_documents_with_numbers_of_64_bits_stay_apart(backend, ids):
    module, x = make(backend, "SelfAttention_v2"), draw(2, 4, D_IN)
    same = (WIDE_IDS[:, :, None] == WIDE_IDS[:, None])[:, None]
    found, wanted = (backend.run(module, x, mask)[0] for mask in (documents(ids), same))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["alibi", "relative bias"])
def test_positions_of_32_bits_may_be_as_far_apart_as_they_can(backend, name, cached):
    # Later keys would have a bias that leaves no digits for the scores.
    config, x = dataclasses.replace(CONFIGS[name], mask=causal()), backend.as_argument(draw(1, 4, 8))
    module = backend.build("GroupedQueryAttention", config=config)
    backend.load(module, draw_weights(config, 0))
    module.eval()
    far, near = (np.array([-size, 0, size - 1, size - 1], "int32") for size in (2**31, 10**6))

    def run(positions):
        at = backend.as_argument(positions)
        if not cached:
            return numbers(module(x, positions=at))
        cache = module.init_cache(1, 4)
        _, cache = module(x[:, :3], positions=at[:3], cache=cache)
        return numbers(module(x[:, 3:], positions=at[3:], cache=cache)[0])

    # Keys that far have no weight, or share the last bucket, as nearer ones do.
    np.testing.assert_array_equal(run(far), run(near))
