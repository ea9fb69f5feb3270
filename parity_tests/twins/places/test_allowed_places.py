"""An accepted difference in a submodule hides no other one: all else is judged with the other side's numbers there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_bridge.parity import compare

WIDTH = 6
X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
FAULTS = ("", "between", "scale", "detached", "child")
WHY = {"norm": "another eps on purpose"}


class Ours(nn.Module):
    """A norm that is called twice, and layers behind it."""

    def __init__(self, fault="", eps=1e-5, recomputed=False):
        super().__init__()
        self.fault, self.recomputed = fault, recomputed
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=eps)
        self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x + self.first(x))
        x = checkpoint(self.second, x, use_reentrant=False) if self.recomputed else self.second(x)
        if self.fault == "detached":
            x = x * 0.5 + x.detach() * 0.5
        x = nn.functional.gelu(x, approximate="tanh" if self.fault == "between" else "none")
        x = self.last(self.norm(x)) * (1.001 if self.fault == "child" else 1.0)
        return x * (1.0001 if self.fault == "scale" else 1.0)


class FlaxBody:
    """What NNX's and Linen's module do alike."""

    def run(self, x, first, norm, second, last):
        x = second(norm(x + first(x)))
        if self.fault == "detached":
            x = x * 0.5 + jax.lax.stop_gradient(x) * 0.5
        x = last(norm(jax.nn.gelu(x, approximate=self.fault == "between")))
        x = x * (1.001 if self.fault == "child" else 1.0)
        return x * (1.0001 if self.fault == "scale" else 1.0)


class Theirs(nnx.Module, FlaxBody):
    def __init__(self, fault="", eps=1e-6):
        rngs, self.fault = nnx.Rngs(0), fault
        self.first, self.second, self.last = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.norm = nnx.LayerNorm(WIDTH, epsilon=eps, rngs=rngs)

    def __call__(self, x):
        return self.run(x, self.first, self.norm, self.second, self.last)


class TheirsInLinen(linen.Module, FlaxBody):
    fault: str = ""
    eps: float = 1e-6

    def setup(self):
        self.first, self.second, self.last = (linen.Dense(WIDTH) for _ in range(3))
        self.norm = linen.LayerNorm(epsilon=self.eps)

    def __call__(self, x):
        return self.run(x, self.first, self.norm, self.second, self.last)


def in_linen(fault="", eps=1e-6):
    module = TheirsInLinen(fault, eps)
    return module, module.init(jax.random.key(0), X)


PAIRS = {
    "torch, NNX": lambda fault: (Ours(), Theirs(fault)),
    "NNX, torch": lambda fault: (Theirs(), Ours(fault)),
    "torch, Linen": lambda fault: (Ours(), in_linen(fault)),
    "NNX, NNX": lambda fault: (Theirs(eps=1e-5), Theirs(fault)),
    "torch, torch": lambda fault: (Ours(eps=1e-6), Ours(fault)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", PAIRS)
def test_faults_outside_an_allowed_submodule_are_differences(kind, fault):
    torch.manual_seed(0)
    report = compare(*PAIRS[kind](fault), X, seeds=1, allow=WHY)
    assert [one.path for one in report.allowed] == ["norm"]
    if not fault:
        assert report.verdict == "equal", str(report)
        assert "all else agrees" in report.notes[0]
        return
    assert report.verdict == "different", str(report)
    assert report.first_divergence is not None
    place = report.first_divergence
    assert place.direction == ("backward" if fault == "detached" else "forward")
    expected = {"between": ("second", "norm"), "scale": ("last", ""), "child": ("last", ""), "detached": None}[fault]
    assert (place.path, place.between) == ("", expected)


def test_without_an_accepted_difference_the_eps_is_named():
    torch.manual_seed(0)
    report = compare(Ours(), Theirs("between"), X, seeds=1)
    assert report.first_divergence is not None
    assert report.first_divergence.path == "norm"


def test_recomputed_submodules_can_be_allowed():
    torch.manual_seed(0)
    assert compare(Theirs(), Ours(recomputed=True), X, seeds=1, allow=WHY).verdict == "equal"
    assert compare(Theirs(), Ours("between", recomputed=True), X, seeds=1, allow=WHY).verdict == "different"


def test_a_fault_in_another_submodule_has_its_own_place():
    class Wrong(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 1.001

    torch.manual_seed(0)
    theirs = Theirs()
    theirs.last = Wrong(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    report = compare(Ours(), theirs, X, seeds=1, allow=WHY)
    assert report.verdict == "different"
    assert report.first_divergence is not None
    assert report.first_divergence.path == "last"


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, "equal"), (2.001, "different")])
def test_a_submodule_that_a_scan_calls(factor, verdict):
    class InAScan(nnx.Module):
        def __init__(self, eps, factor):
            self.norm, self.factor = nnx.LayerNorm(WIDTH, epsilon=eps, rngs=nnx.Rngs(0)), factor

        def __call__(self, x):
            return jax.lax.scan(lambda carry, row: (carry, self.norm(row) * self.factor), 0.0, jnp.asarray(x))[1]

    report = compare(InAScan(1e-5, 2.0), InAScan(1e-6, factor), X, seeds=1, allow=WHY)
    assert report.verdict == verdict


def test_code_around_an_unexchangeable_submodule_is_not_judged():
    """One side maps the norm over its rows, so that no call of it is seen."""

    class Mapped(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.vmap(self.norm)(jnp.asarray(x))

    class Plain(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    report = compare(Plain(), Mapped(), X, seeds=1, allow={"norm": "why"})
    assert "all else agrees" not in " ".join(report.notes)
