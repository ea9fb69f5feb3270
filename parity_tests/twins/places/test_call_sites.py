"""A hint names the call of a helper function that differs, and the operation of a line that has several of its kind."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

from .planted_places import WIDTH, linear

X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
RIGHT = (0.5, 0.5, 0.5)


def where(mark):
    """Return the number of the line that ends with a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def hint(first, second):
    return re.sub(r"[^ (]*test_call_sites.py", "FILE", compare(first, second, X, seeds=1).first_divergence.hint)


def scaled(x, by):
    return x * by  # helper


class Helped(nn.Module):
    """Calls one helper function in three lines."""

    def __init__(self, gains=RIGHT):
        super().__init__()
        self.a, self.b, self.gains = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), gains

    def forward(self, x):
        x = self.a(x)
        u = scaled(torch.sin(x), self.gains[0])  # torch 0
        v = scaled(torch.cos(x), self.gains[1])  # torch 1
        w = scaled(torch.tanh(x), self.gains[2])  # torch 2
        return self.b(u + torch.sin(v) - w)


class FlaxHelped(nnx.Module):
    def __init__(self, gains=RIGHT):
        self.a, self.b, self.gains = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), gains

    def __call__(self, x):
        x = self.a(x)
        u = scaled(jnp.sin(x), self.gains[0])  # Flax 0
        v = scaled(jnp.cos(x), self.gains[1])  # Flax 1
        w = scaled(jnp.tanh(x), self.gains[2])  # Flax 2
        return self.b(u + jnp.sin(v) - w)


@pytest.mark.parametrize("call", range(3))
def test_the_call_of_a_helper_that_differs_is_named(call):
    gains = tuple(0.625 if number == call else 0.5 for number in range(3))
    at = f"in Flax (FILE:{where('helper')}, called in line {where(f'Flax {call}')})"
    assert f"with 0.5 for 0.625 {at}, or with " in hint(Helped(), FlaxHelped(gains))
    assert f"with 0.625 for 0.5 {at}, or with " in hint(Helped(gains), FlaxHelped())


def test_a_helper_that_is_wrong_in_every_call_is_named_alone():
    found = hint(Helped(), FlaxHelped((0.625, 0.625, 0.625)))
    assert f"in Flax (FILE:{where('helper')})" in found


class Several(nn.Module):
    """One line has two products, and another two calls of one function."""

    def __init__(self, wrong=""):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last, self.wrong = nn.Linear(WIDTH, WIDTH), wrong

    def forward(self, x):
        a, b, c = self.a(x), self.b(x) + 3.0, torch.sigmoid(self.c(x)) + 0.5
        y = a / b + b * c if self.wrong == "first" else a * b + b / c if self.wrong == "second" else a * b + b * c
        z = torch.sin(y) + (torch.tanh(c) if self.wrong == "call" else torch.sin(c))
        return self.last(z)


class FlaxSeveral(nnx.Module):
    def __init__(self):
        self.a, self.b, self.c, self.last = (linear(WIDTH, WIDTH) for _ in range(4))

    def __call__(self, x):
        a, b, c = self.a(x), self.b(x) + 3.0, jax.nn.sigmoid(self.c(x)) + 0.5
        y = a * b + b * c  # products
        z = jnp.sin(y) + jnp.sin(c)  # calls
        return self.last(z)


@pytest.mark.parametrize(
    ("wrong", "mark", "expression"),
    [("first", "products", "a * b"), ("second", "products", "b * c"), ("call", "calls", "jnp.sin(c)")],
)
def test_one_of_several_operations_of_a_line_is_named(wrong, mark, expression):
    assert f"in Flax (FILE:{where(mark)} `{expression}`)" in hint(Several(wrong), FlaxSeveral())


class Activated(nnx.Module):
    """Calls functions that JAX traces once and keeps."""

    def __init__(self, second=jax.nn.silu):
        self.a, self.b, self.second = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), second

    def __call__(self, x):
        x = jax.nn.silu(self.a(x))
        y = self.second(x - 0.5)  # kept
        return self.b(x + y)


class TorchActivated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = nn.functional.silu(self.a(x))
        return self.b(x + torch.tanh(x - 0.5))


def test_the_line_of_a_function_that_jax_keeps_traced_is_that_of_its_call():
    assert f"tanh for silu in Flax (FILE:{where('kept')})" in hint(TorchActivated(), Activated())
