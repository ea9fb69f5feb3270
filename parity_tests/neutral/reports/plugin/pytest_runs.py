"""Runs of pytest with the plugin, stand-ins for the frameworks and for `compare`; tests that they run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[4]
FRAMEWORKS = {
    "torch": """
        class cuda:
            is_available = staticmethod(lambda: GPU)
        """,
    "jax": """
        def devices(kind=None):
            if kind not in (None, "cpu") and not (kind == "gpu" and GPU):
                raise RuntimeError(f"Unknown backend: {kind!r} requested, but no platforms\\nare present")
            return [kind]
        """,
    "flax": "",
}
CONFTEST = '''
import json
from pathlib import Path

import attn_parity
from attn_parity.results.allowances import accept
from attn_parity.results.findings import Divergence, ModuleNode, TensorVerdict
from attn_parity.results.report import Report

class Stub(Report):
    def to_html(self, path):
        path.write_text(f"<title>{self.verdict}</title>")

    def to_json(self, path=None):
        if path is None:
            return super().to_json()
        path.write_text(json.dumps({"verdict": self.verdict}))

def compare(torch_module, flax_module, inputs, *, rules=None, transfer=True, seeds=4, first_seed=0, modes=("eager",),
            dtypes=None, device=None, localise=True, command="", progress=None, **more):
    """Give equal modules the verdict equal, and others the verdict that the Flax one is."""
    asked = {name: value for name, value in locals().items() if name not in ("torch_module", "flax_module", "more")}
    asked |= more
    with Path(__file__).with_name("asked.jsonl").open("a") as file:
        file.write(json.dumps(asked) + "\\n")
    if flax_module == "broken":
        raise ValueError("inputs is not an array")
    if torch_module == flax_module:
        return accept(Stub("equal", [], seeds=seeds), more.get("allow", {}))
    if flax_module == "eps":
        tensors = [TensorVerdict(name, name, "output", (), "float32", "different") for name in ("output", "grad ln2.w")]
        place = Divergence("ln2", "ln2", "forward")
        tree = ModuleNode("", "", children=(ModuleNode("ln2", "ln2", verdict="different", first=True),))
        return accept(Stub("different", tensors, place, tree, first_name="T", notes=["mind the gap"]), more["allow"])
    return Stub(flax_module, [], Divergence("blocks.0", "layers.0", "forward", "100%, a:b,c"), notes=["mind the gap"],
                environment={"torch": "2"}, command=command, first_name="T", second_name="F")

attn_parity.compare = compare
'''


@dataclasses.dataclass
class Done:
    """What a pytest run gave: exit status, what it printed, and what `compare` was asked."""

    status: int
    out: str
    err: str
    asked: list[dict]


def ids(done: Done) -> list[str]:
    return re.findall(r"^test_it.py::(\S+)", done.out, re.MULTILINE)


FAILING = """
def test_other(parity):
    parity("a", "a", [1])
    parity("a", "different", [1])  # line 4

def test_lossy(parity):
    with pytest.raises(AssertionError) as caught:
        parity("a", "precision", [1])
    assert type(caught.value).__name__ == "ParityError"
    assert caught.value.report.verdict == "precision"
"""
GRID = """
@pytest.mark.parity(variant="attention", dtypes=("float32", "bfloat16"), devices="cpu", modes=("eager", "jit"), seeds=5)
def test_grid(parity):
    report = parity("a", "a", [1])
    print(parity.variant, parity.dtype, parity.device, parity.mode, parity.seeds, parity.first_seed)
"""
