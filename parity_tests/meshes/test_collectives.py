"""How often devices speak to each other: counted in the compiled program (JAX) and as operations run (torch)."""

from __future__ import annotations

import pytest

from .processes.mesh_counts import counts

BOTH = pytest.mark.parametrize("framework", ["torch", "flax"])


@BOTH
def test_attention_whose_heads_devices_share_reduces_once_and_gathers_nothing(framework):
    assert counts(framework, {"tensor": 4}, "all_gather", "MultiHeadAttention shared") == {"all-reduce": 1}


@BOTH
def test_a_block_reduces_twice_and_gathers_no_weight(framework):
    found = counts(framework, {"tensor": 2}, "all_gather", "DecoderModel")
    # Two blocks, and the rows of the table of tokens, which each device has some of.
    assert found == {"all-reduce": 5}


def test_a_ring_moves_keys_and_values_devices_minus_one_times():
    found = counts("flax", {"context": 4}, "ring", "GroupedQueryAttention llama")
    assert found["collective-permute"] == 2 * (4 - 1)
    assert "all-gather" not in found
