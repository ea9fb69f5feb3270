"""Decoding on a mesh: the tokens of the plain model, and through caches that devices share its logits."""

from __future__ import annotations

import pytest

from .processes.mesh_generation import generated

CASES = ["DecoderModel", "DecoderModel experts", "DecoderModel hybrid"]


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize("sizes", [{"tensor": 2, "context": 2}, {"tensor": 2, "fsdp": 2}], ids=str)
def test_a_sharded_model_decodes_like_the_plain_one(framework, sizes):
    for of_rank in generated(framework, sizes, CASES):
        assert list(of_rank) == CASES
        for name, one in of_rank.items():
            assert one.sharded == one.plain, name
            assert len(set(map(tuple, one.plain))) > 1, name
            assert one.apart <= 1e-12, name
