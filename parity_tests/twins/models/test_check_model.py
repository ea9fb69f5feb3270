"""`check --model`: whole models judged block by block, right ones and ones with a fault in some part."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import torch_attn
from attn_bridge.checkpoints import configs
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.cli import demo
from attn_bridge.cli.app import run
from attn_bridge.models import families
from attn_bridge.parity import check_model
from attn_bridge.specs import LongRoPEScaling, NTKScaling, Rotary
from attn_bridge.weights import WeightsMismatchError
from attn_bridge.weights.placements import LayoutError
from attn_parity.check.model import decoding, makers, walk
from attn_parity.check.model.report import ModelReport
from attn_parity.frameworks.jax import decoded as flax_decoded
from attn_parity.frameworks.torch import decoded as torch_decoded
from attn_parity.frameworks.torch import hugging_face

from ...support.calls import cover
from ...support.models import drawn_decoders

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
ALL_PARTS = ("head", "gate", "key")
"""A fault for each part, in the order of parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    demo.write(path)
    return path / "llama"


@pytest.fixture(scope="module")
def checked(folder) -> tuple[int, str, ModelReport]:
    """Check a right model by the command: return its status, its output and the report."""
    reports, shown = [], io.StringIO()

    def keep(*arguments, **options):
        reports.append(check_model(*arguments, **options))
        return reports[0]

    with mock.patch.object(walk, "check_model", keep), contextlib.redirect_stdout(shown):
        status = run(["check", "--model", str(folder), "--seeds", "1", "--json", "-"])
    return status, shown.getvalue(), reports[0]


@pytest.fixture(scope="module")
def report(checked) -> ModelReport:
    """Return the report of a right model."""
    return checked[2]


@pytest.fixture(scope="module")
def shallow(folder, tmp_path_factory) -> Path:
    """Return the same model with one block, for faults that are alike in each."""
    path = tmp_path_factory.mktemp("shallow") / "llama"
    arrays = changed(folder, path, num_hidden_layers=1)
    save_file({name: one for name, one in arrays.items() if ".layers.1." not in name}, path / "model.safetensors")
    return path


def changed(folder: Path, target: Path, **config: object) -> dict[str, np.ndarray]:
    """Copy a model folder with another config, and return its arrays."""
    shutil.copytree(folder, target)
    known = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(known | config))
    return load_file(target / "model.safetensors")


def test_a_right_model_is_equal_in_every_part(report):
    assert [part.name for part in report.parts] == ["ends", "trf_blocks.0", "trf_blocks.1"]
    assert [part.verdict for part in report.parts] == ["equal"] * 3
    assert report.passed
    assert report.first_divergence is None
    assert np.shape(report.kl) == (2, 12)
    assert 0 <= np.max(report.kl) < 1e-9


def test_a_right_model_ends_the_command_with_0(checked):
    status, shown, _ = checked
    assert status == 0
    assert json.loads(shown)["passed"] is True


def wide(folder: Path, target: Path, factor: float = 1.0) -> Path:
    """Copy a model folder in float64, with one of its weights scaled."""
    arrays = {name: array.astype(np.float64) for name, array in changed(folder, target, dtype="float64").items()}
    arrays["model.layers.0.mlp.up_proj.weight"] *= factor
    save_file(arrays, target / "model.safetensors")
    return target


def test_a_model_has_the_dtype_of_most_of_its_numbers(tmp_path):
    numbers = {"weight": (40, np.float16), "scale": (2, np.float32), "table": (99, np.int64)}
    save_file({name: np.zeros(size, dtype) for name, (size, dtype) in numbers.items()}, tmp_path / "model.safetensors")
    assert makers.dtype_of(tmp_path) == "float16"


def test_a_float64_model_is_judged_in_float64(shallow, tmp_path):
    found = check_model(wide(shallow, tmp_path / "wide"), tmp_path / "wide", seeds=1)
    assert [part.verdict for part in found.parts] == ["equal"] * 2
    assert found.dtype == "float64"


@pytest.mark.full  # the search of the place takes a minute
def test_a_fault_of_a_float64_model_is_placed(shallow, tmp_path):
    wrong = wide(shallow, tmp_path / "wrong", 1 + 1e-9)
    found = check_model(wide(shallow, tmp_path / "wide"), wrong, oracle="torch", seeds=1)
    assert [part.verdict for part in found.parts] == ["equal", "different"]
    assert found.first_divergence.place == "trf_blocks.0.ff.fc2"


@cover.some("faults", [ALL_PARTS, *((fault,) for fault in FAULTS)], always=[ALL_PARTS])
def test_faults_are_placed_at_their_blocks(folder, tmp_path, faults):
    arrays = changed(folder, tmp_path / "wrong")
    for fault in faults:
        name, change, _ = FAULTS[fault]
        arrays[name] = change(arrays[name])
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    found = check_model(folder, tmp_path / "wrong", seeds=1)
    assert not found.passed
    wrong = [part for part in found.parts if part.verdict != "equal"]
    assert [part.verdict for part in wrong] == ["different"] * len(faults)
    assert wrong[0] is found.first_divergence
    assert [part.place for part in wrong] == [FAULTS[fault][2] for fault in faults]
    assert np.max(found.kl) > 1e-9


def test_the_command_shows_a_fault_and_ends_with_1(folder, tmp_path, capsys):
    """On the terminal, in JSON and on the page; blocks behind the fault are equal."""
    arrays = changed(folder, tmp_path / "wrong")
    arrays["model.layers.0.mlp.up_proj.weight"] *= 1.02
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    report, html = tmp_path / "report.json", tmp_path / "page.html"
    arguments = ["check", "--model", str(folder), "--against", str(tmp_path / "wrong"), "--oracle", "torch"]
    sizes = ["--seeds", "1", "--tokens", "5", "--batch", "3"]
    assert run([*arguments, *sizes, "--json", str(report), "--html", str(html)]) == 1
    shown = capsys.readouterr().out
    assert "first divergence: trf_blocks.0.ff.fc2 (forward)" in shown
    assert "2 of 3 parts equal" in shown
    written = json.loads(report.read_text())
    assert written["passed"] is False
    assert [part["verdict"] for part in written["parts"]] == ["equal", "different", "equal"]
    assert np.max(written["kl"]) > 1e-9  # the fault reaches the logits
    page = html.read_text()
    for name in ("ends", "trf_blocks.0", "trf_blocks.1"):
        assert f">{name} <" in page
    assert "trf_blocks.0.ff.fc2" in page
    assert page.count("<rect") == 15
    assert "decoding with a cache: equal" in page


def test_another_number_of_layers_than_the_configs_is_refused(folder, tmp_path):
    arrays = changed(folder, tmp_path / "wrong", num_hidden_layers=3)
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(LayoutError, match=r"the file has 2 layers, but num_hidden_layers of config.json is 3; set"):
        check_model(tmp_path / "wrong")


def test_all_missing_tensors_are_named(folder, tmp_path):
    arrays = changed(folder, tmp_path / "wrong")
    missing = ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    save_file({name: arrays[name] for name in arrays if name not in missing}, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(WeightsMismatchError) as caught:
        check_model(tmp_path / "wrong")
    assert all(name in str(caught.value) for name in missing)


def test_a_config_on_the_other_side_is_judged_too(shallow, tmp_path):
    changed(shallow, tmp_path / "other", rms_norm_eps=1e-3)
    found = check_model(shallow, tmp_path / "other", oracle="torch", seeds=1)
    assert [part.verdict for part in found.parts] == ["different"] * 2
    assert [part.place for part in found.parts] == ["final_norm", "trf_blocks.0.norm1"]


def test_transformers_judges_and_so_does_the_torch_twin(report):
    assert report.oracle == "transformers"
    for part in report.parts:
        assert [pair.first for pair in part.pairs] == ["transformers", "torch"]
        assert [pair.verdict for pair in part.pairs] == ["equal", "equal"]
    assert [part.decoding is None for part in report.parts] == [True, False, False]
    for part in report.parts[1:]:
        assert part.decoding.verdict == "equal"
        assert part.decoding.apart.keys() == {"torch", "flax"}
        assert 0 <= max(part.decoding.apart.values()) < 1e-12


def test_models_unknown_to_transformers_are_judged_by_torch(shallow, tmp_path):
    torch_attn.DecoderModel.from_pretrained(shallow).save_pretrained(tmp_path / "ours")
    found = check_model(tmp_path / "ours", seeds=1)
    assert found.passed
    assert found.oracle == "torch"
    assert "transformers does not know it" in found.notes[0]
    with pytest.raises(ValueError, match="transformers does not know it"):
        check_model(tmp_path / "ours", oracle="transformers")


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_decoding_that_gives_something_else_is_different(shallow, monkeypatch, side):
    home, call = {"torch": (torch_decoded, "forward"), "flax": (flax_decoded, "__call__")}[side]
    right = getattr(home.Decoded, call)
    monkeypatch.setattr(home.Decoded, call, lambda self, x: right(self, x) * (1 + 1e-9))
    found = check_model(shallow, oracle="torch", seeds=1)
    assert [part.verdict for part in found.parts] == ["equal", "different"]
    assert found.parts[1].place == "trf_blocks.0 (decoding)"
    assert found.parts[1].decoding.message.startswith(f"{side}: with a cache")


STRETCHED = {
    "longrope": LongRoPEScaling((1.1, 1.3), (1.5, 2.9), original_context=8, factor=4.0),
    "dynamic ntk": NTKScaling(3.0, original_context=8),
}


@cover.some("scaling", list(STRETCHED), always=["longrope"])
def test_decoding_past_a_change_of_angles_is_equal(shallow, tmp_path, scaling):
    """Cached keys stay turned by the angles of their time, here and in `transformers`."""
    model = torch_attn.DecoderModel.from_pretrained(shallow)
    arrays = {name: one.numpy() for name, one in model.state_dict().items() if name != "out_head.weight"}
    rotary = Rotary(500.0, scaling=STRETCHED[scaling])
    blocks = [one.replace(attention=one.attention.replace(position=rotary)) for one in model.config.blocks]
    config = model.config.replace(blocks=tuple(blocks))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(configs.own_config("DecoderModel", config)))
    if not config.tie:
        arrays["out_head.weight"] = model.state_dict()["out_head.weight"].numpy()
    save_file(arrays, tmp_path / "ours" / "model.safetensors")
    found = check_model(tmp_path / "ours", oracle="torch", seeds=1, tokens=12)
    assert [(part.verdict, part.place) for part in found.parts] == [("equal", "")] * 2
    assert all(0 < max(part.decoding.apart.values()) < 1e-12 for part in found.parts[1:])


STEPS = {
    "none": (None, 12, (6, 12)),
    "one token": (None, 1, (1, 1)),
    "two tokens": (None, 2, (1, 2)),
    "longrope within": (STRETCHED["longrope"], 8, (4, 8)),
    "longrope beyond": (STRETCHED["longrope"], 12, (9, 12)),
    "longrope far beyond": (STRETCHED["longrope"], 30, (15, 30)),
    "longrope, the token after": (STRETCHED["longrope"], 9, (4, 8)),
    "ntk": (NTKScaling(3.0), 12, (6, 12)),
    "dynamic ntk within": (STRETCHED["dynamic ntk"], 7, (3, 7)),
    "dynamic ntk beyond": (STRETCHED["dynamic ntk"], 12, (4, 8)),
    "dynamic ntk, context of one": (NTKScaling(3.0, original_context=1), 12, (1, 1)),
}


@pytest.mark.parametrize("case", STEPS)
def test_decoding_is_judged_where_the_angles_stay(case):
    scaling, tokens, steps = STEPS[case]
    block = families.find_decoder({"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1,
                                   "intermediate_size": 12, "num_attention_heads": 2}).blocks[0]  # fmt: skip
    attention = block.attention.replace(position=Rotary(500.0, scaling=scaling))
    assert decoding.steps(block.replace(attention=attention), tokens) == steps


@cover.some("oracle", ["transformers", "torch"], always=["torch"])
def test_large_weights_are_judged_as_small_ones_are(shallow, tmp_path, monkeypatch, oracle):
    monkeypatch.setattr("attn_parity.sides.arrays.LARGE", 64)
    arrays = changed(shallow, tmp_path / "wrong")
    arrays["model.layers.0.mlp.up_proj.weight"] *= 1.0001
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    found = check_model(shallow, tmp_path / "wrong", oracle=oracle, seeds=1)
    assert [part.verdict for part in found.parts] == ["equal", "different"]
    assert found.parts[1].place == "trf_blocks.0.ff.fc2"


def test_an_interrupted_walk_reports_what_it_has(folder, tmp_path, capsys):
    def stop(name: str, done: int, total: int) -> None:
        if name == "trf_blocks.1":
            raise KeyboardInterrupt

    found = check_model(folder, oracle="torch", seeds=1, progress=stop)
    assert [part.name for part in found.parts] == ["ends", "trf_blocks.0"]
    assert found.stopped
    assert not found.passed
    assert "interrupted" in found.lines()[-1]


BAD = {
    "shapes": (["--against", "{other}"], "must have parameters of the same names and shapes; trf_blocks.0.att.W_key"),
    "variant": (["MultiHeadAttention"], "--model judges a whole model"),
    "seeds": (["--seeds", "0"], "seeds (0) must be at least 1"),
    "tokens": (["--tokens", "0"], "tokens (0) must be at least 1"),
    "oracle": (["--oracle", "jax"], "oracle (jax) must be one of auto, transformers, torch"),
}


def test_more_tokens_than_a_table_of_positions_has_are_refused(tmp_path, capsys):
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_head": 2, "n_layer": 1}
    model = torch_attn.DecoderModel(families.find_decoder({"model_type": "gpt2", **sizes}))
    model.save_pretrained(tmp_path / "gpt")
    assert run(["check", "--model", str(tmp_path / "gpt")]) == 2
    assert capsys.readouterr().err == "error: tokens (12) must be at most num_positions (8)\n"


def test_blocks_that_read_more_than_the_previous_output_are_refused(tmp_path, capsys):
    config = families.find_decoder(
        {
            "model_type": "gemma4_unified_text",
            **drawn_decoders.SIZES,
            **drawn_decoders.OWN_KEYS["gemma4_unified_text"],
        }
    )
    torch_attn.DecoderModel(config).save_pretrained(tmp_path / "gemma")
    assert run(["check", "--model", str(tmp_path / "gemma")]) == 2
    reason = "blocks are judged one at a time, and blocks[3] also reads the keys of blocks[1]"
    error = f"error: {tmp_path / 'gemma'}: {reason}; attn-bridge compare judges whole models\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("case", BAD)
def test_bad_usage_is_one_line(folder, tmp_path, capsys, case):
    arguments, message = BAD[case]
    changed(folder, tmp_path / "other", num_key_value_heads=1)
    given = [one.format(other=tmp_path / "other") for one in arguments]
    assert run(["check", "--model", str(folder), *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_tied_head_with_numbers_of_its_own_is_refused(folder, tmp_path):
    arrays = changed(folder, tmp_path / "wrong", tie_word_embeddings=True)
    save_file(arrays, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight must hold the numbers of model.embed_tokens.weight"):
        check_model(tmp_path / "wrong")


def test_layers_that_transformers_does_not_load_use_torch(shallow, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise hugging_face.UnknownModelError("transformers does not load model.layers.0.self_attn.extra.weight")

    monkeypatch.setattr(hugging_face, "layer", refuse)
    found = check_model(shallow, seeds=1)
    assert found.passed
    assert [[pair.first for pair in part.pairs] for part in found.parts[1:]] == [["torch"]]
    assert found.notes == (
        "transformers does not load model.layers.0.self_attn.extra.weight: the torch twin alone is the measure",
    )
