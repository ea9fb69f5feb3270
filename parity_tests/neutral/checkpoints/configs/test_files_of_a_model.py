"""The files of a model's folder: its config after a cast, its tokenizer, a second copy of its weights, round trips."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.checkpoints import accompanying
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.cli.app import run
from attn_bridge.models import layouts

from ..checkpoint_files import bits, folder, made, sharded, write
from ..checkpoints import gpt


def config_of(path):
    return json.loads((path / "config.json").read_text())


def with_config(path, name="hf-llama", **keys):
    """Write a folder whose config.json has keys beside those that its layout needs."""
    folder(path, name)
    (path / "config.json").write_text(json.dumps({**config_of(path), **keys}))
    return path


def test_weights_of_further_modules_of_sentence_transformers_are_named(tmp_path):
    source = with_config(tmp_path / "hf")
    for name in ("1_Pooling", "2_Dense"):
        (source / name).mkdir()
    (source / "2_Dense" / "model.safetensors").write_bytes(b"")
    note = "left out, as its weights are not the model's: 2_Dense"
    assert note not in checkpoints.plan(source, tmp_path / "out").notes
    (source / "modules.json").write_text("[]")
    assert note in checkpoints.plan(source, tmp_path / "out").notes


# ---- the dtype in config.json

NAMED = {
    "transformers 4": ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
    "transformers 5": ({"dtype": "float32"}, {"dtype": "bfloat16"}),
    "both": ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
    "none": ({}, {"dtype": "bfloat16"}),
    "of a part": (
        {"dtype": "float32", "text_config": {"dtype": "float32", "a": 1}, "quantization_config": {"dtype": "int8"}},
        {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "a": 1}, "quantization_config": {"dtype": "int8"}},
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_cast_is_named_in_the_config_of_transformers(tmp_path, case):
    before, after = NAMED[case]
    source = with_config(tmp_path / "hf", **before)
    checkpoints.convert(source, tmp_path / "flax")
    there = checkpoints.convert(tmp_path / "flax", tmp_path / "there", to_layout="hf-llama", dtype="bf16").target
    assert config_of(there) == {**config_of(source), **after}


@pytest.mark.parametrize("to_layout", ["same", "flax"])
def test_a_cast_is_named_in_a_config_that_goes_along(tmp_path, to_layout):
    source = with_config(tmp_path / "hf", torch_dtype="float32")
    there = checkpoints.convert(source, tmp_path / "there", to_layout=to_layout, dtype="f16").target
    assert config_of(there) == {**config_of(source), "torch_dtype": "float16"}


def test_a_config_that_names_the_cast_dtype_stays_byte_for_byte(tmp_path):
    source = with_config(tmp_path / "hf", torch_dtype="bfloat16")
    there = checkpoints.convert(source, tmp_path / "there", to_layout="same", dtype="bf16").target
    assert (there / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_config_next_to_a_single_file_goes_along(tmp_path):
    source = with_config(tmp_path / "hf")
    there = checkpoints.convert(source / "model.safetensors", tmp_path / "there").target
    assert config_of(there) == config_of(source)


# ---- the tokenizer

TOKENIZER = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{1}",
    "special_tokens_map.json": b"{2}",
    "vocab.json": b"{3}",
    "merges.txt": b"a b",
    "tokenizer.model": bytes(range(256)) * 9000,
    "chat_template.jinja": b"{{ x }}",
    "generation_config.json": b"{4}",
    "preprocessor_config.json": b"{5}",
    "video_preprocessor_config.json": b"{6}",
    "processor_config.json": b"",
}


def with_tokenizer(path, name="hf-llama"):
    source = with_config(path, name)
    for file, data in {**TOKENIZER, "optimizer.json": b"{}", "README.md": b"#"}.items():
        (path / file).write_bytes(data)
    return source


def notes_of(source, target, **options):
    return [note for note in checkpoints.plan(source, target, **options).notes if "not copied" in note]


@pytest.mark.parametrize("workers", [None, 1])
def test_tokenizer_and_generation_files_are_copied(tmp_path, workers):
    source = with_tokenizer(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / "there", workers=workers, task_bytes=workers and 4096).target
    own = {"config.json", "model.safetensors", "attn-bridge.json", "attn-bridge.kept"}
    copied = {path.name: path.read_bytes() for path in there.iterdir() if path.name not in own}
    assert copied == TOKENIZER
    assert notes_of(source, tmp_path / "again") == []


def test_files_next_to_a_single_file_of_a_model_are_copied(tmp_path):
    source = with_tokenizer(tmp_path / "hf") / "model.safetensors"
    there = checkpoints.convert(source, tmp_path / "there").target
    assert all((there / name).read_bytes() == data for name, data in TOKENIZER.items())
    (tmp_path / "hf" / "config.json").unlink()
    there = checkpoints.convert(source, tmp_path / "bare").target
    assert not any((there / name).exists() for name in TOKENIZER)


def test_a_target_without_room_names_what_is_not_copied(tmp_path, capsys):
    source = with_tokenizer(tmp_path / "hf")
    assert run(["convert", str(source), str(tmp_path / "x.npz")]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "not copied" in line]
    assert note.startswith("note: not copied: chat_template.jinja, generation_config.json, ")
    assert note.endswith(" and 3 more: the target has no room for files beside its weights")


def test_files_that_lead_out_or_are_no_files_are_named_and_left(tmp_path, monkeypatch):
    source = with_config(tmp_path / "hf")
    (tmp_path / "secret.json").write_text("secret")
    (source / "tokenizer.json").symlink_to("../secret.json")
    (source / "vocab.json").symlink_to("/dev/zero")
    os.mkfifo(source / "merges.txt")
    (source / "spiece.model").mkdir()
    (source / "generation_config.json").write_bytes(b"{" + b" " * 99 + b"}")
    (source / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(accompanying, "MAX_BYTES", 100)
    there = checkpoints.convert(source, tmp_path / "there").target
    assert {path.name for path in there.iterdir()} & {*TOKENIZER, "spiece.model"} == {"tokenizer_config.json"}
    notes = "\n".join(notes_of(source, tmp_path / "again"))
    for name, reason in {
        "tokenizer.json": "is a link out of its folder",
        "vocab.json": "is a link out of its folder",
        "merges.txt": "is not a file",
        "generation_config.json": "has 101 bytes; at most 100 are copied",
    }.items():
        assert any(name in note and reason in note for note in notes.splitlines()), name
    assert "spiece" not in notes


def test_files_beyond_256_mebibytes_and_100_in_number_are_left(tmp_path):
    source = with_config(tmp_path / "hf")
    for name, size in {"merges.txt": 1 << 28, "tokenizer.json": (1 << 28) + 1}.items():
        (source / name).touch()
        os.truncate(source / name, size)
    for number in range(100, 199):
        (source / f"v{number}.model").touch()
    assert sorted(note.partition(": ")[2] for note in notes_of(source, tmp_path / "x")) == [
        f"tokenizer.json: {source}/tokenizer.json: has 268435457 bytes; at most 268435456 are copied",
        "v198.model: there are more than 100 of its kind",
    ]


def test_metas_params_go_along_where_no_config_is_written(tmp_path):
    source = folder(tmp_path / "meta", "meta-llama")
    (source / "config.json").rename(source / "params.json")
    same = checkpoints.convert(source, tmp_path / "same", to_layout="same").target
    assert (same / "params.json").read_bytes() == (source / "params.json").read_bytes()


def test_a_store_gets_the_same_files(store, tmp_path):
    pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")
    source = with_tokenizer(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / "there").target
    checkpoints.convert(source, "s3://bucket/there")
    assert store.contents() == {f"there/{path.name}": path.read_bytes() for path in there.iterdir()}
    back = checkpoints.convert("s3://bucket/there", tmp_path / "back", to_layout="hf-llama").target
    assert all((back / name).read_bytes() == data for name, data in TOKENIZER.items())


# ---- a second copy of the weights


@pytest.mark.parametrize("parts", ["one", "index", "shards", "their index"])
def test_weights_under_the_makers_names_are_left_out(tmp_path, parts, capsys):
    source = folder(tmp_path / "hf", "hf-llama") if parts in ("one", "their index") else sharded(tmp_path / "hf")
    wanted = checkpoints.read(source)
    if parts == "shards":
        (source / "model.safetensors.index.json").unlink()
    original = {"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}
    write(source / "consolidated.safetensors", original)
    if parts == "their index":
        index = {"metadata": {}, "weight_map": dict.fromkeys(original, "consolidated.safetensors")}
        (source / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    found = checkpoints.read(source)
    assert found.keys() == wanted.keys()
    note = "note: left out, as the folder's other files are the same model: consolidated.safetensors\n"
    for command in (["convert", str(source), str(tmp_path / "there")], ["inspect", str(source)]):
        assert run(command) == 0
        assert note in capsys.readouterr().out


@pytest.mark.parametrize("whole", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
@pytest.mark.parametrize("variant", ["{}.fp16.safetensors", "{}-00001-of-00001.fp16.safetensors"])
def test_another_variant_of_the_weights_is_left_out(tmp_path, whole, variant):
    variant = variant.format(whole.removesuffix(".safetensors"))
    source = folder(tmp_path / "hf")
    (source / "model.safetensors").rename(source / whole)
    wanted = bits(checkpoints.read(source))
    write(source / variant, {name: np.float16(array) for name, array in checkpoints.read(source).items()})
    assert bits(checkpoints.read(source)) == wanted
    assert checkpoints.inspect(source).notes == (
        f"left out, as the folder's other files are the same model: {variant}",
    )
    (source / whole).unlink()
    assert {array.dtype.name for array in checkpoints.read(source).values()} == {"float16"}


def test_tensors_that_come_twice_are_shown_in_part_with_a_remedy(tmp_path):
    source = folder(tmp_path / "hf")
    write(source / "ema_model.safetensors", checkpoints.read(source))
    (source / "model.safetensors").rename(source / "own.safetensors")
    with pytest.raises(CheckpointError, match=r"come twice: .*; and \d+ more; name one of the files: ema_.*") as caught:
        checkpoints.read(source)
    assert len(str(caught.value)) < 500


def test_weights_under_the_makers_names_alone_are_read(tmp_path):
    write(tmp_path / "own" / "consolidated.safetensors", made("meta-llama"))
    assert checkpoints.inspect(tmp_path / "own").layout == "meta-llama"


# ---- pickles


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_not_blamed_on_an_old_torch(tmp_path, protocol):
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"w": np.ones(2, np.float32)}, protocol))
    with pytest.raises(CheckpointError, match=r"x\.pt: is a pickle that torch\.save did not write.* numpy\.savez"):
        checkpoints.inspect(tmp_path / "x.pt")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_of_an_old_torch_is_named(tmp_path, protocol):
    magic = 0x1950A86A20F9469CFC6C  # what torch.save wrote first, before 1.6
    (tmp_path / "x.pt").write_bytes(pickle.dumps(magic, protocol) + pickle.dumps(1001, protocol))
    with pytest.raises(CheckpointError, match=r"was written by torch\.save of torch < 1\.6"):
        checkpoints.inspect(tmp_path / "x.pt")


# ---- round trips


def round_trip(tmp_path, name="hf-llama", by="flax"):
    source = folder(tmp_path / "hf", name)
    checkpoints.convert(source, tmp_path / "there", to_layout=by)
    return source, checkpoints.convert(tmp_path / "there", tmp_path / "back", to_layout=name).target


@pytest.mark.parametrize(("name", "by"), [("hf-llama", "flax"), ("hf-gpt2", "torch"), ("hf-bert", "flax")])
def test_a_round_trip_is_verified_against_its_beginning(tmp_path, name, by):
    source, back = round_trip(tmp_path, name, by)
    found = checkpoints.verify(source, back)
    assert found.passed
    assert (found.by_digest, found.by_source) == (True, True)


def test_a_change_of_the_beginning_is_found_after_a_round_trip(tmp_path):
    source, back = round_trip(tmp_path)
    arrays = made("hf-llama")
    name = "model.layers.1.mlp.up_proj.weight"
    arrays[name] = arrays[name].copy()
    arrays[name][2, 3] += 1
    del arrays["model.norm.weight"]
    write(source / "model.safetensors", arrays, {"format": "pt"})
    found = checkpoints.verify(source, back)
    assert found.problems == {
        name: "has other bits than the source, first at (2, 3)",
        "model.norm.weight": "does not come from the source",
    }


def test_a_source_of_a_third_layout_is_refused_as_before(tmp_path):
    _, back = round_trip(tmp_path)
    write(tmp_path / "gpt" / "model.safetensors", layouts.find("hf-gpt2").from_canonical(gpt(2)))
    with pytest.raises(CheckpointError, match="was made of a checkpoint of layout flax, which"):
        checkpoints.verify(tmp_path / "gpt", back)


# ---- models that are not whole


@pytest.mark.parametrize("to_layout", ["same", "hf-gpt2", "flax"])
def test_a_missing_numbered_file_without_an_index_is_refused(tmp_path, to_layout):
    source = sharded(tmp_path / "hf")
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"files of it are missing: model-00003-of-00004.safetensors$"):
        checkpoints.convert(source, tmp_path / "there", to_layout=to_layout)


def test_numbered_files_without_an_index_may_count_from_zero(tmp_path):
    source = sharded(tmp_path / "hf", count=2)
    (source / "model.safetensors.index.json").unlink()
    for number in (1, 2):
        (source / f"model-0000{number}-of-00002.safetensors").rename(
            source / f"model-0000{number - 1}-of-00002.safetensors"
        )
    checkpoints.convert(source, tmp_path / "there")
    checkpoints.convert(sharded(tmp_path / "whole", count=2), tmp_path / "wanted")
    assert bits(checkpoints.read(tmp_path / "there")) == bits(checkpoints.read(tmp_path / "wanted"))


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("hf-llama", "model.layers.0.mlp.up_proj.weight"),
        ("hf-gpt2", "transformer.ln_f.bias"),
        ("hf-bert", "word_embeddings.weight"),
    ],
)
def test_a_layout_that_stays_needs_its_whole_model(tmp_path, name, lacking):
    arrays = made(name)
    lacking = next(key for key in arrays if key.endswith(lacking))
    del arrays[lacking]
    source = write(tmp_path / "part.safetensors", arrays)
    with pytest.raises(WeightsMismatchError, match=f"missing: {lacking}"):
        checkpoints.convert(source, tmp_path / "there.safetensors", from_layout=name, to_layout=name)
    checkpoints.convert(source, tmp_path / "there.npz", to_layout="same")


@pytest.mark.parametrize("count", [1, 2])
def test_what_came_from_files_of_torch_goes_back_into_safetensors(tmp_path, count):
    arrays = layouts.find("hf-gpt2").from_canonical(gpt(1))
    names = [f"pytorch_model-{number}.bin" for number in range(count)]
    (tmp_path / "x").mkdir()
    weight_map = {}
    for number, name in enumerate(names):
        part = dict(list(arrays.items())[number::count])
        checkpoints.convert(part, tmp_path / "x" / name, to_layout="same")
        weight_map |= dict.fromkeys(part, name)
    if count > 1:
        (tmp_path / "x" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoints.convert(tmp_path / "x", tmp_path / "flax")
    checkpoints.convert(tmp_path / "flax", tmp_path / "back", to_layout="hf-gpt2")
    found = checkpoints.open(tmp_path / "back")
    assert {name: found[name].tobytes() for name in found} == {name: one.tobytes() for name, one in arrays.items()}
    files = {info.file for info in found.tensors.values()}
    assert files == ({"model.safetensors"} if count == 1 else {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)})
    assert {one["format"] for one in found.metadata["files"].values()} == {"pt"}  # transformers refuses it without


def test_model_that_comes_back_without_its_config_is_noted(tmp_path):
    source = with_config(tmp_path / "hf")
    note = "no config.json is written, without which no model is loaded: copy that of the model"
    assert note not in checkpoints.plan(source, tmp_path / "again", to_layout="hf-llama").notes
    (source / "config.json").unlink()
    alone = checkpoints.convert(source, tmp_path / "x.npz", to_layout="flax").target
    assert note in checkpoints.plan(alone, tmp_path / "back", to_layout="hf-llama").notes
    assert note not in checkpoints.plan(alone, tmp_path / "back.safetensors", to_layout="hf-llama").notes
    assert note not in checkpoints.plan(alone, tmp_path / "ours", to_layout="flax", dtype="bfloat16").notes


# ---- targets without room for a config.json


@pytest.mark.parametrize("name", ["x.npz", "x.orbax", "x.dcp", "x.pt", "x.msgpack", "x.safetensors"])
@pytest.mark.parametrize("to_layout", ["same", "flax", "maxtext"])
def test_manifest_of_a_target_without_room_carries_the_config(tmp_path, name, to_layout):
    source = with_config(tmp_path / "hf", rope_theta=12345.0)
    alone = checkpoints.convert(source, tmp_path / name, to_layout=to_layout).target
    moved = checkpoints.convert(alone, tmp_path / "second.npz", to_layout="same").target  # by way of two containers
    for number, one in enumerate((alone, moved)):
        assert checkpoints.plan(one, tmp_path / "n", to_layout="hf-llama").notes == ()
        back = checkpoints.convert(one, tmp_path / f"back{number}", to_layout="hf-llama").target
        assert {path.name for path in back.iterdir()} == {"attn-bridge.json", "config.json", "model.safetensors"}
        assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        assert checkpoints.verify(source, back).passed


def test_carried_config_is_that_of_what_was_written(tmp_path):
    source = with_config(tmp_path / "hf", dtype="float32")
    alone = checkpoints.convert(source, tmp_path / "x.npz", dtype="bf16").target
    back = checkpoints.convert(alone, tmp_path / "back", to_layout="hf-llama").target
    assert config_of(back) == {**config_of(source), "dtype": "bfloat16"}


def test_sizes_of_a_model_are_those_of_the_carried_config(tmp_path):
    source = with_config(tmp_path / "hf")
    alone = checkpoints.convert(source, tmp_path / "x.npz", to_layout="same").target
    there = checkpoints.convert(alone, tmp_path / "there", to_layout="flax").target
    assert config_of(there) == config_of(source)
    (source / "config.json").write_text(json.dumps({**config_of(source), "num_hidden_layers": 7}))
    other = checkpoints.convert(source, tmp_path / "y.npz", to_layout="same").target
    with pytest.raises(ValueError, match="num_hidden_layers"):
        checkpoints.plan(other, tmp_path / "there", to_layout="flax", overwrite=True)


def test_carried_config_that_is_no_text_is_refused_by_the_name_of_the_manifest(tmp_path):
    source = with_config(tmp_path / "hf")
    (source / "config.json").write_bytes(b'{"name": "\xff\xfe"}\n')
    alone = checkpoints.convert(source, tmp_path / "x.npz", to_layout="same").target
    with pytest.raises(CheckpointError, match=r"x\.npz\.attn-bridge\.json can't be read as JSON"):
        checkpoints.plan(alone, tmp_path / "back", to_layout="flax")


def test_config_of_a_file_comes_before_that_of_the_folder_it_is_in(tmp_path):
    source = with_config(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    alone = checkpoints.convert(source, tmp_path / "there" / "x.npz").target
    (tmp_path / "there" / "config.json").write_bytes((source / "config.json").read_bytes() + b"\n")
    assert checkpoints.plan(alone, tmp_path / "back", to_layout="hf-llama").notes == ()
    (tmp_path / "there" / "config.json").write_text(json.dumps({**config_of(source), "rope_theta": 7.0}))
    plan = checkpoints.plan(alone, tmp_path / "back", to_layout="hf-llama")
    assert plan.notes == (
        "config.json beside the file is not read, as x.npz.attn-bridge.json has another: remove it to read that",
    )
    back = checkpoints.convert(alone, tmp_path / "back", to_layout="hf-llama").target
    assert config_of(back) == config_of(source)


def test_config_in_a_folder_of_orbax_comes_before_that_of_the_manifest(tmp_path):
    source = with_config(tmp_path / "hf")
    alone = checkpoints.convert(source, tmp_path / "x.orbax").target
    (alone / "config.json").write_text(json.dumps({**config_of(source), "rope_theta": 7.0}))
    back = checkpoints.convert(alone, tmp_path / "back", to_layout="hf-llama").target
    assert config_of(back) == {**config_of(source), "rope_theta": 7.0}


def test_carried_config_that_is_no_text_is_refused(tmp_path):
    source = with_config(tmp_path / "hf")
    alone = checkpoints.convert(source, tmp_path / "x.npz").target
    path = tmp_path / "x.npz.attn-bridge.json"
    document = json.loads(path.read_text())
    for value, reason in (
        ([1], "config is malformed"),
        ("[1]", "must hold a JSON object"),
        ("{", "as JSON"),
        ("{}" + " " * (1 << 24), "has a config of"),
    ):
        path.write_text(json.dumps({**document, "config": value}))
        with pytest.raises(CheckpointError, match=reason):
            checkpoints.plan(alone, tmp_path / "back", to_layout="hf-llama")


def test_folder_without_a_config_keeps_the_sizes_that_were_set(tmp_path):
    source = folder(tmp_path / "hf", "hf-gpt-neox")
    (source / "config.json").unlink()
    there = checkpoints.convert(source, tmp_path / "there", settings={"num_heads": 2}).target
    assert not (there / "config.json").exists()
    again = checkpoints.convert(there, tmp_path / "x.npz", to_layout="same").target
    for number, one in enumerate((there, again)):
        back = checkpoints.convert(one, tmp_path / f"back{number}", to_layout="hf-gpt-neox").target
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
