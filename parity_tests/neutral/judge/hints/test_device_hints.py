"""What devices that share a side explain is told, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.hints import Evidence, of_devices
from attn_parity.sides.shards import ShardCut, Shares, named

RANDOM = np.random.default_rng(3)
X, RIGHT = RANDOM.normal(size=(2, 12, 5)), RANDOM.normal(size=(2, 12, 5))
BIAS = RANDOM.normal(size=5)
PIECES = np.split(RIGHT, 4, 1)
MESH = {"tensor": 3, "context": 2}


def hint(second, mesh=None, **facts):
    """Return what is said of a place whose outputs are RIGHT and `second`."""
    given = {"inputs": [X], "first_weights": {"out.bias": BIAS}, "labels": ("torch", "flax")} | facts
    return of_devices(
        Evidence(first_outputs=[RIGHT], second_outputs=[second], **given), mesh or MESH, ("torch", "flax")
    )


TOLD = {
    "summed twice": (3 * RIGHT, "Flax is 3 times torch everywhere: consistent with what is added up twice over the 3 "),
    "averaged": (RIGHT / 3, "averaged over the 3 devices of tensor, not added up"),
    "averaged before a bias": (
        (RIGHT - BIAS) / 3 + BIAS,
        "everywhere but for out.bias: consistent with what is averaged",
    ),
    "averaged before a bias and the residual": (
        (RIGHT - BIAS - X) / 2 + BIAS + X,
        "but for out.bias and input 0: consistent with what is averaged over the 2 devices of context",
    ),
    "bias of every device": (
        RIGHT + 2 * BIAS,
        "Flax has out.bias 3 times: consistent with each of the 3 devices of tensor",
    ),
    "residual of every device": (
        RIGHT + X,
        "Flax has input 0 2 times: consistent with each of the 2 devices of context",
    ),
    "on the other side": (RIGHT - 2 * BIAS, "torch has out.bias 3 times"),
    "order of devices": (np.roll(RIGHT, 6, 1), "has the 2 pieces of the sequence in the order 1, 0: consistent with "),
    "balanced order": (
        np.concatenate([PIECES[i] for i in (0, 3, 1, 2)], 1),
        "the 4 pieces of the sequence in the order 0, 3, 1, 2",
    ),
}


@pytest.mark.parametrize(("second", "text"), TOLD.values(), ids=TOLD)
def test_relations_that_devices_explain_are_named(second, text):
    assert text in hint(second)


UNTOLD = {
    "another factor": 1.7 * RIGHT,
    "a fourth device": 4 * RIGHT,
    "one element": RIGHT + np.eye(12, 5),
    "half of a bias": RIGHT + 0.5 * BIAS,
    "tokens in another order": RIGHT[:, ::-1],
}


@pytest.mark.parametrize("second", UNTOLD.values(), ids=UNTOLD)
def test_relations_that_devices_do_not_explain_get_no_hint(second):
    assert hint(second) == ""


@pytest.mark.parametrize("second", [two for two, _ in TOLD.values()], ids=TOLD)
def test_without_devices_nothing_is_said_of_them(second):
    assert hint(second, {"tensor": 1}) == ""


def test_gradients_are_explained_where_outputs_agree():
    text = hint(RIGHT, first_gradients={"out.bias": BIAS, "fc": X}, second_gradients={"out.bias": BIAS / 2, "fc": X})
    assert text.startswith(
        "the gradient of out.bias: Flax is 0.5 times torch everywhere: consistent with what is averaged"
    )


def test_unused_parts_are_named():
    given = {"first_gradients": {"sinks": np.ones(6)}, "second_gradients": {"sinks": np.array([2.0, 2, 0, 0, 0, 0])}}
    text = hint(1.7 * RIGHT, **given)
    assert text.startswith(
        "4 of 6 parts of sinks get no gradient in Flax alone: consistent with the 3 devices of tensor"
    )
    given["second_gradients"] = {"sinks": np.array([2.0, 2, 2, 2, 2, 0])}
    assert hint(1.7 * RIGHT, **given) == ""


def test_sizes_of_the_mesh_are_those_that_cut_results():
    shares = Shares((ShardCut(((), (("context", 2),), ())),), {"fc": ShardCut(((("tensor", 3),), ()))})
    assert shares.sizes == {"context": 2, "tensor": 3}
    assert named([0, 2], shares.parameters["fc"]) == "shards tensor=0; tensor=2 of 3"


def test_nan_gradients_are_no_unused_parts_and_empty_ones_no_failure():
    gradients = {"sinks": np.full(6, np.nan), "empty": np.zeros((4, 0))}
    text = hint(
        1.7 * RIGHT, first_gradients={"sinks": np.ones(6), "empty": np.zeros((4, 0))}, second_gradients=gradients
    )
    assert text == ""
