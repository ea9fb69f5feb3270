"""Of parts that code adds up, the one that differs is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge.parity import compare

X = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)


class Block(nn.Module):
    """Adds its input and the activation of a layer, each times a factor, in front of another layer."""

    def __init__(self, kept=1.0, gain=1.0):
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept, self.gain = kept, gain

    def forward(self, x):
        return self.last(x * self.kept + torch.tanh(self.inner(x)) * self.gain)


@pytest.mark.parametrize(
    ("factors", "place"),
    [
        ({"kept": 1.01}, "between the inputs and last"),
        ({"gain": 1.01}, "between inner and last"),
        ({"kept": 1.01, "gain": 0.98}, "between inner and last"),
    ],
    ids=str,
)
def test_the_part_of_a_sum_that_differs_is_named(factors, place):
    torch.manual_seed(0)
    first = compare(Block(), Block(**factors), X, seeds=1).first_divergence
    assert str(first).startswith(f"first divergence (forward) {place}: ")
    assert ("not excluded" in str(first)) == ("kept" in factors)
