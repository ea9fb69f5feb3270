"""Pairs that are not ours: stock layers of both frameworks, and what `compare` says about them."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.cli.demo import write
from attn_bridge.parity import compare
from jax_attn import compat as flax_compat
from torch_attn import compat as torch_compat

with tempfile.TemporaryDirectory() as demo:
    write(Path(demo))
    PAIRS = runpy.run_path(f"{demo}/pairs.py")


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def pair(torch_name, flax_name):
    return PAIRS[f"torch_{torch_name}"](), PAIRS[f"flax_{flax_name}"]()


def test_linear():
    report = compare(*pair("linear", "linear"), inputs(2, 7, 16)).raise_for_mismatch()
    assert [(one.torch, one.flax, one.pattern) for one in report.pairing] == [
        ("weight", "kernel", "a1 a0 -> a0 a1"),
        ("bias", "bias", "... -> ..."),
    ]
    assert [one.name for one in report.tensors] == ["output", "grad input", "grad weight", "grad bias"]


def test_layer_norms_of_different_eps_name_both_values():
    report = compare(*pair("norm", "norm"), inputs(2, 7, 16))
    assert report.verdict == "different"
    assert report.first_divergence.path == report.first_divergence.flax_path == ""
    assert "eps of LayerNorm is 1e-05 in torch and 1e-06 in Flax" in str(report)


def test_layer_norms_of_equal_eps_are_equal_with_a_note():
    report = compare(*pair("norm", "norm_with_torch_eps"), inputs(2, 7, 16)).raise_for_mismatch()
    assert any("the Flax side loses" in note for note in report.notes)


def test_fast_variance_loses_precision_for_large_means():
    report = compare(*pair("norm", "norm_with_torch_eps"), inputs(4, 7, 16) + 100)
    assert report.verdict == "precision"
    assert {one.side for one in report.failures} == {"flax"}


@pytest.mark.parametrize("keys", [7, 9])
def test_multi_head_attention(keys):
    q, k = inputs(2, 7, 16), inputs(2, keys, 16, seed=1)
    report = compare(*pair("attention", "attention"), (q, q, q) if keys == 7 else (q, k, k)).raise_for_mismatch()
    assert report.invariances == ["in_proj_bias[key]"]
    assert report.unexercised == []
    assert "attention weights of torch's MultiheadAttention: not compared, Flax returns none" in report.notes
    assert {"grad in_proj_weight[query]", "grad out_proj.bias"} <= {one.name for one in report.tensors}


def test_drop_ins_for_attention_layers_leave_nothing_uncovered():
    layers = (
        torch_compat.MultiheadAttention(16, 2, batch_first=True),
        flax_compat.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0)),
    )
    report = compare(*layers, (inputs(2, 7, 16),) * 3).raise_for_mismatch()
    assert report.invariances == ["in_proj_bias[key]"]
    assert "train mode" not in str(report)


def test_multi_head_attention_with_another_number_of_heads_is_different():
    torch_module = nn.MultiheadAttention(16, 2, batch_first=True)
    flax_module = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    report = compare(torch_module, flax_module, (inputs(2, 7, 16),) * 3)
    assert report.verdict == "different"
    assert "num_heads of MultiheadAttention is 2 in torch and 4 in Flax" in str(report)


def test_encoder_layer():
    report = compare(*pair("encoder", "encoder_with_torch_eps"), inputs(2, 7, 16)).raise_for_mismatch()
    assert report.invariances == ["self_attn.in_proj_bias[key]"]


def test_encoder_layers_of_different_eps_diverge_in_the_first_norm():
    report = compare(*pair("encoder", "encoder"), inputs(2, 7, 16))
    assert report.verdict == "different"
    assert (report.first_divergence.path, report.first_divergence.direction) == ("norm1", "forward")
    assert sum(node.first for node in report.tree.walk()) == 1
    assert {"query", "key", "value"} <= {(node.flax_path or "").rpartition(".")[2] for node in report.tree.walk()}


def test_a_bfloat16_softmax_is_not_taken_for_another_mask():
    """The tables of positions are float32 on one side, which shows from the second position on, as a mask would."""

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24, bias=False)
            self.register_buffer("table", torch.cos(0.3 * torch.arange(6.0))[:, None])

        def forward(self, x):
            query, key, value = self.qkv(x).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(query * self.table, key, value, is_causal=True)

    class Theirs(nnx.Module):
        def __init__(self):
            self.q, self.k, self.v = (nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(3))

        def __call__(self, x):
            query, key, value = self.q(x) * jnp.cos(0.3 * jnp.arange(6.0))[:, None], self.k(x), self.v(x)
            scores = jnp.where(jnp.tri(6, dtype=bool), query @ key.mT * 8**-0.5, -jnp.inf)
            return jax.nn.softmax(scores.astype(jnp.bfloat16)).astype(x.dtype) @ value

    report = compare(Ours(), Theirs(), inputs(2, 6, 8), seeds=1)
    assert (report.verdict, report.first_divergence.hint) == ("precision", "")


class TorchLatents(nn.Module):
    """Latents that look at a narrower input, then at each other: two layers that fuse queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.alone = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, z, x):
        z = z + self.cross(z, x, x, need_weights=False)[0]
        return self.mlp(z + self.alone(z, z, z, need_weights=False)[0])


class FlaxLatents(nnx.Module):
    """Its twin without submodules for attention: the eight layers stand side by side, numbered or with a word."""

    def __init__(self, names):
        self.names, rngs = names, nnx.Rngs(0)
        for place, name in enumerate(names):
            setattr(self, name, nnx.Linear(6 if place in (1, 2) else 8, 8, rngs=rngs))
        self.fc1, self.fc2 = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def attend(self, z, x, names):
        q, k, v, out = (getattr(self, name) for name in names)
        apart = [one.reshape(*one.shape[:2], 2, 4) for one in (q(z), k(x), v(x))]
        return out(jax.nn.dot_product_attention(*apart).reshape(z.shape))

    def __call__(self, z, x):
        z = z + self.attend(z, x, self.names[:4])
        return self.fc2(jax.nn.relu(self.fc1(z + self.attend(z, z, self.names[4:]))))


@pytest.mark.parametrize(
    "names",
    [
        "q k v o q2 k2 v2 o2",
        "q_cross k_cross v_cross o_cross q_alone k_alone v_alone o_alone",
        "wide_q wide_k wide_v wide_o inner_q inner_k inner_v inner_o",  # words of its own, sorted the other way round
    ],
)
def test_neighbouring_query_key_value_sets_pair_with_fused_layers(names):
    options = {"seeds": 1, "localise": False}
    report = compare(TorchLatents(), FlaxLatents(names.split()), (inputs(2, 4, 8), inputs(2, 5, 6, seed=1)), **options)
    report.raise_for_mismatch()
    second = [one.flax for one in report.pairing if one.torch.startswith("alone.in_proj_bias")]
    assert second == [f"{name}.bias" for name in names.split()[4:7]]


class TorchVolume(nn.Module):
    """A convolution of volumes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x):
        return torch.nn.functional.elu(self.norm(self.conv(x)))


class FlaxVolume(nnx.Module):
    """Its twin, with channels last inside."""

    def __init__(self, activation=jax.nn.elu, eps=1e-5):
        rngs = nnx.Rngs(0)
        self.activation, self.conv = activation, nnx.Conv(2, 4, (3, 3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, epsilon=eps, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        return jnp.moveaxis(self.activation(self.norm(self.conv(jnp.moveaxis(x, 1, -1)))), -1, 1)


@pytest.mark.parametrize(
    ("wrong", "path", "between"), [({"activation": jax.nn.selu}, "", ("norm", "")), ({"eps": 1e-3}, "norm", None)]
)
def test_a_fault_between_or_in_layers_of_volumes_is_placed(wrong, path, between):
    report = compare(TorchVolume(), FlaxVolume(**wrong), inputs(1, 2, 3, 4, 5), seeds=1)
    assert (report.first_divergence.path, report.first_divergence.between) == (path, between)


class TorchChoices(nn.Module):
    """Probabilities, and choices that a submodule makes."""

    def __init__(self):
        super().__init__()
        self.fc, self.pick = nn.Linear(8, 8), TorchPick()

    def forward(self, x):
        probabilities = self.fc(x).softmax(-1)
        return probabilities, self.pick(x), probabilities.argmax(-1)


class TorchPick(nn.Module):
    """The place of the largest value."""

    def forward(self, x):
        return x.argmax(-1)


class FlaxChoices(nnx.Module):
    """Their twin."""

    def __init__(self, inner=jnp.argmax, outer=jnp.argmax):
        self.fc, self.pick, self.outer = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), FlaxPick(inner), outer

    def __call__(self, x):
        probabilities = jax.nn.softmax(self.fc(x))
        return probabilities, self.pick(x), self.outer(probabilities, -1)


class FlaxPick(nnx.Module):
    """A choice by any function."""

    def __init__(self, call):
        self.choose = call

    def __call__(self, x):
        return self.choose(x, -1)


@pytest.mark.parametrize(("wrong", "path"), [({"outer": jnp.argmin}, ""), ({"inner": jnp.argmin}, "pick")])
def test_other_whole_numbers_are_placed_where_they_are_made(wrong, path):
    report = compare(TorchChoices(), FlaxChoices(**wrong), inputs(3, 8), seeds=1)
    assert (report.verdict, report.first_divergence.path) == ("different", path)
    assert "whole numbers" in report.first_divergence.message
