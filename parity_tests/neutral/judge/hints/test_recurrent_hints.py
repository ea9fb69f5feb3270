"""Hints about LSTMs, GRUs and RNNs: exchanged gates, states that go another way, in every layout of weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attn_parity.hints import Evidence, hint_for
from attn_parity.hints.recurrent import LONGEST, read

RANDOM = np.random.default_rng(3)
D, H, T, B = 3, 4, 5, 2


def draw(*shape):
    return RANDOM.normal(size=shape)


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


def lstm(w, u, b, x, order="ifgo", forget=0.0):
    """Run an LSTM by the formula; `order` says what each quarter of the weights is used as."""
    h = c = np.zeros((x.shape[0], H))
    out = []
    for t in range(x.shape[1]):
        parts = dict(zip(order, np.split(x[:, t] @ w.T + h @ u.T + b, 4, -1), strict=True))
        c = sigmoid(parts["f"] + forget) * c + sigmoid(parts["i"]) * np.tanh(parts["g"])
        h = sigmoid(parts["o"]) * np.tanh(c)
        out.append(h)
    return np.stack(out, 1)


def gru(w, u, b, x, kept_bias, wrong=""):
    """Run torch's GRU by the formula."""
    h = np.zeros((x.shape[0], H))
    out = []
    for t in range(x.shape[1]):
        given, kept = np.split(x[:, t] @ w.T + b, 3, -1), np.split(h @ u.T + kept_bias, 3, -1)
        r, z = sigmoid(given[0] + kept[0]), sigmoid(given[1] + kept[1])
        if wrong == "exchanged":
            r, z = z, r
        added = (r * h) @ u[2 * H :].T + kept_bias[2 * H :] if wrong == "before" else r * kept[2]
        n = np.tanh(given[2] + added)
        h = (1 - z) * h + z * n if wrong == "turned" else (1 - z) * n + z * h
        out.append(h)
    return np.stack(out, 1)


W, U, BIAS, X = draw(4 * H, D), draw(4 * H, H), draw(4 * H), draw(B, T, D)
TORCH = {"rnn.weight_ih_l0": W, "rnn.weight_hh_l0": U, "rnn.bias_ih_l0": BIAS * 0.25, "rnn.bias_hh_l0": BIAS * 0.75}
PARTS = list(zip("ifgo", np.split(W, 4), np.split(U, 4), np.split(BIAS, 4), strict=True))
LAYOUTS = {
    "torch": TORCH,
    "parts of torch's": {
        name: array
        for gate, w, u, b in PARTS
        for name, array in (
            (f"rnn.weight_ih_l0[i{gate}]", w), (f"rnn.weight_hh_l0[h{gate}]", u), (f"rnn.bias_hh_l0[h{gate}]", b),
        )
    },
    "nnx": {
        name: array
        for gate, w, u, b in PARTS
        for name, array in (
            (f"cell.i{gate}.kernel".replace("if.", "if_."), w.T),
            (f"cell.h{gate}.kernel", u.T),
            (f"cell.h{gate}.bias", b),
        )
    },
    "fused kernels": {"cell.dense_i.kernel": W.T, "cell.dense_h.kernel": U.T, "cell.dense_h.bias": BIAS},
    "by hand": {"cell.x.kernel": W.T, "cell.h.kernel": U.T, "cell.h.bias": BIAS},
}  # fmt: skip


def hint(one, two, weights, *inputs):
    return hint_for(Evidence(inputs=inputs or (X,), first_outputs=[one], second_outputs=[two], first_weights=weights))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gates", [*itertools.combinations("ifgo", 2)])
def test_two_gates_that_are_exchanged_are_named(layout, gates):
    order = "ifgo".translate(str.maketrans("".join(gates), "".join(gates[::-1])))
    found = hint(lstm(W, U, BIAS, X), lstm(W, U, BIAS, X, order), LAYOUTS[layout])
    assert found == f"torch computes an LSTM, Flax an LSTM with the gates {gates[0]} and {gates[1]} exchanged"


def test_gates_in_another_order_are_named_in_it():
    found = hint(lstm(W, U, BIAS, X), lstm(W, U, BIAS, X, "iofg"), TORCH)
    assert found == "torch computes an LSTM, Flax an LSTM with its gates in the order i o f g"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda: lstm(W, U, BIAS, X, forget=1.0), "with 1 added to the forget gate"),
        (lambda: lstm(W, U, BIAS, X[:, ::-1])[:, ::-1], "that goes backwards in time"),
    ],
)
def test_typical_faults_of_lstm_ports_are_named(second, said):
    assert hint(lstm(W, U, BIAS, X), second(), TORCH) == f"torch computes an LSTM, Flax an LSTM {said}"


def test_a_batch_before_the_time_may_be_large():
    x = draw(LONGEST + 1, 3, D)
    assert (
        hint(lstm(W, U, BIAS, x), lstm(W, U, BIAS, x, "iofg"), TORCH, x)
        == "torch computes an LSTM, Flax an LSTM with its gates in the order i o f g"
    )


def test_other_faults_of_an_lstm_are_not_named():
    right = lstm(W, U, BIAS, X)
    assert "LSTM" not in hint(right, lstm(W, U, BIAS * 1.01, X), TORCH)
    assert "LSTM" not in hint(right * 1.01, lstm(W, U, BIAS, X, "figo"), TORCH)


def test_states_that_are_given_are_taken_and_may_be_exchanged():
    x, h, c = draw(B, D), draw(B, H), draw(B, H)

    def cell(h, c):
        i, f, g, o = np.split(x @ W.T + h @ U.T + BIAS, 4, -1)
        return sigmoid(o) * np.tanh(sigmoid(f) * c + sigmoid(i) * np.tanh(g))

    found = hint(cell(h, c), cell(c, h), TORCH, x, h, c)
    assert found == "torch computes an LSTM, Flax an LSTM with state and memory exchanged"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("exchanged", "with the gates r and z exchanged"),
        ("turned", "whose update gate is the other way round"),
        ("before", "that resets the state before the product"),
    ],
)
def test_typical_faults_of_gru_ports_are_named(wrong, said):
    w, u, b, kept = draw(3 * H, D), draw(3 * H, H), draw(3 * H), draw(3 * H)
    weights = {"weight_ih_l0": w, "weight_hh_l0": u, "bias_ih_l0": b, "bias_hh_l0": kept}
    assert (
        hint(gru(w, u, b, X, kept), gru(w, u, b, X, kept, wrong), weights) == f"torch computes a GRU, Flax a GRU {said}"
    )


def test_both_directions_are_one_layer():
    w, u, b = draw(4 * H, D), draw(4 * H, H), draw(4 * H)
    back = lstm(w, u, b, X[:, ::-1])[:, ::-1]
    names = ("weight_ih_l0_reverse", "weight_hh_l0_reverse", "bias_hh_l0_reverse")
    weights = {**TORCH, **dict(zip((f"rnn.{name}" for name in names), (w, u, b), strict=True))}
    there = lstm(W, U, BIAS, X)
    both = np.concatenate([there, back], -1)
    assert "directions exchanged" in hint(both, np.concatenate([back, there], -1), weights)
    assert "not turned round" in hint(both, np.concatenate([there, back[:, ::-1]], -1), weights)
    crossed = [lstm(W, U, BIAS, X, "figo"), lstm(w, u, b, X[:, ::-1], "figo")[:, ::-1]]
    assert "gates i and f exchanged" in hint(both, np.concatenate(crossed, -1), weights)


def test_other_weights_are_not_read_as_recurrent_layers():
    assert read({"q.weight": U, "k.weight": U}) == []
    assert read({"rnn.weight_ih_l0": W, "rnn.weight_hh_l0": U, "rnn.weight_ih_l1": U, "rnn.weight_hh_l1": U}) == []
    assert read({"rnn.weight_ih_l0": W, "rnn.weight_hh_l0": draw(5 * H, H)}) == []
    assert read({"rnn.weight_ih_l0": W}) == []
    assert read({"fc.h.weight": draw(4, 4, 4)}) == []
