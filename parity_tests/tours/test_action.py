"""The GitHub Action: its steps are run as a runner runs them, with pairs that are right and wrong."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import jax  # noqa: F401 (the pairs need both frameworks)
import pytest
import torch  # noqa: F401 (likewise)

from attn_bridge.cli.app import run
from release.versions import ROOT

from . import composite

yaml = pytest.importorskip("yaml", reason="comes with transformers")

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
PAIR = {"first": "demo/pairs.py:torch_norm", "second": "demo/pairs.py:flax_norm", "install": "false"}
FAST = "--inputs demo/inputs.npz --seeds 1"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert run(["demo"]) == 0
    return folder


def errors(found):
    """Return the annotations: file and line, title, message."""
    said = re.findall(r"^::error (?:file=([^,]*),line=(\d+),)?title=(.*?)::(.*)$", found.stdout, re.MULTILINE)
    return [(file, int(line or 0), title.replace("%3A", ":"), text) for file, line, title, text in said]


def test_a_wrong_port_is_annotated_and_its_page_is_kept(workspace):
    found = composite.run(ACTION, workspace, {**PAIR, "arguments": FAST})
    assert found.status == 1
    [(file, line, title, message)] = errors(found)
    assert (file, title) == ("demo/pairs.py", "attn-bridge: different")
    assert (workspace / file).read_text().splitlines()[line - 1].startswith("def flax_norm(")
    assert "hint: eps" in message.replace("%0A", "\n")
    assert found.outputs["verdict"] == "different"
    assert (workspace / found.outputs["html"]).read_text().startswith("<!doctype html>")
    [kept] = found.uploaded.values()
    assert kept["path"] == "./attn-bridge-report"
    assert json.loads((workspace / kept["path"] / "report.json").read_text())["verdict"] == "different"
    assert "**different**: LayerNorm (torch) and LayerNorm (Flax)" in found.summary
    assert "<script" not in found.summary


def test_a_right_port_passes_without_an_annotation(workspace):
    given = {**PAIR, "second": "demo/pairs.py:flax_norm_with_torch_eps", "arguments": FAST, "artifact": ""}
    found = composite.run(ACTION, workspace, given)
    assert (found.status, errors(found), found.outputs["verdict"]) == (0, [], "equal")
    assert found.uploaded == {}
    assert "**equal**" in found.summary


def test_the_class_that_diverges_is_annotated_not_the_factory(workspace):
    given = {**PAIR, "first": "pairs:torch_encoder", "second": "pairs:flax_encoder", "working-directory": "demo",
             "arguments": "--inputs inputs.npz --seeds 1"}  # fmt: skip
    found = composite.run(ACTION, workspace, given)
    assert found.status == 1
    [(file, line, _, message)] = errors(found)
    assert "first divergence, forward: norm" in message
    assert file == "demo/pairs.py"
    assert (workspace / file).read_text().splitlines()[line - 1].startswith("class EncoderLayer")
    [kept] = found.uploaded.values()
    assert (workspace / kept["path"] / "report.html").is_file()


def test_what_can_not_be_judged_is_one_annotation(workspace):
    found = composite.run(ACTION, workspace, {**PAIR, "second": "demo/pairs.py:absent", "arguments": FAST})
    assert found.status == 2
    [(file, _, title, message)] = errors(found)
    assert (file, title) == ("demo/pairs.py", "attn-bridge could not judge")
    assert "absent" in message
    assert found.outputs["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"command": "prove"}, r"command \(prove\) must be one of compare, review, pytest, check"),
        ({"second": ""}, "second is needed with command: compare"),
        ({"command": "pytest"}, "first is needed with command: compare, and goes with it alone"),
        ({"arguments": "--shape '2,8"}, "arguments can't be split into words"),
    ],
)
def test_wrong_inputs_are_one_annotation(workspace, given, said):
    found = composite.run(ACTION, workspace, {**PAIR, **given})
    assert found.status == 2
    [(_, _, title, message)] = errors(found)
    assert title == "attn-bridge"
    assert re.search(said, message)


def test_inputs_run_no_shell_and_print_no_commands(workspace):
    (workspace / "loud.py").write_text(
        "import torch\nprint('::error title=mine::x')\ndef make():\n    print('::error title=mine::x')\n"
        "    return torch.nn.Linear(16, 3)\n"
    )
    given = {**PAIR, "first": "loud.py:make", "second": "loud.py:make; touch broken", "arguments": "$(touch broken)"}
    found = composite.run(ACTION, workspace, given)
    assert found.status == 2
    assert not (workspace / "broken").exists()
    lines = found.stdout.splitlines()
    [stop] = [i for i, line in enumerate(lines) if line.startswith("::stop-commands::")]
    start = lines.index(f"::{lines[stop].rpartition('::')[2]}::")
    assert not any("title=mine" in line for line in lines[:stop] + lines[start:])


def test_failing_tests_are_annotated_at_their_lines(workspace):
    (workspace / "tests").mkdir()
    (workspace / "tests" / "test_norm.py").write_text(
        "import numpy as np\nfrom demo import pairs\n\n\ndef test_wrong(parity):\n"
        "    parity(pairs.torch_norm(), pairs.flax_norm(), np.load('demo/inputs.npz')['arr_0'])\n\n\n"
        "def test_right():\n    assert pairs\n"
    )
    given = {"command": "pytest", "install": "false", "arguments": "tests -q --parity-seeds 1 -p no:cacheprovider"}
    found = composite.run(ACTION, workspace, {**given, "reports": "out/reports"})
    assert found.status == 1
    [(file, line, title, message)] = errors(found)
    assert (file, line, title) == ("tests/test_norm.py", 5, "test_wrong failed")
    assert "different" in message
    assert "2 tests, 1 failed" in found.summary
    assert (workspace / found.outputs["html"]).parent.name == "reports"
    assert (workspace / found.outputs["html"]).is_file()


def test_it_installs_itself_with_what_is_asked_for(workspace, tmp_path):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> {shlex.quote(str(tmp_path / 'said'))}\n")
    fake.chmod(0o755)
    given = {
        **PAIR,
        "install": "true",
        "extras": "torch,jax",
        "pip-arguments": "-r requirements.txt '--find-links=a b'",
    }
    found = composite.run(ACTION, workspace, given, tmp_path / "bin")
    assert found.ran[:2] == ["0", "judge"]
    said = (tmp_path / "said").read_text().splitlines()
    wanted = ["attn-bridge[torch,jax] @ file:///the/action", "pytest", "-r", "requirements.txt", "--find-links=a b"]
    assert said[:9] == ["-m", "pip", "install", "--disable-pip-version-check", *wanted]


def test_every_input_says_what_it_is():
    for name, one in {**ACTION["inputs"], **ACTION["outputs"]}.items():
        assert one["description"], name


def test_a_review_annotates_each_pair_that_is_not_equal(workspace):
    pair = '[[pair]]\nname = "{0}"\nfirst = "demo/pairs.py:torch_norm"\nsecond = "demo/pairs.py:{1}"\nseeds = 1\n'
    text = "inputs = 'demo/inputs.npz'\n"
    pairs = [("right", "flax_norm_with_torch_eps"), ("wrong", "flax_norm"), ("absent", "absent")]
    (workspace / "parity.toml").write_text("".join(pair.format(*each) + text for each in pairs))
    identity = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "pairs"]):
        subprocess.run(["git", *words], check=True, capture_output=True, cwd=workspace)
    found = composite.run(ACTION, workspace, {"command": "review", "install": "false"})
    assert (found.status, found.outputs["verdict"]) == (2, "inconclusive")
    [wrong, absent] = errors(found)
    assert (wrong[0], wrong[2]) == ("demo/pairs.py", "attn-bridge: wrong is different")
    assert (workspace / wrong[0]).read_text().splitlines()[wrong[1] - 1].startswith("def flax_norm(")
    assert absent[2] == "attn-bridge: absent is inconclusive"
    assert absent[3].startswith("demo/pairs.py has no absent")
    assert "| right | equal |\n| wrong | different |\n| absent | inconclusive |" in found.summary
    assert (workspace / found.outputs["html"]).name == "report.html"
    [kept] = found.uploaded.values()
    assert kept["path"] == "./attn-bridge-report"
