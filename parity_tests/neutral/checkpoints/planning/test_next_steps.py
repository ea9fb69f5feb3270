"""Errors begin with what to do, name what is near, and where a rule is."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from safetensors.numpy import save_file

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.generation import Options
from attn_bridge.models import layouts
from attn_bridge.weights.placements import LayoutError
from attn_parity.check.real_weights import subjects_from_file

from ..checkpoint_files import made


def test_a_prefix_is_named_before_the_reason():
    names = {f"model.{name}": array.shape for name, array in made("hf-gpt2").items()} | {"optimizer.step": ()}
    with pytest.raises(LayoutError) as caught:
        layouts.detect(names)
    text = str(caught.value)
    assert text.index("(--strip model.)") < text.index("no tensor has a name that a layout knows")
    assert "maxtext" not in text


@pytest.mark.parametrize(
    ("name", "meant"), [("jax", "flax"), ("pytorch", "torch"), ("hf-gpt-2", "hf-gpt2"), ("hflama", "hf-llama")]
)
def test_an_unknown_layout_names_what_is_near(name, meant):
    with pytest.raises(LayoutError, match=rf"^layout \({name}\) is not known; did you mean {meant}\b") as caught:
        layouts.find(name)
    assert len(str(caught.value)) < 200


def test_a_named_layout_keeps_the_advice_to_drop(tmp_path):
    save_file({**made("hf-gpt2"), "my.extra": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsMismatchError, match=r"unexpected: my\.extra; --drop 'my\.\*' leaves the unexpected"):
        checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "y.npz", from_layout="hf-gpt2")


def test_a_missing_folder_is_named(tmp_path):
    save_file(made("hf-gpt2"), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"/out does not exist; make that folder first to write x\.npz to it$"):
        checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "out" / "x.npz", to_layout="flax")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to_layout", ["flax", "torch"])
def test_a_shape_that_a_rule_misses_names_file_and_line(tmp_path, to_layout):
    own = "weight" if to_layout == "flax" else "kernel"
    save_file({f"a.{own}": np.ones((2, 3)), f"b.{own}": np.ones(3)}, tmp_path / "x.safetensors")
    lines = [f'[[rule]]\ntorch = "{one}.weight"\nflax = "{one}.kernel"\npattern = "o i -> i o"\n' for one in "ab"]
    (tmp_path / "rules.toml").write_text("".join(lines))
    with pytest.raises(LayoutError, match=r"/rules\.toml, line 5: b\.\w+ \(3,\) has 1 axes, expected 2"):
        checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "y.npz", rules=tmp_path / "rules.toml")


@pytest.mark.parametrize(("word", "option"), [("to", "to_layout"), ("form_layout", "from_layout"), ("set", "settings")])
def test_an_unknown_option_names_what_is_near(word, option):
    with pytest.raises(TypeError, match=rf"^'{word}' is no option of a conversion; did you mean {option}\?$"):
        checkpoints.convert("x", "y", **{word: "flax"})


def test_top_k_without_a_temperature_warns():
    with pytest.warns(
        UserWarning, match=r"^top_k \(5\) changes nothing at temperature 0.*give temperature=1\.0 to draw$"
    ):
        Options(3, top_k=5).checked(11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options(3, temperature=0.5, top_k=5).checked(11)
        Options(3, top_k=1).checked(11)


def test_grouped_heads_are_referred_to_check_model(tmp_path):
    shapes = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (6, 8)}
    arrays = {f"model.layers.0.self_attn.{name}_proj.weight": np.ones(shape) for name, shape in shapes.items()}
    save_file(arrays, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"layer-0: grouped heads: keys have 4 rows and queries 8.*; use --model$"):
        subjects_from_file(tmp_path / "x.safetensors", "hf-llama", {"num_heads": 4})
