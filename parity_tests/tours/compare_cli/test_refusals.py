"""`attn-bridge compare` refuses bad arguments in one line, with status 2."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge.cli.app import run

from .files import SHAPE


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
        "bad.py:raises raised RuntimeError: no such file: weights.pt and a second line (bad.py:12)\n",
    ),
    "a name nearly right": (["bad.py:raise", *PAIR[1:], *SHAPE], "bad.py has no raise; did you mean raises?\n"),
    "a file without a name": (
        ["bad.py", *PAIR[1:], *SHAPE],
        "FIRST (bad.py) must read file.py:factory or module:factory; it has raises, exits, quits, reads, needs and ",
    ),
    "exits": (["bad.py:exits", "theirs.py:make", *SHAPE], "bad.py:exits raised SystemExit: bye (bad.py:15)\n"),
    "quits": (["bad.py:quits", "theirs.py:make", *SHAPE], "bad.py:quits raised SystemExit: 0 (bad.py:18)\n"),
    "reads": (["bad.py:reads", "theirs.py:make", *SHAPE], "bad.py:reads raised EOFError: "),
    "needs arguments": (
        ["bad.py:needs", "theirs.py:make", *SHAPE],
        "bad.py:needs needs arguments (size), and a factory is called without any; add a line such as: "
        "def make(): return needs(size=...), and give bad.py:make; to judge the function itself: "
        "def make(): from attn_bridge import parity; return parity.function(lambda _, *x: needs(*x), {})\n",
    ),
    "a number": (["bad.py:number", PAIR[1], *SHAPE], "bad.py:number must give a torch.nn.Module, an nnx.Module, "),
    "a function and weights": (
        ["bad.py:function_and_weights", PAIR[1], *SHAPE],
        "bad.py:function_and_weights gives a tuple that begins with a function; "
        "give attn_bridge.parity.function(f, weights), which is called as f(weights, *inputs)\n",
    ),
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
    "a folder of inputs": ([*PAIR, "--inputs", "full"], "full is a folder, not a file\n"),
    "a seed beyond": ([*PAIR, *SHAPE, "--build-seed", "4294967296"], "--build-seed (4294967296) must be a "),
    "arguments": (
        ["bad.py:Sized", PAIR[1], *SHAPE],
        "bad.py:Sized needs arguments (width, rngs), and a factory is called without any; add a line such as: "
        "def make(): return Sized(width=..., rngs=nnx.Rngs(0)), and give bad.py:make\n",
    ),
    "async": (["bad.py:later", PAIR[1], *SHAPE], "bad.py:later is an async function; a factory returns the side "),
    "no zip": ([*PAIR, "--inputs", "no.npz"], "no.npz is no .npz file of plain arrays: "),
    "cut off": ([*PAIR, "--inputs", "cut.npz"], "cut.npz is no .npz file of plain arrays: "),
    "objects": ([*PAIR, "--inputs", "objects.npz"], "objects.npz is no .npz file of plain arrays: Object arrays "),
    "texts": ([*PAIR, "--inputs", "texts.npz"], "texts.npz: arr_0 must hold numbers or bools, it has dtype <U1\n"),
    "a hole": ([*PAIR, "--inputs", "hole.npz"], "hole.npz has arr_2 and no arr_1\n"),
    "empty": ([*PAIR, "--inputs", "empty.npz"], "empty.npz holds no array\n"),
    "no rules": ([*PAIR, *SHAPE, "--rules", "gone.toml"], "gone.toml: No such file or directory\n"),
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
    "html": ([*PAIR, *SHAPE, "--html", "no/x.html"], "--html no/x.html cannot be written: there is no folder no\n"),
    "json": ([*PAIR, *SHAPE, "--json", "full/"], "--json full cannot be written: it is a folder\n"),
    "junit": ([*PAIR, *SHAPE, "--junit", "full"], "--junit full cannot be written: it is a folder\n"),
    "one file twice": ([*PAIR, *SHAPE, "--html", "x.out", "--json", "./x.out"], "--html and --json must be different "),
    "a full folder": ([*PAIR, *SHAPE, "--save-repro", "full"], "--save-repro full exists and is not empty; "),
    "a file for a folder": ([*PAIR, *SHAPE, "--save-repro", "x.npz"], "--save-repro x.npz exists and is no folder\n"),
    "no folder": ([*PAIR, *SHAPE, "--save-repro", "no/r"], "--save-repro no/r cannot be written\n"),
    "a Python alone": ([*PAIR, *SHAPE, "--torch-python", "python"], "--first-python and --second-python go with "),
    "no Python": ([*PAIR, *SHAPE, "--separate", "--torch-python", "gone"], "--first-python gone is no program\n"),
    "structure": (["bad.py:Two", "bad.py:One", *SHAPE], "the outputs differ in structure: torch returns 2 ("),
    "exit in forward": (["bad.py:Broken", "bad.py:One", *SHAPE], "comparing raised SystemExit: 5 (bad.py:48)\n"),
    "random": (["bad.py:Random", "bad.py:One", *SHAPE], "inconclusive: the torch module is not deterministic: "),
    "one factory": ([PAIR[0], *SHAPE], "Missing argument 'SECOND'.\n"),
    "json before factories": (["--json", *PAIR, "--shape", "x"], "--shape (x) must be whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("label", WRONG)
def test_bad_arguments_are_one_line_and_status_2(label, here, capfd):
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
def test_shape_for_token_ids_is_refused_with_advice(command, here, capfd):
    (here / "ids.py").write_text(IDS)
    assert run([*command.split(), *SHAPE]) == 2
    error = capfd.readouterr().err
    advice = "--shape draws floats; give whole numbers, such as token ids, by --inputs FILE.npz, or by a function "
    assert error.count(advice) == 1
    assert error.count("\n") == 1
    assert run(["compare", "bad.py:Broken", "bad.py:One", *SHAPE]) == 2
    assert "--shape" not in capfd.readouterr().err


def test_a_function_is_judged_by_the_line_that_its_refusal_gives(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    codes = {"ours.py": "import torch\ndef gate(x): return x * torch.sigmoid(x)\n",
             "theirs.py": "import jax\ndef gate(x): return jax.nn.silu(x)\n"}  # fmt: skip
    for name, code in codes.items():
        (tmp_path / name).write_text(code)
    for name in codes:
        assert run(["compare", f"{name}:gate", f"{name}:gate", "--shape", "3,4"]) == 2
        line = capfd.readouterr().err.partition("to judge the function itself: ")[2]
        (tmp_path / name).write_text(codes[name] + line)
    assert run(["compare", "ours.py:make", "theirs.py:make", "--shape", "3,4"]) == 0
    assert "equal: " in capfd.readouterr().out
