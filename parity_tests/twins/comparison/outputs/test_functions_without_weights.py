"""Functions without weights as sides: losses, activations, masks and kernels."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attn_bridge import parity

from ..compare.sides import X, verdicts

LENGTHS = np.array([1, 3, 0, 4])
LABELS = np.array([3, 0, 7, 2, 5])


def of_torch(weights, x):
    return functional.gelu(x)


def of_jax(weights, x, approximate=False):
    return jax.nn.gelu(x, approximate=approximate)


def compared(first, second, inputs):
    return parity.compare(parity.function(first, {}), parity.function(second, {}), inputs, seeds=1)


@pytest.mark.parametrize(("approximate", "verdict"), [(False, "equal"), (True, "different")])
def test_activations_are_compared(approximate, verdict):
    report = compared(of_torch, functools.partial(of_jax, approximate=approximate), X)
    assert verdicts(report) == {"output": verdict, "grad x": verdict}


@pytest.mark.parametrize(("mean", "verdict"), [(jnp.mean, "equal"), (jnp.sum, "different")])
def test_losses_return_scalars_and_take_labels_without_gradients(mean, verdict):
    def theirs(weights, x, labels):
        return -mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))

    report = compared(lambda _, x, labels: functional.cross_entropy(x, labels), theirs, (X[0], LABELS))
    assert verdicts(report) == {"output": verdict, "grad x": verdict}


@pytest.mark.parametrize(("shift", "verdict"), [(0, "equal"), (1, "different")])
def test_masks_of_whole_numbers_are_compared(shift, verdict):
    def theirs(weights, lengths):
        return jnp.arange(5) < lengths[:, None] + shift

    report = compared(lambda _, lengths: torch.arange(5) < lengths[:, None], theirs, LENGTHS)
    assert verdicts(report) == {"output": verdict}


@pytest.mark.parametrize(("axis", "verdict"), [(-1, "equal"), (1, "different")])
def test_outputs_of_whole_numbers_are_compared(axis, verdict):
    square = X[:, :, :5]
    report = compared(lambda _, x: x.argmax(-1) + torch.tensor(0), lambda _, x: jnp.argmax(x, axis), square)
    assert verdicts(report)["output"] == verdict


def doubled(weights, x):
    return 2 * x


def normed(weights, x):
    return nn.functional.normalize(x)


class Scaled:
    def __call__(self, weights, x):
        return of_jax(weights, x)


@pytest.mark.parametrize(
    ("call", "framework"),
    [
        (of_torch, "torch"),
        (normed, "torch"),
        (lambda w, x: of_torch(w, x) + 1, "torch"),
        (functools.partial(of_jax, approximate=True), "flax"),
        (jax.jit(doubled), "flax"),
        (lambda w, x: jax.nn.relu(x), "flax"),
        (Scaled(), "flax"),
        (Scaled().__call__, "flax"),
    ],
)
def test_the_framework_is_read_from_the_code(call, framework):
    assert parity.function(call, {}).framework == framework


def test_a_framework_imported_inside_the_function_is_read():
    def local(weights, x):
        import torch

        return torch.tanh(x)

    assert parity.function(local, {}).framework == "torch"


def test_a_framework_that_the_code_does_not_show_is_given():
    with pytest.raises(TypeError, match="calls neither torch nor JAX by name; give framework='torch'"):
        parity.function(doubled, {})
    with pytest.raises(TypeError, match="calls torch and JAX; give"):
        parity.function(lambda w, x: of_torch(w, of_jax(w, x)), {})
    with pytest.raises(ValueError, match=r"framework \(keras\) must be torch or jax"):
        parity.function(doubled, {}, framework="keras")
    with pytest.raises(TypeError, match=r"framework \(jax\) must be that of the weights"):
        parity.function(doubled, {"w": torch.ones(3)}, framework="jax")
    sides = [parity.function(doubled, {}, framework=name) for name in ("torch", "jax")]
    assert parity.compare(*sides, X, seeds=1).verdict == "equal"


@pytest.mark.parametrize("swapped", [False, True])
def test_a_function_that_takes_inputs_alone_gets_the_line_to_write(swapped):
    in_torch = parity.function(lambda x, y: torch.nn.functional.mse_loss(x, y), {})
    in_jax = parity.function(lambda x: jnp.mean(x.sum() ** 2), {})
    whole = parity.function(lambda _, x, y: torch.nn.functional.mse_loss(x, y), {})
    with pytest.raises(ValueError, match=re.escape("give lambda weights, *inputs: FUNCTION(*inputs)")):
        parity.compare(whole if swapped else in_torch, in_jax, (X, X + 1.0))
