"""Descriptions that hold arrays mean the same in every implementation of both frameworks as the bool array they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_attn
import torch_attn
from attn_bridge import masks

RANDOM = np.random.default_rng(0)
IDS = np.sort(RANDOM.integers(0, 4, size=(2, 150)), 1)
MASKS = {
    "documents": masks.causal() & masks.documents(IDS),
    "documents after 60": (masks.causal() & masks.documents(IDS)).offset(60),
    "padding": masks.sliding_window(20) & masks.padding([150, 70]),
    "blocks": masks.block_causal(40).offset(30) & masks.padding([120, 150]),
    "diffusion": masks.block_diffusion(20, 75) & masks.padding([150, 130]),
    "tree": masks.tree(RANDOM.integers(-1, np.arange(100)), 50).offset(55),
    "chunks or prefix": masks.chunked(40) | (masks.prefix(9) & masks.padding([100, 120])),
}
QUERY, KEY, VALUE = (RANDOM.normal(size=shape) for shape in ((2, 90, 4, 8), (2, 150, 2, 8), (2, 150, 2, 8)))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_every_implementation_reads_the_same_mask(name, framework):
    mask = MASKS[name]
    array = mask.allowed(np.arange(90)[:, None], np.arange(150)[None, :])
    assert 0 < array.mean() < 1
    with jax.enable_x64(True), torch.no_grad():
        functional, cast = {
            "torch": (torch_attn.functional, torch.from_numpy),
            "flax": (jax_attn.functional, jnp.asarray),
        }[framework]
        operands = [cast(one) for one in (QUERY, KEY, VALUE)]
        want = functional.dot_product_attention(*operands, mask=cast(array.copy()), implementation="reference")
        for one, reason in functional.explain(*operands, mask=mask).items():
            if reason is None or reason.startswith("more than"):
                got = functional.dot_product_attention(*operands, mask=mask, implementation=one)
                np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-13)
