"""A model whose outputs have a number for each two rows of the batch, as a contrastive one has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge import parity


class Contrastive(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(6, 4), nn.Linear(5, 4), scale

    def forward(self, images, texts):
        logits = self.scale * self.image(images) @ self.text(texts).T
        return nn.functional.cross_entropy(logits, torch.arange(len(logits))), logits


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "equal"), (1.01, "different")])
def test_pairs_of_rows_are_judged_with_any_number_of_rows(rows, scale, verdict):
    random = np.random.default_rng(0)
    inputs = [random.normal(size=(rows, width)).astype(np.float32) for width in (6, 5)]
    first, second = Contrastive().eval(), Contrastive(scale).eval()
    assert parity.compare(first, second, inputs).verdict == verdict
