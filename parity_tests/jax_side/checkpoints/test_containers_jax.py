"""Containers of weights against Flax and Orbax: what they save is read, what we write they restore, bit for bit."""

from __future__ import annotations

import json
import shutil
import sys
import threading

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, TensorInfo, make_writer, open_reader
from attn_bridge.checkpoints.containers.orbax import ocdbt
from attn_bridge.checkpoints.containers.orbax import writer as orbax_writer

from ...fuzz.checkpoints import outcome
from ...fuzz.samples import HELD, assert_same, random_array, random_arrays, read, write
from ...support.calls import cover


def nested(flat):
    """Return nested dicts of dotted names."""
    tree = {}
    for name, value in flat.items():
        *parts, last = name.split(".")
        into = tree
        for part in parts:
            into = into.setdefault(part, {})
        into[last] = value
    return tree


def flat(tree, prefix=""):
    """Return the leaves of nested dicts and lists by dotted name."""
    found = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict | list | tuple) else {name: value}
    return found


# ---- msgpack


def test_flax_restores_our_msgpack(tmp_path):
    arrays = random_arrays(HELD["msgpack"])
    path = write("msgpack", tmp_path / "x.msgpack", arrays, {"float32.step": 3, "lr": 0.5, "name": "x", "none": {}})
    found = flax.serialization.msgpack_restore(path.read_bytes())
    assert (found.pop("lr"), found.pop("name"), found.pop("none"), found["float32"].pop("step")) == (0.5, "x", {}, 3)
    assert_same(flat(found), arrays)


def test_flax_msgpack_round_trips_byte_for_byte(tmp_path):
    arrays = random_arrays(HELD["msgpack"])
    tree = nested(arrays) | {"step": 3, "lr": 0.5, "none": None, "empty": {}, "a text": "x" * 300, "ok": True}
    data = flax.serialization.msgpack_serialize(tree)
    (tmp_path / "x.msgpack").write_bytes(data)
    assert_same(read(tmp_path / "x.msgpack"), arrays)
    with open_reader(tmp_path / "x.msgpack") as reader:
        assert reader.metadata == {key: tree[key] for key in sorted({"step", "lr", "none", "empty", "a text", "ok"})}
        writer = make_writer("msgpack", tmp_path / "y.msgpack", list(reader.tensors.values()), reader.metadata)
        for name in reader.tensors:
            writer.write(name, reader.read(name))
        writer.finish()
    assert (tmp_path / "y.msgpack").read_bytes() == data


def test_msgpack_with_jax_arrays_lists_and_numeric_keys_is_read(tmp_path):
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": [np.ones(2), {"c": np.zeros(1)}], "d": {0: np.ones(1)}}
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree | {"e": np.float32(2.5)}))
    wanted = {name: np.asarray(value) for name, value in flat(tree).items()} | {"e": np.float32(2.5).reshape(())}
    assert_same(read(tmp_path / "x.msgpack"), wanted)


def test_msgpack_of_flax_in_pieces_is_read_and_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    monkeypatch.setattr("attn_bridge.checkpoints.containers.msgpack.writer.CHUNK", 100)
    arrays = random_arrays({"float32", "complex128"}, shapes=[(3, 50), (25,), ()])
    data = flax.serialization.msgpack_serialize(nested(arrays))
    (tmp_path / "x.msgpack").write_bytes(data)
    assert_same(read(tmp_path / "x.msgpack"), arrays)
    assert write("msgpack", tmp_path / "y.msgpack", arrays).read_bytes() == data
    assert_same(flat(flax.serialization.msgpack_restore(data)), arrays)


def test_a_python_complex_in_msgpack_is_refused(tmp_path):
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.msgpack_serialize({"a": 1j}))
    with pytest.raises(CheckpointError, match="a is a complex number, neither a tensor nor a plain value"):
        open_reader(tmp_path / "x.msgpack")


# ---- Orbax


@cover.rotated(
    ("format", "chunk", "file", "checkpointer"),
    [("orbax", 1 << 28, 0), ("orbax", 16, 0), ("orbax+ocdbt", 16, 3000), ("orbax+ocdbt", 1 << 28, 1 << 31)],
    [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer],
)
def test_orbax_restores_our_folder(checkpointer, format, chunk, file, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_writer, "CHUNK", chunk)
    monkeypatch.setattr(orbax_writer, "FILE", file)
    monkeypatch.setattr(ocdbt, "FANOUT", 4096 if chunk > 16 else 3)  # of 3, the tree has several levels
    arrays = random_arrays(HELD["orbax"], format="orbax")
    path = write(format, tmp_path / "x", arrays, {"kind": "test"})
    with checkpointer() as one:
        assert_same(flat(one.restore(path)), arrays)
    monkeypatch.setitem(sys.modules, "tensorstore", None)  # which nothing of ours needs
    assert_same(read(path), arrays)
    assert (path / "manifest.ocdbt").is_file() == (format == "orbax+ocdbt")


@pytest.mark.parametrize("format", ["orbax", "orbax+ocdbt"])
def test_orbax_restores_our_folder_into_arrays_of_jax(format, tmp_path):
    arrays = random_arrays({"float32", "bfloat16", "int32", "bool"}, shapes=[(4, 3), ()], format="orbax")
    path = write(format, tmp_path / "x", arrays)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = nested({name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place) for name, one in arrays.items()})
    with ocp.StandardCheckpointer() as one:
        found = flat(one.restore(path, target))
    assert all(isinstance(value, jax.Array) for value in found.values())
    assert_same(found, arrays)


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_we_read_what_orbax_saves(use_ocdbt, use_zarr3, tmp_path):
    wanted = random_arrays(HELD["orbax"] - {"bool"}, shapes=[(5, 3), (7,), (2, 1, 3)])
    wanted["bool.s0"] = np.array([True, False])
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as one:
        one.save(tmp_path / "x", nested(wanted))
    with open_reader(tmp_path / "x") as reader:
        assert_same({name: reader.read(name) for name in reader.tensors}, wanted)
        data = wanted["float32.s0"].tobytes()
        for start in range(0, 60, 7):
            for stop in range(start, 61, 9):
                assert bytes(reader.read_range("float32.s0", start, stop)) == data[start:stop]
        assert len(reader.files()) > 2


def test_orbax_scalars_lists_and_empty_nodes_are_read(tmp_path):
    tree = {
        "a": {"k": jnp.ones((3, 2), jnp.bfloat16)},
        "l": [np.ones(2), {"x": np.ones(3)}],
        "n": None,
        "e": {},
        "s": 3,
    }
    with ocp.StandardCheckpointer() as one:
        one.save(tmp_path / "x", tree)
    wanted = {name: np.asarray(value) for name, value in flat(tree).items() if value is not None}
    assert_same(read(tmp_path / "x"), wanted)
    assert open_reader(tmp_path / "x").metadata == {"empty": {"e": "Dict", "n": "None"}}


def test_a_step_of_a_checkpoint_manager_is_read(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=ocp.args.StandardSave({"a": {"b": np.arange(3.0)}}))
        manager.wait_until_finished()
    assert_same(read(tmp_path / "run" / "7"), {"a.b": np.arange(3.0)})


def test_a_large_orbax_array_is_read_in_parts(tmp_path):
    array = random_array("float32", (300, 200), np.random.default_rng(0))
    save_args = {"a": ocp.SaveArgs(chunk_byte_size=10_000)}
    with ocp.PyTreeCheckpointer() as one:
        one.save(tmp_path / "x", {"a": jax.device_put(array)}, save_args=save_args)
    with open_reader(tmp_path / "x") as reader:
        step = 12_347
        parts = [reader.read_range("a", at, min(at + step, array.nbytes)) for at in range(0, array.nbytes, step)]
    assert b"".join(parts) == array.tobytes()


def test_an_uncompressed_ocdbt_database_is_read_without_tensorstore(tmp_path, monkeypatch):
    wanted = random_arrays({"float32", "bfloat16"}, shapes=[(40, 30), (7,), ()])
    with ocp.PyTreeCheckpointer() as one:
        one.save(tmp_path / "x", nested(wanted))
    base = {"driver": "file", "path": f"{tmp_path / 'x'}/"}
    there = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    values = {key: there[key] for key in there.list().result()}
    shutil.rmtree(tmp_path / "x" / "d")
    shutil.rmtree(tmp_path / "x" / "ocdbt.process_0")
    (tmp_path / "x" / "manifest.ocdbt").unlink()
    config = {"compression": None, "max_inline_value_bytes": 100, "max_decoded_node_bytes": 400}
    there = tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    for key in values:
        if key.endswith(b"/.zarray"):
            name = key.decode().removesuffix("/.zarray")
            array = json.loads(values[key]) | {"compressor": None}
            (chunk,) = (one for one in values if one.startswith(f"{name}/".encode()) and one != key)
            there[key], there[chunk] = json.dumps(array).encode(), wanted[name].tobytes()
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    assert_same(read(tmp_path / "x"), wanted)


def test_zeros_of_terabytes_that_a_small_folder_claims_are_refused(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as one:
        one.save(tmp_path / "x", {"a": np.arange(3000.0), "b": np.arange(4.0)})
    array, metadata = tmp_path / "x" / "a" / ".zarray", tmp_path / "x" / "_METADATA"
    said = json.loads(array.read_text())
    assert said["compressor"]
    array.write_text(json.dumps(said | {"shape": [1 << 39]}))
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"store_array_data_equal_to_fill_value": False}))
    with pytest.raises(CheckpointError, match=r"x: its arrays claim 4398046511104 bytes or more; its files have \d+$"):
        checkpoints.convert(tmp_path / "x", tmp_path / "y.npz", to_layout="same")
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("use_zarr3", [True, False])
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_missing_chunks_are_refused(use_ocdbt, use_zarr3, tmp_path):
    tree = {"a": {"b": np.arange(3000.0).reshape(30, 100)}, "c": np.arange(4.0)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)) as one:
        one.save(tmp_path / "x", tree)
    chunk = "a.b/c/0/0" if use_zarr3 else "a.b/0.0"
    if use_ocdbt:
        base = {"driver": "file", "path": f"{tmp_path / 'x'}/"}
        there = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        del there[chunk.encode()]
    else:
        (tmp_path / "x" / chunk).unlink()
    with pytest.raises(CheckpointError, match=r"a\.b has 0 chunks; its shape needs 1$"):
        read(tmp_path / "x")


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_links_out_of_a_folder_that_tensorstore_reads_are_refused(use_ocdbt, tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as one:
        one.save(tmp_path / "x", {"a": np.arange(3000.0)})
    largest = max(
        (path for path in (tmp_path / "x").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.rename(tmp_path / "secret")
    largest.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"is a link out of its folder; put a copy of the file there$"):
        read(tmp_path / "x")


def test_array_shards_are_read_by_chunk_and_rechunked(tmp_path, monkeypatch):
    array = random_array("float32", (64, 48), np.random.default_rng(0))
    save_args = {"a": ocp.SaveArgs(chunk_byte_size=array.nbytes // 4)}
    with ocp.PyTreeCheckpointer() as one:
        one.save(tmp_path / "x", {"a": jax.device_put(array)}, save_args=save_args)
    monkeypatch.setattr(orbax_writer, "CHUNK", array.nbytes // 2)
    checkpoints.convert(tmp_path / "x", tmp_path / "y.orbax", to_layout="same", settings={"ocdbt": 1})
    with ocp.StandardCheckpointer() as one:
        assert_same(one.restore(tmp_path / "y.orbax"), {"a": array})
    assert json.loads((tmp_path / "y.orbax" / "_METADATA").read_text())["use_ocdbt"] is True


def test_orbax_without_tensorstore_is_refused_with_what_to_install(tmp_path, monkeypatch):
    with ocp.StandardCheckpointer() as one:
        one.save(tmp_path / "x", {"a": np.ones(1)})
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(CheckpointError, match=r"needs TensorStore: pip install orbax-checkpoint$"):
        open_reader(tmp_path / "x")


@pytest.mark.parametrize("name", ["_METADATA", "manifest", "a/b", "n" * 256])
def test_names_that_can_be_no_folders_of_orbax_are_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="name"):
        make_writer("orbax", tmp_path / "x", [TensorInfo(name, "int8", (1,))], {})


def test_a_damaged_folder_of_orbax_is_refused_in_one_line(tmp_path):
    with ocp.StandardCheckpointer() as one:
        one.save(tmp_path / "x", {"a": np.arange(100.0), "b": {"c": np.ones(3)}})
    refused = 0
    for file in sorted(path for path in (tmp_path / "x").rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for cut in sorted({0, len(whole) // 2, len(whole) - 1}):
            file.write_bytes(whole[:cut])
            refused += outcome(tmp_path / "x", "orbax") == "refused"
        file.write_bytes(whole)
    assert refused > 8


def test_a_refused_folder_has_no_reads_left_running(tmp_path, monkeypatch):
    with ocp.StandardCheckpointer() as one:
        one.save(tmp_path / "x", {"a": np.ones(1), "b": np.ones(1)})
    (first, failed), (second, slow) = (tensorstore.Promise.new() for _ in range(2))
    first.set_exception(ValueError("damaged"))
    futures = iter((failed, slow))
    monkeypatch.setattr(tensorstore, "open", lambda *_, **__: next(futures))
    threading.Timer(0.3, second.set_result, (None,)).start()
    with pytest.raises(CheckpointError, match="a can't be opened: damaged"):
        open_reader(tmp_path / "x")
    assert slow.done()
