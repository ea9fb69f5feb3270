"""Pairs that are not ours: stock layers of both frameworks, and what `compare` says about them."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from attn_bridge.cli.demo import write
from attn_bridge.parity import compare

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


def test_layer_norm_of_another_eps_is_different_and_both_values_are_named():
    report = compare(*pair("norm", "norm"), inputs(2, 7, 16))
    assert report.verdict == "different"
    assert report.first_divergence.path == report.first_divergence.flax_path == ""
    assert "eps of LayerNorm is 1e-05 in torch and 1e-06 in Flax" in str(report)


def test_layer_norm_of_the_same_eps_is_equal_and_its_fast_variance_is_a_note():
    report = compare(*pair("norm", "norm_with_torch_eps"), inputs(2, 7, 16)).raise_for_mismatch()
    assert any("the flax side loses" in note for note in report.notes)


def test_a_fast_variance_is_a_loss_of_precision_where_the_given_mean_is_large():
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


def test_multi_head_attention_with_another_number_of_heads_is_different():
    torch_module = nn.MultiheadAttention(16, 2, batch_first=True)
    flax_module = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    report = compare(torch_module, flax_module, (inputs(2, 7, 16),) * 3)
    assert report.verdict == "different"
    assert "num_heads of MultiheadAttention is 2 in torch and 4 in Flax" in str(report)


def test_encoder_layer():
    report = compare(*pair("encoder", "encoder_with_torch_eps"), inputs(2, 7, 16)).raise_for_mismatch()
    assert report.invariances == ["self_attn.in_proj_bias[key]"]


def test_encoder_layer_of_another_eps_diverges_first_in_its_first_norm():
    report = compare(*pair("encoder", "encoder"), inputs(2, 7, 16))
    assert report.verdict == "different"
    assert (report.first_divergence.path, report.first_divergence.direction) == ("norm1", "forward")
    assert sum(node.first for node in report.tree.walk()) == 1
    assert {"query", "key", "value"} <= {(node.flax_path or "").rpartition(".")[2] for node in report.tree.walk()}
