"""The first divergence is named, at every depth, forward and backward, whichever side is at fault."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare, function

DEPTH, WIDTH = 2, 8
X = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.gelu, self.down = nn.Linear(WIDTH, 12), nn.GELU(approximate="tanh"), nn.Linear(12, WIDTH)
        self.gain = 1.0

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.gain * self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.down(self.gelu(self.up(x)))


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class FlaxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 12, rngs=rngs), nnx.Linear(12, WIDTH, rngs=rngs)
        self.gain = 1.0

    def __call__(self, x):
        x = x + self.gain * self.attn(self.norm(x))
        return x + self.down(jax.nn.gelu(self.up(x)))


class FlaxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(3)
        self.blocks = nnx.List([FlaxBlock(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001


@jax.custom_vjp
def wrong_gradient(x):
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * 1.001,))


class WrongForwardLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0001


class WrongBackwardLinear(nn.Linear):
    def forward(self, x):
        return WrongGradient.apply(super().forward(x))


class WrongForwardFlaxLinear(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x) * 1.0001


class WrongBackwardFlaxLinear(nnx.Linear):
    def __call__(self, x):
        return wrong_gradient(super().__call__(x))


class WrongBackwardAttention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        context, weights = super().forward(*args, **kwargs)
        return WrongGradient.apply(context), weights


FAULTS = {
    "torch-leaf-forward": ("up", WrongForwardLinear, None, "forward"),
    "torch-leaf-backward": ("down", WrongBackwardLinear, None, "backward"),
    "torch-attention-backward": ("attn", WrongBackwardAttention, None, "backward"),
    "flax-leaf-forward": ("down", None, WrongForwardFlaxLinear, "forward"),
    "flax-leaf-backward": ("up", None, WrongBackwardFlaxLinear, "backward"),
}


def models():
    torch.manual_seed(5)
    return TorchModel(), FlaxModel()


@pytest.mark.parametrize("depth", range(DEPTH))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_where_it_is(fault, depth):
    name, torch_class, flax_class, direction = FAULTS[fault]
    ours, theirs = models()
    if torch_class is not None:
        getattr(ours.blocks[depth], name).__class__ = torch_class
    if flax_class is not None:
        getattr(theirs.blocks[depth], name).__class__ = flax_class
    report = compare(ours, theirs, X, seeds=1)
    assert report.verdict == "different"
    first = report.first_divergence
    assert (first.path, first.flax_path, first.direction) == (f"blocks.{depth}.{name}",) * 2 + (direction,)
    assert [node.path for node in report.tree.walk() if node.first] == [f"blocks.{depth}.{name}"]


@pytest.mark.parametrize("depth", [0, DEPTH - 1])
def test_a_fault_between_submodules_is_the_blocks_own(depth):
    ours, theirs = models()
    ours.blocks[depth].gain = 1.001
    first = compare(ours, theirs, X, seeds=1).first_divergence
    assert (first.path, first.direction) == (f"blocks.{depth}", "forward")


def test_the_earlier_fault_is_first_forward_and_last_backward():
    ours, theirs = models()
    for depth in (0, 1):
        ours.blocks[depth].up.__class__ = WrongForwardLinear
    assert compare(ours, theirs, X, seeds=1).first_divergence.path == "blocks.0.up"
    ours, theirs = models()
    for depth in (0, 1):
        ours.blocks[depth].up.__class__ = WrongBackwardLinear
    assert compare(ours, theirs, X, seeds=1).first_divergence.path == "blocks.1.up"


def test_modules_without_a_counterpart_are_in_the_tree():
    report = compare(*models(), X, seeds=1, localise=True)
    assert (report.verdict, report.first_divergence) == ("equal", None)
    nodes = {node.path or node.flax_path: node for node in report.tree.walk()}
    assert nodes["blocks.0.gelu"].flax_path is None
    assert nodes["blocks.0.gelu"].message.startswith("no counterpart")
    assert nodes["blocks.0.attn.query"].path is None
    assert nodes["blocks.1.attn"].verdict == "equal"
    assert nodes["blocks.1.attn"].forward_error < 1e-12


class Half(nn.Linear):
    def forward(self, x):
        weight = self.weight.to(torch.bfloat16).to(self.weight.dtype)
        return nn.functional.linear(x, weight, self.bias)


class FlaxHalf(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel.astype(jax.numpy.bfloat16).astype(self.kernel.dtype) + self.bias


def test_the_submodule_that_loses_precision_is_found():
    ours, theirs = models()
    ours.blocks[1].down.__class__ = Half
    report = compare(ours, theirs, X, seeds=2)
    assert report.verdict == "precision"
    assert {one.side for one in report.failures} == {"torch"}
    assert report.first_divergence.path == "blocks.1.down"


def test_a_reference_that_loses_precision_is_noted_and_no_fault():
    ours, theirs = models()
    ours.blocks[1].down.__class__ = Half
    report = compare(ours, theirs, X, seeds=2, reference=True)
    assert (report.verdict, report.first_divergence) == ("equal", None)
    (note,) = [one for one in report.notes if "reference" in one]
    assert note.startswith("the torch side, which is the reference, loses up to ")
    assert note.endswith("that is no fault of the Flax side")


def test_a_side_may_lose_no_more_than_its_reference():
    ours, theirs = models()
    theirs.blocks[1].up.__class__ = FlaxHalf
    report = compare(ours, theirs, X, seeds=2, reference=True)
    assert report.verdict == "precision"
    assert {one.side for one in report.failures} == {"flax"}
    assert report.first_divergence.path == "blocks.1.up"


def test_a_reference_computes_the_same():
    ours, theirs = models()
    ours.blocks[0].gain = 1.001
    assert compare(ours, theirs, X, seeds=1, reference=True).verdict == "different"


def test_outputs_that_one_side_alone_has_finite_differ_by_no_number():
    sides = (
        function(lambda _, x: torch.where(x > 0, x.sin(), 3.0), {}, framework="torch"),
        function(lambda _, x: jnp.where(x > 0, jnp.sin(x), jnp.inf), {}, framework="jax"),
    )
    divergence = compare(*sides, np.random.default_rng(0).normal(size=(3, 4)), seeds=1).first_divergence
    assert divergence.message == "fed the same inputs, the outputs differ where one side alone is finite"
