"""Tables, and float64 inside low precision, move by a unit of float32; nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from attn_parity.frameworks.torch.probes import rounding
from attn_parity.frameworks.torch.subject import subject_of

from .modules import Calls, X, assert_same, everything, relative, run, writes


def angles():
    turns = torch.arange(5)[:, None] * (1.0 / 10000.0 ** (torch.arange(0, 6, 2) / 6.0))
    return torch.cat([turns, turns], -1)


def turned(x, cos, sin):
    return x * cos + torch.cat([-x[..., 3:], x[..., :3]], -1) * sin


def in_the_call(self, x):
    with torch.no_grad():
        table = angles()
        cos, sin = table.cos(), table.sin()
    return turned(self.linear(x), cos, sin)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("cos", angles().cos(), persistent=False)
        self.register_buffer("sin", angles().sin())

    def forward(self, x):
        return turned(self.linear(x), self.cos, self.sin)


COS, SIN = angles().cos(), angles().sin()
COS_AS_NUMPY, SIN_AS_NUMPY = COS.numpy(), SIN.numpy()


def rotated(self, x):
    turns = torch.polar(torch.ones(5, 3), angles()[:, :3])
    return torch.view_as_real(torch.view_as_complex(self.linear(x).unflatten(-1, (3, 2))) * turns).flatten(-2)


TABLES = {
    "buffers": Buffers,
    "in the call": lambda: Calls(in_the_call),
    "globals": lambda: Calls(lambda self, x: turned(self.linear(x), COS, SIN)),
    "attributes": lambda: Calls(lambda self, x: turned(self.linear(x), *self.kept), kept=(COS, SIN)),
    "lists": lambda: Calls(
        lambda self, x: turned(self.linear(x), torch.tensor(COS.tolist()), torch.tensor(SIN.tolist()))
    ),
    "NumPy": lambda: Calls(
        lambda self, x: turned(self.linear(x), torch.from_numpy(COS_AS_NUMPY), torch.as_tensor(SIN_AS_NUMPY).to(x))
    ),
    "complex": lambda: Calls(rotated),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_move_by_a_float32_unit(name):
    subject = subject_of(TABLES[name]())
    wide = run(subject, dtype="float64")
    first, again, second = (run(subject, mode="tables", seed=seed) for seed in (1, 1, 2))
    assert 1e-8 < relative(first, wide) < 3e-7
    assert first.moved >= 20
    assert_same(first, again)
    assert relative(first, second) > 1e-9
    assert torch.equal(COS, angles().cos())
    assert np.array_equal(COS_AS_NUMPY, angles().cos().numpy())
    assert_same(run(subject, dtype="float64"), wide)


def test_inputs_move_only_where_named_as_tables():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, cos, sin):
            return turned(self.linear(x), cos, sin)

    subject, arrays = subject_of(Given()), (X, COS_AS_NUMPY, SIN_AS_NUMPY)
    wide = run(subject, *arrays, dtype="float64")
    unnamed, named = run(subject, *arrays, mode="tables"), run(subject, *arrays, mode="tables", tables=(1, 2))
    assert unnamed.moved == 0
    assert_same(unnamed, wide)
    assert named.moved > 20
    assert 1e-8 < relative(named, wide) < 3e-7
    assert np.abs(named.input_gradients[1]).max() > 0


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.norm, self.batch = nn.LSTM(6, 6, batch_first=True), nn.LayerNorm(6), nn.BatchNorm1d(5)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.batch(self.rnn(x)[0])
        keep = torch.tril(torch.ones(5, 5))
        return F.gelu(self.norm(self.attention(x, x, x, attn_mask=keep == 0)[0])) * keep.sum(-1, keepdim=True)


@pytest.mark.parametrize("build", [lambda: nn.LayerNorm(6), Everything, lambda: Calls(writes)])
def test_modules_without_tables_do_not_move(build):
    subject = subject_of(build())
    found = run(subject, mode="tables")
    assert found.moved == 0
    assert_same(found, run(subject, dtype="float64"))


def test_values_computed_from_inputs_do_not_move():
    def call(self, x):
        with torch.no_grad():
            size = x.abs().amax(-1, keepdim=True) * 0.3
        return self.linear(x) / size

    assert run(subject_of(Calls(call)), mode="tables").moved == 0


def test_minus_infinity_and_the_lowest_number_stay_finite_or_not():
    def call(self, x):
        hidden = torch.full((6,), torch.finfo(x.dtype).min) * torch.tensor([0.0, 1, 0, 0, 1, 0])
        return torch.softmax(self.linear(x) + hidden + torch.tensor([0.0, 0, 0, -torch.inf, 0, 0]), -1)

    found = run(subject_of(Calls(call)), mode="tables")
    assert all(np.isfinite(one).all() for one in everything(found))
    assert not found.outputs[0][..., [1, 3, 4]].any()


def test_the_moves_are_uniform_and_follow_from_number_and_seed():
    values = np.random.default_rng(0).normal(size=100_000)
    found = rounding.uniform(values, 3)
    assert -1.0 <= found.min() < -0.999 < 0.999 < found.max() < 1.0
    assert abs(found.mean()) < 0.01
    assert abs((found**2).mean() - 1.0 / 3.0) < 0.01
    assert np.array_equal(found, rounding.uniform(values, 3))
    assert abs(np.corrcoef(found, rounding.uniform(values, 4))[0, 1]) < 0.02
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02


def test_float64_inside_float32_modules_moves_by_a_float32_unit():
    def call(self, x):
        return self.linear(x).double().tanh().float()

    class Wide(nn.Module):
        def forward(self, x):
            return (x.double() * 3.0).double()

    subject = subject_of(Wide())
    moves = []
    for x in (X, X.astype(np.float64)):
        found, plain = (run(subject, x, mode=mode).outputs[0] for mode in ("jitter", "eager"))
        moves.append(np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)))
    assert 1e-8 < moves[0] < 1e-6
    assert 1e-17 < moves[1] < 1e-15
    assert relative(run(subject_of(Calls(call)), mode="jitter"), run(subject_of(Calls(call)))) > 1e-8
