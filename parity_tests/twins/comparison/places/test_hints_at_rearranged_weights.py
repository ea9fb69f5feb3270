"""Weights that one side takes for others, or reads in another order, are named by what makes both sides agree."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.parity import compare

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(2, 5, 8)).astype(np.float32)


def linear(inputs: int, outputs: int) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0))


class Fused(nn.Module):
    """Attention whose projection holds queries, then keys, then values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OtherFused(nnx.Module):
    """Attention whose projection holds queries, keys and values of each head in turn."""

    def __init__(self, function=jax.nn.softmax):
        self.qkv, self.out, self.function = linear(8, 24), linear(8, 8), function

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 2, 3, 4), 3, 0)
        weights = self.function(jnp.einsum("bthc,bshc->bhts", q, k) / 2)
        return self.out(jnp.einsum("bhts,bshc->bthc", weights, v).reshape(x.shape))


class Grouped(nn.Module):
    """Two heads of queries for each head of keys and values, all queries first."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, 2)).transpose(1, 2) for one in self.qkv(x).split([8, 4, 4], -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class OtherGrouped(nnx.Module):
    """The same with the queries of each group in front of its key and value."""

    def __init__(self):
        self.qkv, self.out = linear(8, 16), linear(8, 8)

    def __call__(self, x):
        made = self.qkv(x).reshape(*x.shape[:2], 2, 4, 2)
        q, k, v = made[..., :2, :].reshape(*x.shape[:2], 4, 2), made[..., 2, :], made[..., 3, :]
        return self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.up, self.down = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.up(self.norm1(x)).tanh()
        return x + self.down(self.norm2(x)).relu()


class OtherBlock(nnx.Module):
    """The block with its norms exchanged, or with its last activation."""

    def __init__(self, exchanged, function):
        norms = (nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0)) for _ in range(2))
        (self.norm1, self.norm2), self.up, self.down = norms, linear(8, 8), linear(8, 8)
        self.exchanged, self.function = exchanged, function

    def __call__(self, x):
        norms = (self.norm2, self.norm1) if self.exchanged else (self.norm1, self.norm2)
        x = x + jnp.tanh(self.up(norms[0](x)))
        return x + self.function(self.down(norms[1](x)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 6)), nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, x):
        made = torch.einsum("btd,edh->bteh", x, self.up).relu()
        return torch.einsum("bteh,ehd,bte->btd", made, self.down, self.router(x).softmax(-1))


class OtherExperts(nnx.Module):
    """Experts of which each is followed by the second matrix of its neighbour."""

    def __init__(self):
        self.router, self.up, self.down = linear(8, 4), nnx.Param(jnp.ones((4, 8, 6))), nnx.Param(jnp.ones((4, 6, 8)))

    def __call__(self, x):
        made = jax.nn.relu(jnp.einsum("btd,edh->bteh", x, self.up[...]))
        down = self.down[...][jnp.arange(4) ^ 1]
        return jnp.einsum("bteh,ehd,bte->btd", made, down, jax.nn.softmax(self.router(x)))


def kernels(first, second):
    """Return rules that pair the matrices of two layers crosswise, and their biases rightly."""
    pairs = [(first, second), (second, first)]
    rules = [{"torch": f"{one}.weight", "flax": f"{two}.kernel", "pattern": "o i -> i o"} for one, two in pairs]
    return [*rules, *({"torch": f"{one}.bias", "flax": f"{one}.bias"} for one, _ in pairs)]


FAULTS = {
    "heads in front of queries, keys and values": (
        Fused,
        OtherFused,
        None,
        "with an axis of 24 split as (3, 2, 4), then transposed by (1, 0, 2) in Flax, or with an axis of 24 split as "
        "(2, 3, 4), then transposed by (1, 0, 2) in torch both sides agree",
    ),
    "groups in front of queries, keys and values": (
        Grouped,
        OtherGrouped,
        None,
        "with axis 1 of qkv.kernel and of qkv.bias from queries, keys and values to 2 groups of 2 queries, a key and a "
        "value of 2 in Flax both sides agree",
    ),
    "norms": (
        Block,
        lambda: OtherBlock(True, nnx.relu),
        None,
        "with norm1 and norm2 exchanged in Flax both sides agree",
    ),
    "matrices in the pairing": (
        Block,
        lambda: OtherBlock(False, nnx.relu),
        kernels("up", "down"),
        "with down.kernel and up.kernel exchanged in Flax both sides agree",
    ),
    "neighbouring experts": (
        Experts,
        OtherExperts,
        None,
        "with axis 0 of down in the order (1, 0, 3, 2) in Flax both sides agree",
    ),
}


@pytest.mark.parametrize("label", FAULTS)
def test_weights_in_another_order_are_named(label):
    ours, theirs, rules, expected = FAULTS[label]
    report = compare(ours(), theirs(), X, seeds=1, rules=rules)
    assert report.verdict == "different"
    assert re.sub(r" \([^ ]*\.py:\d+( `[^`]*`)?\)", "", report.first_divergence.hint) == expected


def test_another_fault_is_not_called_an_order():
    for ours, theirs in (
        (Block, lambda: OtherBlock(True, nnx.gelu)),
        (Fused, lambda: OtherFused(lambda scores: jax.nn.softmax(scores, -2))),
    ):
        hint = compare(ours(), theirs(), X, seeds=1).first_divergence.hint
        assert "exchanged" not in hint
        assert "transposed" not in hint
