"""`check --model`: whole models judged block by block, right ones and ones with a fault in some part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attn_bridge.cli import demo
from attn_bridge.cli.app import run
from attn_bridge.parity import check_model
from attn_bridge.weights import WeightsMismatchError

FAULTS = {
    "key": ("model.layers.1.self_attn.k_proj.weight", lambda one: one * 1.01, "trf_blocks.1.att.W_key"),
    "rotary pairs": (
        "model.layers.0.self_attn.q_proj.weight",
        lambda one: one.reshape(4, 2, 2, 16).swapaxes(1, 2).reshape(16, 16),
        "trf_blocks.0.att.W_query",
    ),
    "norm": ("model.layers.1.post_attention_layernorm.weight", lambda one: one + 1, "trf_blocks.1.norm2"),
    "gate": ("model.layers.0.mlp.gate_proj.weight", lambda one: one[::-1].copy(), "trf_blocks.0.ff.fc1"),
    "last norm": ("model.norm.weight", lambda one: np.ones_like(one), "final_norm"),
    "head": ("lm_head.weight", lambda one: one[:, ::-1].copy(), "out_head"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    demo.write(path)
    return path / "llama"


def changed(folder: Path, target: Path, **config: object) -> dict[str, np.ndarray]:
    """Copy a model folder with another config, and return its arrays."""
    shutil.copytree(folder, target)
    known = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(known | config))
    return load_file(target / "model.safetensors")


def test_a_right_model_is_equal_in_every_part(folder, capsys):
    assert run(["check", "--model", str(folder), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    found = check_model(folder)
    assert [part.name for part in found.parts] == ["ends", "trf_blocks.0", "trf_blocks.1"]
    assert [part.verdict for part in found.parts] == ["equal"] * 3
    assert found.passed
    assert found.first_divergence is None
    assert np.shape(found.kl) == (2, 12)
    assert 0 <= np.max(found.kl) < 1e-9


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_placed_at_its_block(folder, tmp_path, fault):
    name, change, place = FAULTS[fault]
    arrays = changed(folder, tmp_path / "wrong")
    arrays[name] = change(arrays[name])
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    found = check_model(folder, tmp_path / "wrong")
    assert not found.passed
    wrong = [part for part in found.parts if part.verdict != "equal"]
    assert [part.verdict for part in wrong] == ["different"]
    assert wrong[0] is found.first_divergence
    assert wrong[0].place == place
    assert np.max(found.kl) > 0


def test_a_fault_ends_the_command_with_1_and_its_place(folder, tmp_path, capsys):
    arrays = changed(folder, tmp_path / "wrong")
    arrays["model.layers.1.mlp.up_proj.weight"] *= 1.02
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    report = tmp_path / "report.json"
    status = run(["check", "--model", str(folder), "--against", str(tmp_path / "wrong"), "--json", str(report)])
    assert status == 1
    shown = capsys.readouterr().out
    assert "first divergence: trf_blocks.1.ff.fc2 (forward)" in shown
    assert "2 of 3 parts equal" in shown
    written = json.loads(report.read_text())
    assert written["passed"] is False
    assert [part["verdict"] for part in written["parts"]] == ["equal", "equal", "different"]


def test_all_missing_and_surplus_tensors_are_named(folder, tmp_path):
    arrays = changed(folder, tmp_path / "wrong", num_hidden_layers=3)
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(WeightsMismatchError) as caught:
        check_model(tmp_path / "wrong")
    assert "trf_blocks.2.att.W_query.weight" in str(caught.value)
    assert "trf_blocks.2.ff.fc3.weight" in str(caught.value)


BAD = {
    "configs": (["--against", "{other}"], "must have one config"),
    "variant": (["MultiHeadAttention"], "--model judges a whole model"),
    "seeds": (["--seeds", "0"], "seeds (0) must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_usage_is_one_line(folder, tmp_path, capsys, case):
    arguments, message = BAD[case]
    changed(folder, tmp_path / "other", rms_norm_eps=1e-3)
    given = [one.format(other=tmp_path / "other") for one in arguments]
    assert run(["check", "--model", str(folder), *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
