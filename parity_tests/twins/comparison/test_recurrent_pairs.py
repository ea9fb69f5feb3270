"""torch's recurrent layers, which add two biases, beside Flax's cells, which hold the sum."""

from __future__ import annotations

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import Rule, WeightsMismatchError
from attn_bridge.parity import compare

X = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
RNGS = nnx.Rngs(0)


class Recurrent(nn.Module):
    """A layer and a head."""

    def __init__(self, layer, **options):
        super().__init__()
        self.rnn = layer(4, 3, batch_first=True, **options)
        self.head = nn.Linear(3 * (1 + self.rnn.bidirectional), 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class LinenPort(linen.Module):
    """Its port to Linen: cells by direction."""

    cell: type
    both: bool = False
    turned: bool = False

    @linen.compact
    def __call__(self, x):
        found = [linen.RNN(self.cell(3), reverse=self.turned, keep_order=True, name="ahead")(x)]
        if self.both:
            found.append(linen.RNN(self.cell(3), reverse=True, keep_order=True, name="back")(x))
        return linen.Dense(2, name="head")(jnp.concatenate(found, -1))


class NNXPort(nnx.Module):
    """Its port to NNX."""

    def __init__(self, cell):
        self.rnn = nnx.RNN(cell(4, 3, rngs=RNGS), rngs=RNGS)
        self.head = nnx.Linear(3, 2, rngs=RNGS)

    def __call__(self, x):
        return self.head(self.rnn(x))


def bound(port):
    return port, port.init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("layer", "cell"),
    [
        (nn.LSTM, linen.LSTMCell),
        pytest.param(nn.LSTM, linen.OptimizedLSTMCell, marks=pytest.mark.full),
        (nn.GRU, linen.GRUCell),
        pytest.param(nn.RNN, linen.SimpleCell, marks=pytest.mark.full),
    ],
)
def test_a_linen_cell_with_one_bias_equals_two_biases(layer, cell):
    first, second = Recurrent(layer), bound(LinenPort(cell))
    held = {name: one.clone() for name, one in first.state_dict().items()}
    report = compare(first, second, X, seeds=1).raise_for_mismatch()
    assert any("judged as their sum (rnn.bias_" in note for note in report.notes)
    assert all(torch.equal(one, held[name]) for name, one in first.state_dict().items())
    assert compare(second, first, X, seeds=1).verdict == "equal"  # the other way round
    wrong = compare(first, bound(LinenPort(cell, turned=True)), X, seeds=1)
    assert (wrong.verdict, wrong.first_divergence.path) == ("different", "rnn")


def test_both_directions_are_folded():
    report = compare(Recurrent(nn.LSTM, bidirectional=True), bound(LinenPort(linen.LSTMCell, both=True)), X, seeds=1)
    assert report.verdict == "equal"
    assert any("rnn.bias_ih_l0_reverse to rnn.bias_hh_l0_reverse" in note for note in report.notes)


def test_only_the_sum_of_both_biases_matches():
    first, port = Recurrent(nn.LSTM), NNXPort(nnx.LSTMCell)
    held = {name: one.detach().numpy() for name, one in first.named_parameters()}
    bias = held["rnn.bias_ih_l0"] + held["rnn.bias_hh_l0"]
    for k, gate in enumerate(("i", "f", "g", "o")):
        rows = slice(3 * k, 3 * k + 3)
        getattr(port.rnn.cell, "if_" if gate == "f" else f"i{gate}").kernel[...] = held["rnn.weight_ih_l0"][rows].T
        getattr(port.rnn.cell, f"h{gate}").kernel[...] = held["rnn.weight_hh_l0"][rows].T
        getattr(port.rnn.cell, f"h{gate}").bias[...] = bias[rows]
    port.head.kernel[...], port.head.bias[...] = held["head.weight"].T, held["head.bias"]
    assert compare(first, port, X, seeds=1, transfer=False).verdict == "equal"
    port.rnn.cell.hi.bias[...] = held["rnn.bias_hh_l0"][:3]  # the other one is forgotten
    assert compare(first, port, X, seeds=1, transfer=False).verdict == "different"


def test_rules_that_name_both_biases_are_kept_to():
    rules = [Rule(torch="rnn.bias_ih_l0", drop="zero")]
    with torch.no_grad():
        (first := Recurrent(nn.LSTM)).rnn.bias_ih_l0.zero_()
    report = compare(first, bound(LinenPort(linen.OptimizedLSTMCell)), X, seeds=1, rules=rules)
    assert not any("judged as their sum" in note for note in report.notes)


def test_layers_that_folding_does_not_fit_are_listed():
    with pytest.raises(WeightsMismatchError, match="bias_ih_l0") as caught:
        compare(Recurrent(nn.LSTM, num_layers=2), bound(LinenPort(linen.LSTMCell)), X, seeds=1)
    assert "weight_ih_l1" in str(caught.value)
