"""A model's head is written where the source holds one, or where something ties it to the embeddings; never made up."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import configs
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.cli.app import run
from attn_bridge.models import families, layouts
from attn_bridge.weights.placements import LayoutError

from ..checkpoint_files import bits, tree
from ..checkpoints import SIZES, WIDTH, drawn, gpt, llama
from ..planning.test_prefixes import with_prefix
from ..planning.test_prefixes import write as put

CONFIG = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": WIDTH,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
"""Untied, as Llama's own default says."""

TARGETS = ["flax", "torch", "meta-llama", "book-llama3", "tunix-llama3", "maxtext"]
VISION = {f"blocks.{i}.attn.{name}.weight": (4, 4) for i in range(3) for name in ("qkv", "proj")}


def plain():
    """Return a Llama by the names of `transformers`, with a head of its own."""
    arrays = {name: array for name, array in llama(2).items() if "_norm." not in name or "final" in name}
    return layouts.find("hf-llama").from_canonical(arrays, **SIZES)


def base(arrays):
    """Return what a base model of it holds."""
    return {name.removeprefix("model."): array for name, array in arrays.items() if name != "lm_head.weight"}


def written(folder, arrays, name="model.safetensors", **config):
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return put(folder / name, arrays)


def options_in(message):
    """Return the options that a message names, behind its last semicolon, as words of a command."""
    words = shlex.split(message.rpartition("; ")[2].replace(" takes it along", "").strip(" ()\n"))
    return [word for at, word in enumerate(words) if word.startswith("--") or words[at - 1].startswith("--")]


@pytest.mark.parametrize("target", TARGETS)
def test_a_base_model_gets_no_head(tmp_path, target):
    written(tmp_path / "base", base(plain()), **CONFIG, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"holds no head, lm_head\.weight, .* does not tie one to embed_tokens"):
        checkpoints.convert(tmp_path / "base", tmp_path / "out", to_layout=target)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["base"]


def test_the_command_refuses_to_make_a_head_up_in_one_line(tmp_path, capsys):
    written(tmp_path / "base", base(plain()), **CONFIG)
    assert run(["convert", str(tmp_path / "base"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    remedy = (
        "convert a checkpoint that has the head, or set that to true if its model's head is the embeddings; "
        "--to same changes its container alone"
    )
    assert error.endswith(f"(tie_word_embeddings); {remedy}\n")


@pytest.mark.parametrize("target", ["flax", "tunix-llama3", "maxtext"])
def test_a_config_that_ties_the_head_makes_it_the_embeddings(tmp_path, target):
    arrays = base(plain())
    written(tmp_path / "base", arrays, **CONFIG, tie_word_embeddings=True)
    checkpoints.convert(tmp_path / "base", tmp_path / "out", to_layout=target)
    back = checkpoints.convert(tmp_path / "out", tmp_path / "torch", to_layout="torch").target
    np.testing.assert_array_equal(checkpoints.read(back)["out_head.weight"], arrays["embed_tokens.weight"])
    assert checkpoints.verify(tmp_path / "base", tmp_path / "out").passed


@pytest.mark.parametrize("kind", ["smollm3", "qwen2"])
def test_a_key_that_is_missing_is_the_default_of_its_family(tmp_path, kind):
    source = written(tmp_path / "base", base(plain()), **{**CONFIG, "model_type": kind})
    if kind == "smollm3":
        found = checkpoints.read(checkpoints.convert(source.parent, tmp_path / "out").target)
        np.testing.assert_array_equal(found["out_head.kernel"].T, found["tok_emb.embedding"])
    else:
        with pytest.raises(CheckpointError, match="holds no head"):
            checkpoints.convert(source.parent, tmp_path / "out")


def test_the_text_config_of_a_larger_model_says_whether_it_is_tied(tmp_path):
    config = {"model_type": "unheard_of", "text_config": {**CONFIG, "tie_word_embeddings": True}}
    written(tmp_path / "base", base(plain()), **config, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="does not tie one"):
        checkpoints.convert(tmp_path / "base", tmp_path / "out", from_layout="hf-llama")


def test_without_a_config_the_user_says_that_the_embeddings_are_the_head(tmp_path, capsys):
    source = written(tmp_path / "base", base(plain()))
    assert run(["convert", str(source), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    remedy = (
        "convert a checkpoint that has the head, or give --set tie=1 if its model's head is the embeddings; "
        "--to same changes its container alone"
    )
    assert error.endswith(f"; {remedy}\n")
    assert run(["convert", str(source), str(tmp_path / "out"), "--set", "tie=1"]) == 0
    found = checkpoints.read(tmp_path / "out")
    np.testing.assert_array_equal(found["out_head.kernel"].T, base(plain())["embed_tokens.weight"])
    assert run(["verify", str(source), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("file", "config"),
    [("x.pt", {}), ("x.dcp", CONFIG), ("x.safetensors", {**CONFIG, "tie_word_embeddings": False})],
)
def test_a_prefix_that_leaves_the_head_out_is_refused(tmp_path, capsys, file, config):
    wrapped = with_prefix("model.", plain()) | {"rng": np.arange(3)}
    source = written(tmp_path / "trained", wrapped, file, **config)
    arguments = ["convert", str(source), str(tmp_path / "out")]
    assert run([*arguments, "--strip", "model.model."]) == 2
    error = capsys.readouterr().err
    assert "--strip model.model. leaves out the head, model.lm_head.weight, " in error
    assert not (tmp_path / "out").exists()
    assert options_in(error) == ["--strip", "model."]
    assert run([*arguments, *options_in(error)]) == 0
    checkpoints.convert(written(tmp_path / "hf", plain(), **config), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(checkpoints.read(tmp_path / "wanted"))


@pytest.mark.parametrize(
    ("text", "vision", "strip"),
    [
        ("model.language_model.", "model.visual.", "model.language_model."),
        ("model.", "visual.", "model."),
    ],
)
def test_a_text_model_whose_head_stands_outside_is_taken_with_it(tmp_path, capsys, text, vision, strip):
    arrays = with_prefix(text, base(plain())) | {"lm_head.weight": plain()["lm_head.weight"]}
    config = {"model_type": "other_vl", "text_config": {**CONFIG, "model_type": "other_vl_text"}}
    config["tie_word_embeddings"] = False
    source = written(tmp_path / "vl", arrays | with_prefix(vision, drawn(VISION)), **config).parent
    arguments = ["convert", str(source), str(tmp_path / "out"), "--from", "hf-llama"]
    assert run(arguments[:3]) == 2
    assert "--from hf-llama takes them as they are\n" in capsys.readouterr().err
    alone = tmp_path / "alone"
    assert run(["convert", str(source), str(alone), "--from", "hf-llama"]) == 0
    assert "left out, as it is no part of the text model" in capsys.readouterr().out
    assert run([*arguments, "--strip", strip]) == 2
    error = capsys.readouterr().err
    assert f"--strip {strip} leaves out the head, lm_head.weight, " in error
    assert options_in(error) == ["--drop", f"{vision}*"]
    assert run([*arguments, *options_in(error)]) == 0
    checkpoints.convert(written(tmp_path / "hf", plain()), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(checkpoints.read(tmp_path / "wanted"))
    assert bits(checkpoints.read(alone)) == bits(checkpoints.read(tmp_path / "wanted"))
    for target in (tmp_path / "out", alone):
        assert run(["verify", str(source), str(target)]) == 0


def test_a_head_outside_that_is_tied_by_the_config_is_left_out_and_named(tmp_path):
    arrays = plain()
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    source = written(tmp_path / "x", arrays, **CONFIG, tie_word_embeddings=True)
    found = checkpoints.plan(source, tmp_path / "out", strip="model.")
    assert found.notes == ("left out, as their names do not begin with model.: lm_head.weight",)


def test_an_optional_head_of_gpt_2_is_not_lost_either(tmp_path):
    arrays = layouts.find("hf-gpt2").from_canonical(gpt(2, tied=False), tie=0)
    source = written(tmp_path / "x", arrays)
    with pytest.raises(CheckpointError, match=r"leaves out the head, lm_head\.weight, .*; names without --strip take"):
        checkpoints.convert(source, tmp_path / "out", strip="transformer.")
    checkpoints.convert(source, tmp_path / "out")
    found = checkpoints.read(tmp_path / "out")
    np.testing.assert_array_equal(found["out_head.kernel"].T, arrays["lm_head.weight"])


@pytest.mark.parametrize("layout", ["hf-llama", "tunix-llama3", "maxtext"])
def test_our_own_model_without_its_head_is_refused(tmp_path, layout):
    ours = checkpoints.convert(written(tmp_path / "hf", plain()), tmp_path / "torch", to_layout="torch").target
    arrays = {name: array for name, array in checkpoints.read(ours).items() if name != "out_head.weight"}
    written(tmp_path / "ours", arrays, **configs.own_config("DecoderModel", families.find_decoder(CONFIG)))
    with pytest.raises(CheckpointError, match=r"holds no head, out_head\.weight, .* does not tie one to tok_emb"):
        checkpoints.convert(tmp_path / "ours", tmp_path / "out", to_layout=layout)


def test_verify_does_not_call_a_head_right_that_was_made_up(tmp_path, capsys):
    source = written(tmp_path / "base", base(plain()), **CONFIG, tie_word_embeddings=True).parent
    checkpoints.convert(source, tmp_path / "out")
    written(source, base(plain()), **CONFIG, tie_word_embeddings=False)
    assert run(["verify", str(source), str(tmp_path / "out")]) == 2
    assert "holds no head" in capsys.readouterr().err


def test_a_head_that_drop_leaves_out_is_not_replaced(tmp_path):
    source = written(tmp_path / "x", plain(), **CONFIG)
    with pytest.raises(CheckpointError, match=r"holds no head, .* --drop leaves out lm_head\.weight, and its config"):
        checkpoints.convert(source, tmp_path / "out", drop="lm_head.*")


def test_blocks_that_the_config_has_and_the_source_has_not_are_missed(tmp_path):
    source = written(tmp_path / "half", plain(), **{**CONFIG, "num_hidden_layers": 4})
    with pytest.raises(LayoutError, match=r"the file has 2 layers, but num_hidden_layers of config.json is 4; set"):
        checkpoints.convert(source.parent, tmp_path / "out")
    assert tree(tmp_path).keys() == {"half/config.json", "half/model.safetensors"}
    written(source.parent, plain(), **CONFIG)
    assert checkpoints.verify(source.parent, checkpoints.convert(source.parent, tmp_path / "out").target).passed


def test_blocks_that_drop_leaves_out_are_not_missed(tmp_path):
    source = written(tmp_path / "x", plain(), **CONFIG).parent
    checkpoints.convert(source, tmp_path / "out", drop=["model.layers.1.*"])
    assert not any("trf_blocks.1" in name for name in checkpoints.read(tmp_path / "out"))
