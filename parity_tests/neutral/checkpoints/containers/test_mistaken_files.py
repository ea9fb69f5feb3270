"""Files of another kind than their name says, and weights that are no weights: refused by name, with a remedy."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_bridge.checkpoints.containers.safetensors import PIECES
from parity_tests.fuzz.samples import ENDINGS, HELD, assert_same, read, write

from ..checkpoint_files import made

FORMATS = ["safetensors", "torch", "npz", "msgpack", "gguf", "pickle", "keras", "equinox"]
EXTENSIONS = dict(
    zip(FORMATS, (".safetensors", ".pt", ".npz", ".msgpack", ".gguf", ".pkl", ".h5", ".eqx"), strict=True)
)


def saved_by_torch(value, path):
    """Write a pickle in an archive as ``torch.save`` does."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/version", "3\n")
    return path


def archive_of_numpy(path):
    np.savez(path, a=np.arange(3.0))
    return path.read_bytes()


OTHERS = {
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS"),
    "a page": (b"\n <!DOCTYPE html><html><body>404", "is a web page, not a checkpoint: download the file itself"),
    "gzip": (b"\x1f\x8b\x08" + bytes(30), "is compressed by gzip: unpack it first"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(30), "is compressed by zstd: unpack it first"),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", OTHERS)
def test_files_that_are_no_checkpoints_are_named(tmp_path, kind, format):
    data, message = OTHERS[kind]
    path = tmp_path / f"x{EXTENSIONS[format]}"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_reader(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("there", FORMATS)
@pytest.mark.parametrize("format", ["safetensors", "torch", "npz", "gguf", "keras"])
def test_a_file_of_another_container_is_named_with_the_option(tmp_path, format, there):
    if format == there or (format, there) in (("torch", "npz"), ("keras", "msgpack")):
        return  # an archive's members, and a byte that begins a map, are looked at first
    contents = {
        "safetensors": lambda: safetensors.numpy.save({"a": np.arange(3.0)}),
        "torch": lambda: saved_by_torch({"a": 1}, tmp_path / "archive").read_bytes(),
        "npz": lambda: archive_of_numpy(tmp_path / "a.npz"),
        "gguf": lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        "keras": lambda: b"\x89HDF\r\n\x1a\n" + bytes(100),
    }
    path = tmp_path / f"x{EXTENSIONS[there]}"
    path.write_bytes(contents[format]())
    with pytest.raises(CheckpointError) as caught:
        open_reader(path)
    if format in ("torch", "npz") and there == "keras":  # an archive, as Keras has it
        assert "so it is not an archive of Keras" in str(caught.value)
        return
    assert f"is a file of {format}, not of {there}: --source-format {format} reads it" in str(caught.value)
    if format in ("safetensors", "npz"):
        assert open_reader(path, format).tensors.keys() == {"a"}


def test_programs_of_torch_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, 2))
        archive.writestr("x/code/__torch__.py", "pass", zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"is a TorchScript module; save the state_dict of torch.jit.load"):
        open_reader(tmp_path / "x.pt")
    for name, message in (("x.pt2", "is a program of torch.export"), ("x.onnx", "is a graph of ONNX")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(CheckpointError, match=message):
            open_reader(tmp_path / name)


# ---- arrays of NumPy in files of torch


def test_arrays_of_numpy_in_a_file_of_torch_are_read(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "none": np.zeros((0, 2), np.float16),
        "complex": np.array([1 + 2j], np.complex64),
        "scalar": np.array(2.5),
    }
    path = saved_by_torch({"model": arrays, "step": 3, "list": [np.arange(2)]}, tmp_path / "x.pt")
    with open_reader(path) as reader:
        assert reader.metadata == {"step": 3}
        for name, array in arrays.items():
            found = reader.read(f"model.{name}")
            assert found.dtype == array.dtype.newbyteorder("=")
            assert found.tobytes() == np.ascontiguousarray(array.astype(found.dtype)).tobytes()
        assert reader.read("list.0").tolist() == [0, 1]
    checkpoints.convert(path, tmp_path / "x.npz", to_layout="same", strip="model.")
    assert read(tmp_path / "x.npz").keys() == arrays.keys()


def test_arrays_of_objects_in_a_file_of_torch_can_be_left_out(tmp_path):
    path = saved_by_torch({"a": np.arange(3.0), "odd": np.array(["x", None])}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"odd of .* is an array of O8, .*--drop leaves it out"):
        checkpoints.convert(path, tmp_path / "x.npz", to_layout="same")
    checkpoints.convert(path, tmp_path / "x.npz", to_layout="same", drop=["odd"])
    assert read(tmp_path / "x.npz").keys() == {"a"}
    with pytest.raises(CheckpointError, match=r"odd is an array of O8, which is no dtype of a tensor$"):
        open_reader(saved_by_torch({"odd": np.array(["x", None])}, tmp_path / "y.pt"))


# ---- values that no container of ours holds


def test_values_beside_the_arrays_of_a_msgpack_file_are_skipped_by_name(tmp_path):
    array = b"\x93\x91\x02\xa5uint8\xc4\x02ab"
    packed = b"\xc8" + struct.pack(">H", len(array)) + b"\x01" + array
    odd = b"\xa1b\xc4\x01x\xa1n\xcb\x7f\xf8" + bytes(6) + b"\xa1z\xc7\x02\x02ab"
    (tmp_path / "x.msgpack").write_bytes(b"\x84\xa1a" + packed + odd)
    with open_reader(tmp_path / "x.msgpack") as reader:
        assert reader.read("a").tobytes() == b"ab"
        (note,) = reader.notes
    assert note.endswith("neither tensors nor plain values: b (bytes); n (nan); z (a complex number)")


@pytest.mark.parametrize("unit", ["s", "D", "M"])
def test_dates_beside_the_arrays_of_an_npz_are_named(tmp_path, unit):
    np.savez(tmp_path / "x.npz", a=np.ones(2), d=np.array(["2020-01"], f"M8[{unit}]"))
    with open_reader(tmp_path / "x.npz") as reader:
        assert list(reader.tensors) == ["a"]
        assert reader.unread == {
            "d": f"it is an array of <M8[{unit}], which is no dtype of a tensor; save it as another"
        }


# ---- pieces of tensors


def test_pieces_of_tensors_that_ranks_saved_are_no_tensors(tmp_path):
    for rank in range(2):
        said = {"a": {"saved_offsets": [2 * rank, 0]}}
        file = tmp_path / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        safetensors.numpy.save_file({"a": np.zeros((2, 3))}, file, {PIECES: json.dumps(said), "DCP_VERSION": "1.0"})
    first, second = sorted(tmp_path.iterdir())
    for path in (tmp_path, first, second):
        with pytest.raises(CheckpointError, match=r"has a piece of a: .* join them by consolidate_safetensors_files"):
            open_reader(path)
    second.unlink()
    with open_reader(first) as reader:  # may be whole
        assert reader.tensors["a"].shape == (2, 3)


# ---- weights


@pytest.mark.parametrize("dtype", ["complex64", "bool", "int32"])
@pytest.mark.parametrize("format", ENDINGS)
def test_weights_that_are_no_real_numbers_are_refused_by_layouts(tmp_path, format, dtype):
    if dtype not in HELD[format]:
        return
    arrays = made("hf-llama")
    odd = [name for name in arrays if name.endswith("q_proj.weight")]
    arrays |= {name: arrays[name].astype(dtype) for name in odd}
    source = tmp_path / f"source{ENDINGS[format]}"
    write(format, source, arrays)
    for layout in ("flax", "hf-llama", "torch"):
        message = rf"q_proj.weight \(and 1 more\) is {dtype}, which no weight of {layout} is; --to same carries it"
        with pytest.raises(CheckpointError, match=message):
            checkpoints.convert(source, tmp_path / "out.npz", to_layout=layout)
        assert not (tmp_path / "out.npz").exists()
    checkpoints.convert(source, tmp_path / "same.npz", to_layout="same")
    assert_same(read(tmp_path / "same.npz"), arrays)


@pytest.mark.parametrize("there", ENDINGS)
@pytest.mark.parametrize("here", ["npz", "torch"])
def test_complex_numbers_cross_containers_bit_for_bit(tmp_path, here, there):
    values = np.array([[1 - 2j, np.nan + 1j], [0j, -np.inf * 1j]])
    arrays = {dtype: values.astype(dtype) for dtype in ("complex64", "complex128") if dtype in HELD[there]}
    assert "complex64" in arrays
    source = tmp_path / f"a{ENDINGS[here]}"
    write(here, source, arrays)
    target = tmp_path / f"b{ENDINGS[there]}"
    checkpoints.convert(source, target, to_layout="same", dtype="bf16", format=there)
    assert_same(read(target), arrays)
    checkpoints.convert(target, tmp_path / f"c{ENDINGS[here]}", to_layout="same")
    assert_same(read(tmp_path / f"c{ENDINGS[here]}"), arrays)


def test_masks_of_truth_values_are_still_kept_aside(tmp_path):
    arrays = {**made("hf-gpt2"), "transformer.h.0.attn.bias": np.tri(7, dtype=bool)[None, None]}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    for layout in ("flax", "hf-gpt2"):
        checkpoints.convert(tmp_path / "a.safetensors", tmp_path / layout, to_layout=layout)
        assert np.dtype(bool) not in {array.dtype for array in read(tmp_path / "flax").values()}
        checkpoints.convert(tmp_path / layout, tmp_path / f"{layout}.safetensors", to_layout="hf-gpt2")
        assert_same(read(tmp_path / f"{layout}.safetensors"), arrays)


def test_eight_bit_weights_are_still_copied_with_a_note(tmp_path):
    arrays = made("hf-llama")
    name = next(name for name in arrays if name.endswith("q_proj.weight"))
    arrays[name] = arrays[name].astype(ml_dtypes.float8_e4m3fn)
    write("npz", tmp_path / "a.npz", arrays)
    plan = checkpoints.plan(tmp_path / "a.npz", tmp_path / "b")
    assert any("copied as they are" in note for note in plan.notes)


def test_an_empty_archive_is_no_file_of_torch(tmp_path):
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match=r"is no file of torch\.save: it has 0 members called data\.pkl"):
        open_reader(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["checkpoint-10/model.safetensors", "checkpoint-20/model.safetensors", "runs/x.txt"],
         "holds checkpoints in its folders; give one of them: checkpoint-10; checkpoint-20"),
        (["latest", "global_step3/mp_rank_00_model_states.pt"],
         "holds checkpoints in its folders; give one of them: global_step3"),
        (["text_encoder/model.safetensors", "unet/x.safetensors"], "give one of them: text_encoder; unet"),
        (["optimizer.pt", "rng_state_0.pth", "pytorch_model_fsdp_0/.metadata"], "of them: pytorch_model_fsdp_0"),
        (["zero/lm_head.weight/fp32.pt"], "is a universal checkpoint of DeepSpeed, a folder for each tensor"),
        ([f"bf16_zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1)]
         + [f"zero_pp_rank_{n}_mp_rank_00_model_states.pt" for n in (0, 1)], "its zero_to_fp32.py puts them together"),
        ([f"layer_0{n}-model_00-model_states.pt" for n in (1, 2)], "holds a file for each layer"),
        ([f"model_world_size_2_rank_{n}.pt" for n in (0, 1)], "holds the part of the weights that each rank of FSDP"),
        (["checkpoint_metadata.json", "model/model/decoder/0/x.safetensors"], "is a checkpoint of nanotron"),
        (["target.decoder.kernel/.zarray", "checkpoint"], "holds a folder of Zarr for each array, as T5X and older"),
        (["model.kernel/.zarray", "common.pt"], "holds a folder of Zarr for each array, as T5X and older Megatron"),
        (["a.pt", "b.pt"], "has 2 files of torch.save and no index; name one of them: a.pt; b.pt"),
    ],
)  # fmt: skip
def test_folders_of_trainers_name_what_to_give(tmp_path, names, message):
    for name in names:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.inspect(tmp_path / "x")
    assert message in str(caught.value)


def test_the_state_of_a_trainer_beside_weights_is_passed_over(tmp_path):
    (tmp_path / "x").mkdir()
    write("torch", tmp_path / "x" / "model.pt", {"x": np.ones(3, np.float32)})
    (tmp_path / "x" / "optimizer.pt").write_bytes(b"")
    assert checkpoints.inspect(tmp_path / "x").tensors.keys() == {"x"}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("torch", "its extension says no format; it is a file of torch: --source-format torch reads it"),
        ("safetensors", "it is a file of safetensors: --source-format safetensors reads it"),
        ("msgpack", "it may be msgpack: --source-format msgpack reads it"),
        ("tar", "it is a tar archive: unpack it, and convert the checkpoint in it"),
        ("text", "its extension says no format; name one of"),
    ],
)
def test_a_file_of_an_unknown_extension_is_named_by_its_bytes(tmp_path, made, message):
    path = tmp_path / "x.pth.tar"
    if made == "text":
        path.write_text("weights")
    elif made == "tar":
        with tarfile.open(path, "w") as archive:
            archive.add(__file__, "model.ckpt")
    else:
        write(made, path, {"x": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError) as caught:
        checkpoints.inspect(path)
    assert message in str(caught.value)
    if made != "text":
        folder = path.rename(tmp_path / "x.tar").parent
        with pytest.raises(CheckpointError) as caught:
            checkpoints.inspect(folder)
        assert f"give the file x.tar, which {message.rpartition('it ')[2]}" in str(caught.value)
        path = folder / "x.tar"
    if made == "msgpack":
        (tmp_path / "run").mkdir()
        path.rename(tmp_path / "run" / "checkpoint_100")
        with pytest.raises(CheckpointError, match="give the file checkpoint_100, which may be msgpack"):
            checkpoints.inspect(tmp_path / "run")


def test_texts_in_an_npz_are_named_and_can_be_left_out(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, x=np.ones(3, np.float32), names=np.array(["a", "b"]))
    assert checkpoints.inspect(path).tensors.keys() == {"x"}
    message = r"names of .* can't be read: it is an array of <U1.*--drop leaves it out"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(path, tmp_path / "out", to_layout="same")
    checkpoints.convert(path, tmp_path / "out", to_layout="same", drop=["names"])
    assert checkpoints.read(tmp_path / "out").keys() == {"x"}


def test_graph_of_openvino_is_named_and_left_alone_next_to_weights(tmp_path):
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    (tmp_path / "openvino_model.bin").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"openvino_model.xml is a graph of OpenVINO, whose weights have other"):
        open_reader(tmp_path)
    saved_by_torch({"epoch": 1}, tmp_path / "pytorch_model.bin")
    with open_reader(tmp_path) as reader:
        assert reader.metadata["files"] == {"pytorch_model.bin": {"epoch": 1}}


def test_parts_of_ranks_of_tensorrt_are_named_from_the_folder_and_from_one_file(tmp_path):
    for number in range(2):
        safetensors.numpy.save_file(
            {"a.weight": np.full(2, number, np.float32)}, tmp_path / f"rank{number}.safetensors"
        )
    for path in (tmp_path, tmp_path / "rank0.safetensors", tmp_path / "rank1.safetensors"):
        with pytest.raises(
            CheckpointError, match=r"ranks of TensorRT-LLM take: convert the model that they were made of"
        ):
            open_reader(path)
    (tmp_path / "rank1.safetensors").unlink()
    assert read(tmp_path).keys() == {"a.weight"}
