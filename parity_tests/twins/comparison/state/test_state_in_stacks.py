"""State of layers, one by one or stacked, is carried layer by layer, and a fault next to it keeps its place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge.parity import compare

from ..compare.sides import X


class TorchGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x):
        return torch.sigmoid(x @ self.weight.T) * torch.tanh(self.shift)


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out = TorchGate(), nn.Linear(6, 8)

    def forward(self, x):
        return x + self.out(self.gate(x))


class TorchStack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([TorchBlock(), TorchBlock()])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def gated(x, kernel, shift, factor=1.0):
    return jax.nn.sigmoid(x @ kernel) * jnp.tanh(factor * shift)


class FlaxRouter(nnx.Module):
    def __init__(self, kind, name, factor):
        self.kernel = nnx.Param(jnp.ones((8, 6)))
        setattr(self, name, kind(jnp.zeros(6)))
        self._name, self._factor = name, factor

    def __call__(self, x):
        return gated(x, self.kernel[...], getattr(self, self._name)[...], self._factor)


class FlaxBlock(nnx.Module):
    def __init__(self, kind, name, factor):
        self.router, self.out = FlaxRouter(kind, name, factor), nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + self.out(self.router(x))


class FlaxStack(nnx.Module):
    def __init__(self, kind, name="shift", factor=1.0):
        self.layers = nnx.List([FlaxBlock(kind, name, 1.0), FlaxBlock(kind, name, factor)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
@pytest.mark.parametrize("name", ["shift", "bias"])
def test_a_fault_in_the_second_layer_keeps_its_place(kind, name):
    assert compare(TorchStack(), FlaxStack(kind, name), X, seeds=1).verdict == "equal"
    report = compare(TorchStack(), FlaxStack(kind, name, 1.1), X, seeds=1)
    assert report.verdict == "different"
    assert report.first_divergence.path == "layers.1.gate"
    assert any(note.startswith("paired by shape alone") for note in report.notes) == (name == "bias")


class LinenBlock(linen.Module):
    collection: str

    @linen.compact
    def __call__(self, x, _):
        kernel = self.param("kernel", lambda _: jnp.ones((8, 6)))
        if self.collection == "params":
            shift = self.param("shift", lambda _: jnp.zeros(6))
        else:
            shift = self.variable(self.collection, "shift", lambda: jnp.zeros(6)).value
        return x + linen.Dense(8, name="out")(gated(x, kernel, shift)), None


class LinenStack(linen.Module):
    collection: str

    @linen.compact
    def __call__(self, x):
        axes = {"params": 0, self.collection: 0}
        block = linen.scan(LinenBlock, variable_axes=axes, split_rngs={"params": True}, length=2)
        return block(self.collection, name="layers")(x, None)[0]


@pytest.mark.parametrize("collection", ["params", "own"])
def test_state_of_layers_is_carried_to_a_stack(collection):
    second = LinenStack(collection)
    report = compare(TorchStack(), (second, second.init(jax.random.key(0), X)), X, seeds=1)
    assert report.verdict == "equal"
    assert ("layers.1.gate.shift", "layers.shift[1]") in {(row.first, row.second) for row in report.pairing}


def test_unlike_state_next_to_a_fault_is_left_alone():
    first, second = TorchStack(), FlaxStack(nnx.Variable, factor=1.1)
    first.register_buffer("steps", torch.arange(4.0))
    second.cache = nnx.Cache(jnp.zeros(4))
    report = compare(first, second, X, seeds=1)
    assert report.verdict == "different"
    assert "state that is not carried, so that torch keeps its own: steps" in report.notes
