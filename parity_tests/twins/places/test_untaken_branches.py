"""Branches of code that no sample takes are reported as not covered: a side without them is equal."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from attn_bridge import parity
from attn_bridge.parity import compare

from .planted_places import WIDTH, linear

X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
MASK = np.tril(np.ones((5, 5), bool))


class Branching(nn.Module):
    """Attention with causal masks and a bound that numbers reach, and perhaps guards that none needs."""

    def __init__(self, guards=()):
        super().__init__()
        self.qkv, self.out, self.guards = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), guards

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        norm, mask = q.norm(dim=-1, keepdim=True), torch.from_numpy(MASK)
        if "eps" in self.guards:
            norm = norm.clamp(min=1e-12)
        scores = torch.tanh(q / norm @ k.swapaxes(1, 2))
        scores = torch.clamp(scores, -0.25, 5.0) if "upper" in self.guards else scores.clamp(min=-0.25)
        if "limit" in self.guards:
            scores = torch.where(scores.abs() > 2.0, 0.1 * scores, scores)
        y = torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ v
        if "rows" in self.guards:
            y = torch.where(mask.any(-1)[:, None], y, 0.0)
        if "if" in self.guards and y.isnan().any():
            y = y.nan_to_num()
        return self.out(torch.relu(y))


class FlaxBranching(nnx.Module):
    def __init__(self, guards=()):
        self.qkv, self.out, self.guards = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH), guards

    def __call__(self, x):
        return guarded(x, self.qkv, self.out, self.guards)


class InLinen(linen.Module):
    guards: tuple[str, ...] = ()

    @linen.compact
    def __call__(self, x):
        return guarded(x, linen.Dense(3 * WIDTH, name="qkv"), linen.Dense(WIDTH, name="out"), self.guards)


def guarded(x, qkv, out, guards):
    q, k, v = jnp.split(qkv(x), 3, -1)
    norm = jnp.linalg.norm(q, axis=-1, keepdims=True)
    if "eps" in guards:
        norm = jnp.maximum(norm, 1e-12)
    scores = jnp.tanh(q / norm @ k.swapaxes(1, 2))
    scores = jnp.clip(scores, -0.25, 5.0) if "upper" in guards else jnp.maximum(scores, -0.25)
    if "limit" in guards:
        scores = jnp.where(jnp.abs(scores) > 2.0, 0.1 * scores, scores)
    y = jax.nn.softmax(jnp.where(MASK, scores, -1e9), -1) @ v
    if "rows" in guards:
        y = jnp.where(jnp.asarray(MASK).any(-1)[:, None], y, 0.0)
    if "if" in guards:
        y = jax.lax.cond(jnp.isnan(y).any(), jnp.nan_to_num, lambda y: y, y)
    return out(jax.nn.relu(y))


def side(kind, *guards):
    if kind != "linen":
        return Branching(guards) if kind == "torch" else FlaxBranching(guards)
    module = InLinen(guards)
    return module, module.init(jax.random.key(0), X)


def untaken(first, second):
    report = compare(first, second, X, seeds=2)
    assert report.verdict == "equal", str(report)
    lines = (re.sub(r"[^ (]*test_untaken_branches.py", "FILE", line) for line in report.unreached)
    return [line for line in lines if "condition" in line or "bound" in line or "comparison" in line]


@pytest.mark.parametrize(
    ("guard", "torch_name", "name", "words"),
    [
        ("eps", "clamp", "maximum", "no number reaches its lower bound"),
        ("upper", "clamp", "clip", "no number reaches its upper bound"),
        ("limit", "where", "where", "its condition is always false"),
        ("rows", "where", "where", "its condition is always true"),
        ("if", "if", "cond", "its condition is always false"),
    ],
)
def test_a_branch_that_no_sample_takes_is_not_covered(guard, torch_name, name, words):
    for kind, other, label in (("torch", "nnx", "torch"), ("nnx", "torch", "Flax"), ("linen", "torch", "Flax")):
        (line,) = untaken(side(kind, guard), side(other))
        assert line.startswith(f"{label}'s {torch_name if kind == 'torch' else name} (FILE:")
        assert line.endswith(f"): {words}")


def test_branches_that_samples_take_are_covered():
    assert untaken(side("torch"), side("linen")) == []


def test_branches_of_library_code_are_not_listed():
    """`logsumexp` guards against infinite maxima, `normalize` against zeros, and indices count from the end."""

    def ours(_, x):
        return nn.functional.normalize(torch.logsumexp(x, -1))[..., torch.tensor([0, -1])]

    def theirs(_, x):
        y = jax.nn.logsumexp(x, -1)
        return (y / jnp.linalg.norm(y, axis=1, keepdims=True))[..., jnp.array([0, -1])]

    assert untaken(parity.function(ours, {}, framework="torch"), parity.function(theirs, {})) == []


def test_a_mask_that_hides_nothing_is_one_line():
    class Hiding(nn.Module):
        def forward(self, x, mask):
            return torch.where(mask, torch.sin(x), 0.0)

    class FlaxHiding(nnx.Module):
        def __call__(self, x, mask):
            return jnp.where(mask, jnp.sin(x), 0.0)

    report = compare(Hiding(), FlaxHiding(), (X, np.ones(X.shape, bool)), seeds=1)
    assert [line for line in report.unreached if "always" in line or "everywhere" in line] == [
        "another mask: True everywhere, so that a side may ignore it"
    ]


def test_a_bound_of_an_activation_that_no_number_reaches_is_not_covered():
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU6()

        def forward(self, x):
            return self.act(0.01 * x)

    class Unbounded(nnx.Module):
        def __call__(self, x):
            return jax.nn.relu(0.01 * x)

    report = compare(Bounded(), Unbounded(), X, seeds=1)
    assert report.verdict == "equal"
    (line,) = (line for line in report.unreached if "hardtanh" in line)  # which ReLU6 calls
    assert line.endswith(": no number reaches its upper bound")


class Windowed(nn.Module):
    def __init__(self, window=None):
        super().__init__()
        self.window = window

    def forward(self, x):
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = distance >= 0 if self.window is None else (distance >= 0) & (self.window > distance)
        return torch.softmax((x @ x.mT).masked_fill(~seen, -1e9), -1) @ x


class FlaxWindowed(nnx.Module):
    def __init__(self, window=None):
        self.window = window

    def __call__(self, x):
        distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        return jax.nn.softmax(jnp.where(seen, x @ x.mT, -1e9), -1) @ x


def test_a_window_wider_than_the_tokens_is_not_covered():
    for first, second, label in ((Windowed(32), FlaxWindowed(), "torch"), (Windowed(), FlaxWindowed(32), "Flax")):
        (line,) = untaken(first, second)
        assert line == f"{label}'s comparison < 32 (FILE:{line.split(':')[1].split(')')[0]}): it is always true"
    assert compare(Windowed(3), FlaxWindowed(), X, seeds=1).verdict == "different"
    assert untaken(Windowed(3), FlaxWindowed(3)) == []


def test_a_choice_by_a_comparison_that_always_comes_out_alike_is_one_line():
    def ours(_, x):
        return torch.where(torch.arange(5)[:, None] < 9, torch.sin(x), 0.5 * x)

    def theirs(_, x):
        return jnp.where(jnp.arange(5)[:, None] < 9, jnp.sin(x), 0.5 * x)

    lines = untaken(parity.function(ours, {}, framework="torch"), parity.function(theirs, {}))
    assert [re.sub(r":\d+", "", line) for line in lines] == [
        "torch's comparison < 9 (FILE): it is always true",
        "Flax's comparison < 9 (FILE): it is always true",
    ]


def test_a_comparison_with_another_number_in_each_turn_of_a_loop_is_one():
    def ours(_, x):
        places = torch.arange(5)
        return sum(torch.where((places <= t)[:, None], x, 0.5 * x).sin() for t in range(5))

    def theirs(_, x):
        places = jnp.arange(5)
        return sum(jnp.sin(jnp.where((places <= t)[:, None], x, 0.5 * x)) for t in range(5))

    assert untaken(parity.function(ours, {}, framework="torch"), parity.function(theirs, {})) == []


def test_a_mean_over_an_axis_of_size_one_is_not_covered():
    class OverTokens(nn.Module):
        def forward(self, x):
            return torch.sin(x - x.mean(1, keepdim=True))

    class OverBoth(nnx.Module):
        def __call__(self, x):
            return jnp.sin(x - x.mean((0, 1), keepdims=True))

    report = compare(OverTokens(), OverBoth(), X[:1], seeds=1)
    assert report.verdict == "equal"
    assert report.unreached == ["another size than 1 of axis 0 of x: a mean over it would not show"]
    assert compare(OverTokens(), OverBoth(), X, seeds=1).verdict == "different"
