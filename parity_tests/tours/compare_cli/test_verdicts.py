"""`attn-bridge compare`: verdicts, forms of inputs, allowed differences, changes since a baseline."""

from __future__ import annotations

import json
import shlex

import numpy as np

from attn_bridge.cli.app import run

from .files import FLAX, SHAPE, TORCH


def test_equal_modules_are_status_0_with_the_command_shown(here, capfd):
    assert run(["compare", "ours.py:make", "theirs.py:Net", "--inputs", "x.npz", "--seeds", "1"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("equal: Net (torch) and Net (Flax), 6 tensors, ")
    command = "attn-bridge compare ours.py:make theirs.py:Net --inputs x.npz --seeds 1"
    assert printed.out.endswith(f"again: {command}\n")


def test_a_file_of_keywords_and_rules_are_used(here, capfd):
    np.savez("kw.npz", x=np.ones((2, 6), np.float32) * np.arange(6))
    names = (("norm.weight", "norm.scale"), ("norm.bias", "norm.bias"), ("out.bias", "out.bias"))
    rules = [f'[[rule]]\ntorch = "{torch}"\nflax = "{flax}"\n' for torch, flax in names]
    rules.append('[[rule]]\ntorch = "out.weight"\nflax = "out.kernel"\npattern = "o i -> i o"\n')
    (here / "rules.toml").write_text("\n".join(rules))
    arguments = ["--inputs", "kw.npz", "--rules", "rules.toml", "--seeds", "1", "--json"]
    assert run(["compare", "ours.py:module", "theirs.py:make", *arguments]) == 0
    assert {one["how"] for one in json.loads(capfd.readouterr().out)["pairing"]} == {"rule"}


def test_the_flax_side_may_take_its_arguments_in_another_way(here, capfd):
    (here / "other.py").write_text(FLAX.replace("(self, x)", "(self, hidden)").replace("norm(x)", "norm(hidden)"))
    np.savez("kw.npz", hidden=np.load("x.npz")["arr_0"])
    arguments = ["--inputs", "x.npz", "--flax-inputs", "kw.npz", "--seeds", "1", "--json"]
    assert run(["compare", "ours.py:make", "other.py:make", *arguments]) == 0
    assert "grad x" in [one["name"] for one in json.loads(capfd.readouterr().out)["tensors"]]


def test_sides_may_be_in_any_order_or_one_framework(here, capfd):
    assert run(["compare", "theirs.py:wrong", "ours.py:make", *SHAPE, "--seeds", "1", "--save-repro", "repro"]) == 1
    assert capfd.readouterr().out.startswith("different: Net (Flax) and Net (torch), 6 tensors, ")
    record = json.loads((here / "repro" / "repro.json").read_text())
    assert shlex.split(record["again"])[2:4] == ["flax_side.py:make", "torch_side.py:make"]
    assert run(["compare", "ours.py:make", "ours.py:Net", *SHAPE, "--seeds", "1"]) == 0
    assert capfd.readouterr().out.startswith("equal: Net (first) and Net (second), 6 tensors, ")


def test_the_report_is_written_when_it_is_inconclusive(here, capfd):
    assert run(["compare", "bad.py:Random", "bad.py:One", *SHAPE, "--json", "--html", "a.html"]) == 2
    printed = capfd.readouterr()
    assert json.loads(printed.out)["verdict"] == "inconclusive"
    assert printed.err.count("\n") == 1
    assert "inconclusive" in (here / "a.html").read_text()


def test_an_allowed_difference_is_equal_in_every_report(here, capfd):
    arguments = ["compare", "ours.py:make", "theirs.py:wrong", "--inputs", "x.npz", "--seeds", "1"]
    assert run([*arguments, "--allow", "norm=eps differs on purpose", "--html", "a.html", "--json", "a.json"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("equal: Net (torch) and Net (Flax), 6 tensors, ")
    assert "\nallowed: norm: eps differs on purpose\n" in printed
    assert "allowed: norm: eps differs on purpose" in (here / "a.html").read_text()
    data = json.loads((here / "a.json").read_text())
    assert data["allowed"][0]["reason"] == "eps differs on purpose"
    assert "--allow 'norm=eps differs on purpose'" in data["command"]
    assert run([*arguments, "--allow", "out=something else"]) == 1
    assert "allowed: out: something else (nothing there differs)" not in capfd.readouterr().out  # its gradients do


def test_an_allowance_that_names_nothing_is_a_warning(here, capfd):
    """A report that is equal is not read to its end; a misspelt path may have let nothing pass."""
    arguments = ["compare", "ours.py:make", "--inputs", "x.npz", "--seeds", "1"]
    assert run([*arguments, "theirs.py:make", "--allow", "norn=eps", "--allow", "out=x", "--allow", "zz=x"]) == 0
    assert capfd.readouterr().err.splitlines() == [
        "warning: --allow norn: no tensor and no submodule with parameters has that name; the nearest: norm",
        "warning: --allow zz: no tensor and no submodule with parameters has that name",
    ]
    assert run([*arguments, "theirs.py:wrong", "--allow", "norm.weigth=eps", "--json"]) == 1
    out, err = capfd.readouterr()
    near = "norm.weight, grad norm.weight, out.weight"
    assert err == f"warning: --allow norm.weigth: nothing has that name; the nearest: {near}\n"
    assert json.loads(out)["allowed"][0]["known"] is False


def test_a_baseline_shows_what_has_changed(here, capfd):
    arguments = ["compare", "ours.py:make", "--inputs", "x.npz", "--seeds", "1"]
    assert run([*arguments, "theirs.py:make", "--json", "before.json"]) == 0
    assert run([*arguments, "theirs.py:wrong", "--baseline", "before.json", "--json", "after.json"]) == 1
    flat = " ".join(capfd.readouterr().out.split())
    assert "since the baseline: verdict equal -> different; 4 newly failing (output, grad x, " in flat
    assert json.loads((here / "after.json").read_text())["changes"]["place"] == ["", "norm"]
    assert run([*arguments, "theirs.py:make", "--baseline", "after.json"]) == 0
    assert "verdict different -> equal; 4 mended" in capfd.readouterr().out


def test_build_seed_repeats_randomly_drawn_weights(here, capfd):
    (here / "drawn.py").write_text(
        "import random, numpy, torch\n" + TORCH.replace("torch.manual_seed(0)", "pass").replace(
            "self.out = nn.Linear(6, 6)",
            "self.out = nn.Linear(6, 6); self.norm.weight.data *= numpy.random.rand() + random.random()"
        )
    )  # fmt: skip
    arguments = ["compare", "drawn.py:make", "theirs.py:make", "--inputs", "x.npz", "--seeds", "1", "--no-transfer"]
    found = []
    import torch

    for seed in ("0", "0", "1"):
        before = torch.random.get_rng_state()
        assert run([*arguments, "--build-seed", seed, "--json"]) == 1
        assert torch.equal(torch.random.get_rng_state(), before)
        data = json.loads(capfd.readouterr().out)
        assert ("--build-seed" in data["command"]) is (seed != "0")
        found.append([one["worst"] for one in data["tensors"]])
    assert found[0] == found[1] != found[2]
