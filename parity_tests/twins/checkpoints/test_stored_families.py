"""Families outside the package: in a model's folder, in a file, and derived on the spot."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import jax_attn
import torch_attn
from attn_bridge import checkpoints, models
from attn_bridge.cli.app import run
from attn_bridge.models import families
from attn_bridge.models.derived import known, stored
from attn_bridge.models.derived.description import dumps

derivation = importlib.import_module("attn_parity.frameworks.torch.derivation")

HELIUM = next(one for one in known.DESCRIPTIONS if one.model_type == "helium")
NOVA = dataclasses.replace(HELIUM, model_type="nova")
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 5))
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model():
    config = transformers.HeliumConfig(**SIZES, vocab_size=40, num_key_value_heads=2, head_dim=4)
    torch.manual_seed(0)
    model = transformers.HeliumForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


@pytest.fixture
def folder(model, tmp_path):
    """A folder of a model_type that the package does not know, without a file of its family."""
    path = tmp_path / "nova"
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "nova"}))
    return path


def logits(package, folder, **options):
    module = package.DecoderModel.from_pretrained(folder, **options)
    if package is torch_attn:
        return module(torch.tensor(TOKENS)).detach().numpy()
    return np.asarray(module(TOKENS))


@pytest.mark.parametrize("given", ["folder", "file", "object"])
@pytest.mark.parametrize("package", [torch_attn, jax_attn])
def test_model_of_unknown_type_is_read_by_a_stored_family(package, given, model, folder, tmp_path):
    file = (folder if given == "folder" else tmp_path) / stored.FILE
    file.write_text(dumps(NOVA))
    options = {"folder": {}, "file": {"family": file}, "object": {"family": known.family_of(NOVA)}}[given]
    expected = model(torch.tensor(TOKENS)).logits.detach().numpy()
    assert np.abs(logits(package, folder, **options) - expected).max() < 1e-5 * np.abs(expected).max()
    file.unlink()
    with pytest.raises(ValueError, match=r"model_type \(nova\) must be one of .*; attn-bridge derive FOLDER"):
        logits(package, folder)


def test_family_of_the_folder_goes_along_both_ways(folder, tmp_path):
    (folder / stored.FILE).write_text(dumps(NOVA))
    checkpoints.convert(folder, tmp_path / "flax", to_layout="flax")
    assert checkpoints.inspect(folder).layout == "hf-llama"
    assert checkpoints.verify(folder, tmp_path / "flax").passed
    checkpoints.convert(tmp_path / "flax", tmp_path / "back", to_layout="hf-nova")
    for name in ("model.safetensors", stored.FILE):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model_type = ", "attn-bridge-family.toml: "),
        (b"\xff\xfe", "attn-bridge-family.toml can't be read as a family: "),
        (b"#" * (stored.LIMIT + 1), f"can't be read as a family: it has more than {stored.LIMIT} bytes"),
        (b"rows = " + b"[" * 3000, "attn-bridge-family.toml: "),
        (b"fields = 3", "attn-bridge-family.toml: "),
        (f"architecture = 3\n{dumps(NOVA)}".encode(), "attn-bridge-family.toml: "),
        (dumps(NOVA).replace("hf-llama", "hf-nosuch").encode(), "layout (hf-nosuch) of the family is not known"),
    ],
)
def test_wrong_file_of_a_family_is_refused_in_a_line(content, message, folder, tmp_path, capsys):
    (folder / stored.FILE).write_bytes(content)
    with pytest.raises(ValueError, match=rf"\A.*{re.escape(message)}.*\Z"):  # a line, as . is no newline
        torch_attn.DecoderModel.from_pretrained(folder)
    capsys.readouterr()
    assert run(["convert", str(folder), str(tmp_path / "out"), "--to", "flax"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_family_without_a_field_is_refused(folder):
    (folder / stored.FILE).write_text(dumps(NOVA).replace("[fields.norm]", "[fields.nosuch]"))
    with pytest.raises(ValueError, match=r"attn-bridge-family.toml lacks 'kind' of the family$"):
        torch_attn.DecoderModel.from_pretrained(folder)


def test_another_kind_of_family_is_refused(folder):
    with pytest.raises(TypeError, match=r"^family must be a Family or the path of its file, got int$"):
        torch_attn.DecoderModel.from_pretrained(folder, family=3)


@pytest.fixture
def derived(monkeypatch):
    """The packaged family in place of its derivation, which takes a minute."""
    monkeypatch.setattr(derivation, "derive", lambda model_type, flax: {"helium": HELIUM}[model_type])


def test_derived_family_is_saved_beside_its_model(model, tmp_path, derived, capsys):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert models.derive(config).description == models.derive(tmp_path).description == HELIUM
    assert run(["derive", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / stored.FILE}\n")
    family = stored.beside(tmp_path)
    assert family is not None
    assert family.description == HELIUM


def test_config_that_the_derived_family_does_not_compute_is_refused(model, tmp_path, derived, capsys):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": "nosuch"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert run(["derive", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("refused: the family is proven, but not with this config: hidden_act")
    assert not (tmp_path / stored.FILE).exists()


def test_stored_family_that_does_not_hold_is_refused(tmp_path, capsys):
    shutil.copy(Path(families.__file__).with_name("helium.toml"), tmp_path / stored.FILE)
    text = (tmp_path / stored.FILE).read_text()
    assert "interleaved" in text
    (tmp_path / stored.FILE).write_text(text.replace("interleaved", "half"))
    for source in (tmp_path, tmp_path / stored.FILE):
        assert run(["derive", str(source), "--check"]) == 1
        assert capsys.readouterr().err.startswith("refused: HeliumForCausalLM is not what the family describes: logits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch", "--check"], "no family is stored for model_type (nosuch); attn-bridge derive makes them"),
        (["helium", "--check", "--out", "x.toml"], "--check proves a stored family and writes nothing"),
    ],
)
def test_check_of_nothing_stored_is_bad_usage(arguments, message, capsys):
    assert run(["derive", *arguments]) == 2
    assert message in capsys.readouterr().err
