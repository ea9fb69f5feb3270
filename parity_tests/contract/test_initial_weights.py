"""How the weights of a new module are distributed."""

from __future__ import annotations

import numpy as np

from . import backends
from .modules import MHA, seeded

backend = backends.fixture(backends.adapters("backend"))


def check_uniform(values: np.ndarray, low: float, high: float, tolerance: float) -> None:
    assert values.min() >= low
    assert values.max() <= high
    np.testing.assert_allclose(values.std(), (high - low) / 12**0.5, rtol=tolerance)
    np.testing.assert_allclose(values.mean(), (high + low) / 2, atol=tolerance * (high - low))


@seeded
def test_linear_layers_start_uniform_within_the_inverse_root_fan_in(backend, seed):
    module = backend.build(MHA, seed, d_in=64, d_out=512, context_length=4, num_heads=2, qkv_bias=True)
    for layer, fan_in in (("W_query", 64), ("W_key", 64), ("W_value", 64), ("out_proj", 512)):
        bound = np.float32(fan_in**-0.5)
        check_uniform(backend.parameter(module, f"{layer}.weight"), -bound, bound, 0.03)
        check_uniform(backend.parameter(module, f"{layer}.bias"), -bound, bound, 0.08)
    assert not np.array_equal(backend.parameter(module, "W_query.weight"), backend.parameter(module, "W_key.weight"))


@seeded
def test_bare_matrices_start_uniform_between_zero_and_one(backend, seed):
    module = backend.build("SelfAttention_v1", seed, d_in=64, d_out=512)
    matrices = [backend.parameter(module, name) for name in ("W_query", "W_key", "W_value")]
    for matrix in matrices:
        check_uniform(matrix, 0.0, 1.0, 0.03)
        assert matrix.max() < 1.0
    assert not np.array_equal(*matrices[:2])


def test_a_norm_starts_with_ones_and_zeros(backend):
    module = backend.build("LayerNorm", emb_dim=5)
    np.testing.assert_array_equal(backend.parameter(module, "scale"), np.ones(5, "float32"))
    np.testing.assert_array_equal(backend.parameter(module, "shift"), np.zeros(5, "float32"))
