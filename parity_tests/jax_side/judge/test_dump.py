"""`attn-bridge dump` of a Flax module where torch can't be imported, like a dump of the torch side."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from attn_bridge.cli.app import run
from attn_parity.dumps.recording import dump
from attn_parity.dumps.replay import compare_dumps
from parity_tests.neutral.test_house import run_python
from parity_tests.support.files.fake_dumps import INPUTS, Net, write

NET = """
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.shift = nnx.Param(np.ones(3, np.float32))
        self.spare = nnx.Param(np.ones(3, np.float32))
    def __call__(self, x):
        return self.fc(x) + self.shift - self.shift

class Wrong(Net):
    def __call__(self, x):
        return super().__call__(x) * 1.01
"""


@pytest.fixture
def torch_dump(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    return write(tmp_path / "torch", Net("torch"), monkeypatch)


def test_dumping_flax_needs_no_torch_and_compares_with_its_dump(torch_dump, tmp_path):
    command = ["attn_bridge", "dump", f"{tmp_path}/net.py:Net", f"{tmp_path}/out", "--like", str(torch_dump)]
    done = run_python(*command, blocked={"torch", "torch_attn"})
    assert (done.returncode, done.stderr) == (0, "")
    report = compare_dumps(torch_dump, tmp_path / "out")
    assert report.verdict == "equal"
    assert (report.unexercised, report.invariances, report.samples) == (["spare"], ["shift"], 11)
    assert {one.weights for one in report.tensors} <= {"held", "own"}


def test_a_fault_is_found_in_the_dump(torch_dump, tmp_path):
    assert run(["dump", f"{tmp_path}/net.py:Wrong", f"{tmp_path}/out", "--like", str(torch_dump)]) == 0
    report = compare_dumps(torch_dump, tmp_path / "out")
    assert report.verdict == "different"
    assert report.first_divergence.path == ""


def test_dump_refuses_outputs_of_another_structure(torch_dump, tmp_path):
    class Pair(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
            self.shift, self.spare = (nnx.Param(np.ones(3, np.float32)) for _ in range(2))

        def __call__(self, x):
            return self.fc(x), x

    with pytest.raises(ValueError, match="the outputs differ in structure: torch returns 1 "):
        dump(Pair(), INPUTS, tmp_path / "out", like=torch_dump)
    assert not (tmp_path / "out").exists()


def test_other_parameters_are_an_error_that_lists_them(torch_dump, tmp_path):
    with pytest.raises(ValueError, match=r"weights do not match: unexpected: fc\.bias"):
        dump(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), None, tmp_path / "out", like=torch_dump)
