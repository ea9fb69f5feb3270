"""Layers that hold some of the heads, as those of a device under tensor parallelism do, compute just those heads."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import specs

from .. import backends, modules

backend = backends.fixture(backends.adapters("backend"))

CASES = {
    "MultiHeadAttention": {"d_in": 4, "d_out": 8, "context_length": 5, "num_heads": 4},
    "GroupedQueryAttention": {"config": specs.GroupedQueryAttentionConfig(4, 4, 2, 2, position=specs.Rotary())},
    "CrossAttention": {"config": specs.CrossAttentionConfig(4, 4, num_kv_heads=2, head_dim=2)},
    "LinearAttention": {"config": specs.LinearAttentionConfig(4, 4, head_dim=2, value_head_dim=6)},
    "MultiHeadLatentAttention": {"config": specs.MultiHeadLatentAttentionConfig(4, 4, 3, 4, 2, 2)},
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_of_halves_of_the_heads_add_up(backend, name):
    x, options = backend.as_argument(modules.draw(2, 5, 4)), {}
    if name == "CrossAttention":
        options["context"] = backend.as_argument(modules.draw(2, 6, 4, seed=1))

    def output(half=None):
        module = backend.build(name, **CASES[name])
        weights = modules.draw_weights(module.config, 0)
        if "out_proj.bias" in weights:  # each half would add it
            weights["out_proj.bias"][:] = 0.0
        backend.load(module, weights)
        module.eval()
        if half is not None:
            for layer in (module.W_query, module.W_key, module.W_value):
                backend.halve(layer, half, "outputs")
            backend.halve(module.out_proj, half, "inputs")
        found = module(x, **options)
        return np.asarray(found.detach() if hasattr(found, "detach") else found)

    expected = output()
    np.testing.assert_allclose(output(0) + output(1), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
