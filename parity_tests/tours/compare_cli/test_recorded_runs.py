"""`attn-bridge compare --record`: a port is compared on a class's calls in a run of a test or script."""

from __future__ import annotations

import json

import pytest

from attn_bridge.cli.app import run

LAYERS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
    def forward(self, x, mask=None, scale=1.0):
        return self.norm(x) * scale if mask is None else self.norm(x) * scale * mask

class Held(Block):
    def __init__(self, lock):
        super().__init__(6)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(6, eps=1e-3), Block(6)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x
"""
PORT = """
from flax import nnx

class Block(nnx.Module):
    def __init__(self, eps=1e-3):
        self.norm = nnx.LayerNorm(6, epsilon=eps, rngs=nnx.Rngs(0))
    def __call__(self, x, mask=None, scale=1.0):
        return self.norm(x) * scale if mask is None else self.norm(x) * scale * mask

def wrong():
    return Block(1e-5)
"""
TEST = """
import torch
from layers import Model

def test_model():
    print("printed by a test")
    model = Model().train()
    model(torch.randn(2, 3, 6))
    model(torch.randn(2, 5, 6))
    assert False, "a test that fails"
"""
SCRIPT = """
import threading, torch
from layers import Held
Held(threading.Lock())(torch.randn(1, 6))
"""


@pytest.fixture
def project(here):
    for name, text in (("layers", LAYERS), ("port", PORT), ("test_it", TEST), ("script", SCRIPT)):
        (here / f"{name}.py").write_text(text)
    return here


def test_a_port_is_compared_on_the_calls_of_a_test(project, capfd):
    command = ["compare", "--record", "pytest test_it.py::test_model", "layers.Block", "port.py:wrong"]
    assert run([*command, "--seeds", "1", "--json", "-"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["first_divergence"]["hint"] == "eps is 0.001 in torch and 1e-05 in Flax"
    assert report["notes"][:2] == [
        "inputs: the first of 4 stored calls of Block in pytest test_it.py::test_model in train mode; "
        "others have other shapes: [(2, 5, 6)]",
        "pytest test_it.py::test_model ended with status 1",
    ]
    assert report["command"].endswith("--record 'pytest test_it.py::test_model' --seeds 1")
    assert any("scale" in line for line in report["unreached"]), "the call has the keyword"


@pytest.mark.parametrize(
    ("command", "first", "message"),
    [
        ("make test", "layers.Block", "--record (make test) must begin with pytest, python FILE or python -m MODULE"),
        (
            "python -c pass",
            "layers.Block",
            "--record (python -c pass) must begin with pytest, python FILE or python -m MODULE",
        ),
        ("pytest 'x", "layers.Block", "--record (pytest 'x) can't be read: No closing quotation"),
        ("pytest", "layers.py:Block", "FIRST (layers.py:Block) must read PATH.TO.Module with --record"),
    ],
)
def test_refusals_before_anything_runs(project, capfd, command, first, message):
    assert run(["compare", "--record", command, first, "port.py:Block"]) == 2
    assert capfd.readouterr().err.startswith(f"error: {message}")


def test_refusals_of_a_run(project, capfd):
    for first, message in (
        (
            "layers.Held",
            "layers:Held raised ValueError: it can't be built again, as a constructor argument can't be "
            "stored: lock is a lock",
        ),
        (
            "layers.Model",
            "--record python script.py has stored no call of layers.Model: the command ended with status 0",
        ),
    ):
        assert run(["compare", "--record", "python script.py", first, "port.py:Block"]) == 2
        assert capfd.readouterr().err.startswith(f"error: {message}")
    assert run(["compare", "--record", "pytest", "layers.Block", "port.py:Block", "--shape", "2,6"]) == 2
    assert capfd.readouterr().err.startswith(
        "error: --record does not go with --inputs, --shape, --separate and --save"
    )
