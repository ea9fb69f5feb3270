"""`attn-bridge dump` of a torch module where JAX can't be imported, and what such a dump holds."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors.numpy import load_file

from attn_parity.dumps import format as dumps
from attn_parity.dumps.recording import dump
from parity_tests.neutral.test_house import run_python

JAX = {"jax", "jaxlib", "flax", "jax_attn", "optax", "orbax"}
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)
        self.spare = torch.nn.Parameter(torch.ones(2))
    def forward(self, x, *, scale):
        return {"sum": self.fc(x).sum(-1), "all": self.fc(x) * scale}
"""


def test_a_dump_needs_no_jax(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    x, scale = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32), np.array(2.0, np.float32)
    np.savez(tmp_path / "in.npz", arr_0=x, scale=scale)
    options = ["--inputs", str(tmp_path / "in.npz"), "--seeds", "1", "--dtype", "float32", "--dtype", "bfloat16"]
    done = run_python("attn_bridge", "dump", f"{tmp_path}/net.py:Net", f"{tmp_path}/out", *options, blocked=JAX)
    assert (done.returncode, done.stderr) == (0, "")
    found = dumps.Dump(tmp_path / "out")
    assert (found.framework, found.name, found.argument_names) == ("torch", "Net", ["x"])
    assert [place for place, _, _ in found.manifest.outputs] == ["['all']", "['sum']"]
    assert found.parameters()["fc.weight"].owner == "Linear"
    assert found.manifest.reach == {"spare": (False, False)}
    assert found.manifest.environment["torch"] == torch.__version__
    assert "torch float32_matmul_precision" in found.manifest.environment
    assert "jax" not in found.manifest.environment
    held = load_file(tmp_path / "out" / "weights.safetensors")
    run = found.run(dumps.FIRST, "float32", "oracle")
    wide = {name: array.astype(np.float64) for name, array in held.items()}
    np.testing.assert_allclose(run.outputs[0], 2 * (x @ wide["fc.weight"].T + wide["fc.bias"]), rtol=1e-13)
    cotangents = found.cotangents(dumps.FIRST, "float32")
    expected = (cotangents[1][:, None] + 2.0 * cotangents[0]).sum(0)
    np.testing.assert_allclose(run.parameter_gradients["fc.bias"], expected, rtol=1e-6)
    low = found.run(dumps.FIRST, "bfloat16", "eager").outputs[0]
    assert low.dtype.name == "bfloat16"
    assert set(json.loads((tmp_path / "out" / "dump.json").read_text())["dtypes"]) == {"float32", "bfloat16"}


def test_the_module_is_left_as_it_was(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)).train()
    before = {name: array.clone() for name, array in module.state_dict().items()}
    state = torch.random.get_rng_state()
    dump(module, np.ones((2, 4), np.float32), tmp_path / "out", seeds=1)
    assert module.training
    assert all(torch.equal(array, module.state_dict()[name]) for name, array in before.items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(one.grad is None for one in module.parameters())
