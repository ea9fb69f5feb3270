"""Gates of a GRU of Keras are paired with those of torch, which keeps them in another order."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.pairing import propose

from .parameters import draw, parameters

IN, WIDTH = 5, 4
TORCH = {
    "rnn.weight_ih_l0": ((3 * WIDTH, IN), "GRU"),
    "rnn.weight_hh_l0": ((3 * WIDTH, WIDTH), "GRU"),
    "rnn.bias_ih_l0": ((3 * WIDTH,), "GRU"),
    "rnn.bias_hh_l0": ((3 * WIDTH,), "GRU"),
}


def keras(path):
    return {
        f"{path}/kernel": ((IN, 3 * WIDTH), ""),
        f"{path}/recurrent_kernel": ((WIDTH, 3 * WIDTH), ""),
        f"{path}/bias": ((2, 3 * WIDTH), ""),
    }


@pytest.mark.parametrize("turned", [False, True], ids=["torch-first", "keras-first"])
def test_gates_of_keras_are_put_in_torchs_order(turned):
    path = "sequential/bidirectional/forward_gru/gru_cell"
    torch, other = parameters(TORCH, "torch"), parameters(keras(path), "flax")
    pairing = propose(*((other, torch) if turned else (torch, other)), lambda candidate: 0.5)
    arrays = draw(torch)
    found = pairing.to_first(arrays) if turned else pairing.to_second(arrays)

    def reordered(name):
        r, z, n = np.split(arrays[name].view(np.uint32), 3)
        return np.concatenate([z, r, n])

    assert np.array_equal(found[f"{path}/kernel"].view(np.uint32), reordered("rnn.weight_ih_l0").T)
    assert np.array_equal(found[f"{path}/recurrent_kernel"].view(np.uint32), reordered("rnn.weight_hh_l0").T)
    biases = [reordered(f"rnn.bias_{source}_l0") for source in ("ih", "hh")]
    assert np.array_equal(found[f"{path}/bias"].view(np.uint32), np.stack(biases))
    back = pairing.to_second(found) if turned else pairing.to_first(found)
    assert all(np.array_equal(back[name].view(np.uint32), arrays[name].view(np.uint32)) for name in arrays)


def test_fused_gates_of_others_stay_in_torchs_order():
    theirs = parameters(keras("gru"), "flax")
    pairing = propose(parameters(TORCH, "torch"), theirs, lambda candidate: 0.5)
    rows = {row.first: row.second for row in pairing.rows()}
    assert rows["rnn.weight_ih_l0"] == "gru/kernel"


@pytest.mark.parametrize("order", ["zrn", "rzn"])
def test_gates_of_fused_kernels_without_keras_path_are_tried_in_both_orders(order):
    torch, other = parameters(TORCH, "torch"), parameters(keras("gru"), "flax")
    arrays = draw(torch)

    def distance(candidate):
        gates = dict(zip("rzn", np.split(arrays["rnn.weight_ih_l0"].view(np.uint32), 3), strict=True))
        wanted = np.concatenate([gates[gate] for gate in order]).T
        return 0.0 if np.array_equal(candidate.to_second(arrays)["gru/kernel"].view(np.uint32), wanted) else 1.0

    found = propose(torch, other, distance)
    assert distance(found) == 0.0
