"""Positions and numbers of documents in every integer dtype: differences must not wrap around, nor ids be cut."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge.masks import documents, full
from attn_bridge.specs import Alibi, GroupedQueryAttentionConfig, RelativeBias, Rotary
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


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("name", CONFIGS)
def test_positions_may_have_any_integer_dtype(backend, name, dtype):
    config = CONFIGS[name]
    module = backend.build("GroupedQueryAttention", config=config)
    backend.load(module, draw_weights(config, 0))
    module.eval()
    x = backend.as_argument(draw(2, 5, 8))
    found, wanted = (module(x, positions=backend.as_argument(POSITIONS.astype(kind))) for kind in (dtype, "int32"))
    arrays = (np.asarray(each.detach() if hasattr(each, "detach") else each) for each in (found, wanted))
    np.testing.assert_array_equal(*arrays)


@pytest.mark.parametrize("ids", [WIDE_IDS, WIDE_IDS.tolist(), WIDE_IDS.astype("uint64")])
def test_documents_with_numbers_of_64_bits_stay_apart(backend, ids):
    module, x = make(backend, "SelfAttention_v2"), draw(2, 4, D_IN)
    same = (WIDE_IDS[:, :, None] == WIDE_IDS[:, None])[:, None]
    found, wanted = (backend.run(module, x, mask)[0] for mask in (documents(ids), same))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
