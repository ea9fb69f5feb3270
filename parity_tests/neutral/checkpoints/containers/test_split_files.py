"""Meta's files of a model that was split over several devices, read as one checkpoint."""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.checkpoints.containers.torch_file import TorchWriter

from ..checkpoint_files import bits, write

PARAMS = {
    "dim": 8,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "vocab_size": 12,
    "multiple_of": 4,
    "ffn_dim_multiplier": 0.6,
    "norm_eps": 1e-5,
}


def meta(width=8, rows=12):
    random = np.random.default_rng(5)
    shapes = {
        "tok_embeddings.weight": (rows, width),
        "layers.0.attention.wq.weight": (width, width),
        "layers.0.attention.wk.weight": (4, width),
        "layers.0.attention.wv.weight": (4, width),
        "layers.0.attention.wo.weight": (width, width),
        "layers.0.feed_forward.w1.weight": (12, width),
        "layers.0.feed_forward.w3.weight": (12, width),
        "layers.0.feed_forward.w2.weight": (width, 12),
        "layers.0.attention_norm.weight": (width,),
        "layers.0.ffn_norm.weight": (width,),
        "norm.weight": (width,),
        "output.weight": (rows, width),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


AXES = {"wo.weight": 1, "w2.weight": 1}


def parts(arrays, count, axes=AXES):
    found = [{} for _ in range(count)]
    for name, array in arrays.items():
        axis = axes.get(".".join(name.split(".")[-2:]), 0)
        pieces = np.split(array, count, axis) if array.ndim == 2 else [array] * count
        for one, piece in zip(found, pieces, strict=True):
            one[name] = np.ascontiguousarray(piece)
    return found


def saved(folder, states, numbers=None):
    folder.mkdir()
    for number, state in zip(numbers or range(len(states)), states, strict=True):
        infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in state.items()]
        writer = TorchWriter(folder / f"consolidated.{number:02d}.pth", infos, {})
        for name, array in state.items():
            writer.write(name, array)
        writer.finish()
    return folder


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("axes", [AXES, {**AXES, "tok_embeddings.weight": 1}], ids=["llama 3", "llama 2"])
def test_parts_are_put_together_to_the_bit(tmp_path, count, axes):
    arrays = meta()
    folder = saved(tmp_path / "parts", parts(arrays, count, axes))
    assert bits(checkpoints.read(folder)) == bits(arrays)
    (folder / "params.json").write_text(json.dumps(PARAMS))
    assert checkpoints.inspect(folder).layout == "meta-llama"
    there = checkpoints.convert(folder, tmp_path / "hf", to_layout="hf-llama", max_memory=200 << 20)
    assert json.loads((there.target / "config.json").read_text())["intermediate_size"] == 12
    back = checkpoints.convert(
        there.target, tmp_path / "back.pth", to_layout="meta-llama", settings={"num_heads": 2, "num_kv_heads": 1}
    )
    assert bits(checkpoints.read(back.target)) == bits(arrays)


@pytest.mark.parametrize("name", ["x.npz", "x.msgpack", "x.orbax", "x.dcp", "x.safetensors"])
def test_targets_without_room_for_params_carry_them(tmp_path, name):
    folder = saved(tmp_path / "in", [meta()])
    (folder / "params.json").write_text(json.dumps(PARAMS))
    assert not any("params.json" in note for note in checkpoints.plan(folder, tmp_path / name).notes)
    flax = checkpoints.convert(folder, tmp_path / name, to_layout="flax").target
    back = checkpoints.convert(flax, tmp_path / "back", to_layout="meta-llama").target
    assert (back / "params.json").read_text() == json.dumps(PARAMS)
    assert not (back / "config.json").exists()
    theirs = checkpoints.convert(flax, tmp_path / "hf", to_layout="hf-llama").target
    assert json.loads((theirs / "config.json").read_text())["num_key_value_heads"] == 1


def test_any_range_of_a_tensor_in_parts_is_right(tmp_path):
    arrays = meta()
    with containers.open_reader(saved(tmp_path / "parts", parts(arrays, 4))) as reader:
        for name in ("layers.0.feed_forward.w2.weight", "layers.0.feed_forward.w1.weight", "norm.weight"):
            whole = arrays[name].tobytes()
            for start in range(0, len(whole) + 1, 7):
                for stop in (start, start + 3, start + 50, len(whole)):
                    assert (
                        bytes(reader.read_range(name, min(start, stop), min(stop, len(whole)))) == (whole[start:stop])
                    ), (name, start, stop)


def changed(states, number, name, array):
    states[number] = {**states[number], name: array}
    return states


BROKEN = {
    "hole": (lambda states: (states[:2], [0, 2]), "these files of it are missing: consolidated.01.pth"),
    "names": (
        lambda states: (changed(states, 1, "more.weight", np.ones(2, np.float32)), None),
        "consolidated.00.pth and consolidated.01.pth hold different tensors: more.weight",
    ),
    "shapes": (
        lambda states: (changed(states, 1, "layers.0.attention.wk.weight", np.ones((2, 4), np.float32)), None),
        "layers.0.attention.wk.weight has several shapes or dtypes",
    ),
    "dtypes": (
        lambda states: (changed(states, 1, "norm.weight", np.ones(8, np.float16)), None),
        "norm.weight has several shapes or dtypes",
    ),
    "norms": (
        lambda states: (changed(states, 1, "norm.weight", np.ones(8, np.float32)), None),
        "norm.weight holds different numbers in several of its files",
    ),
    "unknown": (
        lambda states: ([{**one, "adapter.weight": np.ones((2, 2), np.float32)} for one in states], None),
        "it is not known how adapter.weight is split over its files",
    ),
    "many": (
        lambda states: (states * 3, None),
        "has 12 parts of one model, consolidated.00.pth to consolidated.11.pth",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_are_refused_in_one_line(tmp_path, case):
    change, message = BROKEN[case]
    folder = saved(tmp_path / "parts", *change(parts(meta(), 4)))
    with pytest.raises(CheckpointError, match=r"^[^\n]*$") as caught:
        checkpoints.read(folder)
    assert message in str(caught.value)


def put_part(path, arrays):
    writer = TorchWriter(path, [TensorInfo(name, one.dtype.name, one.shape) for name, one in arrays.items()], {})
    for name, array in arrays.items():
        writer.write(name, array)
    writer.finish()


def test_numbered_files_of_torch_without_their_index_are_one_model(tmp_path):
    source, arrays = tmp_path / "in", meta()
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    source.mkdir()
    for name, part in zip(names, (list(arrays)[:4], list(arrays)[4:]), strict=True):
        put_part(source / name, {one: arrays[one] for one in part})
    checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(arrays)
    assert checkpoints.verify(source, tmp_path / "out").passed
    (source / names[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"in: these files of it are missing: {names[0]}$"):
        checkpoints.convert(source, tmp_path / "other", to_layout="same")


@pytest.mark.parametrize("ending", ["npz", "msgpack", "pt"])
@pytest.mark.parametrize("name", ["weights.0{}", "flax_model-0000{}-of-00002", "hf_model_000{}_0"])
def test_files_whose_names_differ_by_a_number_are_one_model(tmp_path, name, ending):
    source, arrays = tmp_path / "in", {f"l{number}.w": np.full(3, number, np.float32) for number in (1, 2)}
    source.mkdir()
    files = {one: f"{name.format(one[1])}.{ending}" for one in arrays}
    for one, file in files.items():
        info = TensorInfo(one, "float32", (3,))
        writer = containers.make_writer(containers.format_of(source / file), source / file, [info], {})
        writer.write(one, arrays[one])
        writer.finish()
    note = () if "-of-" in name else (f"read as one model: {'; '.join(files.values())}",)
    assert checkpoints.inspect(source).notes == note
    checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert bits(checkpoints.read(tmp_path / "out")) == bits(arrays)
    assert checkpoints.verify(source, tmp_path / "out").passed
    shutil.copy(source / files["l1.w"], source / files["l2.w"])  # two checkpoints, and no parts of one
    with pytest.raises(CheckpointError, match=r"name one of|give a folder of one model's files"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("names", [("weights.00.npz", "weights.02.npz"), ("w1.npz", "w01.npz"), ("a1.npz", "b2.npz")])
def test_files_whose_numbers_have_gaps_are_no_model(tmp_path, names):
    for number, name in enumerate(names):
        np.savez(tmp_path / name, **{f"x{number}": np.ones(2)})
    with pytest.raises(CheckpointError, match="does not determine which checkpoint is meant"):
        checkpoints.inspect(tmp_path)


def indexed(folder, files):
    """Write a folder of files by name, each of tensors by name, and its index."""
    for file, arrays in files.items():
        write(folder / file, arrays)
    weights = {name: file for file, arrays in files.items() for name in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


NUMBERED = {f"model-0000{number}-of-00002.safetensors": {f"x{number}": np.ones(number)} for number in (1, 2)}


def test_an_index_that_leaves_out_a_file_of_its_model_is_refused(tmp_path):
    folder, file = indexed(tmp_path / "in", NUMBERED), "model-00002-of-00002.safetensors"
    weights = {name: one for one, arrays in NUMBERED.items() for name in arrays if one != file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CheckpointError, match=rf"the index has no tensor of these files of its model: {file}$"):
        checkpoints.convert(folder, tmp_path / "out", to_layout="same")
    (folder / file).unlink()  # some publishers delete a file without weights
    assert checkpoints.read(folder).keys() == {"x1"}


def test_files_beside_those_of_an_index_are_named(tmp_path):
    folder = indexed(tmp_path / "in", NUMBERED)
    write(folder / "head.safetensors", {"y": np.ones(2)})
    note = "left out, as model.safetensors.index.json does not name them: head.safetensors"
    assert checkpoints.inspect(folder).notes == (note,)
    assert note in checkpoints.plan(folder, tmp_path / "out", to_layout="same").notes


def test_a_file_of_several_read_alone_says_so(tmp_path):
    folder, file = indexed(tmp_path / "in", NUMBERED), "model-00002-of-00002.safetensors"
    note = f"read alone: {file} is one of 2 files of a model; its folder has all"
    assert note in checkpoints.plan(folder / file, tmp_path / "out", to_layout="same").notes
    assert not checkpoints.inspect(write(tmp_path / "model-00001-of-00001.safetensors", {"x": np.ones(2)})).notes


def test_other_files_of_torch_beside_the_usual_name(tmp_path):
    arrays, source = {"x": np.ones(2, np.float32)}, tmp_path / "in"
    source.mkdir()
    for name in ("pytorch_model.bin", "head.bin", "optimizer.bin"):
        put_part(source / name, arrays)
    note = "left out, as pytorch_model.bin is the folder's model: head.bin"
    assert checkpoints.inspect(source).notes == (note,)
    put_part(source / "pytorch_model_1.bin", arrays)
    models = "pytorch_model.bin; pytorch_model_1.bin"
    with pytest.raises(CheckpointError, match=f"has several models, as accelerate saves them; name one: {models}$"):
        checkpoints.read(source)


@pytest.mark.parametrize(("files", "note"), [
    (["model.safetensors", "pytorch_model.bin"], "safetensors: pytorch_model.bin"),
    (["pytorch_model.bin", "a.npz"], "torch: a.npz"),
    (["consolidated.safetensors", "x.pt"], "safetensors: x.pt"),
    (["v_head.safetensors", "pytorch_model.bin"], "torch: v_head.safetensors"),
    (["adapter_model.safetensors", "pytorch_model.bin"], "torch: adapter_model.safetensors"),
    (["ema.safetensors", "model.pt"], "torch: ema.safetensors"),
    (["own_v2.safetensors", "own_v2.npz", "own_v2.pt"], "safetensors: own_v2.npz; own_v2.pt"),
    (["own_v2.pt", "own_v2.pkl"], "torch: own_v2.pkl"),
    (["open_clip_model.safetensors", "open_clip_pytorch_model.bin"], "safetensors: open_clip_pytorch_model.bin"),
    (["own-00001-of-00001.safetensors", "own.npz"], "safetensors: own.npz"),
    (["own.npz", "own.pkl"], "own.npz: own.pkl"),
    (["own.weights.h5", "own.keras"], "own.keras: own.weights.h5"),
    (["model.weights.h5", "task.weights.h5"], "model.weights.h5: task.weights.h5"),
    (["own.keras", "other.weights.h5"], None),
    (["model.safetensors", "training_args.bin", "rng_state.pth", "scheduler.pt", "optimizer.pt"], ""),
    (["v_head.safetensors", "own.bin"], None),  # the model may be the other file
    (["own.safetensors", "own.npz", "mean.npz"], None),
    (["a.npz", "b.ckpt"], None),
    (["a.pt", "b.ckpt"], None),
])  # fmt: skip
def test_files_of_other_containers_are_named_or_refused(tmp_path, files, note):
    arrays = {"x": np.ones(2, np.float32)}
    (tmp_path / "in").mkdir()
    for file in files:
        path = tmp_path / "in" / file
        if file.endswith(".safetensors"):
            write(path, arrays)
        elif file.endswith(".npz"):
            np.savez(path, **arrays)
        elif file.endswith((".h5", ".keras")):
            h5py.File(path, "w").create_dataset("x", data=arrays["x"])
        else:
            put_part(path, arrays)
    if note is None:
        with pytest.raises(CheckpointError, match=r"(give one of its files|name one of them): ") as caught:
            checkpoints.convert(tmp_path / "in", tmp_path / "out", to_layout="same")
        assert all(file in str(caught.value) for file in files)
    else:
        notes = (f"left out, as the model is read from {note}",) if note else ()
        assert checkpoints.inspect(tmp_path / "in").notes == notes


def test_the_files_of_open_clip_beside_those_of_transformers_are_the_same_model(tmp_path):
    write(tmp_path / "in" / "model.safetensors", {"text_model.x": np.ones(2)})
    write(tmp_path / "in" / "open_clip_model.safetensors", {"transformer.x": np.ones(2)})
    assert checkpoints.read(tmp_path / "in").keys() == {"text_model.x"}
    (note,) = checkpoints.inspect(tmp_path / "in").notes
    assert note == "left out, as the folder's other files are the same model: open_clip_model.safetensors"


def test_an_index_of_another_container_without_its_files_is_passed_over(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    put_part(source / "pytorch_model.bin", {"x": np.ones(2)})
    weights = dict.fromkeys("xy", "model-00001-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert checkpoints.read(source).keys() == {"x"}
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"these files of it are missing: model-00001-of-00002.safetensors"):
        checkpoints.read(source)


def test_hidden_files_that_macos_adds_are_not_counted(tmp_path):
    (tmp_path / "in").mkdir()
    put_part(tmp_path / "in" / "own.pt", {"x": np.ones(2)})
    (tmp_path / "in" / "._own.pt").write_bytes(b"\0\5\x16\7")
    assert checkpoints.read(tmp_path / "in").keys() == {"x"}


@pytest.mark.parametrize("other", ["v_head", "optimizer", "model_ema"])
def test_other_safetensors_beside_the_usual_name(tmp_path, other):
    arrays, source = {"x": np.ones(2, np.float32)}, tmp_path / "in"
    write(source / "model.safetensors", arrays)
    write(source / f"{other}.safetensors", {"y": np.ones(3)})
    assert bits(checkpoints.read(source)) == bits(arrays)
    note = f"left out, as model.safetensors is the folder's model: {other}.safetensors"
    assert checkpoints.inspect(source).notes == (note,)
    write(source / "model_1.safetensors", {"z": np.ones(3)})
    models = "model.safetensors; model_1.safetensors"
    with pytest.raises(CheckpointError, match=f"has several models, as accelerate saves them; name one: {models}$"):
        checkpoints.read(source)


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_without_its_files_beside_the_whole_model_is_left_out(tmp_path, whole):
    folder, (stem, _, ending) = tmp_path / "in", whole.partition(".")  # as transformers leaves it that saves again
    put = put_part if ending == "bin" else write
    names = [f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
    for name in names:
        folder.mkdir(exist_ok=True)
        put(folder / name, {name: np.ones(1)})
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))
    put(folder / whole, {"x": np.ones(3)})
    with pytest.raises(CheckpointError, match=rf"has both {whole} and {whole}.index.json; name one of them$"):
        checkpoints.read(folder)
    for name in names:
        (folder / name).unlink()
    assert checkpoints.read(folder)["x"].shape == (3,)
    assert checkpoints.inspect(folder).notes == (f"left out, as none of its files exist: {whole}.index.json",)
    (folder / whole).unlink()
    with pytest.raises(CheckpointError, match=rf"these files of it are missing: {names[0]}"):
        checkpoints.read(folder)


@pytest.mark.parametrize("count", [1, 2])
def test_variants_of_a_model_alone_are_named(tmp_path, count):
    source = tmp_path / "in"
    for number, variant in enumerate(("bf16", "fp16")):
        weights = {}
        for part in range(count):
            cut = f"-{part + 1:05}-of-{count:05}" if count > 1 else ""
            write(source / f"model.{variant}{cut}.safetensors", {f"x{part}": np.full(2, number, np.float32)})
            weights[f"x{part}"] = f"model.{variant}{cut}.safetensors"
        if count > 1:
            (source / f"model.safetensors.index.{variant}.json").write_text(json.dumps({"weight_map": weights}))
    names = [
        f"model.safetensors.index.{one}.json" if count > 1 else f"model.{one}.safetensors" for one in ("bf16", "fp16")
    ]
    with pytest.raises(
        CheckpointError, match=f"has several variants of a model; name one of them: {'; '.join(names)}$"
    ):
        checkpoints.convert(source, tmp_path / "out", to_layout="same")
    for number, name in enumerate(names):
        arrays = checkpoints.read(source / name)
        assert arrays.keys() == {f"x{part}" for part in range(count)}
        assert all((array == number).all() for array in arrays.values())


def test_files_with_the_same_tensors_are_named(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / "in" / f"{name}.safetensors", {"x": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"; name one of the files: a.safetensors; b.safetensors$"):
        checkpoints.read(tmp_path / "in")
    write(tmp_path / "in" / "a-00001-of-00001.safetensors", {"x": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"; give a folder of one model's files alone$"):
        checkpoints.read(tmp_path / "in")
