"""Names with a prefix in front, as wrappers and trainers leave them: what an error says of it, and --strip."""

from __future__ import annotations

import json

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.checkpoints.readers import Stripped
from attn_bridge.cli.app import run
from attn_bridge.models.layouts import LayoutError
from parity_tests.support.calls import cover

from ..checkpoint_files import sharded, tree

FRONTS = ["module.", "model.", "state.net.model.", "0."]
"""Prefixes; a number is that of a list or a tuple."""


def write(path, arrays):
    """Write a checkpoint with the names given."""
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    writer = containers.make_writer(containers.format_of(path, None), path, infos, {})
    for name, array in arrays.items():
        writer.write_range(name, 0, np.ascontiguousarray(array).view(np.uint8).data)
    writer.finish()
    return path


@pytest.fixture
def plain(tmp_path):
    return sharded(tmp_path / "hf", width=16)


@pytest.fixture
def arrays(plain):
    return checkpoints.read(plain)


def with_prefix(prefix, arrays):
    return {prefix + name: array for name, array in arrays.items()}


@cover.rotated(("file", "prefix"), ["x.safetensors", "x.npz", "x.dcp", "x.pt"], FRONTS)
def test_a_prefix_is_named_and_taken_away(tmp_path, plain, arrays, file, prefix):
    source = write(tmp_path / file, with_prefix(prefix, arrays) | {"step": np.arange(3)})
    with pytest.raises(LayoutError, match=f"names begin with {prefix}, .* without it \\(--strip {prefix}\\)"):
        checkpoints.plan(source, tmp_path / "out")
    assert f"--strip {prefix}" in checkpoints.inspect(source).why
    found = checkpoints.plan(source, tmp_path / "out", strip=prefix)
    assert found.notes == (f"left out, as their names do not begin with {prefix}: step",)
    checkpoints.convert(source, tmp_path / "out", strip=prefix)
    checkpoints.convert(plain, tmp_path / "wanted")
    found, wanted = (checkpoints.read(tmp_path / name) for name in ("out", "wanted"))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert checkpoints.verify(source, tmp_path / "out").passed


@cover.some("workers", [2, 5], [2])
def test_workers_take_it_away_alike(tmp_path, arrays, workers):
    source = write(tmp_path / "x.dcp", with_prefix("model.", arrays))
    checkpoints.convert(source, tmp_path / "one", strip="model.", workers=1)
    checkpoints.convert(source, tmp_path / "many", strip="model.", workers=workers, task_bytes=4096)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_rows_of_a_matrix_are_read_by_its_own_name(tmp_path):
    matrix = np.random.default_rng(0).normal(size=(7, 12)).astype("float32")
    source = write(tmp_path / "x.safetensors", {"net.w": matrix, "w": matrix + 1})
    with containers.open_reader(source) as reader:
        found = np.empty((7, 4), np.float32)
        Stripped(reader, "net.").read_rows("w", 3, 12, found)
    np.testing.assert_array_equal(found, matrix[:, 3:7])


def test_one_of_two_models_of_a_file_is_not_resumed_as_the_other(tmp_path, arrays):
    average = {name: array + 1 for name, array in arrays.items()}
    source = write(tmp_path / "x.safetensors", with_prefix("model.", arrays) | with_prefix("ema.", average))
    plans = [checkpoints.plan(source, tmp_path / "out", strip=one) for one in ("model.", "ema.")]
    with containers.open_reader(source) as reader:
        assert len({plan.identity(reader) for plan in plans}) == 2
    checkpoints.convert(source, tmp_path / "out", strip="ema.")
    assert checkpoints.verify(source, tmp_path / "out").passed
    assert not checkpoints.verify(source, tmp_path / "out", strip="model.").passed


def test_the_command_takes_it_and_the_manifest_remembers_it(tmp_path, arrays, capsys):
    source = write(tmp_path / "x.safetensors", with_prefix("module.", arrays) | {"epoch": np.ones(1)})
    assert run(["convert", str(source), str(tmp_path / "out"), "--strip", "module."]) == 0
    assert "left out, as their names do not begin with module.: epoch" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/attn-bridge.json").read_text())["source"]["stripped"] == "module."
    assert run(["verify", str(source), str(tmp_path / "out")]) == 0
    assert run(["plan", str(source), str(tmp_path / "again"), "--strip", "module."]) == 0


def test_what_was_kept_aside_beside_the_source_is_said_to_be_left_out(tmp_path, plain, arrays):
    checkpoints.convert(
        write(tmp_path / "x.safetensors", arrays | {"transformer.h.0.attn.bias": np.tri(7)[None, None]}), tmp_path / "x"
    )
    (note,) = checkpoints.plan(tmp_path / "x", tmp_path / "y", strip="trf_", to_layout="same").notes[-1:]
    assert note.endswith("what was kept aside beside the source")


def test_a_source_that_lost_its_prefix_since_is_verified_as_it_is(tmp_path, plain, arrays):
    checkpoints.convert(
        write(tmp_path / "x.safetensors", with_prefix("module.", arrays)), tmp_path / "out", strip="module."
    )
    write(tmp_path / "again.safetensors", arrays)
    assert checkpoints.verify(tmp_path / "again.safetensors", tmp_path / "out").passed
    assert checkpoints.verify(tmp_path / "again.safetensors", tmp_path / "out", strip="").passed


@pytest.mark.parametrize("prefix", ["", "modul_", "module.wte.weight"])
def test_what_no_name_begins_with_is_refused(tmp_path, prefix):
    source = write(tmp_path / "x.safetensors", {"module.wte.weight": np.ones((2, 3))})
    with pytest.raises(CheckpointError, match=r"--strip \(.*\) must be what names of .* its first is module\.wte"):
        checkpoints.convert(source, tmp_path / "out", strip=prefix)
    assert not (tmp_path / "out").exists()


def test_a_layer_is_no_model_with_a_prefix(tmp_path):
    arrays = {f"net.{n}.attention.{part}.weight": np.ones((4, 4)) for n in range(2) for part in ("W_query", "W_odd")}
    source = write(tmp_path / "x.safetensors", arrays)
    with pytest.raises(LayoutError) as caught:
        checkpoints.plan(source, tmp_path / "out")
    assert "--strip" not in str(caught.value)
