"""Containers of weights without a framework: every dtype there and back, and against NumPy and safetensors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import (
    READERS,
    WRITERS,
    CheckpointError,
    TensorInfo,
    format_of,
    make_writer,
    open_reader,
    strided,
)
from attn_bridge.checkpoints.containers.dcp import writer as dcp_writer
from attn_bridge.checkpoints.containers.files import File, boxes
from attn_bridge.checkpoints.containers.msgpack import writer as msgpack_writer
from attn_bridge.checkpoints.containers.orbax import writer as orbax_writer
from attn_bridge.checkpoints.containers.torch_file import Stored
from parity_tests.fuzz.samples import ENDINGS, HELD, assert_same, infos, random_array, random_arrays, read, write
from parity_tests.support.processes.work import count_calls

FORMATS = list(WRITERS)


def content(path):
    """Return all files below a path and their bytes."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def place(tmp_path, format, name="x"):
    return tmp_path / f"{name}{ENDINGS[format]}"


# ---- every container


def test_every_format_is_read_and_written():
    assert (
        [name for name in READERS if name not in ("gguf", "pickle", "equinox", "keras")]
        == list(WRITERS)
        == list(ENDINGS)
        == list(HELD)
    )


def test_formats_that_nobody_asks_for_are_not_loaded(tmp_path):
    code = (
        "import sys; from attn_bridge.checkpoints import accompanying, containers; from pathlib import Path;"
        "containers.make_writer('npz', Path(sys.argv[1]), [], {}).finish();"
        "print(sorted(name.rpartition('.')[2] for name in sys.modules if name.startswith(containers.__name__ + '.')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, check=True)
    loaded = "base files mistaken npz paths remote shards sources strided writing zips"
    assert done.stdout == f"{loaded.split()}\n"


@pytest.mark.parametrize("format", FORMATS)
def test_every_dtype_comes_back_bit_for_bit(format, tmp_path):
    arrays = random_arrays(HELD[format], format=format)
    path = write(format, place(tmp_path, format), arrays)
    assert_same(read(path, format), arrays)
    with open_reader(path, format) as reader:
        assert reader.format == format
        assert reader.metadata == {}
        assert all(file.exists() for file in reader.files())
        assert {info.file for info in reader.tensors.values()} == {""}


@pytest.mark.parametrize("format", [*FORMATS, "shards"])
def test_all_tensors_are_read_listed_and_inspected(format, tmp_path):
    arrays = random_arrays({"int64", "float32"}, shapes=[(3, 2), (), (0, 4)])
    files = {name: f"{index % 2}.safetensors" for index, name in enumerate(arrays)}
    if format == "shards":
        path = write("safetensors", tmp_path / "x", arrays, files=files)
    else:
        path = write(format, place(tmp_path, format), arrays)
    assert_same(checkpoints.read(path), arrays)
    with checkpoints.open(path) as checkpoint:
        assert_same(checkpoint, arrays)
        assert len(checkpoint) == len(checkpoint.tensors) == len(arrays)
        assert all(name in checkpoint for name in arrays)
    inspection = checkpoints.inspect(path)
    assert {name: (info.dtype, info.shape) for name, info in inspection.tensors.items()} == {
        name: (array.dtype.name, array.shape) for name, array in arrays.items()
    }
    assert inspection.dtypes == {"int64": 7, "float32": 7}
    assert inspection.nbytes == 7 * 8 + 7 * 4


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_come_in_the_order_they_were_written_in(format, tmp_path):
    arrays = random_arrays({"float32"}, shapes=[(2,)] * 5)
    arrays = {name: arrays[name] for name in sorted(arrays, reverse=True)}
    with open_reader(write(format, place(tmp_path, format), arrays), format) as reader:
        assert list(reader.tensors) == list(arrays)


@pytest.mark.parametrize("format", FORMATS)
def test_any_range_of_bytes_can_be_read(format, tmp_path):
    rng = random.Random(0)
    arrays = random_arrays({"float32", "bfloat16"}, shapes=[(5, 3, 4), ()])
    with open_reader(write(format, place(tmp_path, format), arrays), format) as reader:
        for name, array in arrays.items():
            data = array.tobytes()
            for _ in range(50):
                start, stop = sorted(rng.choices(range(len(data) + 1), k=2))
                assert bytes(reader.read_range(name, start, stop)) == data[start:stop]
            for start, stop in ((-1, 1), (0, len(data) + 1), (2, 1)):
                with pytest.raises(CheckpointError, match=rf"bytes; {start}:{stop} was asked for$"):
                    reader.read_range(name, start, stop)


@pytest.mark.parametrize("format", FORMATS)
def test_parts_give_the_same_bytes_as_wholes_and_as_another_run(format, tmp_path):
    arrays = random_arrays({"int64", "bool", "float32"}, shapes=[(4, 9), (3,), (), (0, 2)], format=format)
    metadata = {"b": "2", "a": "1"}
    whole = write(format, place(tmp_path, format, "whole"), arrays, metadata)
    again = write(format, place(tmp_path, format, "again"), arrays, dict(reversed(metadata.items())))
    writer = make_writer(format, place(tmp_path, format, "parts"), infos(arrays), metadata)
    for name, array in arrays.items():
        for start in range(0, array.nbytes, 7):
            writer.write_range(name, start, array.tobytes()[start : start + 7])
    writer.finish()
    assert content(whole) == content(again) == content(writer.path)
    assert open_reader(whole, format).metadata == metadata


@pytest.mark.parametrize("format", [name for name in FORMATS if WRITERS[name].random_access])
def test_parts_can_be_written_in_any_order_and_after_a_restart(format, tmp_path):
    rng = random.Random(0)
    arrays = random_arrays({"int16", "float32"}, shapes=[(4, 9), (3,), ()])
    parts = [
        (name, start, array.tobytes()[start : start + 11])
        for name, array in arrays.items()
        for start in range(0, array.nbytes, 11)
    ]
    rng.shuffle(parts)
    path = place(tmp_path, format)
    for half in (parts[::2], parts[1::2]):
        writer = make_writer(format, path, infos(arrays), {})
        for part in half:
            writer.write_range(*part)
        writer.abort()
    make_writer(format, path, infos(arrays), {}).finish()
    assert content(path) == content(write(format, place(tmp_path, format, "whole"), arrays))


@pytest.mark.parametrize("format", [name for name in FORMATS if not WRITERS[name].random_access])
def test_a_writer_in_a_stream_refuses_what_comes_out_of_order(format, tmp_path):
    arrays = random_arrays({"float32"}, shapes=[(4,), (2,)])
    first, second = arrays
    data = bytes(16)

    def writer():
        return make_writer(format, place(tmp_path, format), infos(arrays), {})

    one = writer()
    with pytest.raises(CheckpointError, match=r"out of order: 4 after 0$"):
        one.write_range(first, 4, data[:4])
    one.abort()
    one = writer()
    one.write_range(first, 0, data[:4])
    with pytest.raises(CheckpointError, match=f"{first} was left at byte 4$"):
        one.write_range(second, 0, data[:8])
    one.abort()
    one = writer()
    one.write_range(first, 0, data)
    with pytest.raises(CheckpointError, match=f"{second} was not written$"):
        one.finish()
    one.abort()
    one = writer()
    with pytest.raises(CheckpointError, match="out of order"):
        one.write_range(first, 0, bytes(20))
    one.abort()


@pytest.mark.parametrize("format", FORMATS)
def test_no_tensors_are_a_checkpoint_too(format, tmp_path):
    path = write(format, place(tmp_path, format), {})
    assert read(path, format) == {}


@pytest.mark.parametrize("format", FORMATS)
def test_files_have_the_mode_of_the_umask(format, tmp_path):
    path = write(format, place(tmp_path, format), random_arrays({"float32"}))
    mask = os.umask(0)
    os.umask(mask)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("info", "message"),
    [
        (TensorInfo("", "float32", (1,)), "a tensor has an empty name"),
        (TensorInfo("a\nb", "float32", (1,)), "the name a\\nb has control characters"),
        (TensorInfo("n" * 1001, "float32", (1,)), "is longer than 1000 characters"),
        (TensorInfo("a", "object", (1,)), "a has the unknown dtype object"),
        (TensorInfo("a", "int4", (1,)), "a has the unknown dtype int4; cast it before it is saved"),
        (TensorInfo("a", "float32", (-1,)), "a has a negative size in its shape [-1]"),
        (TensorInfo("a", "float32", (1,) * 65), "a has 65 axes; at most 64 can be held"),
        (TensorInfo("a", "float32", (1 << 62, 4)), "which no file can hold"),
    ],
)
def test_a_writer_refuses_what_no_reader_would_take(format, info, message, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        make_writer(format, place(tmp_path, format), [info], {})
    assert message in str(caught.value)
    assert not place(tmp_path, format).exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_name_to_be_written_twice_is_refused(format, tmp_path):
    with pytest.raises(CheckpointError, match=r"a is to be written twice$"):
        make_writer(format, place(tmp_path, format), [TensorInfo("a", "int8", (1,))] * 2, {})


@pytest.mark.parametrize(
    ("format", "dtype"), [(format, dtype) for format in FORMATS for dtype in sorted(HELD["npz"] - HELD[format])]
)
def test_a_dtype_that_a_container_has_not_is_refused_by_name(format, dtype, tmp_path):
    with pytest.raises(CheckpointError, match=rf"has no {dtype} \(t\)$"):
        make_writer(format, place(tmp_path, format), [TensorInfo("t", dtype, (1,))], {})


@pytest.mark.parametrize("format", ["torch", "npz", "msgpack", "orbax"])
def test_only_safetensors_is_written_in_several_files(format, tmp_path):
    with pytest.raises(CheckpointError, match="file"):
        make_writer(format, place(tmp_path, format), [TensorInfo("t", "int8", (1,), "a.bin")], {})


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
@pytest.mark.parametrize("name", ["a..b", ".a", "a."])
def test_a_name_that_gives_no_keys_is_refused(format, name, tmp_path):
    with pytest.raises(CheckpointError, match="a part"):
        make_writer(format, place(tmp_path, format), [TensorInfo(name, "int8", (1,))], {})


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b", "a.b.c.d")])
def test_a_tensor_below_a_tensor_is_refused(format, names, tmp_path):
    with pytest.raises(CheckpointError, match="below"):
        make_writer(format, place(tmp_path, format), [TensorInfo(name, "int8", (1,)) for name in names], {})


@pytest.mark.parametrize("format", ["safetensors", "torch", "npz", "msgpack"])
def test_a_file_that_changed_while_it_was_open_is_refused(format, tmp_path):
    arrays = random_arrays({"float32"}, shapes=[(100,)])
    path = write(format, place(tmp_path, format), arrays)
    with open_reader(path) as reader:
        reader.close()
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=r"has changed while it was read$"):
            reader.read("float32.s0")
    path.unlink()
    path = write(format, path, arrays)
    with open_reader(path) as reader:
        os.truncate(path, 300)
        with pytest.raises(CheckpointError, match=r"ends at byte \d+, before byte"):
            reader.read("float32.s0")


def test_importing_the_containers_loads_no_framework():
    program = """
import sys, attn_bridge.checkpoints.containers
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "jax", "flax", "orbax", "tensorstore"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- which format


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_known_by_its_extension_or_its_folder(format, tmp_path):
    path = write(format, place(tmp_path, format), random_arrays({"float32"}))
    assert open_reader(path).format == format
    assert format_of(path) == format_of(tmp_path / f"new{ENDINGS[format]}") == format


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "w.pth"])
def test_a_folder_with_one_file_of_torch_is_read(name, tmp_path):
    arrays = random_arrays({"float32"})
    write("torch", tmp_path / name, arrays)
    with open_reader(tmp_path) as reader:
        assert reader.format == "torch"
        assert {info.file for info in reader.tensors.values()} == {name}
    assert_same(read(tmp_path), arrays)


def test_a_folder_with_shards_of_torch_is_read(tmp_path):
    arrays = random_arrays({"float32", "int8"}, shapes=[(2, 3)])
    weight_map = {}
    for index, (name, array) in enumerate(arrays.items()):
        weight_map[name] = f"pytorch_model-{index}.bin"
        write("torch", tmp_path / weight_map[name], {name: array})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 30, "kind": 1}, "weight_map": weight_map}))
    for path in (tmp_path, index):
        assert_same(read(path), arrays)
        assert open_reader(path).metadata["index"] == {"kind": 1}


@pytest.mark.parametrize("name", ["a.npz", "flax_model.msgpack"])
def test_a_folder_with_one_file_of_another_format_is_read(name, tmp_path):
    arrays = random_arrays({"float32"})
    write(format_of(tmp_path / name), tmp_path / name, arrays)
    assert_same(read(tmp_path), arrays)


def test_safetensors_go_before_torch_in_a_folder_with_both(tmp_path):
    write("torch", tmp_path / "pytorch_model.bin", random_arrays({"float32"}))
    write("safetensors", tmp_path / "model.safetensors", random_arrays({"int8"}))
    assert open_reader(tmp_path).format == "safetensors"


def test_a_distributed_checkpoint_is_known_by_its_metadata(tmp_path):
    arrays = random_arrays({"float32"})
    write("dcp", tmp_path / "x", arrays)
    for path in (tmp_path / "x", tmp_path / "x" / ".metadata"):
        assert_same(read(path), arrays)
        assert open_reader(path).format == "dcp"
    assert format_of(tmp_path / "new.dcp") == "dcp"


def test_what_has_no_known_format_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(CheckpointError, match="its extension says no format; name one of safetensors, torch, npz"):
        open_reader(tmp_path / "x.txt")
    with pytest.raises(CheckpointError, match="has no checkpoint of a known format in it"):
        open_reader(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not exist$"):
        open_reader(tmp_path / "y.pt")
    for call in (lambda: open_reader(tmp_path, "zip"), lambda: format_of(tmp_path, "zip")):
        with pytest.raises(CheckpointError, match=r"^the format zip is unknown; known are safetensors, torch"):
            call()
    with pytest.raises(CheckpointError, match="keras is read, not written; written are safetensors, torch"):
        format_of(tmp_path / "new.h5")
    with pytest.raises(CheckpointError, match=r"gguf is read, not written; llama.cpp's convert_hf_to_gguf.py makes it"):
        format_of(tmp_path / "new.gguf")
    with pytest.raises(CheckpointError, match=r"its extension says no format; name one of safetensors.* \(--format\)$"):
        format_of(tmp_path / "new.txt")
    for format in ("npz", "msgpack"):
        with pytest.raises(CheckpointError, match=f"is a folder, which no {format} is"):
            open_reader(tmp_path, format)
    assert format_of(tmp_path / "new") == format_of(tmp_path / "Llama-3.2-1B") == "safetensors"
    assert format_of(tmp_path / "new", "orbax") == "orbax"


@pytest.mark.parametrize("format", FORMATS)
def test_a_pipe_is_refused_and_not_waited_for(format, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"is not a (file|folder)"):
        open_reader(tmp_path / "pipe", format)


# ---- safetensors


def official(tmp_path, arrays, name="official.safetensors", **options):
    safetensors.numpy.save_file(arrays, tmp_path / name, **options)
    return tmp_path / name


def in_numpy(dtypes):
    return {name for name in dtypes if not name.startswith("float8")}


def test_safetensors_of_the_library_are_read_and_written_again_byte_for_byte(tmp_path):
    arrays = random_arrays(in_numpy(HELD["safetensors"]))
    path = official(tmp_path, arrays, metadata={"format": "pt"})
    assert_same(read(path), arrays)
    with open_reader(path) as reader:
        again = write(
            "safetensors", tmp_path / "again.safetensors", {one: arrays[one] for one in reader.tensors}, reader.metadata
        )
    assert again.read_bytes() == path.read_bytes()


def test_the_library_reads_our_safetensors(tmp_path):
    arrays = random_arrays(in_numpy(HELD["safetensors"]))
    path = write("safetensors", tmp_path / "x.safetensors", arrays, {"b": "ö\n\x01", "a": '"'})
    assert_same(safetensors.numpy.load_file(path), arrays)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"b": "ö\n\x01", "a": '"'}


def test_tensors_keep_their_order_unless_that_would_misalign_one(tmp_path):
    rng = np.random.default_rng(0)
    one = {"z": random_array("float32", (3,), rng), "a": random_array("int8", (3,), rng)}
    assert list(open_reader(write("safetensors", tmp_path / "1.safetensors", one)).tensors) == ["z", "a"]
    two = dict(reversed(one.items()))
    path = write("safetensors", tmp_path / "2.safetensors", two)
    assert list(open_reader(path).tensors) == ["z", "a"]
    assert_same(safetensors.numpy.load_file(path), two)


def hub_folder(folder, arrays, shards=3):
    """Write a folder as the hub's libraries do."""
    folder.mkdir()
    weight_map = {}
    for index in range(shards):
        name = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        own = {key: array for number, (key, array) in enumerate(arrays.items()) if number % shards == index}
        official(folder, own, name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, name)
    size = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": size, "total_parameters": 7}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return folder


def test_a_folder_of_shards_is_read_and_written_again_byte_for_byte(tmp_path):
    arrays = random_arrays(in_numpy(HELD["safetensors"]))
    path = hub_folder(tmp_path / "hub", arrays)
    assert_same(read(path), arrays)
    assert_same(read(path / "model.safetensors.index.json"), arrays)
    with open_reader(path) as reader:
        assert reader.metadata["index"] == {"total_parameters": 7}
        assert len(reader.files()) == 4
        writer = make_writer("safetensors", tmp_path / "again", list(reader.tensors.values()), reader.metadata)
        for name in random.Random(0).sample(list(arrays), len(arrays)):
            writer.write(name, reader.read(name))
        writer.finish()
    assert content(tmp_path / "again") == content(path)


def test_a_folder_without_index_is_all_its_files(tmp_path):
    arrays = random_arrays({"float32", "int8"}, shapes=[(2,)])
    for name, array in arrays.items():
        official(tmp_path, {name: array}, f"{name}.safetensors")
    assert_same(read(tmp_path), arrays)
    with open_reader(tmp_path) as reader:
        assert [info.file for info in reader.tensors.values()] == ["float32.s0.safetensors", "int8.s0.safetensors"]
        assert "index" not in reader.metadata


def test_an_index_and_a_whole_file_beside_it_are_ambiguous(tmp_path):
    path = hub_folder(tmp_path / "hub", random_arrays({"float32"}))
    official(path, random_arrays({"float32"}), "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both model\.safetensors and model\.safetensors\.index\.json; name"):
        open_reader(path)
    assert len(open_reader(path / "model.safetensors").tensors) == 5


def test_shards_in_folders_within_are_written_and_read(tmp_path):
    arrays = random_arrays({"float32"}, shapes=[(2,), (3,)])
    files = dict(zip(arrays, ["text/a.safetensors", "b.safetensors"], strict=True))
    assert_same(read(write("safetensors", tmp_path / "x", arrays, files=files)), arrays)


@pytest.mark.parametrize("file", ["../a.safetensors", "/a.safetensors", "a/../../b.safetensors", "a\\b.safetensors"])
def test_no_shard_is_written_outside(file, tmp_path):
    info = TensorInfo("t", "int8", (1,), file)
    with pytest.raises(CheckpointError, match=r"is not named as one of its folder$"):
        make_writer("safetensors", tmp_path / "x", [info], {})


def test_some_tensors_in_files_and_some_not_is_refused(tmp_path):
    one = [TensorInfo("t", "int8", (1,), "a.safetensors"), TensorInfo("s", "int8", (1,))]
    with pytest.raises(CheckpointError, match=r"some tensors name a file and some don't$"):
        make_writer("safetensors", tmp_path / "x", one, {})


def test_the_links_of_the_hubs_cache_are_followed(tmp_path):
    arrays = random_arrays({"float32"})
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    hub = hub_folder(tmp_path / "hub", arrays)
    for file in hub.iterdir():
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    assert_same(read(snapshot), arrays)


def test_a_thousand_shards_open_at_once(tmp_path):
    def shards(count):
        arrays = random_arrays({"float32"}, shapes=[(2,)] * count)
        files = {name: f"model-{index:04}.safetensors" for index, name in enumerate(arrays)}
        return write("safetensors", tmp_path / f"of-{count}", arrays, files=files), arrays

    (path, arrays), (small, _) = shards(1000), shards(100)
    open_reader(small)
    assert count_calls(lambda: open_reader(path)) < 11 * count_calls(lambda: open_reader(small))
    reader = open_reader(path)
    assert_same({name: reader.read(name) for name in reader.tensors}, arrays)
    if Path("/proc/self/fd").is_dir():
        assert len(list(Path("/proc/self/fd").iterdir())) < 200


# ---- npz


def test_numpy_reads_our_npz(tmp_path):
    arrays = random_arrays(name for name in HELD["npz"] if np.dtype(name).isbuiltin == 1)
    path = write("npz", tmp_path / "x.npz", arrays)
    with np.load(path) as file:
        assert_same(dict(file), arrays)


def test_numpy_reads_foreign_dtypes_of_our_npz_as_the_void_it_writes_itself(tmp_path):
    arrays = random_arrays({"bfloat16", "float8_e5m2"})
    path = write("npz", tmp_path / "x.npz", arrays)
    with np.load(path) as file:
        assert set(file.files) == {*arrays, "attn_bridge.json"}
        for name, array in arrays.items():
            assert file[name].dtype.kind == "V"
            assert file[name].tobytes() == array.tobytes()
        assert json.loads(file["attn_bridge.json"])["dtypes"]["bfloat16.s0"] == "bfloat16"


def test_npz_of_numpy_are_read(tmp_path):
    arrays = random_arrays(name for name in HELD["npz"] if np.dtype(name).isbuiltin == 1)
    np.savez(tmp_path / "x.npz", **arrays)
    assert_same(read(tmp_path / "x.npz"), arrays)


@pytest.mark.parametrize("part", [1 << 24, 64])
def test_npz_in_another_order_come_out_in_ours(tmp_path, monkeypatch, part):
    monkeypatch.setattr(strided, "PART", part)
    rng = np.random.default_rng(0)
    arrays = {name: random_array(name, (5, 3, 4), rng) for name in ("float32", "complex64", "int16", "bool")}
    stored = {name: np.asfortranarray(array) for name, array in arrays.items()}
    stored |= {f"{name}.big": array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    stored |= {f"{name}.both": np.asfortranarray(stored[f"{name}.big"]) for name in arrays}
    np.savez(tmp_path / "x.npz", **stored)
    wanted = {name: arrays[name.partition(".")[0]] for name in stored}
    with open_reader(tmp_path / "x.npz") as reader:
        for name, array in wanted.items():
            if array.dtype.kind in "bi":
                assert reader.read(name).tobytes() == array.tobytes(), name
            np.testing.assert_array_equal(reader.read(name), array)
            assert bytes(reader.read_range(name, 5, 31)) == reader.read(name).tobytes()[5:31]


def test_a_float8_that_numpy_saved_is_refused_since_it_does_not_say_which(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3, ml_dtypes.float8_e5m2).view("V1"))
    with pytest.raises(
        CheckpointError, match=r"a is an array of \|V1, which is no dtype of a tensor; save it as another$"
    ):
        open_reader(tmp_path / "x.npz")


@pytest.mark.parametrize("format", ["npz", "torch"])
def test_a_flipped_bit_in_a_zip_is_found_when_the_tensor_is_read_whole(format, tmp_path):
    arrays = {"a": np.arange(100, dtype=np.float32)}
    path = write(format, place(tmp_path, format), arrays)
    data = bytearray(path.read_bytes())
    at = data.index(np.float32(50).tobytes() + np.float32(51).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with open_reader(path) as reader:
        assert len(reader.read_range("a", 4, 400)) == 396
        with pytest.raises(CheckpointError, match=r"is damaged: its checksum is another$"):
            reader.read("a")
        reader.read_range("a", 0, 100)
        with pytest.raises(CheckpointError, match=r"is damaged: its checksum is another$"):
            reader.read_range("a", 100, 400)


@pytest.mark.parametrize("format", FORMATS)
def test_threads_may_read_the_same_tensor(format, tmp_path):
    arrays = {"a": random_array("int8", (100_000,), np.random.default_rng(0))}
    path = write(format, place(tmp_path, format), arrays)
    with open_reader(path, format) as reader, ThreadPoolExecutor(4) as pool:

        def read_in_parts(_):
            return b"".join(bytes(reader.read_range("a", at, at + 1000)) for at in range(0, 100_000, 1000))

        assert set(pool.map(read_in_parts, range(8))) == {arrays["a"].tobytes()}


@pytest.mark.parametrize("format", ["npz", "torch"])
def test_pythons_zip_finds_our_archives_whole(format, tmp_path):
    path = write(format, place(tmp_path, format), random_arrays({"float32"}), {"a": "b"})
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert {one.date_time for one in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize("format", ["npz", "torch"])
def test_archives_with_64_bit_sizes_and_offsets_are_read_and_written(format, tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 500)
    arrays = random_arrays({"float32"}, shapes=[(200,), (3,), (300,)])
    path = write(format, place(tmp_path, format), arrays)
    assert_same(read(path), arrays)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert max(one.header_offset for one in file.infolist()) > 1000


# ---- msgpack and Orbax


def test_plain_leaves_of_msgpack_come_back_and_numbers_are_written_as_text(tmp_path):
    arrays = random_arrays({"float32"}, shapes=[(2,)])
    metadata = {"step": 3, "a.name": "x", "a.rate": 0.5, "a.none": None, "a.on": True, "empty": {}, "big": -(1 << 40)}
    path = write("msgpack", tmp_path / "x.msgpack", arrays, metadata)
    assert_same(read(path), arrays)
    assert open_reader(path).metadata == metadata


def test_large_arrays_of_msgpack_are_cut_as_flax_does(tmp_path, monkeypatch):
    monkeypatch.setattr(msgpack_writer, "CHUNK", 100)
    arrays = random_arrays({"float32", "int8", "complex128"}, shapes=[(3, 50), (25,), (101,), ()])
    path = write("msgpack", tmp_path / "x.msgpack", arrays)
    assert path.read_bytes().count(b"__msgpack_chunked_array__") == 7
    assert_same(read(path), arrays)
    with open_reader(path) as reader:
        for name, array in arrays.items():
            start = min(3, array.nbytes)
            assert bytes(reader.read_range(name, start, array.nbytes)) == array.tobytes()[start:]


def test_large_arrays_of_orbax_are_cut_into_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_writer, "CHUNK", 100)
    arrays = random_arrays({"float32", "int8", "complex128"}, shapes=[(3, 50), (25,), (101,), (), (2, 3, 4), (0, 9)])
    path = write("orbax", tmp_path / "x.orbax", arrays)
    assert (path / "float32.s0" / "2.1").is_file()
    assert_same(read(path), arrays)
    rng = random.Random(0)
    with open_reader(path) as reader:
        for name, array in arrays.items():
            for _ in range(20):
                start, stop = sorted(rng.choices(range(array.nbytes + 1), k=2))
                assert bytes(reader.read_range(name, start, stop)) == array.tobytes()[start:stop]


def test_bools_that_orbax_would_not_read_are_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"bool.s0 has bools that are neither 0 nor 1, which Orbax would not read$"
    ):
        write("orbax", tmp_path / "x.orbax", random_arrays({"bool"}))


@pytest.mark.parametrize("shape", [(), (7,), (1, 7), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_blocks_of_an_array_are_its_elements_in_order(shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start in range(array.size + 1):
        for stop in range(start, array.size + 1):
            found = [array[box].reshape(-1) for box in boxes(shape, start, stop)]
            assert len(found) <= 2 * len(shape) + 1
            assert np.concatenate([*found, np.empty(0, int)]).tolist() == list(range(start, stop))


def test_short_reads_are_read_on_until_all_is_there(tmp_path, monkeypatch):
    content = np.random.default_rng(3).bytes(100)
    (tmp_path / "x").write_bytes(content)
    whole, pieces = (os.pread, os.preadv), []

    def pread(number, count, start):
        return whole[0](number, min(count, 7), start)

    def preadv(number, buffers, start):
        pieces.append(start)
        return whole[1](number, [buffers[0][:7]], start)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    assert bytes(File(tmp_path / "x").read(10, 25)) == content[10:35]
    assert pieces == [17, 24, 31]
    assert bytes(File(tmp_path / "x").read(70, 30)) == content[70:]


# ---- distributed checkpoints of torch


def test_columns_of_a_distributed_checkpoint_are_read_alone(tmp_path, monkeypatch):
    array = random_array("float32", (40, 2, 1024), np.random.default_rng(0))
    monkeypatch.setattr(dcp_writer, "CHUNK", 10 * array[0].nbytes)
    path = write("dcp", tmp_path / "x.dcp", {"a": array})
    amounts, whole = [], Stored.read
    monkeypatch.setattr(
        Stored, "read", lambda one, start, stop: amounts.append(stop - start) or whole(one, start, stop)
    )
    with open_reader(path) as reader:
        for step, start, run in ((1024, 1024 * 3 + 70, 12), (2048, 2048 * 9 + 1500, 200), (2048, 2048 * 5 + 900, 300)):
            rows = array.reshape(-1, step)
            first, column = divmod(start, step)
            block = np.zeros((len(rows) - first, run), "f4")
            amounts.clear()
            reader.read_rows("a", start, step, block)
            assert block.tobytes() == rows[first:, column : column + run].tobytes()
            assert sum(amounts) <= 2 * block.nbytes
