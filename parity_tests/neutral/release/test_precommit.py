"""The hook of pre-commit, by its entry, in a repository of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.cli.ci import precommit
from release.versions import ROOT

yaml = pytest.importorskip("yaml", reason="comes with transformers")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    random = np.random.default_rng(0)
    arrays = {f"layer.{i}.weight": random.normal(size=(4, 3)).astype(np.float32) for i in range(3)}
    np.savez("source.npz", **arrays)
    (tmp_path / "models").mkdir()
    checkpoints.convert("source.npz", "models/one", to_layout="same")
    checkpoints.convert("source.npz", "two.safetensors", to_layout="same")
    git("add", "-A")
    return tmp_path


def git(*arguments):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True)


def hook(*names):
    """Run the hook's entry as pre-commit does."""
    [one] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command = one["entry"].split()
    assert command[0] == "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command[1:], *names], capture_output=True, text=True, check=False, env=environment
    )


def spoil(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_files_are_traced_to_the_checkpoints_they_belong_to(repository):
    for names, found in (
        (["models/one/model.safetensors", "models/one/attn-bridge.json"], ["models/one"]),
        (["two.safetensors"], ["two.safetensors"]),
        (["two.safetensors.attn-bridge.json"], ["two.safetensors"]),
        (["source.npz", "absent.py"], []),
        (["two.safetensors", "models/one/config.json"], ["models/one", "two.safetensors"]),
    ):
        assert [str(path) for path in precommit.checkpoints_of(names)] == found


def test_right_checkpoints_pass_and_a_flipped_bit_does_not(repository):
    names = ["models/one/model.safetensors", "two.safetensors", "source.npz"]
    done = hook(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every bit is right") == 2
    spoil(repository / "two.safetensors")
    done = hook(*names)
    assert done.returncode == 1
    assert "models/one: every bit is right" in done.stdout
    assert "two.safetensors: 1 tensor is wrong" in done.stdout


def test_a_commit_that_touches_no_checkpoint_costs_nothing(repository):
    spoil(repository / "two.safetensors")
    done = hook("source.npz")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_weights_that_a_commit_deletes_are_missed(repository):
    git("commit", "-qm", "x")
    git("rm", "-q", "models/one/model.safetensors")
    done = hook()
    assert done.returncode == 2
    assert "models/one" in done.stderr
    assert len(done.stderr.splitlines()) == 1
