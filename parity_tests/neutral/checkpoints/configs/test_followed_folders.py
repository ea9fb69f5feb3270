"""Runs and steps of Orbax, the hub's cache, state of random streams, and bfloat16 that NumPy saved."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import make_writer
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.cli.app import run
from parity_tests.support.files import adapter_files

from ..planning.test_training_trees import ours
from .test_heads import CONFIG, base, plain


def orbax(folder, **arrays):
    """Write a folder of Orbax."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    writer = make_writer("orbax", folder, infos, {})
    for name, array in arrays.items():
        writer.write(name, array)
    writer.finish()


def steps(folder, *numbers, item="default", name="{}"):
    """Write steps of a run, as CheckpointManager does: a folder each, with a folder per item in it."""
    for number in numbers:
        step = folder / name.format(number)
        orbax(step / item, w=np.float32([number, 0.5]))
        (step / "_CHECKPOINT_METADATA").write_text("{}")
        (step / "metrics").mkdir(exist_ok=True)
    return folder


def read(tmp_path, source, name="out", **options):
    """Convert, verify, and return the tensors."""
    target = tmp_path / f"{name}.npz"
    checkpoints.convert(source, target, to_layout="same", **options)
    assert checkpoints.verify(source, target).passed
    return checkpoints.read(target)


@pytest.mark.parametrize("name", ["{}", "checkpoint_{}", "{:08}"])
def test_the_newest_step_of_a_run_is_read(tmp_path, name):
    source = steps(tmp_path / "run", 9, 100, 20, name=name)
    orbax(source / "101.orbax-checkpoint-tmp" / "default", w=np.ones(2, np.float32))
    (source / "logs").mkdir()
    assert read(tmp_path, source)["w"][0] == 100
    assert checkpoints.read(source)["w"][0] == 100
    (note,) = checkpoints.plan(source, tmp_path / "x.npz", to_layout="same").notes
    assert note == "read step 100, the newest of 3; --step takes another"


@pytest.mark.parametrize("damage", ["no metadata", "cut short"])
def test_a_damaged_newest_step_names_the_one_before(tmp_path, damage):
    source = steps(tmp_path / "run", 9, 20, 100)
    path = source / "100" / "default" / "_METADATA"
    if damage == "no metadata":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same")
    message = str(caught.value)
    assert message.endswith("; it is the newest step of its run, --step 20 reads the one before")
    assert str(source / "100") in message
    assert "\n" not in message
    assert read(tmp_path, source, step=20)["w"][0] == 20


def test_folders_of_later_numbers_without_a_step_are_named(tmp_path):
    source = steps(tmp_path / "run", 9, 20)
    (source / "30" / "default").mkdir(parents=True)
    (note,) = checkpoints.plan(source, tmp_path / "x.npz", to_layout="same").notes
    assert note.endswith("passed over, as Orbax finished no step there: 30")


def test_a_step_is_chosen_by_its_number(tmp_path, capsys):
    source, target = steps(tmp_path / "run", 9, 100, 20), tmp_path / "x.npz"
    assert run(["convert", str(source), str(target), "--to", "same", "--step", "20"]) == 0
    assert checkpoints.read(target)["w"][0] == 20
    steps(source, 200)
    assert run(["verify", str(source), str(target)]) == 0  # of the step that was read
    assert run(["verify", str(source / "20"), str(target)]) == 0
    assert run(["verify", str(source), str(target), "--step", "9"]) == 1
    assert run(["convert", str(source), str(target), "--step", "7", "--overwrite"]) == 2
    assert f"{source}: has no step 7 (--step); it has 9; 20; 100; 200\n" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["run/config.json", "run/7/config.json"])
@pytest.mark.parametrize("item", ["default", "params"])
def test_files_of_a_model_are_found_above_the_step_that_is_read(tmp_path, config, item):
    source = tmp_path / "run"
    orbax(source / "7" / item, **base(plain()))
    (source / "7" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no head"):
        checkpoints.convert(source, tmp_path / "out", to_layout="tunix-llama3")
    (tmp_path / config).write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    (tmp_path / config).with_name("tokenizer.json").write_text("{}")
    checkpoints.convert(source, tmp_path / "out", to_layout="tunix-llama3")
    assert checkpoints.verify(source, tmp_path / "out").passed
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert checkpoints.inspect(source).layout == "hf-llama"
    (tmp_path / config).write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match="does not tie one"):
        checkpoints.convert(source, tmp_path / "other", to_layout="tunix-llama3")


def test_an_item_is_chosen_by_its_name(tmp_path):
    source = tmp_path / "run"
    for item in ("params", "opt_state"):
        steps(source, 3, 4, item=item)
    for path in (source, source / "4"):
        with pytest.raises(CheckpointError, match=r"4: holds several items, opt_state; params; --item chooses one$"):
            checkpoints.convert(path, tmp_path / "x.npz", to_layout="same")
        with pytest.raises(CheckpointError, match=r"4: has no item ema \(--item\); it has opt_state; params$"):
            checkpoints.convert(path, tmp_path / "x.npz", to_layout="same", item="ema")
        assert read(tmp_path, path, path.name, item="params")["w"][0] == 4
    assert read(tmp_path, source, "both", item="opt_state", step=3)["w"][0] == 3
    assert checkpoints.inspect(source, item="opt_state", step=3).tensors.keys() == {"w"}
    steps(source, 5, item="params")
    assert read(tmp_path, source, "only")["w"][0] == 5


def test_a_page_shows_the_step_and_item_that_are_chosen(tmp_path, capsys):
    for item in ("params", "opt_state"):
        source = steps(tmp_path / "run", 3, 4, item=item)
    page = tmp_path / "x.html"
    assert run(["inspect", str(source), "--html", str(page)]) == 2
    assert "--item chooses one" in capsys.readouterr().err
    assert run(["inspect", str(source), "--step", "3", "--item", "params", "--html", str(page)]) == 0
    assert "w       float32" in capsys.readouterr().out
    assert {"3", "0.5"} <= set(re.findall(r"[0-9.]+", page.read_text()))


def test_a_newest_step_with_an_optimizer_alone_names_the_step_with_weights(tmp_path):
    source = tmp_path / "run"
    steps(source, 3, item="params")
    for step in (3, 4):
        steps(source, step, item="opt_state")
    message = r"4: is the newest step and holds opt_state alone; step 3 has params: --step 3 reads it$"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "x.npz", to_layout="same")
    with pytest.raises(CheckpointError, match=r"4: has no item params \(--item\); .*step 3 has params: --step 3"):
        checkpoints.convert(source, tmp_path / "x.npz", to_layout="same", item="params")
    assert read(tmp_path, source, "item", item="params", step=3)["w"][0] == 3
    assert read(tmp_path, source, "optimizer", item="opt_state")["w"][0] == 4


@pytest.mark.parametrize("options", [{"step": 1}, {"item": "params"}])
def test_steps_and_items_of_other_files_are_refused(tmp_path, options):
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointError, match=r"is no folder of Orbax, whose steps and items --step and --item choose$"
    ):
        checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "out", to_layout="same", **options)
    orbax(tmp_path / "x.orbax", w=np.ones(2))
    with pytest.raises(CheckpointError, match=r"x.orbax: (has no step 1|is a single item)"):
        checkpoints.convert(tmp_path / "x.orbax", tmp_path / "out", to_layout="same", **options)


def test_steps_that_are_links_elsewhere_are_refused(tmp_path):
    source = steps(tmp_path / "run", 1)
    steps(tmp_path / "other", 2)
    (source / "2").symlink_to(tmp_path / "other" / "2")
    with pytest.raises(CheckpointError, match=r"the file 2 is a link out of its folder"):
        checkpoints.convert(source, tmp_path / "x.npz", to_layout="same")


@pytest.mark.parametrize("options", [{}, {"step": 5}])
def test_folders_of_the_same_step_are_refused(tmp_path, options):
    source = steps(tmp_path / "run", 4, 5)
    steps(source, 5, name="best_{:03}")
    with pytest.raises(CheckpointError, match=r"run: 5 and best_005 are both step 5; give one of the folders$"):
        checkpoints.convert(source, tmp_path / "x.npz", to_layout="same", **options)
    assert read(tmp_path, source / "best_005")["w"][0] == 5
    assert read(tmp_path, source, "four", step=4)["w"][0] == 4


def snapshots(folder, *names):
    for name in names:
        below = folder / "snapshots" / name
        below.mkdir(parents=True)
        blob = folder / "blobs" / f"of-{name}"
        blob.parent.mkdir(exist_ok=True)
        safetensors.numpy.save_file({"w": np.float32([len(name)])}, blob)
        (below / "model.safetensors").symlink_to(f"../../blobs/of-{name}")
        (below / "config.json").write_text(json.dumps({"n": len(name)}))
    return folder


def test_the_cache_of_a_repository_is_followed_to_its_snapshot(tmp_path):
    folder = snapshots(tmp_path / "models--org--name", "abc")
    assert read(tmp_path, folder)["w"] == 3
    checkpoints.convert(folder, tmp_path / "folder", to_layout="same")
    assert json.loads((tmp_path / "folder" / "config.json").read_text()) == {"n": 3}
    snapshots(folder, "abcd")
    with pytest.raises(
        CheckpointError, match=r"repository with 2 snapshots, of which refs/main names none; give one of"
    ):
        checkpoints.convert(folder, tmp_path / "again", to_layout="same")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abcd")
    assert read(tmp_path, folder, "main")["w"] == 4
    (folder / "refs" / "main").write_text("../../..")
    with pytest.raises(CheckpointError, match=r"repository with 2 snapshots"):
        checkpoints.convert(folder, tmp_path / "out", to_layout="same")


def test_the_files_beside_a_model_are_those_of_the_snapshot(tmp_path):
    folder = snapshots(tmp_path / "models--org--name", "abc")
    weight = np.ones((6, 6), np.float32)
    safetensors.numpy.save_file({"layers.0.q_proj.weight": weight}, folder / "blobs" / "of-abc")
    for file in adapter_files.save(tmp_path / "made", adapter_files.matrices("layers.0.q_proj", 6, 6)).iterdir():
        file.rename(folder / "snapshots" / "abc" / file.name)
    with pytest.raises(CheckpointError, match=r"snapshots/abc holds a model and an adapter of peft for it: --adapter"):
        checkpoints.convert(folder, tmp_path / "out", to_layout="same")
    for name, adapter in (("cache", folder), ("snapshot", folder / "snapshots" / "abc")):
        checkpoints.convert(folder, tmp_path / name, to_layout="same", adapter=adapter)
        assert checkpoints.verify(folder, tmp_path / name, adapter=folder).passed
    merged = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cache", "snapshot")]
    assert merged[0] == merged[1]
    assert weight.tobytes() not in merged[0]


@pytest.mark.parametrize("main", ["abc", None])
def test_snapshots_that_are_links_elsewhere_are_refused(tmp_path, main):
    other = snapshots(tmp_path / "other", "abc")
    folder = tmp_path / "models--org--name"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "snapshots" / "abc").symlink_to(other / "snapshots" / "abc")
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    with pytest.raises(
        CheckpointError, match=r"the file snapshots/abc is a link out of its folder; put a copy of the file there$"
    ):
        checkpoints.convert(folder, tmp_path / "x.npz", to_layout="same")


def test_a_cache_without_snapshots_is_named(tmp_path):
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"is the hub's cache of a repository without snapshots; download it first$"
    ):
        checkpoints.convert(tmp_path / "models--org--name", tmp_path / "out")


@pytest.mark.parametrize(
    "names", [("a-Q4.gguf", "b-Q8.gguf"), ("params.pkl",), ("model.eqx", "notes.txt"), ("m.ckpt",)]
)
def test_files_that_a_folder_leaves_open_are_named(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"?")
    given = "; ".join(name for name in names if name != "notes.txt")
    with pytest.raises(
        CheckpointError, match=rf"does not determine which checkpoint is meant; give one of its files: {given}$"
    ):
        checkpoints.convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("ending", ["", ".value"])
def test_state_of_random_streams_is_left_out(tmp_path, ending):
    model = {name + ending: array for name, array in ours().items()}
    streams = {}
    for name in ("drop_emb.rngs", "rngs.default", "trf_blocks.0.rngs.dropout"):
        streams[f"{name}.count{ending}"] = np.uint32(3).reshape(())
        streams[f"{name}.key{ending}"] = np.uint32([1, 2])
    orbax(tmp_path / "x.orbax", **model, **streams)
    source, target = tmp_path / "x.orbax", tmp_path / "out"
    assert checkpoints.inspect(source).layout == "flax"
    checkpoints.convert(source, target)
    assert checkpoints.verify(source, target).passed
    assert checkpoints.read(target).keys() == ours("torch").keys()
    said = json.loads((target / "attn-bridge.json").read_text())["source"]["left_out"]
    assert said == {"it is the state of a random stream": sorted(streams)}
    (note,) = [one for one in checkpoints.plan(source, tmp_path / "y").notes if "random" in one]
    assert re.match(r"left out, as it is the state of a random stream: 6 tensors: ", note)


@pytest.mark.parametrize(
    "others",
    [
        {"rngs.count": np.float32(1).reshape(()), "rngs.key": np.uint32([1, 2])},
        {"rngs.count": np.uint32(1).reshape(()), "rngs.key": np.ones((2, 3), np.uint32)},
        {"rngs.count": np.uint32(1).reshape(())},
    ],
)
def test_what_only_sounds_like_a_random_stream_stays(tmp_path, others):
    orbax(tmp_path / "x.orbax", **ours(), **others)
    with pytest.raises(ValueError, match=r"rngs\.(count|key)"):
        checkpoints.convert(tmp_path / "x.orbax", tmp_path / "out")


def test_bfloat16_that_numpy_saved_is_read(tmp_path):
    arrays = {"w": np.float32([[1.5, -2], [3, 0.25]]).astype(ml_dtypes.bfloat16), "b": np.float32([1, 2])}
    np.savez(tmp_path / "x.npz", **arrays)
    found = checkpoints.read(tmp_path / "x.npz")
    assert {name: (one.dtype, one.tobytes()) for name, one in found.items()} == {
        name: (one.dtype, one.tobytes()) for name, one in arrays.items()
    }


def test_a_single_array_is_refused_with_what_to_do(tmp_path):
    np.save(tmp_path / "x.npy", np.array({"w": np.ones(2)}), allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"save it by np.savez\(FILE, \*\*arrays\), and convert that$"):
        checkpoints.convert(tmp_path / "x.npy", tmp_path / "out", to_layout="same")
