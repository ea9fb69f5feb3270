"""Where precision is lost: code between submodules, sides without float64, decode loops over a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare
from attn_parity.localisation import search
from attn_parity.localisation.search import find_on

from . import planted_places as planted
from .planted_places import WIDTH, X, linear


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.c(torch.sin(self.b(torch.tanh(self.a(x)))))


class FlaxSteps(nnx.Module):
    """Rounds what goes from one layer to the next, and may refuse float64."""

    def __init__(self, rounded="", gain=1.0, refuses=False):
        self.a, self.b, self.c = linear(WIDTH, 12), linear(12, WIDTH), linear(WIDTH, 3)
        self.rounded, self.gain, self.refuses = rounded, gain, refuses

    def at(self, name, x):
        return x.astype(jnp.bfloat16).astype(x.dtype) if name == self.rounded else x

    def __call__(self, x):
        if self.refuses and x.dtype == jnp.float64:
            raise TypeError("no float64")
        x = self.at("ab", jnp.tanh(self.a(self.at("start", x))))
        return self.at("end", self.c(self.at("bc", jnp.sin(self.b(x) * self.gain))))


PLACES = {"start": ("", "a"), "ab": ("a", "b"), "bc": ("b", "c"), "end": ("c", "")}


@pytest.mark.parametrize(("spot", "refuses"), [("start", False), ("ab", False), ("bc", True), ("end", False)])
def test_code_that_loses_precision_is_named(spot, refuses):
    sides = planted.sides_of(Steps(), FlaxSteps(spot, refuses=refuses))
    if refuses:
        sides.lacks["second"] = "no float64"
    found = find_on(sides, "precision").divergence
    assert (found.path, found.direction, found.between) == ("", "forward", PLACES[spot])


def test_a_side_without_float64_keeps_the_place_of_another_function():
    first = compare(Steps(), FlaxSteps(gain=1.01, refuses=True), X, seeds=1).first_divergence
    assert (first.path, first.between) == ("", ("b", "c"))


def test_precision_lost_in_no_single_sample_has_a_place(monkeypatch):
    weigh = search.weigh

    def weaker(*args):
        used, worse, problem = weigh(*args)
        return {key: value / 1e6 for key, value in used.items()}, worse, problem

    monkeypatch.setattr(search, "weigh", weaker)
    found = find_on(planted.sides_of(Steps(), FlaxSteps("ab")), "precision").divergence
    assert (found.direction, found.path) in {("forward", ""), ("backward", "")}
    assert "of what may be lost" in found.message


# ---- decoding


class Decoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        keys, values, found = torch.zeros_like(x), torch.zeros_like(x), []
        for t in range(x.shape[1]):
            now = x[:, t : t + 1]
            keys = torch.cat([keys[:, :t], self.k(now), keys[:, t + 1 :]], 1)
            values = torch.cat([values[:, :t], self.v(now), values[:, t + 1 :]], 1)
            scores = self.q(now) @ keys[:, : t + 1].swapaxes(1, 2)
            found.append(self.o(torch.softmax(scores, -1) @ values[:, : t + 1]))
        return torch.cat(found, 1)


class FlaxDecoding(nnx.Module):
    """Keeps keys and values in a float32 cache; indices are int32 next to what `jnp.arange` gives."""

    def __init__(self, gain=1.0, dtype=jnp.float32):
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.gain, self.dtype = gain, dtype

    def __call__(self, x):
        zero, length = jnp.int32(0), x.shape[1]

        def step(cache, now_and_t):
            now, t = now_and_t
            now = now[:, None]
            keys, values = (
                jax.lax.dynamic_update_slice(held, project(now).astype(self.dtype), (zero, t, zero))
                for held, project in zip(cache, (self.k, self.v), strict=True)
            )
            scores = self.q(now) @ keys.astype(x.dtype).swapaxes(1, 2) * self.gain
            scores = jnp.where(jnp.arange(length) <= t, scores, -jnp.inf)
            return (keys, values), self.o(jax.nn.softmax(scores, -1) @ values.astype(x.dtype))

        empty = jnp.zeros(x.shape, self.dtype)
        _, found = jax.lax.scan(step, (empty, empty), (x.swapaxes(0, 1), jnp.arange(length)))
        return found[:, :, 0].swapaxes(0, 1)


@pytest.mark.parametrize(
    ("fault", "verdict", "between"),
    [
        ({}, "equal", None),
        ({"gain": 1.01}, "different", ("q", "o")),
        ({"dtype": jnp.bfloat16}, "precision", ("v", "o")),
    ],
)
def test_a_decode_loop_keeps_its_float64_run_and_its_place(fault, verdict, between):
    report = compare(Decoding(), FlaxDecoding(**fault), X, seeds=1)
    first = report.first_divergence
    assert (report.verdict, first and first.between) == (verdict, between)
    assert not [note for note in report.notes if "no float64" in note]
