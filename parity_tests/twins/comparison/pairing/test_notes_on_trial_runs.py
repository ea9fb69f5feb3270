"""A report names the layers that trial runs alone told apart, if a side has words for which of them is which."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

X = np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
NOTE = "paired by trial runs alone, as names do not: "


class Gated(nn.Module):
    def __init__(self, gate: str, up: str):
        super().__init__()
        self.names = gate, up
        for name in self.names:
            self.add_module(name, nn.Linear(6, 6))

    def forward(self, x):
        gate, up = (getattr(self, name)(x) for name in self.names)
        return nn.functional.silu(gate) * up


class OtherGated(nnx.Module):
    """The same; a port with a fault gives the names in the other order."""

    def __init__(self, gate: str, up: str):
        self.names = gate, up
        for name in sorted(self.names):
            setattr(self, name, nnx.Linear(6, 6, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        gate, up = (getattr(self, name)(x) for name in self.names)
        return jax.nn.silu(gate) * up


@pytest.mark.parametrize(
    ("ours", "theirs", "pairs"),
    [
        (("w1", "w3"), ("up_proj", "gate_proj"), "w1 = up_proj, w3 = gate_proj;"),
        (("wi_0", "wi_1"), ("wi_up", "wi_gate"), "wi_0 = wi_up, wi_1 = wi_gate;"),
        (("wi_0", "wi_1"), ("fc1", "fc2"), ""),
    ],
)
def test_layers_with_words_that_trial_runs_alone_told_apart_are_named(ours, theirs, pairs):
    torch.manual_seed(0)
    report = compare(Gated(*ours), OtherGated(*theirs), X, seeds=1)
    assert report.verdict == "equal"
    notes = [note for note in report.notes if note.startswith(NOTE)]
    assert len(notes) == bool(pairs)
    assert all(note.startswith(NOTE + pairs) for note in notes)
