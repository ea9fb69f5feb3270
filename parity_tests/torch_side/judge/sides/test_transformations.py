"""Transformations and checkpoints inside a side's call change neither results nor gradients."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_parity.frameworks.torch import subject as subjects
from attn_parity.frameworks.torch.drawing import drawing
from attn_parity.frameworks.torch.subject import subject_of
from attn_parity.sides.subject import Arguments

from .modules import DRAW, Calls, Stack, X, assert_same, relative, run, writes

COTANGENT = DRAW.normal(size=(2, 5, 6)).astype(np.float32)
CHECKPOINTED = {
    "reentrant": lambda: Stack(True),
    "not reentrant": lambda: Stack(False),
    "in segments, reentrant": lambda: Stack(True, segments=True),
    "in segments": lambda: Stack(False, segments=True),
    "nested": lambda: Nested(),
}


class Nested(Stack):
    """A reentrant checkpoint around others: its backward pass calls another, from Python."""

    def __init__(self):
        super().__init__(False)

    def forward(self, x):
        return checkpoint(self.blocks, self.first(x), use_reentrant=True)


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, {"mode": "tables", "seed": 1}, {"mode": "logsumexp"}])
def test_a_checkpoint_changes_nothing(name, options):
    module = CHECKPOINTED[name]()
    plain = subject_of(Stack(None))
    subject = subject_of(module)
    wanted = run(plain, **options)
    assert_same(run(subject, **options), wanted)
    moved = subject.weights()
    for array in moved.values():
        array += 1.0  # the weights of the call, not those that the module holds
    assert_same(subject.run(moved, Arguments((X,)), [X], **options), plain.run(moved, Arguments((X,)), [X], **options))
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpointed_call_is_recorded_once_with_its_gradients(name):
    plain, subject = subject_of(Stack(None)), subject_of(CHECKPOINTED[name]())
    arguments = Arguments((X,))
    wanted = plain.substituted(plain.weights(), arguments, [COTANGENT], {})[1]
    if "segments" in name:  # there torch calls the parts of a Sequential itself
        wanted = [call for call in wanted if call.path != "blocks"]
    found = subject.substituted(subject.weights(), arguments, [COTANGENT], {})[1]
    assert [(call.path, call.number) for call in found] == [(call.path, call.number) for call in wanted]
    for one, two in zip(found, wanted, strict=True):
        for ours, theirs in zip(
            (*one.arguments.leaves, *one.outputs, *one.cotangents),
            (*two.arguments.leaves, *two.outputs, *two.cotangents),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)
        assert all(cotangent.any() for cotangent in one.cotangents)


def test_outputs_written_again_by_a_checkpoint_keep_their_values():
    """A cache counts its tokens in place; the backward pass computes the block again, and counts them again."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, count):
            def step(x):
                count[:] = count + 1
                return self.linear(x)

            return checkpoint(step, x, use_reentrant=False), count

    found = run(subject_of(Cached()), X, np.array([3], np.int32), cotangents=[COTANGENT, np.zeros(1, np.float32)])
    assert found.outputs[1] == 4


def test_random_rounding_reaches_recomputed_values():
    subject = subject_of(Stack(True))
    plain, found = run(subject), run(subject, mode="jitter", seed=3)
    assert 1e-8 < relative(found, plain) < 1e-5


@pytest.mark.parametrize("how", [True, False])
def test_dropout_in_a_checkpoint_is_driven_like_outside(how):
    class Drops(nn.Module):
        def __init__(self, how):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.drop, self.how = nn.Linear(6, 6), nn.Dropout(0.5), how

        def inner(self, x):
            return self.drop(torch.tanh(self.linear(self.drop(x))))

        def forward(self, x):
            for _ in range(3):
                x = self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how)
            return x

    plain, subject = (subject_of(Drops(one), train=True) for one in (None, how))
    found, wanted = run(subject), run(plain)
    assert_same(found, wanted)
    assert len(found.draws) == len(wanted.draws) == 6
    assert not found.foreign


@pytest.mark.parametrize("p", [(), (0.5,)])
def test_bernoulli_is_unchanged_without_masks(p):
    def draw():
        return torch.bernoulli(torch.linspace(0.1, 0.9, 64), *p, generator=torch.Generator().manual_seed(3))

    with drawing(None, nn.Identity()):
        found = draw()
        out = torch.bernoulli(torch.full((64,), 0.5), out=torch.empty(64))
    assert torch.equal(found, draw())
    assert {0.0, 1.0} == set(out.tolist())


def test_given_masks_do_not_leave_float64():
    table = torch.ones(6)
    subject = subject_of(Calls(lambda self, x: F.dropout(x, 0.5, self.training) * table), train=True)
    assert run(subject, dtype="float64").outputs[0].dtype == np.float64


def slope(self, x):
    return torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0]


def slope_by_hand(self, x):
    return (1.0 - self.linear(x).tanh() ** 2) @ self.linear.weight


SAME = {
    "vmap": (lambda self, x: torch.func.vmap(self.linear)(x), lambda self, x: self.linear(x)),
    "torch.func.grad": (
        lambda self, x: torch.func.grad(lambda h: self.linear(h).tanh().sum())(x),
        slope_by_hand,
    ),
    "jvp": (
        lambda self, x: torch.func.jvp(self.linear, (x,), (2.0 * x,))[1],
        lambda self, x: 2.0 * x @ self.linear.weight.T,
    ),
    "jacrev": (
        lambda self, x: torch.func.jacrev(lambda h: self.linear(h).tanh().sum())(x),
        slope_by_hand,
    ),
    "functional_call": (
        lambda self, x: torch.func.functional_call(
            self.linear, {name: 2.0 * one for name, one in self.linear.named_parameters()}, (x,)
        ),
        lambda self, x: 2.0 * self.linear(x),
    ),
    "autograd.grad": (slope, slope_by_hand),
    "torch.compile": (
        lambda self, x: torch.compile(self.linear, backend="aot_eager")(x),
        lambda self, x: self.linear(x),
    ),
    "a write into the input": (writes, lambda self, x: self.linear(2.0 * x * torch.tensor([0.0, 1.0])[:, None, None])),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("mode", ["eager", "jitter", "tables"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, from jvp
def test_transformed_calls_match_plain_ones(name, mode):
    call, plain = SAME[name]
    wide = run(subject_of(Calls(plain)), dtype="float64")
    x = X.copy()
    found = run(subject_of(Calls(call)), dtype="float64" if mode == "eager" else None, mode=mode)
    assert np.array_equal(x, X)
    assert relative(found, wide) < (1e-14 if mode != "jitter" else 1e-6)
    assert found.moved == 0


def test_parametrised_tied_and_hooked_modules_use_the_given_weights():
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    hooked = nn.Linear(6, 6)
    hooked.register_forward_pre_hook(lambda module, args: (args[0] * module.bias,))
    hooked.register_forward_hook(lambda module, args, output: output * module.weight.sum())
    with pytest.warns(FutureWarning):
        old = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    parametrizations = torch.nn.utils.parametrizations
    modules = [tied, hooked, old, parametrizations.weight_norm(nn.Linear(6, 6)), nn.LSTM(6, 6, batch_first=True)]
    for module in [*modules, parametrizations.spectral_norm(nn.Linear(6, 6)).eval()]:
        subject = subject_of(module)
        weights = {name: array * 1.5 + 0.1 for name, array in subject.weights().items()}
        state = {name: one.clone() for name, one in module.state_dict().items()}
        attributes = {name: value for child in module.modules() for name, value in child.__dict__.items()}
        found = subject.run(weights, Arguments((X,)))
        now = {name: value for child in module.modules() for name, value in child.__dict__.items()}
        assert all(now[name] is attributes[name] for name in {*now, *attributes})
        assert all(torch.equal(one, state[name]) for name, one in module.state_dict().items())
        with torch.no_grad():
            for name, one in module.named_parameters():
                one.copy_(torch.from_numpy(weights[name]))
            wanted = module(torch.from_numpy(X))
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).numpy()
        np.testing.assert_allclose(found.outputs[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "is_rate"), [(0.0, False), (1e-3, True), (1.0, True), (1.5, False), (True, False), (None, False)]
)
def test_rates_are_above_0_and_at_most_1(value, is_rate):
    assert subjects._is_rate(types.SimpleNamespace(rate=value), "rate") == is_rate
