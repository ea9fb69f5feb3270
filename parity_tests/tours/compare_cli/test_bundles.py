"""`attn-bridge compare --save-repro`: the bundle of a difference shows the same difference."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from attn_bridge.cli.app import run

from .files import FLAX, SHAPE, TORCH


def test_a_difference_is_status_1_and_its_bundle_reproduces_it(here, monkeypatch, capfd):
    (here / "ours.py").write_text(TORCH.replace("torch.manual_seed(0)", "torch.seed()"))
    arguments = ["compare", "ours.py:make", "theirs.py:wrong", "--inputs", "x.npz", "--seeds", "1", "--first-seed", "3"]
    reports = ["--json", "a.json", "--html", "a.html", "--junit", "a.xml", "--save-repro", "repro"]
    assert run([*arguments, *reports]) == 1
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.endswith("saved: repro; its README.md says how to run it again\n")
    found = json.loads((here / "a.json").read_text())
    assert (found["verdict"], found["first_divergence"]["path"]) == ("different", "norm")
    assert (here / "a.html").read_text().startswith("<!doctype html>")
    assert "<failure" in (here / "a.xml").read_text()
    assert run([*shlex.split(found["command"])[1:], "--json", "again.json"]) == 1
    assert json.loads((here / "again.json").read_text())["first_divergence"]["path"] == "norm"

    bundle = here / "repro"
    record = json.loads((bundle / "repro.json").read_text())
    assert record["again"] in (bundle / "README.md").read_text()
    assert record["command"] == found["command"]
    assert record["first_divergence"] == found["first_divergence"]
    assert record["environment"] == found["environment"]
    assert str(here) not in "".join(path.read_text() for path in bundle.glob("*.[jmpt]*"))
    elsewhere = here / "moved"
    bundle.rename(elsewhere)
    for name in ("ours.py", "theirs.py", "x.npz"):
        (here / name).unlink()
    monkeypatch.chdir(elsewhere)
    assert run([*shlex.split(record["again"])[1:], "--json", "../repro.json"]) == 1
    assert_same(found, json.loads((here / "repro.json").read_text()))
    monkeypatch.chdir(here)
    options = shlex.split(record["again"])[4:]
    inside = [f"moved/{one}" if (elsewhere / one).exists() else one for one in options]
    assert run(["compare", "moved/torch_side.py:make", "moved/flax_side.py:make", *inside]) == 1


def assert_same(one, two):
    """Compare what two reports found; how the pairing was settled may differ."""
    assert two["first_divergence"] == one["first_divergence"]
    for first, second in zip(one["tensors"], two["tensors"], strict=True):
        for name in ("name", "verdict", "dtype", "mode", "weights"):
            assert first[name] == second[name]
        assert first["relative"] == pytest.approx(second["relative"], rel=1e-6, abs=1e-14)
        assert first["worst"]["index"] == second["worst"]["index"]


def test_an_equal_pair_writes_no_bundle(here):
    assert (
        run(["compare", "ours.py:make", "theirs.py:make", "--shape", "2,6", "--seeds", "1", "--save-repro", "r"]) == 0
    )
    assert not (here / "r").exists()


def test_a_bundle_reruns_only_the_failed_precision(here, capfd):
    (here / "low.py").write_text(
        FLAX.replace(
            "return self.out(self.norm(x))", "return self.out(self.norm(x).astype('bfloat16').astype(x.dtype))"
        )
    )
    arguments = ["ours.py:make", "low.py:make", "--inputs", "x.npz", "--seeds", "1", "--dtype", "float64"]
    assert run(["compare", *arguments, "--dtype", "float32", "--save-repro", "repro", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    record = json.loads((here / "repro" / "repro.json").read_text())
    failed = {one["dtype"] for one in found["tensors"] if one["verdict"] == found["verdict"]}
    assert [word for word in shlex.split(record["again"]) if word.startswith("float")] == sorted(failed)
    assert found["verdict"] == "precision"


def test_example_inputs_are_used_and_bundled(here, capfd):
    assert run(["compare", "ours.py:make", "theirs.py:wrong", "--seeds", "1", "--save-repro", "repro", "--json"]) == 1
    data = json.loads(capfd.readouterr().out)
    assert next(one["shape"] for one in data["tensors"] if one["name"] == "grad x") == [4, 6]
    with np.load(here / "repro" / "inputs.npz") as file:
        assert file["arr_0"].tolist() == (np.arange(24.0).reshape(4, 6) % 7).tolist()


TREES = """
import jax, numpy as np, torch
from flax import linen
from attn_bridge.parity import function

class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x)

def variables():
    module = Dense()
    return module, module.init(jax.random.key(0), np.ones((2, 6), "f4"))

def weights():
    made = {name: one.detach() for name, one in torch.nn.Linear(6, 3).named_parameters()}
    return function(lambda w, x: x @ w["weight"].T * 2 + w["bias"], made)
"""


@pytest.mark.parametrize("pair", [("variables", "weights"), ("weights", "variables")])
def test_linen_modules_and_functions_are_bundled(pair, here, monkeypatch, capfd):
    (here / "trees.py").write_text(TREES)
    arguments = ["compare", *(f"trees.py:{one}" for one in pair), *SHAPE, "--seeds", "1", "--no-transfer"]
    assert run([*arguments, "--save-repro", "repro", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    monkeypatch.chdir(here / "repro")
    again = json.loads((here / "repro" / "repro.json").read_text())["again"]
    assert run([*shlex.split(again)[1:], "--build-seed", "5", "--json", "-"]) == 1
    second = json.loads(capfd.readouterr().out)
    for one, two in zip(found["tensors"], second["tensors"], strict=True):
        assert (one["name"], one["verdict"], one["worst"]) == (two["name"], two["verdict"], two["worst"])
