"""A dry run refuses what the run refuses by headers and paths, in the same words, and writes nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.cli.app import run

from ..checkpoint_files import folder, tree, write

TARGETS = ("y.safetensors", "folder", "y.pt", "y.npz", "y.msgpack", "y.orbax", "y.dcp")
NAMES = ("a", "a..b", "__metadata__", "../x", "x/y", "x" * 300, "x.npy", "__msgpack_chunked_array__")


def said_of(source, target, capsys, *options):
    """Return the status and the errors of a dry run and of the run, after a check that the first wrote nothing."""
    results = []
    for more in (["--dry-run"], []):
        before = tree(source.parent)
        results.append((run(["convert", str(source), str(target), *options, *more]), capsys.readouterr().err))
        assert not more or tree(source.parent) == before
    return results


@pytest.mark.parametrize("dtype", ["complex128", "float8_e3m4", "float8_e8m0fnu", "uint16"])
@pytest.mark.parametrize("target", TARGETS)
def test_dtypes(tmp_path, capsys, target, dtype):
    kind = getattr(ml_dtypes, dtype, dtype)
    source = checkpoints.convert({"x": np.ones((2, 3), kind)}, tmp_path / "x.npz", to_layout="same").target
    dry, real = said_of(source, tmp_path / target, capsys, "--to", "same")
    assert dry == real
    assert dry[0] == (2 if f"no {dtype}" in dry[1] or "can't" in dry[1] else 0), dry


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_names(tmp_path, capsys, target, name):
    source = checkpoints.convert({name: np.ones(2), "a.b": np.ones(3)}, tmp_path / "x.pt", to_layout="same").target
    dry, real = said_of(source, tmp_path / target, capsys, "--to", "same")
    assert dry == real


@pytest.mark.parametrize(("target", "options"), [
    ("x.safetensors", ["--overwrite"]),
    ("none/y.npz", []),
    ("there.npz", []),
    ("others", ["--overwrite"]),
    ("n" * 250 + ".npz", []),
    ("y.npz", ["--max-memory", "1MiB"]),
    ("y.npz", ["--workers", "100000"]),
    ("y.safetensors", ["--workers", "100000"]),
    ("y.safetensors", ["--workers", "4", "--max-memory", "200MiB"]),
])  # fmt: skip
def test_targets_and_settings(tmp_path, capsys, target, options):
    source = write(tmp_path / "x.safetensors", {"x": np.ones(2)})
    (tmp_path / "there.npz").touch()
    (tmp_path / "others" / "inner").mkdir(parents=True)
    dry, real = said_of(source, tmp_path / target, capsys, "--to", "same", *options)
    assert dry == real
    assert dry[0] == (0 if options[1:] == ["100000"] and target == "y.npz" else 2)


def test_tensors_kept_aside(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    arrays = checkpoints.read(source)
    arrays["transformer.h.0.attn.bias"] = arrays["transformer.h.0.attn.bias"].astype(np.complex128)
    source = checkpoints.convert(arrays, tmp_path / "x.npz", to_layout="same").target
    dry, real = said_of(source, tmp_path / "y.npz", capsys, "--from", "hf-gpt2", "--to", "flax")
    assert dry == real
    assert "y.npz: safetensors has no complex128" in dry[1]


def test_arrays_in_memory(tmp_path):
    arrays = {"x": np.ones(2, np.complex128)}
    with pytest.raises(checkpoints.containers.CheckpointError, match="safetensors has no complex128"):
        checkpoints.plan(arrays, tmp_path / "y.safetensors", to_layout="same")
