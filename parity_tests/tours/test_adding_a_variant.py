"""docs/adding-a-variant.md, followed step by step in a copy of the packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("attn_bridge", "attn_kernels", "attn_parity", "fault_lab", "torch_attn", "jax_attn", "parity_tests")
BESIDE = ("README.md", ".gitignore")  # the tests of the house read them
PAGE = (ROOT / "docs" / "adding-a-variant.md").read_text()


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the packages with the files of the page, registered as it says."""
    target = tmp_path_factory.mktemp("walk")
    for package in PACKAGES:
        leave = shutil.ignore_patterns("__pycache__", "goldens")
        shutil.copytree(ROOT / package, target / package, ignore=leave)
    for name in BESIDE:
        shutil.copy(ROOT / name, target)
    files = re.findall(r"^`(\S+\.py)`\n```python\n(.*?)^```", PAGE, re.M | re.S)
    assert {Path(name).parent.as_posix() for name, _ in files} == {
        "attn_bridge/specs",
        "attn_bridge/reference",
        "torch_attn",
        "jax_attn",
    }
    for name, text in files:
        (target / name).write_text(text)
    line = re.search(r"^    \S+\.VARIANT,$", PAGE, re.M)
    assert line is not None
    specs = target / "attn_bridge/specs/__init__.py"
    text = specs.read_text().replace("from . import (", "from . import (\n    sigmoid_attention,", 1)
    text = text.replace("__all__ = [", '__all__ = [\n    "SigmoidAttentionConfig",', 1)
    text = text.replace(
        "from .base import", "from .sigmoid_attention import SigmoidAttentionConfig\nfrom .base import", 1
    )
    specs.write_text(re.sub(r"(VARIANTS: [^=]*= \()", rf"\1\n{line[0]}", text, count=1))
    for package in ("torch_attn", "jax_attn"):
        init = target / package / "__init__.py"
        text = init.read_text().replace("__all__ = [", '__all__ = [\n    "SigmoidAttention",', 1)
        imported = "from .sigmoid_attention import SigmoidAttention\n"
        init.write_text(text.replace("from .simple_self", f"{imported}from .simple_self", 1))
    return target


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_the_walk_ends_with_equal_twins(tree):
    done = run(tree, "attn_bridge", "check", "SigmoidAttention", "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SigmoidAttention" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("all equal")


def test_the_walk_satisfies_the_house(tree):
    (tree / "pytest.ini").write_text("[pytest]\n")
    (paths,) = re.findall(r"^\$ python -m pytest (.+)$", PAGE, re.M)
    done = run(tree, "pytest", "-q", "-p", "no:cacheprovider", *paths.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^(\d+) passed", done.stdout.splitlines()[-1])


def test_a_walk_that_strays_is_seen(tree):
    twin = tree / "jax_attn" / "sigmoid_attention.py"
    right = twin.read_text()
    try:
        twin.write_text(right.replace("- math.log(batch.shape[1])", ""))
        done = run(tree, "attn_bridge", "check", "SigmoidAttention", "--seeds", "1", "--case", "sigmoid-no-batch")
    finally:
        twin.write_text(right)
    assert done.returncode == 1
    assert "different: SigmoidAttention" in done.stdout
