"""Weights that Keras saves in HDF5: read by their paths in the file, without following anything out of it."""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError

h5py = pytest.importorskip("h5py", reason="files of Keras are read by h5py, of the extra keras")

W = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
ARRAYS = {
    "layers/dense/vars/0": W,
    "layers/dense/vars/1": W[0].astype(np.float16),
    "layers/dense_1/vars/0": W.astype(ml_dtypes.bfloat16),
    "optimizer/vars/0": np.int32(7),
    "seen/vars/0": np.array([True, False]),
}


def saved(path, arrays=ARRAYS, **options):
    """Write a file as `keras.Model.save_weights` does."""
    with h5py.File(path, "w", **options) as file:
        for name, array in arrays.items():
            if array.dtype == ml_dtypes.bfloat16:
                file[name] = array
                file[name].attrs["dtype"] = "bfloat16"
            else:
                file[name] = array
        file.create_group("layers/dropout/vars").attrs["name"] = "dropout"
    return path


def check(found, arrays=ARRAYS):
    assert set(found) == {name.replace("/", ".") for name in arrays}
    for name, array in arrays.items():
        one = found[name.replace("/", ".")]
        assert (one.dtype, one.shape) == (array.dtype, array.shape)
        assert one.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["x.weights.h5", "x.h5", "x.hdf5"])
def test_names_are_paths_in_the_file(tmp_path, name):
    check(checkpoints.read(saved(tmp_path / name)))


def test_files_of_newer_hdf5_are_read(tmp_path):
    check(checkpoints.read(saved(tmp_path / "x.h5", libver="latest")))


def archived(path, **files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"metadata.json": b"{}", "config.json": b"{}", **files}.items():
            archive.writestr(name, data)
    return path


def test_archives_of_keras_are_read(tmp_path):
    weights = saved(tmp_path / "w.h5").read_bytes()
    check(checkpoints.read(archived(tmp_path / "x.keras", **{"model.weights.h5": weights})))


def halves(folder):
    """Write two shards and return their index."""
    names = list(ARRAYS)
    parts = {"m_00000.weights.h5": names[:2], "m_00001.weights.h5": names[2:]}
    for file, part in parts.items():
        saved(folder / file, {name: ARRAYS[name] for name in part})
    by_group = {f"/{name.rpartition('/')[0]}": [file] for file, part in parts.items() for name in part}
    return {"metadata": {"total_size": 1}, "weight_map": by_group | {"/seen/vars": "m_00001.weights.h5"}}


def test_sharded_weights_are_read_by_their_index(tmp_path):
    (tmp_path / "m.weights.json").write_text(json.dumps(halves(tmp_path)))
    check(checkpoints.read(tmp_path / "m.weights.json"))
    check(checkpoints.read(tmp_path))


def test_sharded_weights_in_an_archive_are_read(tmp_path):
    index = json.dumps(halves(tmp_path))
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("m_*")}
    check(checkpoints.read(archived(tmp_path / "x.keras", **shards, **{"model.weights.json": index})))


def kept(index, file):
    """Return an index without the groups of a file."""
    groups = {
        group: [one for one in np.atleast_1d(files) if one != file] for group, files in index["weight_map"].items()
    }
    return {"weight_map": {group: files for group, files in groups.items() if files}}


@pytest.mark.parametrize("number", [0, 1])
def test_an_index_that_leaves_out_a_file_of_its_model_is_refused(tmp_path, number):
    file = f"m_{number:05}.weights.h5"
    index = json.dumps(kept(halves(tmp_path), file))
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("m_*")}
    (tmp_path / "m.weights.json").write_text(index)
    archive = archived(tmp_path / "x.keras", **shards, **{"model.weights.json": index})
    for path in (tmp_path / "m.weights.json", archive):
        with pytest.raises(CheckpointError, match=f"its weight_map does not name {file}, which is a file of its model"):
            checkpoints.convert(path, tmp_path / "out", to_layout="same")


def test_an_index_that_names_a_group_its_files_lack_is_refused(tmp_path):
    index = halves(tmp_path)
    index["weight_map"]["/layers/dense/vars"] = ["m_00000.weights.h5", "m_00001.weights.h5"]
    (tmp_path / "m.weights.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"m_00001.weights.h5 has no array of /layers/dense/vars, which the index"
    ):
        checkpoints.read(tmp_path / "m.weights.json")


def test_a_file_of_several_read_alone_says_so(tmp_path):
    halves(tmp_path)
    note = "read alone: m_00001.weights.h5 is one of several files of a model; its index (.weights.json) has all"
    assert checkpoints.inspect(tmp_path / "m_00001.weights.h5").notes == (note,)
    (tmp_path / "m_00000.weights.h5").unlink()
    assert checkpoints.inspect(tmp_path / "m_00001.weights.h5").notes == ()


def test_a_preset_folder_is_its_weights(tmp_path):
    saved(tmp_path / "model.weights.h5")
    saved(tmp_path / "task.weights.h5", {"head": W})
    (tmp_path / "config.json").write_text("{}")
    check(checkpoints.read(tmp_path))


def test_rules_and_conversions_take_the_names(tmp_path):
    source = saved(tmp_path / "x.weights.h5")
    (tmp_path / "rules.toml").write_text(
        '[[rule]]\ntorch = "fc.weight"\nflax = "layers.dense.vars.0"\npattern = "o i -> i o"\n'
    )
    checkpoints.convert(source, tmp_path / "out", rules=tmp_path / "rules.toml", drop=["*.1", "*_1.*", "opt*", "seen*"])
    np.testing.assert_array_equal(checkpoints.read(tmp_path / "out")["fc.weight"], W.T)
    checkpoints.convert(source, tmp_path / "out.orbax", to_layout="same")
    assert checkpoints.verify(source, tmp_path / "out.orbax").passed


def opaque(file):
    file["x"] = np.zeros(3, "V5")


def gzipped(file):
    file.create_dataset("x", data=W, compression="gzip")


UNREAD = {
    "text": (lambda file: file.update({"x": "hello"}), "its elements are not numbers that NumPy has"),
    "big-endian": (lambda file: file.update({"x": W.astype(">f4")}), "it is big-endian"),
    "opaque": (opaque, "it has opaque elements of 5 bytes"),
    "compressed": (gzipped, "its numbers are in chunks, maybe compressed; Keras stores them in one piece"),
    "empty": (lambda file: file.update({"x": h5py.Empty("f4")}), "it has no elements"),
    "never written": (
        lambda file: file.create_dataset("x", (1 << 40,), "f4"), "no numbers were ever written to it"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_what_numpy_has_not_is_named(tmp_path, case):
    make, reason = UNREAD[case]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
        file["w"] = W
    with pytest.raises(CheckpointError, match=f"x of .*x.h5 can't be read: {reason}; --strip"):
        checkpoints.convert(tmp_path / "x.h5", tmp_path / "out", to_layout="same")
    checkpoints.convert(tmp_path / "x.h5", tmp_path / "out", to_layout="same", drop=["x"])
    np.testing.assert_array_equal(checkpoints.read(tmp_path / "out")["w"], W)


def virtual(file):
    layout = h5py.VirtualLayout((2, 3), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "w", (2, 3))
    file.create_virtual_dataset("x", layout)


def external(file):
    file.create_dataset("x", (2, 3), "f4", external=[("/etc/hostname", 0, 24)])


def circle(file):
    file["a/b"] = W
    file["a/again"] = file["a"]


def deep(file):
    file["/".join("g" * 80)] = W


def doubled(file):
    file["a.b"] = W
    file["a/b"] = W


HOSTILE = {
    "a link to a file": (lambda file: file.update({"x": h5py.ExternalLink("/etc/x.h5", "w")}), "x is a link to"),
    "a soft link": (lambda file: file.update({"x": h5py.SoftLink("/w")}), "x is a link to another object or file"),
    "a virtual dataset": (virtual, "x has its numbers in other files, which are not read"),
    "external storage": (external, "x has its numbers in other files, which are not read"),
    "a circle": (circle, "the group a/again has two names"),
    "deep groups": (deep, "is deeper than 64 groups"),
    "two of a name": (doubled, "two of its arrays have the name a.b"),
    "control characters": (lambda file: file.update({"a\nb": W}), r"the name a\\nb has control characters"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_references_out_of_the_file_are_refused(tmp_path, case):
    make, reason = HOSTILE[case]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
    with pytest.raises(CheckpointError, match=reason) as caught:
        checkpoints.convert(tmp_path / "x.h5", tmp_path / "out", to_layout="same")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_refused_or_read(tmp_path):
    whole = saved(tmp_path / "x.h5").read_bytes()
    draw = np.random.default_rng(0)
    bad = tmp_path / "bad.h5"
    for number in range(60):
        data = bytearray(whole)
        for at in draw.integers(0, 2000, 1 + number % 3):
            data[at : at + 4] = draw.bytes(4)
        bad.write_bytes(data[: len(data) - 100 * (number % 7)])
        with contextlib.suppress(CheckpointError):  # any other error fails the test
            assert all(array.nbytes <= len(whole) for array in checkpoints.read(bad).values())


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no model.weights.h5 in it, so it is not an archive of Keras"),
        ({"model.weights.h5": b"no"}, "model.weights.h5: is not an HDF5 file"),
        ({"model.weights.json": '{"weight_map": {"/a": "x.h5"}}'}, "has no x.h5 in it, which model.weights.json names"),
        ({"model.weights.json": "{}"}, "is not an index of Keras: it has no weight_map"),
        ({"model.weights.json": '{"weight_map": {"/a": 1}}'}, "names a file by something that is not text"),
    ],
)
def test_archives_without_weights_are_refused(tmp_path, files, reason):
    with pytest.raises(CheckpointError, match=reason):
        checkpoints.read(archived(tmp_path / "x.keras", **files))


def test_an_index_names_files_of_its_folder_alone(tmp_path):
    (tmp_path / "in").mkdir()
    saved(tmp_path / "x.h5")
    index = tmp_path / "in" / "m.weights.json"
    index.write_text('{"weight_map": {"/a": "../x.h5"}}')
    with pytest.raises(CheckpointError, match=r"the file \.\./x\.h5 is not named as one of its folder"):
        checkpoints.read(index)


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    source = saved(tmp_path / "x.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(CheckpointError, match=r"files of Keras need h5py: pip install 'attn-bridge\[keras\]'"):
        checkpoints.read(source)
