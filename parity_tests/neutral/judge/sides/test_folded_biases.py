"""A recurrent torch side whose two biases count as one: its weights, its calls and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.sides.folded import Fold, FoldedSubject, folds
from attn_parity.sides.subject import Run, SideWeight

BIASES = {"bias_ih_l0": np.arange(6, dtype=np.float32), "bias_hh_l0": np.float32([10, 20, 30, 40, 50, 60])}


def weight(owner="LSTM", framework="torch", size=6):
    return SideWeight((size,), "float32", owner, "", framework=framework)


class Plain:
    """A side that returns the weights it is called with as its gradients."""

    train = False

    def parameters(self):
        return {"weight": weight(), **{name: weight() for name in BIASES}}

    def weights(self):
        return {"weight": np.ones(2, np.float32), **{name: array.copy() for name, array in BIASES.items()}}

    def run(self, weights, *, gradients):
        self.last = dict(weights)
        return Run([], [], parameter_gradients=dict(weights) if gradients else {})


FOLDS = {"all": Fold("bias_hh_l0", "bias_ih_l0", 6), "GRU": Fold("bias_ih_l0", "bias_hh_l0", 4)}


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        ("LSTM", [Fold("bias_hh_l0", "bias_ih_l0", 6)]),
        ("RNNCell", [Fold("bias_hh_l0", "bias_ih_l0", 6)]),
        ("GRU", [Fold("bias_ih_l0", "bias_hh_l0", 4)]),
        ("Linear", []),
    ],
)
def test_biases_of_recurrent_layers_fold(owner, expected):
    assert folds({name: weight(owner) for name in BIASES}) == expected


def test_other_biases_do_not_fold():
    assert folds({name: weight(framework="flax") for name in BIASES}) == []
    assert folds({"bias_ih_l0": weight()}) == []
    assert folds({"rnn.bias_ih_l1_reverse": weight(), "rnn.bias_hh_l1_reverse": weight()}) == [
        Fold("rnn.bias_hh_l1_reverse", "rnn.bias_ih_l1_reverse", 6)
    ]


def test_sum_is_held_and_the_rest_stays():
    whole, part = (FoldedSubject(Plain(), [FOLDS[name]]) for name in ("all", "GRU"))
    assert whole.parameters().keys() == {"weight", "bias_hh_l0"}
    assert whole.weights()["bias_hh_l0"].tolist() == [10, 21, 32, 43, 54, 65]
    assert part.parameters()["bias_hh_l0"].shape == (2,)
    assert part.weights()["bias_ih_l0"].tolist() == [10, 21, 32, 43, 4, 5]
    assert part.weights()["bias_hh_l0"].tolist() == [50, 60]


@pytest.mark.parametrize("name", FOLDS)
def test_call_gets_both_biases_and_their_gradient_is_shared(name):
    plain = Plain()
    folded, fold = FoldedSubject(plain, [FOLDS[name]]), FOLDS[name]
    weights = folded.weights()
    run = folded.run(weights, gradients=True)
    assert plain.last.keys() == {"weight", *BIASES}
    np.testing.assert_array_equal(plain.last["bias_ih_l0"] + plain.last["bias_hh_l0"], sum(BIASES.values()))
    assert {key: array.tolist() for key, array in run.parameter_gradients.items()} == {
        key: array.tolist() for key, array in weights.items()
    }
    assert not plain.last[fold.folded][: fold.summed].any()
    assert folded.run(weights, gradients=False).parameter_gradients == {}


def test_mode_is_that_of_the_side():
    plain = Plain()
    folded = FoldedSubject(plain, [])
    folded.train = True
    assert plain.train
    assert folded.train
