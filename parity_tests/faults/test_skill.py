"""The skill `port-and-prove`: its form, and its commands run literally on ports with planted faults and right ones."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax  # noqa: F401 (the pairs need both frameworks)
import pytest
import torch  # noqa: F401 (likewise)

from attn_bridge.cli.app import run
from parity_tests.planted_ports import FAULTS, RIGHT
from parity_tests.planted_ports.__main__ import lay_out
from release.versions import ROOT

yaml = pytest.importorskip("yaml", reason="comes with transformers")

SKILL = ROOT / "skills" / "port-and-prove"
TEXT = (SKILL / "SKILL.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines() if line.strip()]
JUDGE, IN_BFLOAT16, IN_TRAINING = COMMANDS


def judged(command):
    """Run a command of the skill as it is written; return its status and the report it wrote."""
    assert command[0] == "attn-bridge"
    status = run(command[1:])
    return status, json.loads(Path("report.json").read_text()) if "--json" in command else None


@pytest.fixture
def ports(tmp_path, monkeypatch):
    lay_out(tmp_path / "ports")

    def enter(name):
        monkeypatch.chdir(tmp_path / "ports" / name)
        return tmp_path / "ports" / name / "port.py"

    return enter


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_located_and_its_fix_is_equal(ports, name):
    fault, port = FAULTS[name], ports(name)
    status, report = judged(JUDGE)
    assert (status, report["verdict"]) == (1, "different")
    first = report["first_divergence"]
    between = None if first["between"] is None else tuple(first["between"])
    assert (first["path"], between, first["direction"]) == (fault.path, fault.between, fault.direction)
    text = port.read_text()
    assert text.count(fault.wrong) == 1
    port.write_text(text.replace(fault.wrong, fault.right))
    status, report = judged(JUDGE)
    assert (status, report["verdict"]) == (0, "equal")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_port_is_equal(ports, name):
    ports(name)
    assert judged(JUDGE)[0] == 0


@pytest.mark.parametrize("name", ["fused_attention", "tanh_mlp"])
def test_a_right_port_is_equal_in_bfloat16_and_training(ports, name):
    ports(name)
    assert judged(IN_BFLOAT16)[0] == 0
    assert judged(IN_TRAINING)[0] == 0


def test_no_pair_says_whether_it_is_right(ports):
    for name in [*FAULTS, *RIGHT]:
        port = ports(name)
        assert sorted(one.name for one in port.parent.iterdir()) == ["original.py", "port.py"]
        for file in port.parent.iterdir():
            assert not re.search(r"\b(fault|wrong|right|bug|planted)|#", file.read_text(), re.IGNORECASE), file


def test_the_skill_has_the_form_that_agents_read():
    _, front, body = TEXT.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["name"] == SKILL.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", data["name"])
    assert 1 <= len(data["description"]) <= 1024
    assert "Use when" in data["description"]
    assert len(body.splitlines()) < 500
    linked = set(re.findall(r"\]\(([^)#]+)\)", body))
    assert linked == {path.relative_to(SKILL).as_posix() for path in SKILL.rglob("*.md")} - {"SKILL.md"}


def test_the_test_that_the_skill_leaves_behind_runs(ports):
    [block] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    folder = ports("tanh_mlp").parent
    (folder / "test_port.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_port.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
