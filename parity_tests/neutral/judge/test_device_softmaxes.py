"""A softmax over the keys of several devices: which parameters show that devices count a logit once each."""

from __future__ import annotations

import types

import numpy as np

from attn_parity.samples.sampling import FIRST, Sample
from attn_parity.sides.subject import Arguments, Run
from attn_parity.verdict.devices.softmaxes import mixed

X = np.random.default_rng(0).normal(size=(2, 4, 3))
WEIGHTS = {
    "embedding.offset": np.array([0.5]),
    "attention.scale": np.array([[0.25]]),
    "attention.sinks": np.array([0.75]),
}


def attention(side, weights, arguments):
    """Run attention whose sink the second side counts twice; all weights move the sink, those outside as well."""
    (x,) = arguments.leaves
    sink = np.exp(sum(weight.sum() for weight in weights.values())) * (2 if side == "second" else 1)
    exponentials = np.exp(x @ x.swapaxes(1, 2))
    return Run([exponentials / (exponentials.sum(-1, keepdims=True) + sink) @ x], ["0"], [])


def test_a_logit_counted_by_each_device_is_a_vector_of_the_submodule():
    pair = types.SimpleNamespace(
        lacks="",
        effort=types.SimpleNamespace(large=False),
        train=False,
        labels={"first": "torch", "second": "flax"},
        weights=lambda sample, side: WEIGHTS,
    )
    runner = types.SimpleNamespace(pair=pair, precisely=attention)
    arguments = Arguments((X,))
    sample = Sample(WEIGHTS, {"first": arguments, "second": arguments}, FIRST)
    within = {"first": "attention", "second": "attention"}
    assert mixed(runner, sample, within, {"context": 2, "tensor": 1}) == (
        "the sides agree once attention.sinks is log(2) larger in torch: consistent with Flax counting it 2 times in a "
        "softmax, once on each of the 2 devices of context"
    )
