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


class Heads(nn.Module):
    """Returns two outputs of one shape, and their mean squares, which may be exchanged or scaled."""

    def __init__(self, *, order=(0, 1), weight=1.0):
        super().__init__()
        self.inner, self.order, self.weight = nn.Linear(6, 8), order, weight

    def forward(self, x):
        halves = self.inner(x).chunk(2, -1)
        loss = (halves[0] - halves[1]).square().mean()
        return halves[self.order[0]], halves[self.order[1]], loss * self.weight, loss


@pytest.mark.parametrize("fault", [{"order": (1, 0)}, {"weight": 0.25}], ids=str)
def test_outputs_of_the_whole_are_compared_in_their_order(fault):
    torch.manual_seed(0)
    first = compare(Heads(), Heads(**fault), X, seeds=1).first_divergence
    assert str(first).startswith("first divergence (forward) between inner and the outputs: ")


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
