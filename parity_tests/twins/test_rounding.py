"""Roundings drawn at random: as large as those of the precision, in both frameworks, forward and backward."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge import transfer
from attn_bridge.parity import compare
from attn_parity.frameworks.jax.subject import subject_of as of_jax
from attn_parity.frameworks.torch.subject import subject_of as of_torch
from attn_parity.sides.subject import Arguments

X = np.random.default_rng(3).normal(size=(3, 7, 6)).astype(np.float32)
COTANGENT = np.random.default_rng(4).normal(size=(3, 7, 5)).astype(np.float32)


class FlaxModel(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(6, 5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.nn.softmax(self.linear(x), axis=-1)


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        return torch.softmax(self.linear(x), dim=-1)


def subjects():
    torch.manual_seed(1)
    ours, theirs = TorchModel(), FlaxModel()
    theirs.linear.kernel.set_value(ours.linear.weight.detach().numpy().T)
    theirs.linear.bias.set_value(ours.linear.bias.detach().numpy())
    return of_torch(ours), of_jax(theirs)


def everything(run):
    return [*run.outputs, *run.input_gradients, *run.parameter_gradients.values()]


@pytest.mark.parametrize("side", [0, 1], ids=["torch", "flax"])
def test_random_rounding_moves_every_result_by_a_few_units(side):
    subject = subjects()[side]
    weights = subject.weights()

    def run(mode, seed):
        return everything(subject.run(weights, Arguments((X,)), [COTANGENT], mode=mode, seed=seed))

    plain, first, again, second = run("eager", 0), run("jitter", 5), run("jitter", 5), run("jitter", 6)
    for one, two, three, four in zip(plain, first, again, second, strict=True):
        unit = np.finfo(np.float32).eps * np.abs(one).max()
        assert 0.0 < np.abs(two - one).max() < 30.0 * unit
        assert np.array_equal(two, three)
        assert not np.array_equal(two, four)
    assert np.array_equal(run("eager", 0)[0], plain[0])  # nothing is left behind


@pytest.mark.parametrize("side", [0, 1], ids=["torch", "flax"])
def test_operations_without_rounding_do_not_move(side):
    class TorchMoves(nn.Module):
        def forward(self, x):
            return torch.relu(x.transpose(0, 1)[..., 1:].reshape(7, -1).contiguous())

    class FlaxMoves(nnx.Module):
        def __call__(self, x):
            return jax.nn.relu(x.transpose(1, 0, 2)[..., 1:].reshape(7, -1))

    subject = (of_torch(TorchMoves()), of_jax(FlaxMoves()))[side]
    plain, moved = (
        subject.run({}, Arguments((X,)), [np.ones((7, 15), np.float32)], mode=mode) for mode in ("eager", "jitter")
    )
    assert np.array_equal(plain.outputs[0], moved.outputs[0])


@pytest.mark.parametrize("seed", [0, 3])
def test_a_saturated_softmax_is_equal(seed):
    """Attention with scores of 1e4: one side's weights are exactly 1, the other's one unit less."""
    import jax_attn
    import torch_attn

    torch.manual_seed(seed)
    ours = torch_attn.MultiHeadAttention(5, 10, 6, 0.0, num_heads=2, qkv_bias=True)
    theirs = jax_attn.MultiHeadAttention(5, 10, 6, 0.0, num_heads=2, qkv_bias=True, rngs=nnx.Rngs(0))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(9.0)
    transfer(ours, theirs)
    inputs = 30.0 * np.random.default_rng(seed).normal(size=(2, 5, 5)).astype(np.float32)
    assert compare(ours, theirs, inputs).verdict == "equal"


def test_a_side_that_rounds_its_weights_is_still_found_there():
    import torch_attn

    class Rounds(torch_attn.CausalAttention):
        def forward(self, x):
            return super().forward(x.to(torch.bfloat16).to(x.dtype))

    import jax_attn

    torch.manual_seed(2)
    ours = Rounds(5, 10, 6, 0.0, qkv_bias=True)
    theirs = jax_attn.CausalAttention(5, 10, 6, 0.0, qkv_bias=True, rngs=nnx.Rngs(0))
    inputs = 30.0 * np.random.default_rng(1).normal(size=(2, 5, 5)).astype(np.float32)
    report = compare(ours, theirs, inputs, seeds=1, localise=False)
    assert report.verdict == "precision"
    assert {one.side for one in report.failures} == {"torch"}


class HiddenTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x):
        return torch.softmax(self.linear(x) + torch.tensor([0.0, 0.0, -torch.inf, 0.0, -torch.inf]), dim=-1)


class HiddenFlax(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(6, 5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.nn.softmax(self.linear(x) + np.array([0.0, 0.0, -np.inf, 0.0, -np.inf], np.float32), axis=-1)


@pytest.mark.parametrize("make", [lambda: of_torch(HiddenTorch()), lambda: of_jax(HiddenFlax())])
def test_scores_hidden_by_addition_stay_hidden(make):
    subject = make()
    run = subject.run(subject.weights(), Arguments((X,)), [COTANGENT], mode="jitter", seed=5)
    assert all(np.isfinite(one).all() for one in everything(run))
    assert not run.outputs[0][:, :, [2, 4]].any()
