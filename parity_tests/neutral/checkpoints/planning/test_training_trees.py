"""Files of trainers: which prefix an error advises, and names that no conversion keeps without a word."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.cli.app import run
from attn_bridge.models import layouts
from attn_bridge.models.layouts import LayoutError

from ..checkpoint_files import bits
from ..checkpoints import CONFIG, attention, drawn, gpt, llama
from .test_prefixes import with_prefix
from .test_prefixes import write as put

VISION = {
    **{f"blocks.{i}.{name}.weight": (4, 4) for i in range(4) for name in ("attn.qkv", "attn.proj", "mlp.up_proj")},
    "patch_embed.proj.weight": (4, 4),
    "patch_embed.proj.bias": (4,),
}


def ours(layout="flax", seed=0):
    """Return a GPT by our own names."""
    return layouts.find(layout).from_canonical(gpt(2, seed=seed, tied=False))


def theirs(seed=0):
    """Return a Llama by the names of `transformers`, with a head of its own."""
    return layouts.find("hf-llama").from_canonical(llama(2, seed=seed), **CONFIG)


def refusal(tmp_path, arrays, file="x.safetensors", **options):
    """Return the source, and the error of a conversion of it."""
    source = put(tmp_path / file, arrays)
    with pytest.raises(LayoutError) as caught:
        checkpoints.convert(source, tmp_path / "out", **options)
    message = str(caught.value)
    assert "\n" not in message
    assert not (tmp_path / "out").exists()
    return source, message


def advised(message):
    """Return the prefixes that a message advises to strip, in its order."""
    return re.findall(r"--strip (\S+?)[),]?(?=[ ;)]|$)", message)


def check_followed(tmp_path, source, wanted, **options):
    """Convert as advised, and hold the result against a conversion of the model by itself."""
    checkpoints.convert(source, tmp_path / "out", **options)
    checkpoints.convert(put(tmp_path / "alone.safetensors", wanted), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(checkpoints.read(tmp_path / "wanted"))
    assert checkpoints.verify(source, tmp_path / "out").passed


def moments(arrays, *names):
    return {name: array for moment in names for name, array in with_prefix(moment, arrays).items()}


# ---- what an error advises


@pytest.mark.parametrize("file", ["x.pt", "x.dcp"])
def test_the_prefix_below_which_most_tensors_stand_is_advised(tmp_path, file):
    source, message = refusal(tmp_path, with_prefix("model.", theirs()) | {"step": np.arange(2)}, file)
    assert advised(message) == ["model."]
    check_followed(tmp_path, source, theirs(), strip="model.")


@pytest.mark.parametrize(
    ("front", "state"),
    [
        ("params.", ("opt_state.mu.", "opt_state.nu.")),
        ("params.", ("opt_state.0.mu.", "opt_state.0.nu.")),
        ("model.", ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")),
        ("net.", ("momentum_buffer.",)),
        ("weights.", ("mu.", "nu.")),
        ("weights.", ("mu.",)),
    ],
)
def test_moments_of_an_optimizer_are_never_advised(tmp_path, front, state):
    arrays = moments({name: array + 1 for name, array in theirs().items()}, *state) | with_prefix(front, theirs())
    source, message = refusal(tmp_path, arrays)
    assert advised(message) == [front]
    check_followed(tmp_path, source, theirs(), strip=front)


@pytest.mark.parametrize(
    ("first", "second"), [("ema_state.", "state."), ("teacher.", "student."), ("target_network.", "network.")]
)
def test_every_model_of_a_file_is_advised(tmp_path, first, second):
    arrays = with_prefix(first, theirs(1)) | with_prefix(second, theirs())
    source, message = refusal(tmp_path, arrays)
    assert advised(message) == [second, first]
    check_followed(tmp_path, source, theirs(1), strip=first)


@pytest.mark.parametrize("front", ["ema.", "draft."])
def test_a_model_without_a_prefix_is_advised_before_another_with_it(tmp_path, front):
    source, message = refusal(tmp_path, theirs() | with_prefix(front, theirs(1)))
    assert f"(--drop '{front}*'); 25 names begin with {front}" in message
    check_followed(tmp_path, source, theirs(), drop=[f"{front}*"])
    assert advised(message) == [front]


def test_parameters_of_a_maxtext_step_are_advised(tmp_path):
    wanted = layouts.find("maxtext").from_canonical(llama(2), **CONFIG)
    bare = {name.removeprefix("params."): array for name, array in wanted.items()}
    arrays = moments({name: array + 1 for name, array in bare.items()}, "opt_state.mu.", "opt_state.nu.")
    source, message = refusal(tmp_path, arrays | wanted | {"step": np.arange(2)})
    assert advised(message) == ["params."]
    checkpoints.convert(source, tmp_path / "out", strip="params.", to_layout="torch")
    found = checkpoints.read(tmp_path / "out")
    np.testing.assert_array_equal(found["tok_emb.weight"], bare["params.token_embedder.embedding"])
    np.testing.assert_array_equal(found["out_head.weight"].T, bare["params.decoder.logits_dense.kernel"])


def test_moments_by_themselves_lead_to_no_advice(tmp_path):
    _, message = refusal(tmp_path, moments(theirs(), "state.exp_avg.", "state.exp_avg_sq."))
    assert "--strip" not in message


def test_a_small_part_of_a_file_is_not_advised(tmp_path):
    arrays = with_prefix("visual.", drawn(VISION)) | {"visual.merger.ln_q.weight": np.ones(4)}
    _, message = refusal(tmp_path, arrays)
    assert "--strip" not in message


def test_another_tower_beside_a_text_model_is_advised_to_be_dropped(tmp_path, capsys):
    arrays = theirs() | with_prefix("tower.", drawn(VISION))
    source, message = refusal(tmp_path, arrays)
    assert message.startswith("without the other 14, names are those of hf-llama (--drop 'tower.*')")
    assert run(["convert", str(source), str(tmp_path / "out"), "--drop", "tower.*"]) == 0
    said = capsys.readouterr().out
    assert "left out by --drop tower.*: 14 tensors: 14 of tower (tower.blocks.0.attn" in said
    assert "14 left out" in said
    checkpoints.convert(put(tmp_path / "alone.safetensors", theirs()), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(checkpoints.read(tmp_path / "wanted"))


def test_a_vision_tower_is_left_out_counted_and_named(tmp_path, capsys):
    source = put(tmp_path / "in.safetensors", theirs() | with_prefix("visual.", drawn(VISION)))
    assert run(["convert", str(source), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "left out, as it is no part of the text model, which alone is converted: 14 tensors: 14 of visual (" in said
    assert "14 left out" in said
    checkpoints.convert(put(tmp_path / "alone.safetensors", theirs()), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(checkpoints.read(tmp_path / "wanted"))
    held = json.loads((tmp_path / "out" / "attn-bridge.json").read_text())["source"]["left_out"]
    assert [len(names) for names in held.values()] == [14]


def test_the_state_of_a_random_generator_is_advised_to_be_dropped(tmp_path):
    state = {f"{part}.rngs.{name}.value": np.arange(2) for part in ("drop_emb", "trf_blocks.0.drop") for name in "ck"}
    arrays = {f"{name}.value": array for name, array in ours().items()}
    source, message = refusal(tmp_path, arrays | state)
    assert "--strip" not in message
    assert "(--drop '*.rngs.*')" in message
    check_followed(tmp_path, source, arrays, drop="*.rngs.*")


def test_tensors_within_blocks_are_never_advised_to_be_dropped(tmp_path):
    arrays = theirs() | {f"model.layers.{i}.self_attn.q_proj.lora_A.weight": np.ones((2, 2)) for i in range(2)}
    _, message = refusal(tmp_path, arrays)
    assert "--drop" not in message


def test_what_a_prefix_leaves_out_is_counted_and_named_by_kind(tmp_path, capsys):
    arrays = with_prefix("params.", theirs()) | moments(theirs(), "opt_state.mu.") | {"step": np.arange(2)}
    source = put(tmp_path / "x.safetensors", arrays)
    assert run(["convert", str(source), str(tmp_path / "out"), "--strip", "params."]) == 0
    count = len(theirs())
    said = capsys.readouterr().out
    assert f"left out, as their names do not begin with params.: {count + 1} tensors: {count} of opt_state (" in said
    assert f" and {count - 3} more); step\n" in said
    assert said.rstrip().endswith(f"{count + 1} left out")


# ---- what is not kept without a word


def test_a_prefix_of_a_whole_model_stays_where_the_user_says_so(tmp_path):
    source, message = refusal(tmp_path, with_prefix("model.", ours("torch")), "x.pt")
    assert message.endswith("--strip model. takes it away, --from torch keeps it")
    check_followed(tmp_path, source, ours("torch"), strip="model.")
    checkpoints.convert(source, tmp_path / "kept", from_layout="torch")
    assert checkpoints.read(tmp_path / "kept").keys() == with_prefix("model.", ours()).keys()


def test_a_module_of_a_users_own_keeps_its_path(tmp_path):
    source = put(tmp_path / "x.safetensors", attention("net.module.att.") | attention("net.other.att."))
    found = checkpoints.read(checkpoints.convert(source, tmp_path / "out").target)
    assert {name.rpartition(".att.")[0] for name in found} == {"net.module", "net.other"}


@pytest.mark.parametrize("layout", ["torch", "flax"])
@pytest.mark.parametrize("is_said", [False, True])
def test_a_training_tree_is_not_written_as_several_models(tmp_path, layout, is_said):
    arrays = with_prefix("ema_params.", ours(layout, 1)) | with_prefix("params.", ours(layout))
    arrays |= moments(ours(layout, 2), "opt_state.mu.", "opt_state.nu.")
    source, message = refusal(tmp_path, arrays, "x.msgpack", **({"from_layout": layout} if is_said else {}))
    assert advised(message) == ["params.", "ema_params."]
    assert "an optimizer's state (opt_state.)" in message
    check_followed(tmp_path, source, ours(layout), strip="params.")


def test_a_layer_beside_its_moments_is_not_written_with_them(tmp_path):
    arrays = with_prefix("params.", attention("att.")) | moments(attention("att."), "mu.", "nu.")
    source, message = refusal(tmp_path, arrays)
    assert advised(message) == ["params."]
    check_followed(tmp_path, source, attention("att."), strip="params.")


def test_parameters_beside_an_optimizer_of_any_name_are_advised(tmp_path):
    arrays = with_prefix("model.", ours("flax")) | moments(ours("flax", 1), "opt.0.mu.", "opt.0.nu.")
    source, message = refusal(tmp_path, arrays | {"opt.0.count": np.int32(3), "step": np.int32(3)}, "x.msgpack")
    assert advised(message) == ["model."]
    check_followed(tmp_path, source, ours("flax"), strip="model.")


def test_moments_beside_a_bare_model_are_left_out_by_drop(tmp_path):
    arrays = ours("torch") | moments(ours("torch"), "optimizer.exp_avg.")
    source, message = refusal(tmp_path, arrays)
    (pattern,) = re.findall(r"--drop (\S+)", message)
    check_followed(tmp_path, source, ours("torch"), drop=shlex.split(pattern))


def test_two_models_that_the_user_means_are_written(tmp_path):
    arrays = with_prefix("actor.", ours("torch")) | with_prefix("critic.", ours("torch", 1))
    source, message = refusal(tmp_path, arrays)
    assert advised(message) == ["actor.", "critic."]
    checkpoints.convert(source, tmp_path / "out", from_layout="torch")
    assert len(checkpoints.read(tmp_path / "out")) == len(arrays)


def test_a_change_of_container_alone_keeps_every_name(tmp_path):
    arrays = with_prefix("_orig_mod.", ours("torch")) | moments(ours("torch"), "opt_state.mu.")
    source = put(tmp_path / "x.safetensors", arrays)
    checkpoints.convert(source, tmp_path / "x.npz", to_layout="same")
    assert bits(checkpoints.read(tmp_path / "x.npz")) == bits(arrays)
