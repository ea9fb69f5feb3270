"""What the README shows runs, and the examples do."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np

import attn_bridge

ROOT = Path(attn_bridge.__file__).parent.parent


def test_the_python_of_the_readme_runs_and_gives_what_it_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["weights"].shape == (2, 2, 6, 6)
    assert names["kernels"]["h.0.attn.q.kernel"].shape == (32, 8, 8)
    assert names["back"].keys() == names["arrays"].keys()
    assert all(np.array_equal(names["back"][name], array) for name, array in names["arrays"].items())
    assert "torch -> flax: 5 tensors copied bit for bit" in capsys.readouterr().out


def test_the_linen_example_runs_and_agrees(capsys):
    runpy.run_path(str(ROOT / "examples" / "linen.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) < 1e-6
