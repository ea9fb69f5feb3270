"""`attn-bridge dump` and `compare-dumps`, and `--separate`, find what `compare` finds."""

from __future__ import annotations

import json
import shlex
import sys

import numpy as np
import pytest

from attn_bridge.cli.app import run
from attn_bridge.parity import compare
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps

from .files import BAD, SHAPE


def test_compared_dumps_match_compare_in_every_number(here, capfd):
    common = ["--inputs", "x.npz", "--seeds", "2"]
    assert run(["compare", "ours.py:make", "theirs.py:wrong", *common, "--json", "live.json"]) == 1
    assert run(["dump", "ours.py:make", "t", *common]) == 0
    assert run(["dump", "theirs.py:wrong", "f", "--like", "t"]) == 0
    assert run(["compare-dumps", "t", "f", "--json", "dumps.json"]) == 1
    assert capfd.readouterr().err == ""
    live, found = (json.loads((here / name).read_text()) for name in ("live.json", "dumps.json"))
    for one in (live, found):
        for tensor in one["tensors"]:
            tensor["flax_ulps"] = pytest.approx(tensor["flax_ulps"], rel=1e-9)
            tensor["torch_ulps"] = pytest.approx(tensor["torch_ulps"], rel=1e-9)
    same = ("verdict", "seeds", "samples", "pairing", "unexercised", "invariances", "unreached", "torch_name")
    assert {name: live[name] for name in same} == {name: found[name] for name in same}
    assert [one["name"] for one in live["tensors"]] == [one["name"] for one in found["tensors"]]
    for one, two in zip(live["tensors"], found["tensors"], strict=True):
        for name in ("verdict", "relative", "meaning_used", "worst", "torch_ulps", "flax_ulps", "weights"):
            assert one[name] == two[name], (one["name"], name)
    assert found["first_divergence"]["path"] == live["first_divergence"]["path"] == "norm"
    assert "eps of norm is 1e-05 in torch and 0.001 in Flax" in found["first_divergence"]["message"]


def test_an_ambiguous_pairing_is_settled_by_the_stored_results(here):
    import torch
    from flax import nnx
    from torch import nn

    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Parameter(torch.randn(4, 4))
            self.right = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ self.left + torch.tanh(x @ self.right)

    class Flax(nnx.Module):
        def __init__(self):
            self.first = nnx.Param(np.zeros((4, 4), np.float32))
            self.second = nnx.Param(np.zeros((4, 4), np.float32))

        def __call__(self, x):
            return x @ self.second[...].T + nnx.tanh(x @ self.first[...])

    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    dump(Torch(), x, here / "t", seeds=1)
    dump(Flax(), None, here / "f", like=here / "t")
    report = compare_dumps(here / "t", here / "f")
    assert report.verdict == "equal"
    assert [(one.torch, one.flax) for one in report.pairing] == [("left", "second"), ("right", "first")]
    assert {one.how for one in report.pairing} == {"probe"}


def test_dumps_of_fused_attention_have_the_invariances_of_compare(here):
    from flax import nnx
    from torch import nn

    class Flax(nnx.Module):
        def __init__(self):
            self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, query, key, value):
            return self.attn(query, key, value)

    ours = nn.MultiheadAttention(8, 2, batch_first=True)
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 8)).astype(np.float32)
    live = compare(ours, Flax(), tuple(x), seeds=1)
    dump(ours, tuple(x), here / "t", seeds=1)
    dump(Flax(), None, here / "f", like=here / "t")
    found = compare_dumps(here / "t", here / "f")
    assert (found.verdict, found.invariances, found.unexercised) == ("equal", live.invariances, live.unexercised)
    assert found.invariances == ["in_proj_bias[key]"]
    assert [one.name for one in found.tensors] == [one.name for one in live.tensors]


def test_separate_processes_give_the_same_report(here, capfd):
    arguments = ["compare", "ours.py:make", "theirs.py:wrong", "--inputs", "x.npz", "--seeds", "1", "--separate"]
    assert run([*arguments, "--torch-python", sys.executable, "--json"]) == 1
    printed = capfd.readouterr()
    assert printed.err == ""
    data = json.loads(printed.out)
    assert (data["verdict"], data["first_divergence"]["path"]) == ("different", "norm")
    assert data["command"] == shlex.join(["attn-bridge", *arguments, "--first-python", sys.executable])


def test_a_failing_separate_side_is_one_line(here, capfd):
    (here / "bad.py").write_text(BAD.partition("import torch")[0] + BAD[BAD.index("print") : BAD.index("class")])
    assert run(["compare", "bad.py:raises", "theirs.py:make", *SHAPE, "--separate"]) == 2
    expected = (
        "error: first side: bad.py:raises raised RuntimeError: no such file: weights.pt and a second line (bad.py:9)\n"
    )
    assert capfd.readouterr() == ("", expected)
