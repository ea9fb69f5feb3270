"""An entry of a structured output is judged next to an array, or next to the same entry."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps

X = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)


@dataclasses.dataclass
class ModelOutput:
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]


class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return ModelOutput(self.head(hidden), (x, hidden))


class Flax(nnx.Module):
    def __init__(self, returned, factor=1.0):
        self.body, self.head = (nnx.Linear(6, width, rngs=nnx.Rngs(width)) for width in (6, 4))
        self.returned, self.factor = returned, factor

    def __call__(self, x):
        hidden = jnp.tanh(self.body(x))
        logits = self.head(hidden) * self.factor
        return {"alone": logits, "mapping": {"logits": logits, "loss": logits.sum()}, "hidden": hidden}[self.returned]


@pytest.mark.parametrize(
    ("returned", "output"), [("alone", "logits"), ("mapping", "logits"), ("hidden", "hidden_states.1")]
)
def test_the_picked_entry_is_judged_alone(returned, output):
    report = compare(Torch(), Flax(returned), X, output=output, seeds=1)
    assert report.verdict == "equal"
    assert [one.name for one in report.tensors if one.kind == "output"] == ["output"]
    assert any("head.weight" in one for one in report.unexercised) == (returned == "hidden")


def test_a_fault_in_the_picked_entry_is_placed():
    report = compare(Torch(), Flax("mapping", factor=1.01), X, output="logits", seeds=1)
    assert report.verdict == "different"
    assert "between head and the outputs" in str(report.first_divergence)


def test_structures_that_differ_name_the_entries_to_pick():
    with pytest.raises(ValueError, match=r"output=NAME \(--output NAME\) of logits, hidden_states"):
        compare(Torch(), Flax("alone"), X)
    with pytest.raises(ValueError, match=r"output \(logit\) must be one of .*: logits, hidden_states$"):
        compare(Torch(), Flax("alone"), X, output="logit")
    with pytest.raises(ValueError, match=r"output \(''\) must be the name of an entry"):
        compare(Torch(), Flax("alone"), X, output="")


def test_dumps_of_a_picked_entry_are_compared(tmp_path):
    dump(Torch(), X, tmp_path / "first", output="logits", seeds=1)
    dump(Flax("mapping"), X, tmp_path / "second", like=tmp_path / "first", output="logits")
    report = compare_dumps(tmp_path / "first", tmp_path / "second")
    assert (report.verdict, [one.name for one in report.tensors if one.kind == "output"]) == ("equal", ["output"])
