"""`attn-bridge compare` on users' files: verdicts, reports, bundles, dumps, and one line for what is bad."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from attn_bridge.cli.app import run
from attn_bridge.parity import compare
from attn_bridge.parity.dumps.recording import dump
from attn_bridge.parity.dumps.replay import compare_dumps

TORCH = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6, eps=eps)
        self.out = nn.Linear(6, 6)
    def forward(self, x):
        return self.out(self.norm(x))

def make():
    return Net()

def example_inputs():
    return torch.arange(24.0).reshape(4, 6) % 7

module = make()
"""

FLAX = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, eps=1e-5):
        self.norm = nnx.LayerNorm(6, epsilon=eps, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
    def __call__(self, x):
        return self.out(self.norm(x))

def make():
    return Net()

def wrong():
    return Net(1e-3)
"""

BAD = """
import os
import sys
import numpy as np
import torch
from flax import linen, nnx

print("printed by the user's module")
print("printed on stderr", file=sys.stderr)

def raises():
    raise RuntimeError("no such file: weights.pt\\nand a second line")

def exits():
    sys.exit("bye")

def quits():
    sys.exit(0)

def reads():
    return input("which one? ")

def needs(size):
    return torch.nn.Linear(size, size)

def leaves():
    os._exit(0)

def number():
    return 3

def linen_module():
    return linen.Dense(3)

class Two(torch.nn.Module):
    def forward(self, x):
        return x, x

class Random(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

class Broken(torch.nn.Module):
    def forward(self, x):
        sys.exit(5)

class Leaving(torch.nn.Module):
    def forward(self, x):
        os._exit(0)

class One(nnx.Module):
    def __call__(self, x):
        return x

class Identity(torch.nn.Module):
    def forward(self, x):
        return x

constant = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with both sides in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(TORCH)
    (tmp_path / "theirs.py").write_text(FLAX)
    (tmp_path / "bad.py").write_text(BAD)
    np.savez("x.npz", np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32))
    return tmp_path


# ---- verdicts


def test_equal_modules_are_status_0_and_the_command_stands_below(here, capfd):
    assert run(["compare", "ours.py:make", "theirs.py:Net", "--inputs", "x.npz", "--seeds", "1"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("equal: Net (torch) and Net (Flax), 6 tensors, ")
    command = "attn-bridge compare ours.py:make theirs.py:Net --inputs x.npz --seeds 1"
    assert printed.out.endswith(f"again: {command}\n")


def test_different_ones_are_status_1_with_every_report_and_a_bundle_that_shows_the_same(here, monkeypatch, capfd):
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


def test_no_bundle_is_written_of_what_is_equal(here):
    assert (
        run(["compare", "ours.py:make", "theirs.py:make", "--shape", "2,6", "--seeds", "1", "--save-repro", "r"]) == 0
    )
    assert not (here / "r").exists()


def test_a_bundle_of_several_precisions_shows_the_one_that_failed(here, capfd):
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


def test_example_inputs_beside_the_factory_are_used_and_go_into_the_bundle(here, capfd):
    assert run(["compare", "ours.py:make", "theirs.py:wrong", "--seeds", "1", "--save-repro", "repro", "--json"]) == 1
    data = json.loads(capfd.readouterr().out)
    assert next(one["shape"] for one in data["tensors"] if one["name"] == "grad x") == [4, 6]
    with np.load(here / "repro" / "inputs.npz") as file:
        assert file["arr_0"].tolist() == (np.arange(24.0).reshape(4, 6) % 7).tolist()


def test_a_file_of_keywords_and_rules_are_used(here, capfd):
    np.savez("kw.npz", x=np.ones((2, 6), np.float32) * np.arange(6))
    names = (("norm.weight", "norm.scale"), ("norm.bias", "norm.bias"), ("out.bias", "out.bias"))
    rules = [f'[[rule]]\ntorch = "{torch}"\nflax = "{flax}"\n' for torch, flax in names]
    rules.append('[[rule]]\ntorch = "out.weight"\nflax = "out.kernel"\npattern = "o i -> i o"\n')
    (here / "rules.toml").write_text("\n".join(rules))
    arguments = ["--inputs", "kw.npz", "--rules", "rules.toml", "--seeds", "1", "--json"]
    assert run(["compare", "ours.py:module", "theirs.py:make", *arguments]) == 0
    assert {one["how"] for one in json.loads(capfd.readouterr().out)["pairing"]} == {"rules"}


def test_the_flax_side_may_take_its_arguments_in_another_way(here, capfd):
    (here / "other.py").write_text(FLAX.replace("(self, x)", "(self, hidden)").replace("norm(x)", "norm(hidden)"))
    np.savez("kw.npz", hidden=np.load("x.npz")["arr_0"])
    arguments = ["--inputs", "x.npz", "--flax-inputs", "kw.npz", "--seeds", "1", "--json"]
    assert run(["compare", "ours.py:make", "other.py:make", *arguments]) == 0
    assert "grad x" in [one["name"] for one in json.loads(capfd.readouterr().out)["tensors"]]


def test_the_sides_may_stand_in_any_order_and_be_of_one_framework(here, capfd):
    assert run(["compare", "theirs.py:wrong", "ours.py:make", *SHAPE, "--seeds", "1", "--save-repro", "repro"]) == 1
    assert capfd.readouterr().out.startswith("different: Net (Flax) and Net (torch), 6 tensors, ")
    record = json.loads((here / "repro" / "repro.json").read_text())
    assert shlex.split(record["again"])[2:4] == ["flax_side.py:make", "torch_side.py:make"]
    assert run(["compare", "ours.py:make", "ours.py:Net", *SHAPE, "--seeds", "1"]) == 0
    assert capfd.readouterr().out.startswith("equal: Net (first) and Net (second), 6 tensors, ")


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
def test_a_linen_module_with_its_variables_and_a_function_go_into_a_bundle(pair, here, monkeypatch, capfd):
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


# ---- finding the factories


def test_files_of_one_name_do_not_clash_nor_do_what_they_import(here, capfd):
    for folder, text, wanted in (("a", TORCH, 6), ("b", FLAX, 6)):
        (here / folder / "parts").mkdir(parents=True)
        (here / folder / "model.py").write_text(
            f"import sizes\nfrom parts.deep import SIZE\nassert sizes.SIDE == SIZE == {folder!r}\n" + text
        )
        (here / folder / "sizes.py").write_text(f"SIDE = {folder!r}\nWIDTH = {wanted}\n")
        (here / folder / "parts" / "deep.py").write_text(f"SIZE = {folder!r}\n")
    arguments = ["compare", "a/model.py:make", "b/model.py:wrong", "--shape", "2,6", "--seeds", "1"]
    assert run([*arguments, "--save-repro", "repro", "--json", "-"]) == 1
    assert json.loads(capfd.readouterr().out)["verdict"] == "different"
    copied = {path.relative_to(here / "repro").as_posix() for path in (here / "repro" / "sources").rglob("*.py")}
    parts = ("model.py", "sizes.py", "parts/deep.py")
    assert copied == {f"sources/{side}/{name}" for side in ("torch", "flax") for name in parts}
    record = json.loads((here / "repro" / "repro.json").read_text())
    options = shlex.split(record["again"])[4:]
    inside = [f"repro/{one}" if (here / "repro" / one).exists() else one for one in options]
    assert run(["compare", "repro/torch_side.py:make", "repro/flax_side.py:make", *inside]) == 1


def test_a_file_in_a_package_may_import_relatively_and_a_dotted_name_is_found_in_the_current_folder(here, capfd):
    (here / "pack" / "deep").mkdir(parents=True)
    for path in ("pack/__init__.py", "pack/deep/__init__.py"):
        (here / path).write_text("")
    (here / "pack" / "widths.py").write_text("WIDTH = 6\n")
    (here / "pack" / "deep" / "net.py").write_text("from ..widths import WIDTH\nfrom . import __name__ as n\n" + TORCH)
    (here / "pack" / "flax_net.py").write_text("from pack.widths import WIDTH\n" + FLAX)
    arguments = ["compare", "pack/deep/net.py:Net", "pack.flax_net:wrong", "--shape", "2,6", "--seeds", "1"]
    assert run([*arguments, "--save-repro", "repro"]) == 1
    record = json.loads((here / "repro" / "repro.json").read_text())
    assert record["factories"] == {
        "torch": "sources/torch/pack/deep/net.py:Net",
        "flax": "sources/flax/pack/flax_net.py:wrong",
    }
    (here / "pack" / "widths.py").unlink()
    options = shlex.split(record["again"])[4:]
    inside = [f"repro/{one}" if (here / "repro" / one).exists() else one for one in options]
    assert run(["compare", "repro/torch_side.py:make", "repro/flax_side.py:make", *inside]) == 1
    assert capfd.readouterr().err == ""


def test_the_sides_may_be_called_as_their_frameworks(here):
    (here / "both").mkdir()
    (here / "both" / "torch.py").write_text(TORCH)
    (here / "both" / "flax.py").write_text(FLAX)
    done = subprocess.run(
        [sys.executable, "-m", "attn_bridge", "compare", "both/torch.py:make", "both/flax.py:make", "--seeds", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_what_user_code_changes_is_put_back(here):
    (here / "rude.py").write_text(
        "import os, sys\nsys.argv.append('x')\nsys.path.clear()\nsys.path.append('/nowhere')\nos.chdir('/')\n"
    )
    before = list(sys.path), list(sys.argv), Path.cwd()
    assert run(["compare", "rude.py:make", "theirs.py:make", "--shape", "2,6"]) == 2
    assert (sys.path, sys.argv, Path.cwd()) == before


# ---- one line


def bad_files(here):
    np.savez("objects.npz", np.array([{"a": 1}], dtype=object))
    np.savez("texts.npz", np.array(["a"]))
    np.savez("hole.npz", arr_0=np.ones(3), arr_2=np.ones(3))
    np.savez("empty.npz")
    (here / "no.npz").write_text("not a zip")
    (here / "cut.npz").write_bytes((here / "x.npz").read_bytes()[:100])
    (here / "bad.toml").write_text('[[rule]]\ntorch = "a"\n')
    (here / "other.toml").write_text('[[rule]]\ntorch = "a"\nflax = "b"\n')
    (here / "full").mkdir()
    (here / "full" / "note").write_text("mine")
    (here / "broken.py").write_text("def make(:\n")
    (here / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (here / "lacks.py").write_text("import nonsense_package\n")


PAIR = ["ours.py:make", "theirs.py:make"]
SHAPE = ["--shape", "2,6"]
WRONG = {
    "no colon": (["ours.py", "theirs.py:make", *SHAPE], "FIRST (ours.py) must read file.py:factory or module:factory"),
    "no file": (["gone.py:make", "theirs.py:make", *SHAPE], "gone.py does not exist"),
    "a folder": (["full/:make", "theirs.py:make", *SHAPE], "full/ is a folder, not a Python file"),
    "no module": (["gone.net:make", "theirs.py:make", *SHAPE], "there is no module gone.net in the current folder or "),
    "no submodule": (["json.gone:make", PAIR[1], *SHAPE], "importing json.gone raised ModuleNotFoundError: No module "),
    "no attribute": (["ours.py:made", "theirs.py:make", *SHAPE], "ours.py has no made"),
    "no syntax": (["broken.py:make", "theirs.py:make", *SHAPE], "importing broken.py raised SyntaxError: "),
    "an import that fails": (["lacks.py:make", PAIR[1], *SHAPE], "importing lacks.py raised ModuleNotFoundError: No "),
    "exit at import": (["exits.py:make", "theirs.py:make", *SHAPE], "importing exits.py raised SystemExit: 0"),
    "raises": (
        ["bad.py:raises", "theirs.py:make", *SHAPE],
        "bad.py:raises raised RuntimeError: no such file: weights.pt and a second line\n",
    ),
    "exits": (["bad.py:exits", "theirs.py:make", *SHAPE], "bad.py:exits raised SystemExit: bye\n"),
    "quits": (["bad.py:quits", "theirs.py:make", *SHAPE], "bad.py:quits raised SystemExit: 0\n"),
    "reads": (["bad.py:reads", "theirs.py:make", *SHAPE], "bad.py:reads raised EOFError: "),
    "needs arguments": (["bad.py:needs", "theirs.py:make", *SHAPE], "bad.py:needs raised TypeError: needs() missing "),
    "a number": (["bad.py:number", PAIR[1], *SHAPE], "bad.py:number must give a torch.nn.Module, an nnx.Module, "),
    "no factory": (["bad.py:constant", "theirs.py:make", *SHAPE], "bad.py:constant is of type int, not a factory\n"),
    "Linen": ([PAIR[0], "bad.py:linen_module", *SHAPE], "bad.py:linen_module gives the Linen module Dense alone; "),
    "no inputs": (
        ["bad.py:Identity", "theirs.py:make"],
        "there are no inputs: give --inputs FILE.npz or --shape 2,8,16 (once per positional input), or put a function ",
    ),
    "inputs twice": ([*PAIR, *SHAPE, "--inputs", "x.npz"], "--inputs and --shape do not go together\n"),
    "no shape": ([*PAIR, "--shape", "2,x"], "--shape (2,x) must be whole numbers from 1 with commas between, such as"),
    "shape 0": ([*PAIR, "--shape", "2,0"], "--shape (2,0) must be whole numbers from 1"),
    "a huge shape": ([*PAIR, "--shape", "9999999,9999999"], "--shape (9999999,9999999) is more than fits into "),
    "another width": ([*PAIR, "--shape", "2,5"], "torch module Net raised RuntimeError: "),
    "no npz": ([*PAIR, "--inputs", "gone.npz"], "gone.npz does not exist\n"),
    "no zip": ([*PAIR, "--inputs", "no.npz"], "no.npz is no .npz file of plain arrays: "),
    "cut off": ([*PAIR, "--inputs", "cut.npz"], "cut.npz is no .npz file of plain arrays: "),
    "objects": ([*PAIR, "--inputs", "objects.npz"], "objects.npz is no .npz file of plain arrays: Object arrays "),
    "texts": ([*PAIR, "--inputs", "texts.npz"], "texts.npz: arr_0 must hold numbers or bools, it has dtype <U1\n"),
    "a hole": ([*PAIR, "--inputs", "hole.npz"], "hole.npz has arr_2 and no arr_1\n"),
    "empty": ([*PAIR, "--inputs", "empty.npz"], "empty.npz holds no array\n"),
    "no rules": ([*PAIR, *SHAPE, "--rules", "gone.toml"], "[Errno 2] No such file or directory: 'gone.toml'\n"),
    "bad rules": ([*PAIR, *SHAPE, "--rules", "bad.toml"], "bad.toml, line 1: a rule needs the keys torch and flax, "),
    "other rules": ([*PAIR, *SHAPE, "--rules", "other.toml"], "weights do not match: missing: a\n"),
    "dtype": ([*PAIR, *SHAPE, "--dtype", "int8"], "--dtype (int8) must be one of float64, float32, bfloat16, "),
    "mode": ([*PAIR, *SHAPE, "--mode", "fast"], "--mode (fast) must be one of eager, jit\n"),
    "too many seeds": ([*PAIR, *SHAPE, "--seeds", "1001"], "--seeds (1001) must be at most 1000\n"),
    "no time": ([*PAIR, *SHAPE, "--timeout", "0"], "--timeout (0) must be a number of seconds above 0\n"),
    "endless time": ([*PAIR, *SHAPE, "--timeout", "inf"], "--timeout (inf) must be a number of seconds above 0\n"),
    "no reason": ([*PAIR, *SHAPE, "--allow", "norm"], "--allow (norm) must read PATH=REASON, such as "),
    "no baseline": ([*PAIR, *SHAPE, "--baseline", "gone.json"], "the baseline gone.json cannot be read: No such file "),
    "another baseline": ([*PAIR, *SHAPE, "--baseline", "bad.toml"], "the baseline bad.toml is not JSON: "),
    "leaves": (["bad.py:leaves", *PAIR[1:], *SHAPE], "bad.py:leaves raised SystemExit: os._exit(0)\n"),
    "leaves in forward": (["bad.py:Leaving", "bad.py:One", *SHAPE], "comparing raised SystemExit: os._exit(0)\n"),
    "seeds": ([*PAIR, *SHAPE, "--seeds", "0"], "--seeds (0) must be at least 1\n"),
    "first seed": ([*PAIR, *SHAPE, "--first-seed", "-1"], "--first-seed (-1) must be at least 0\n"),
    "device": ([*PAIR, *SHAPE, "--device", "cpu,moon"], "--device (cpu,moon) must be one of cpu, gpu, tpu, or two "),
    "absent device": ([*PAIR, *SHAPE, "--device", "cpu,tpu"], "device tpu: JAX finds none on this machine\n"),
    "html": ([*PAIR, *SHAPE, "--html", "no/x.html"], "--html no/x.html cannot be written\n"),
    "json": ([*PAIR, *SHAPE, "--json", "full/"], "--json full cannot be written\n"),
    "junit": ([*PAIR, *SHAPE, "--junit", "full"], "--junit full cannot be written\n"),
    "one file twice": ([*PAIR, *SHAPE, "--html", "x.out", "--json", "./x.out"], "--html and --json must be different "),
    "a full folder": ([*PAIR, *SHAPE, "--save-repro", "full"], "--save-repro full exists and is not empty; "),
    "a file for a folder": ([*PAIR, *SHAPE, "--save-repro", "x.npz"], "--save-repro x.npz exists and is no folder\n"),
    "no folder": ([*PAIR, *SHAPE, "--save-repro", "no/r"], "--save-repro no/r cannot be written\n"),
    "a Python alone": ([*PAIR, *SHAPE, "--torch-python", "python"], "--first-python and --second-python go with "),
    "no Python": ([*PAIR, *SHAPE, "--separate", "--torch-python", "gone"], "--first-python gone is no program\n"),
    "structure": (["bad.py:Two", "bad.py:One", *SHAPE], "the outputs differ in structure: torch returns 2 ("),
    "exit in forward": (["bad.py:Broken", "bad.py:One", *SHAPE], "comparing raised SystemExit: 5\n"),
    "random": (["bad.py:Random", "bad.py:One", *SHAPE], "inconclusive: the torch module is not deterministic: "),
    "one factory": ([PAIR[0], *SHAPE], "Missing argument 'SECOND'.\n"),
    "json before factories": (["--json", *PAIR, "--shape", "x"], "--shape (x) must be whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("label", WRONG)
def test_what_is_bad_is_one_line_and_status_2(label, here, capfd):
    bad_files(here)
    arguments, message = WRONG[label]
    before = sorted(path.name for path in here.iterdir())
    assert run(["compare", *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 600
    assert printed.out == "" or label == "random"
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == before


IDS = """
import torch
from flax import nnx

def first():
    return torch.nn.Embedding(9, 3)

def second():
    return nnx.Embed(9, 3, rngs=nnx.Rngs(0))

class Indexed(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(nnx.Rngs(0).normal((9, 3)))
    def __call__(self, ids):
        return self.table[...][ids]

class Gathered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(9, 3))
    def forward(self, ids):
        return self.table[ids]
"""


@pytest.mark.parametrize(
    "command",
    ["compare ids.py:first ids.py:second", "compare ids.py:second ids.py:first", "dump ids.py:Gathered d",
     "dump ids.py:Indexed d", "compare ids.py:first ids.py:second --separate"],
)  # fmt: skip
def test_floats_that_shape_draws_for_token_ids_are_named(command, here, capfd):
    (here / "ids.py").write_text(IDS)
    assert run([*command.split(), *SHAPE]) == 2
    error = capfd.readouterr().err
    advice = "--shape draws floats; give whole numbers, such as token ids, by --inputs FILE.npz, or by a function "
    assert error.count(advice) == 1
    assert error.count("\n") == 1
    assert run(["compare", "bad.py:Broken", "bad.py:One", *SHAPE]) == 2
    assert "--shape" not in capfd.readouterr().err


def test_the_report_is_written_when_it_is_inconclusive(here, capfd):
    assert run(["compare", "bad.py:Random", "bad.py:One", *SHAPE, "--json", "--html", "a.html"]) == 2
    printed = capfd.readouterr()
    assert json.loads(printed.out)["verdict"] == "inconclusive"
    assert printed.err.count("\n") == 1
    assert "inconclusive" in (here / "a.html").read_text()


NOISE = """
import atexit, ctypes, logging, os, sys, threading, warnings
warnings.warn("a warning")
logging.basicConfig()
logging.warning("logged")
os.write(1, b"raw\\n")
ctypes.CDLL(None).puts(b"from C")
atexit.register(print, "at exit")
atexit.register(lambda: os.write(2, b"raw at exit\\n"))
print("printed")
print("printed on stderr", file=sys.stderr)
"""


def test_in_a_process_of_its_own_only_json_is_on_stdout_whatever_user_code_prints(here):
    (here / "quiet.py").write_text(NOISE)
    (here / "noisy.py").write_text(NOISE + TORCH.replace("return self.out", "print('in forward'); return self.out"))
    command = [sys.executable, "-m", "attn_bridge", "compare", "noisy.py:make", "theirs.py:wrong", "--seeds", "1"]
    done = subprocess.run([*command, *SHAPE, "--json"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["verdict"] == "different"
    command[4] = "quiet.py:gone"
    done = subprocess.run([*command, *SHAPE, "--json"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: quiet.py has no gone\n")


# ---- what is known, what has changed, what never ends


def test_an_allowed_difference_is_equal_and_every_report_says_so(here, capfd):
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


def test_what_draws_its_own_weights_is_built_alike_again(here, capfd):
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


HANG = """
import subprocess, sys, threading, time
import torch
from flax import nnx

def building():
    time.sleep(60)

class Running(torch.nn.Module):
    def forward(self, x):
        while True:
            time.sleep(0.01)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(60)

class Gradient(torch.nn.Module):
    def forward(self, x):
        return Slow.apply(x)

class Child(nnx.Module):
    def __call__(self, x):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(61)"])
        return x

class Identity(torch.nn.Module):
    def forward(self, x):
        return x

class Same(nnx.Module):
    def __call__(self, x):
        return x
"""


@pytest.mark.parametrize(
    ("first", "second", "separate", "message"),
    [
        ("building", "Child", False, "the first side has been building for more than 3 s (--timeout): hang.py:7 in "),
        (
            "Gradient",
            "Same",
            False,
            "the first side (torch) has been computing its gradient for more than 3 s (--timeo",
        ),
        (
            "Identity",
            "Child",
            False,
            "the second side (Flax) has been running for more than 3 s (--timeout): hang.py:28",
        ),
        (
            "Identity",
            "Child",
            True,
            "the second side has been running for more than 3 s (--timeout): hang.py:28 in __c",
        ),
    ],
)
def test_a_hang_is_named_and_leaves_nothing_behind(first, second, separate, message, here):
    (here / "hang.py").write_text(HANG)
    command = [sys.executable, "-m", "attn_bridge", "compare", f"hang.py:{first}", f"hang.py:{second}", *SHAPE]
    before = {path.name for path in here.iterdir()} | {"__pycache__"}
    with subprocess.Popen(
        [*command, "--timeout", "3", *(["--separate"] if separate else [])],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(here)},
    ) as process:  # fmt: skip
        out, err = process.communicate(timeout=60)
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert (process.returncode, out) == (2, "")
    assert {path.name for path in here.iterdir()} <= before
    assert not alive("time.sleep(61)")


def test_a_hang_of_a_dumped_side_among_installed_packages_is_named_at_its_line(here):
    """The line is the side's own, although its folder is one that is taken for a library's elsewhere."""
    folder = here / "site-packages"
    folder.mkdir()
    (folder / "hang.py").write_text(HANG.replace("time.sleep(0.01)", "threading.Event().wait(60)"))
    command = [sys.executable, "-m", "attn_bridge", "dump", "site-packages/hang.py:Running", "d", *SHAPE]
    done = subprocess.run([*command, "--timeout", "3"], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.startswith("error: the side has been running for more than 3 s (--timeout): site-packages/hang")
    assert done.stderr.endswith("in forward: threading.Event().wait(60)\n")
    assert not (here / "d").exists()


def alive(words: str) -> bool:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return any(words in line and "pytest" not in line for line in lines)


def test_a_process_that_is_told_to_end_takes_its_sides_along(here):
    text = "import pathlib, subprocess, sys\npathlib.Path('started').touch()\n"
    (here / "hang.py").write_text(text + "subprocess.run([sys.executable, '-c', 'import time; time.sleep(62)'])\n")
    command = [sys.executable, "-m", "attn_bridge", "compare", "hang.py:Running", "hang.py:Child", *SHAPE, "--separate"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(here)}) as process:
        while not (here / "started").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        process.terminate()
        process.wait(timeout=20)
    assert process.returncode == 143
    assert not alive("time.sleep(62)")
    assert not list(here.glob("tmp*"))


def test_a_process_that_user_code_forks_ends_as_it_means_to(here):
    (here / "forks.py").write_text(
        "import os\n" + TORCH.replace(
            "def make():", "def make():\n    child = os.fork()\n    if not child:\n        os._exit(7)\n"
            "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7"
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "attn_bridge", "compare", "forks.py:make", "theirs.py:make", *SHAPE]
    done = subprocess.run([*command, "--seeds", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- dumps of real modules


def test_dumps_of_both_sides_say_what_compare_says_number_by_number(here, capfd):
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


def test_attention_with_fused_weights_has_the_same_invariances_as_compare_finds(here):
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


def test_each_side_in_a_process_of_its_own_says_the_same(here, capfd):
    arguments = ["compare", "ours.py:make", "theirs.py:wrong", "--inputs", "x.npz", "--seeds", "1", "--separate"]
    assert run([*arguments, "--torch-python", sys.executable, "--json"]) == 1
    printed = capfd.readouterr()
    assert printed.err == ""
    data = json.loads(printed.out)
    assert (data["verdict"], data["first_divergence"]["path"]) == ("different", "norm")
    assert data["command"] == shlex.join(["attn-bridge", *arguments, "--first-python", sys.executable])


def test_a_side_that_fails_in_its_process_is_one_line(here, capfd):
    (here / "bad.py").write_text(BAD.partition("import torch")[0] + BAD[BAD.index("print") : BAD.index("class")])
    assert run(["compare", "bad.py:raises", "theirs.py:make", *SHAPE, "--separate"]) == 2
    expected = "error: first side: bad.py:raises raised RuntimeError: no such file: weights.pt and a second line\n"
    assert capfd.readouterr() == ("", expected)
