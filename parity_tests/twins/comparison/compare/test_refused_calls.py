"""`compare` refuses bad calls, failing modules and incomparable values in one line."""

from __future__ import annotations

import typing

import flax.linen as linen
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

from .sides import X, judge, linear, scale

BAD_CALLS = {
    "no module": (lambda t, f: compare(t, X, X), TypeError, "second must be a torch.nn.Module, .*, got ndarray"),
    "a function": (lambda t, f: compare(torch.relu, f, X), TypeError, "first must be .*parity.function.*, got builtin"),
    "a class": (lambda t, f: compare(nn.Linear, f, X), TypeError, "Linear is a class, give an instance of it"),
    "linen": (lambda t, f: compare(t, linen.Dense(4), X), TypeError, r"a Linen module, give \(module, variables\)"),
    "no inputs at all": (lambda t, f: compare(t, f), TypeError, "compare needs inputs"),
    "no inputs": (lambda t, f: compare(t, f, None), ValueError, "inputs must be an array, a tuple .*, got NoneType"),
    "a string": (lambda t, f: compare(t, f, "x"), ValueError, "inputs must be an array, a tuple .*, got str"),
    "empty": (lambda t, f: compare(t, f, ()), ValueError, "inputs must be an array, a tuple .*, got tuple"),
    "wrong shape": (
        lambda t, f: compare(t, f, X[..., :3]),
        ValueError,
        "torch module Linear raised RuntimeError: mat1",
    ),
    "unknown keyword": (
        lambda t, f: compare(t, f, {"z": X}),
        ValueError,
        "torch module Linear raised TypeError: .*'z'",
    ),
    "no devices": (lambda t, f: compare(t, f, X, device=()), ValueError, r"device \(\(\)\) must be one of cpu, gpu"),
    "three devices": (lambda t, f: compare(t, f, X, device=("cpu",) * 3), ValueError, "or a pair of them: torch's"),
    "no seeds": (
        lambda t, f: compare(t, f, X, seeds=0),
        ValueError,
        r"seeds \(0\) must be a whole number from 1 to 1000",
    ),
    "half a seed": (lambda t, f: compare(t, f, X, seeds=1.5), ValueError, r"seeds \(1.5\) must be a whole number"),
    "first seed": (lambda t, f: compare(t, f, X, first_seed=-1), ValueError, r"first_seed \(-1\) must be a whole"),
    "mode": (lambda t, f: compare(t, f, X, modes=("fast",)), ValueError, r"modes \(fast\) must be one of eager, jit"),
    "no mode": (lambda t, f: compare(t, f, X, modes=()), ValueError, "modes must hold at least one of eager, jit"),
    "dtype": (lambda t, f: compare(t, f, X, dtypes=("int8",)), ValueError, r"dtypes \(int8\) must be one of float64"),
    "device": (lambda t, f: compare(t, f, X, device="nonsense"), ValueError, "device nonsense: torch finds none on"),
    "torch on a tpu": (lambda t, f: compare(t, f, X, device="tpu"), ValueError, "device tpu: torch does not run on a"),
    "Flax's device": (
        lambda t, f: compare(t, f, X, device=("cpu", "tpu")),
        ValueError,
        "device tpu: JAX finds none on",
    ),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_bad_call_is_one_line(call):
    wrong, kind, message = BAD_CALLS[call]
    with pytest.raises(kind, match=message) as caught:
        wrong(*linear())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_module_that_raises_is_named(side):
    def fail(m, x):
        raise RuntimeError("out\nof order")

    sides = {"torch": scale, "flax": scale} | {side: fail}
    name = {"torch": "torch module TorchSide", "flax": "Flax module FlaxSide"}[side]
    with pytest.raises(
        ValueError, match=f"^{name} raised RuntimeError: out of order \\(.*test_refused_calls\\.py:\\d+\\)$"
    ):
        judge(sides["torch"], sides["flax"])


class Ab(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


class Ba(typing.NamedTuple):
    b: typing.Any
    a: typing.Any


NOTHING_TO_JUDGE = {
    "fields in another order": (lambda m, x: Ab(x * m.w, x), lambda m, x: Ba(x, x * m.w), X, "differ in structure"),
    "an empty batch": (scale, scale, X[:0], r"nothing to compare: the outputs are empty \(1 \(an array \(0, 5, 8\)"),
    "complex outputs": (
        lambda m, x: torch.fft.fft(x * m.w),
        lambda m, x: jnp.fft.fft(x * m.w),
        X,
        "output of torch is complex64; complex numbers are not judged",
    ),
    "complex inputs": (scale, scale, X + 1j, "inputs must hold numbers or bools, one has dtype complex64; give real"),
    "words": (scale, scale, np.array(["a"]), "inputs must hold numbers or bools, one has dtype <U1"),
    "NaN": (scale, scale, X * np.nan, r"input inputs\[0\] holds nothing but NaN"),
}


@pytest.mark.parametrize("what", NOTHING_TO_JUDGE)
def test_uncomparable_outputs_and_inputs_are_refused_in_one_line(what):
    ours, theirs, inputs, message = NOTHING_TO_JUDGE[what]
    with pytest.raises(ValueError, match=message) as caught:
        judge(ours, theirs, inputs)
    assert "\n" not in str(caught.value)


def test_modules_without_weights_yet_are_refused_in_one_line():
    ours, theirs = linear()
    with torch.device("meta"):
        meta = nn.Linear(8, 4)
    abstract = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    for pair, message in (
        ((meta, theirs), "weight weight of torch module Linear is on the meta device and holds no numbers"),
        ((nn.LazyLinear(4), theirs), "weights of the torch module LazyLinear cannot be read: .*uninitialized"),
        ((ours, abstract), "of the Flax module Linear holds no numbers; initialise it first"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            compare(*pair, X)
        assert "\n" not in str(caught.value)


def test_channels_in_the_other_place_are_named():
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 5)).astype(np.float32)
    conv = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=nnx.Rngs(0))
    advice = "it can be called with the channels last: give it inputs of its own (second_inputs=, --second-inputs)"
    with pytest.raises(ValueError, match="feature dimension size") as caught:
        compare(nn.Conv2d(3, 4, 3), conv, x)
    assert str(caught.value).endswith(advice)
    with pytest.raises(ValueError, match="feature dimension size") as caught:
        compare(nn.Conv2d(3, 4, 3), conv, x, x)
    assert advice not in str(caught.value)
