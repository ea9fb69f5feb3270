"""Beside an allowed difference, another one is found and placed in its direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_bridge.parity import compare

X = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)


class Normed(nn.Module):
    """A norm and a layer, whose output may be scaled or lose half of its gradient."""

    def __init__(self, eps, gain=1.0, kept=1.0):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(6, eps=eps), nn.Linear(6, 6)
        self.gain, self.kept = gain, kept

    def forward(self, x):
        x = self.out(self.norm(x)) * self.gain
        return x * self.kept + x.detach() * (1 - self.kept)


@pytest.mark.parametrize(
    ("fault", "direction"), [({}, None), ({"gain": 1.001}, "forward"), ({"kept": 0.5}, "backward")], ids=str
)
def test_a_difference_beside_an_allowed_one_has_its_direction(fault, direction):
    torch.manual_seed(0)
    report = compare(Normed(1e-5), Normed(1e-6, **fault), X, seeds=1, allow={"norm": "another eps on purpose"})
    assert [one.path for one in report.allowed] == ["norm"]
    assert report.verdict == ("equal" if direction is None else "different")
    assert (report.first_divergence and report.first_divergence.direction) == direction
