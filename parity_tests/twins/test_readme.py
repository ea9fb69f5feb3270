"""What the README shows runs, and the examples do."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import attn_bridge
from attn_bridge.models.families import known_model_types

ROOT = Path(attn_bridge.__file__).parent.parent


def test_the_python_of_the_readme_runs_and_gives_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["weights"].shape == (2, 2, 6, 6)
    assert names["kernels"]["h.0.attn.q.kernel"].shape == (32, 8, 8)
    assert names["back"].keys() == names["arrays"].keys()
    assert all(np.array_equal(names["back"][name], array) for name, array in names["arrays"].items())
    printed = capsys.readouterr().out
    assert "torch -> flax: 5 tensors copied bit for bit" in printed
    assert "eps of LayerNorm is 1e-05 in torch and 1e-06 in Flax" in printed
    assert names["report"].verdict == "different"
    assert names["fixed"].verdict == "equal"
    assert names["mixed"].verdict == "equal"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_python_of_the_page_on_modern_attention_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "modern.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/modern.md", "exec"), names)
    assert names["report"].verdict == "equal"
    assert names["back"].keys() == names["state"].keys()
    assert all(np.array_equal(names["back"][name], array) for name, array in names["state"].items())
    whole = names["qwen"](names["x"])
    parts = np.concatenate([names["first"], names["last"]], 1)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    assert np.abs(whole).max() > 0.1


def test_the_page_on_modern_attention_knows_all_families():
    text = (ROOT / "docs" / "modern.md").read_text(encoding="utf-8")
    assert [name for name in known_model_types() if f"`{name}`" not in text] == []


def test_the_pytest_example_of_the_readme_passes(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "(parity)" in block]
    (tmp_path / "test_block.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "test_block.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "parity: 4 comparisons, 4 equal" in done.stdout, done.stdout + done.stderr


def test_the_linen_example_runs_and_agrees(capsys):
    runpy.run_path(str(ROOT / "examples" / "linen.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) < 1e-6
