"""Repositories of the Hugging Face hub, ``hf://``: their headers are read without a download."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("fsspec", reason="pip install 'attn-bridge[remote]'")
pytest.importorskip("huggingface_hub", reason="comes with transformers")

from attn_bridge import checkpoints
from parity_tests.neutral.checkpoints.checkpoint_files import sharded
from parity_tests.support.files import hub


def command(server: hub.Hub, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run attn-bridge with another hub, which its library asks for when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-m", "attn_bridge", *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = sharded(tmp_path_factory.mktemp("hub") / "gpt2", width=96)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 4}))
    return folder


def test_a_repository_is_converted_and_verified_like_its_folder(repository, tmp_path):
    with hub.serving(repository) as server:
        converted = command(server, "convert", f"hf://{hub.REPOSITORY}", str(tmp_path / "flax"))
        assert converted.returncode == 0, converted.stderr
        verified = command(server, "verify", f"hf://{hub.REPOSITORY}@{hub.COMMIT}", str(tmp_path / "flax"))
        assert verified.returncode == 0, verified.stderr
    checkpoints.convert(repository, tmp_path / "local")
    names = sorted(one.name for one in (tmp_path / "local").iterdir())
    assert names == sorted(one.name for one in (tmp_path / "flax").iterdir())
    assert all((tmp_path / "local" / one).read_bytes() == (tmp_path / "flax" / one).read_bytes() for one in names)


def test_headers_are_read_without_a_download(tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    np.savez(tmp_path / "x.npz", **{f"part.{i}": np.random.default_rng(i).normal(size=(512, 1024)) for i in range(6)})
    checkpoints.convert(tmp_path / "x.npz", folder / "model.safetensors", to_layout="same")
    whole = (folder / "model.safetensors").stat().st_size
    with hub.serving(folder) as server:
        done = command(server, "inspect", f"hf://{hub.REPOSITORY}", "--json", "-")
        assert done.returncode == 0, done.stderr
        assert server.names >= {"model.safetensors"}
        assert server.served < whole // 20
    assert len(json.loads(done.stdout)["tensors"]) == 6


def test_a_repository_that_is_not_there_is_one_line(repository):
    with hub.serving(repository) as server:
        done = command(server, "inspect", "hf://org/another")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "hf://org/another" in done.stderr
