"""Hints about groups of channels, bags of embeddings and layers of Keras; what could not be seen is not named."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.hints import Evidence, hint_for

from .test_recurrent_hints import BIAS, U, W, X, gru, lstm

RANDOM = np.random.default_rng(5)
IMAGE, KERNEL = RANDOM.normal(size=(2, 8, 5, 6)), RANDOM.normal(size=(12, 2, 3, 3))
SCALE, SHIFT = RANDOM.uniform(0.5, 2.0, 8), RANDOM.normal(size=8)


def hint(one, two, *inputs, weights=None, **fields):
    given = Evidence(inputs=inputs, first_outputs=[one], second_outputs=[two], first_weights=weights or {}, **fields)
    return hint_for(given)


def convolved(*, strided_inputs=False, strided_outputs=False):
    """Convolve in four groups, whose channels follow each other or lie four apart."""
    padded = np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    found = np.zeros((2, 12, 5, 6))
    for group in range(4):
        ins = np.arange(8)[group::4] if strided_inputs else np.arange(8)[2 * group : 2 * group + 2]
        outs = np.arange(12)[group::4] if strided_outputs else np.arange(12)[3 * group : 3 * group + 3]
        found[:, outs] = np.einsum("nchwij,ocij->nohw", windows[:, ins], KERNEL[outs])
    return found


@pytest.mark.parametrize("axis", ["inputs", "outputs"])
def test_groups_of_strided_channels_of_a_convolution_are_named(axis):
    wrong = convolved(**{f"strided_{axis}": True})
    said = {"inputs": "strided inputs and outputs", "outputs": "inputs and strided outputs"}[axis]
    expected = (
        f"torch computes a convolution of 4 groups of inputs and outputs, Flax a convolution of 4 groups of {said}"
    )
    assert hint(convolved(), wrong, IMAGE, weights={"conv.weight": KERNEL}) == expected
    last = [one.transpose(0, 2, 3, 1) for one in (convolved(), wrong, IMAGE)]
    assert hint(*last, weights={"conv.kernel": KERNEL.transpose(2, 3, 1, 0)}) == expected


def normed(groups, *, strided=False):
    shape = (2, 8 // groups, groups, 30) if strided else (2, groups, 8 // groups, 30)
    axes = (1, 3) if strided else (2, 3)
    x = IMAGE.reshape(shape)
    x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    return x.reshape(IMAGE.shape) * SCALE[:, None, None] + SHIFT[:, None, None]


@pytest.mark.parametrize(
    ("second", "said"),
    [((4, False), "4 groups of neighbouring channels"), ((2, True), "2 groups of every so many channels")],
)
def test_groups_of_a_norm_are_named(second, said):
    weights = {"weight": SCALE, "bias": SHIFT}
    found = hint(normed(2), normed(second[0], strided=second[1]), IMAGE, weights=weights)
    formula = "(x - mean) / sqrt(var + 1e-05) * weight + bias over"
    assert found == f"torch computes {formula} 2 groups of neighbouring channels, Flax {formula} {said}"


def test_a_momentum_explains_no_difference_of_one_call():
    fields = {"first_settings": {"momentum": 0.1, "eps": 1e-5}, "second_settings": {"momentum": 0.01, "eps": 1e-5}}
    assert hint(X, 1.01 * X, **fields) == "Flax is 1.01 times torch everywhere"


def test_gates_of_an_lstm_with_keras_names_are_named():
    weights = {"lstm_cell/kernel": W.T, "lstm_cell/recurrent_kernel": U.T, "lstm_cell/bias": BIAS}
    found = hint(lstm(W, U, BIAS, X), lstm(W, U, BIAS, X, "ifog"), X, weights=weights)
    assert found == "torch computes an LSTM, Flax an LSTM with the gates g and o exchanged"


def test_gates_of_a_gru_with_keras_names_are_named():
    w, u, b, kept = (RANDOM.normal(size=size) for size in ((12, 3), (12, 4), 12, 12))
    weights = {"kernel": w.T, "recurrent_kernel": u.T, "bias": np.stack([b, kept])}
    found = hint(gru(w, u, b, X, kept), gru(w, u, b, X, kept, "exchanged"), X, weights=weights)
    assert found == "torch computes a GRU, Flax a GRU with the gates r and z exchanged"


def test_a_step_of_power_iteration_on_one_side_is_named():
    matrix, x, u, v = (RANDOM.normal(size=size) for size in ((6, 8), (3, 8), 6, 8))
    step = u @ matrix / np.linalg.norm(u @ matrix)
    sides = [x @ matrix.T / norm + SHIFT[:6] for norm in (u @ matrix @ v, np.linalg.norm(matrix @ step))]
    found = hint(*sides, x, weights={"weight_orig": matrix, "weight_u": u, "bias": SHIFT[:6]})
    assert found.startswith("Flax divides the weight by its norm after a step of power iteration from weight_u")
