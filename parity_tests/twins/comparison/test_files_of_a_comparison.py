"""How many files of the judge a small comparison passes through: who reads one has to read that many."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from flax import nnx

import attn_parity
from attn_bridge.parity import compare

MOST = 50
ROOM = str(Path(attn_parity.__file__).parent)
X = np.random.default_rng(0).standard_normal((2, 7, 16)).astype(np.float32)


def compare_norms() -> str:
    flax_norm = nnx.LayerNorm(16, rngs=nnx.Rngs(0), epsilon=1e-5)
    return str(compare(torch.nn.LayerNorm(16), flax_norm, X, seeds=2))


def test_comparing_two_norms_passes_through_few_files():
    assert compare_norms().startswith("equal")  # modules are imported, and decorators have run
    files: set[str] = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            files.add(frame.f_code.co_filename.removeprefix(ROOM))

    sys.setprofile(note)
    try:
        compare_norms()
    finally:
        sys.setprofile(None)
    assert 30 < len(files) <= MOST, sorted(files)
