"""Parts of names that wrappers of torch add: removed wherever they stand, and reported."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.selection import without_wrappers
from attn_bridge.cli.app import run
from attn_bridge.models import layouts

from .. import checkpoints as checkpoints_of
from ..checkpoint_files import tree
from ..checkpoints import attention
from .test_prefixes import with_prefix
from .test_prefixes import write as put
from .test_training_trees import check_followed, ours, refusal, theirs


def inside(part, arrays):
    """Return names with a part behind every block's number."""
    return {re.sub(r"(\.\d+)\.", rf"\1.{part}.", name): array for name, array in arrays.items()}


@pytest.mark.parametrize(
    "front", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."]
)
@pytest.mark.parametrize("model", [theirs, ours])
def test_wrappers_in_front_of_all_names_are_removed(tmp_path, front, model):
    source = put(tmp_path / "x.safetensors", with_prefix(front, model()))
    (note,) = [one for one in checkpoints.plan(source, tmp_path / "out").notes if "wrapper" in one]
    assert all(f"{part} ({len(model())} tensors)" in note for part in front.rstrip(".").split("."))
    check_followed(tmp_path, source, model())


@pytest.mark.parametrize(
    "part", ["_fsdp_wrapped_module._checkpoint_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"]
)
@pytest.mark.parametrize("model", [theirs, ours])
def test_wrappers_of_blocks_are_removed(tmp_path, part, model):
    source = put(tmp_path / "x.safetensors", with_prefix("_fsdp_wrapped_module.", inside(part, model())))
    check_followed(tmp_path, source, model())


@pytest.mark.parametrize("options", [{}, {"from_layout": "torch"}])
def test_wrappers_are_removed_where_the_layout_is_said(tmp_path, options):
    source = put(tmp_path / "x.safetensors", with_prefix("_orig_mod.net.", attention("")))
    check_followed(tmp_path, source, with_prefix("net.", attention("")), **options)


def test_wrappers_behind_what_is_stripped_are_removed(tmp_path):
    held = with_prefix("model._orig_mod.", ours("torch")) | {"optimizer.exp_avg": np.ones(2)}
    check_followed(tmp_path, put(tmp_path / "x.safetensors", held), ours("torch"), strip="model.")


def test_module_beside_a_counter_is_advised_to_strip(tmp_path):
    held = with_prefix("module.", theirs()) | {"n_averaged": np.arange(3)}
    source, message = refusal(tmp_path, held)
    assert "--strip module." in message
    check_followed(tmp_path, source, theirs(), strip="module.")


def test_a_change_of_container_keeps_wrappers(tmp_path):
    source = put(tmp_path / "x.safetensors", with_prefix("_orig_mod.", theirs()))
    checkpoints.convert(source, tmp_path / "x.npz", to_layout="same")
    assert checkpoints.read(tmp_path / "x.npz").keys() == with_prefix("_orig_mod.", theirs()).keys()
    assert checkpoints.verify(source, tmp_path / "x.npz").passed


def test_workers_remove_wrappers_alike(tmp_path):
    source = put(tmp_path / "x.dcp", with_prefix("_orig_mod.", theirs()))
    checkpoints.convert(source, tmp_path / "one", workers=1)
    checkpoints.convert(source, tmp_path / "many", workers=2, task_bytes=4096)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_module_inside_names_of_a_whole_model_is_removed(tmp_path):
    source = put(tmp_path / "x.safetensors", inside("module", theirs()))
    check_followed(tmp_path, source, theirs())


def test_below_model_dot_module_all_is_removed(tmp_path):
    wrapped = {name.replace("model.", "model.module."): array for name, array in theirs().items()}
    check_followed(tmp_path, put(tmp_path / "x.safetensors", wrapped), theirs())


def test_a_users_own_part_called_module_stays(tmp_path):
    source = put(tmp_path / "x.safetensors", attention("net.module."))
    checkpoints.convert(source, tmp_path / "out")
    assert all(name.startswith("net.module.") for name in checkpoints.read(tmp_path / "out"))
    assert not checkpoints.plan(source, tmp_path / "again").notes


@pytest.mark.parametrize("strip", ["_orig_mod.net.", "net."])
def test_a_prefix_is_taken_with_the_wrapper_or_without(tmp_path, strip):
    held = with_prefix("_orig_mod.net.", theirs()) | {"_orig_mod.step": np.arange(2)}
    source = put(tmp_path / "x.safetensors", held)
    (left, *_) = [one for one in checkpoints.plan(source, tmp_path / "out", strip=strip).notes if "left out" in one]
    assert left.endswith("step")
    check_followed(tmp_path, source, theirs(), strip=strip)


def test_the_advice_of_a_refusal_works_on_wrapped_names(tmp_path):
    held = with_prefix("state._orig_mod.net.", theirs()) | {"step": np.arange(2)}
    source, message = refusal(tmp_path, held)
    assert "--strip state.net." in message
    check_followed(tmp_path, source, theirs(), strip="state.net.")


@pytest.mark.parametrize("pattern", ["step*", "_orig_mod.step"])
def test_a_pattern_fits_names_with_the_wrapper_or_without(tmp_path, pattern):
    source = put(tmp_path / "x.safetensors", with_prefix("_orig_mod.", theirs() | {"step": np.arange(2)}))
    check_followed(tmp_path, source, theirs(), drop=pattern)


def test_two_tensors_that_a_wrapper_tells_apart_are_refused(tmp_path):
    held = with_prefix("_orig_mod.", theirs()) | {"lm_head.weight": theirs()["lm_head.weight"] + 1}
    source = put(tmp_path / "x.safetensors", held)
    with pytest.raises(CheckpointError, match=r"_orig_mod\.lm_head\.weight and lm_head\.weight .* without wrappers"):
        checkpoints.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    checkpoints.convert(source, tmp_path / "out", strip="_orig_mod.")


def test_deepspeed_s_module_beside_an_optimizer_is_not_merged_with_it(tmp_path):
    held = with_prefix("module.", theirs()) | {"optimizer.exp_avg": np.ones(2)}
    source, message = refusal(tmp_path, held)
    assert "--strip module." in message
    check_followed(tmp_path, source, theirs(), strip="module.")


def test_commands_report_it_and_the_manifest_remembers_it(tmp_path, capsys):
    source = put(tmp_path / "x.safetensors", with_prefix("_orig_mod.", theirs()))
    assert run(["convert", str(source), str(tmp_path / "out")]) == 0
    assert f"removed from names, as wrappers add them: _orig_mod ({len(theirs())} tensors)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/attn-bridge.json").read_text())["source"]["unwrapped"] == ["_orig_mod"]
    assert run(["verify", str(source), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert run(["inspect", str(source)]) == 0
    said = capsys.readouterr().out
    assert "layout hf-llama" in said
    assert "_orig_mod" in said


def test_norms_with_the_names_of_tensorflow_are_read_as_transformers_reads_them(tmp_path):
    bert = layouts.find("hf-bert").from_canonical(checkpoints_of.bert(2))
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
           for name, array in bert.items()}  # fmt: skip
    source = put(tmp_path / "x.safetensors", old)
    assert checkpoints.inspect(source).layout == "hf-bert"
    count = sum(name.endswith(".gamma") for name in old)
    (note,) = [one for one in checkpoints.plan(source, tmp_path / "out").notes if "renamed" in one]
    assert note.endswith(f"LayerNorm.gamma to weight ({count} tensors), LayerNorm.beta to bias ({count} tensors)")
    check_followed(tmp_path, source, bert)
    checkpoints.convert(source, tmp_path / "same.npz", to_layout="same")
    assert checkpoints.read(tmp_path / "same.npz").keys() == old.keys()


def test_other_norms_keep_their_names(tmp_path):
    held = {"norm.gamma": np.ones(2, np.float32), "LayerNorm.gamma.x": np.ones(2, np.float32)}
    assert without_wrappers(held) == {name: name for name in held}


@pytest.mark.parametrize("file", ["x.npz", "x.msgpack", "x.safetensors"])
def test_names_with_slashes_are_read_with_dots(tmp_path, file):
    flat = {name.replace(".", "/"): array for name, array in theirs().items()}
    source = put(tmp_path / file, flat)
    assert checkpoints.inspect(source).layout == "hf-llama"
    (note,) = [one for one in checkpoints.plan(source, tmp_path / "out").notes if "slash" in one]
    assert note == f"read with dots for slashes ({len(flat)} tensors)"
    check_followed(tmp_path, source, theirs())


def test_a_prefix_of_names_with_slashes_is_advised_with_a_dot(tmp_path):
    flat = {name.replace(".", "/"): array for name, array in with_prefix("params.", theirs()).items()}
    source, message = refusal(tmp_path, flat | {"step": np.int32(3)}, "x.npz")
    assert "--strip params." in message
    check_followed(tmp_path, source, theirs(), strip="params.")
    checkpoints.convert(source, tmp_path / "same.npz", to_layout="same")
    assert checkpoints.read(tmp_path / "same.npz").keys() == {*flat, "step"}
