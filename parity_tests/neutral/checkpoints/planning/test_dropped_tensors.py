"""--drop: tensors that are left out by name, which the output and the manifest say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.cli.app import run

from ..checkpoint_files import bits, made, tree
from ..checkpoints import drawn
from .test_prefixes import write as put

EXTRA = {"score.weight": (3, 6), "value.head.0.weight": (4, 6), "value.head.0.bias": (4,)}


@pytest.fixture
def model():
    return {name: array for name, array in made("hf-gpt2").items() if ".attn.bias" not in name}


@pytest.fixture
def source(tmp_path, model):
    return put(tmp_path / "x.safetensors", model | drawn(EXTRA))


def test_what_fits_a_pattern_is_left_out_and_named(tmp_path, source, model, capsys):
    options = ["--drop", "score.*", "--drop", "value.*"]
    assert run(["convert", str(source), str(tmp_path / "out"), *options]) == 0
    said = capsys.readouterr().out
    assert "left out by --drop score.*: score.weight\n" in said
    assert "left out by --drop value.*: 2 tensors: 2 of value (value.head.0.weight, value.head.0.bias)\n" in said
    assert said.endswith("hf-gpt2 to flax, 3 left out\n")
    checkpoints.convert(put(tmp_path / "alone.safetensors", model), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(checkpoints.read(tmp_path / "wanted"))


def test_the_manifest_says_what_was_left_out_and_verify_reads_it(tmp_path, source, capsys):
    checkpoints.convert(source, tmp_path / "out", drop=["score.*", "value.*"])
    assert json.loads((tmp_path / "out/attn-bridge.json").read_text())["source"]["dropped"] == {
        "score.*": ["score.weight"],
        "value.*": ["value.head.0.bias", "value.head.0.weight"],
    }
    assert run(["verify", str(source), str(tmp_path / "out")]) == 0
    assert run(["verify", str(source), str(tmp_path / "out"), "--drop", "score.*", "--drop", "value.*"]) == 0
    capsys.readouterr()
    assert run(["verify", str(source), str(tmp_path / "out"), "--drop", "score.*"]) == 2
    assert "value.head.0" in capsys.readouterr().err


def test_what_was_left_out_is_not_missed_on_the_way_back(tmp_path, source, model):
    checkpoints.convert(source, tmp_path / "out", drop=["score.*", "value.*"])
    checkpoints.convert(tmp_path / "out", tmp_path / "back.safetensors", to_layout="hf-gpt2")
    assert bits(checkpoints.read(tmp_path / "back.safetensors")) == bits(model)


@pytest.mark.parametrize("option", ["convert", "plan", "verify"])
def test_a_pattern_that_fits_nothing_is_one_line(tmp_path, source, capsys, option):
    checkpoints.convert(source, tmp_path / "out", drop=["score.*", "value.*"])
    target = tmp_path / ("out" if option == "verify" else "new")
    before = tree(tmp_path)
    assert run([option, str(source), str(target), "--drop", "scores.*"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --drop (scores.*) fits no name of {source}; its first is ")
    assert error.count("\n") == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("drop", "message"), [("*", "leaves nothing"), ("", "must be a pattern"), ([3], "(3) must be")]
)
def test_patterns_that_are_none_are_refused(tmp_path, source, drop, message):
    with pytest.raises(CheckpointError) as caught:
        checkpoints.plan(source, tmp_path / "out", drop=drop)
    assert message in str(caught.value)


def test_patterns_fit_names_as_the_file_has_them(tmp_path, model):
    wrapped = {f"module.{name}": array for name, array in (model | drawn(EXTRA)).items()}
    source = put(tmp_path / "y.dcp", wrapped)
    plan = checkpoints.plan(source, tmp_path / "out", strip="module.", drop=["module.score.*", "*.head.?.*"])
    assert {one.info.name for one in plan.targets} == {
        one.info.name for one in checkpoints.plan(put(tmp_path / "z.npz", model), tmp_path / "out").targets
    }


def test_workers_leave_the_same_tensors_out(tmp_path, source):
    options = {"drop": ("score.*", "value.*"), "task_bytes": 4096}
    checkpoints.convert(source, tmp_path / "single", workers=1, **options)
    checkpoints.convert(source, tmp_path / "many", workers=2, **options)
    assert tree(tmp_path / "single") == tree(tmp_path / "many")


def test_plans_that_leave_out_other_tensors_are_others(tmp_path, source):
    plans = [checkpoints.plan(source, tmp_path / "out", to_layout="same", drop=one) for one in ("score.*", "value.*")]
    with containers.open_reader(source) as reader:
        assert len({plan.identity(reader) for plan in plans}) == 2


@pytest.mark.parametrize("file", ["x.pt", "x.msgpack"])
def test_values_beside_the_tensors_go_with_a_change_of_container(tmp_path, file):
    arrays = {"net.w": np.ones((2, 3), np.float32), "optimizer.m": np.ones(3, np.float32)}
    metadata = {"optimizer.rate": 0.5, "epoch": 7}
    infos = [containers.base.TensorInfo(name, "float32", array.shape) for name, array in arrays.items()]
    writer = containers.make_writer(containers.format_of(tmp_path / file, None), tmp_path / file, infos, metadata)
    for name, array in arrays.items():
        writer.write_range(name, 0, array.view(np.uint8).data)
    writer.finish()
    done = checkpoints.convert(tmp_path / file, tmp_path / f"out.{file}", to_layout="same", drop="optimizer.*").target
    with checkpoints.open(done) as found:
        assert list(found) == ["net.w"]
        assert found.metadata == {"epoch": 7}
