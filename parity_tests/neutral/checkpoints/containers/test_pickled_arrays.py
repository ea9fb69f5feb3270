"""Pickled trees of arrays, as users of Haiku save them: read without executing anything, or refused in a line."""

from __future__ import annotations

import collections
import os
import pickle
import types

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.containers.pickles import ndarrays
from attn_bridge.checkpoints.containers.pickles.calls import Record

W = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
TREE = {
    "mlp/~/linear_0": {"w": W, "b": W[0].astype(ml_dtypes.bfloat16)},
    "turned": np.asfortranarray(W),
    "big": W.astype(">f4"),
    "scalar": np.array(3, np.int32),
    "layers": [{"w": W + 1}, (W + 2, W.astype(bool))],
    "empty": np.zeros((0, 3), np.float16),
}
NAMES = {
    "mlp/~/linear_0.w": W, "mlp/~/linear_0.b": TREE["mlp/~/linear_0"]["b"], "turned": W, "big": W,
    "scalar": TREE["scalar"], "layers.0.w": W + 1, "layers.1.0": W + 2, "layers.1.1": W.astype(bool),
    "empty": TREE["empty"],
}  # fmt: skip


def put(path, tree, protocol=4):
    path.write_bytes(pickle.dumps(tree, protocol))
    return path


@pytest.mark.parametrize("code", [5, None, "S5", "M8", "f99999", "float32"])
def test_a_dtype_without_numbers_of_known_width_is_shown_as_it_is(code):
    assert ndarrays._dtype_of(Record("numpy.dtype", (code, False, True))) == (str(code), False)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["x.pkl", "x.pickle"])
def test_arrays_of_a_tree_are_read(tmp_path, protocol, name):
    source = put(tmp_path / name, TREE | {"step": 7, "name": "a", "sizes": (1, 2)}, protocol)
    found = checkpoints.read(source)
    assert found.keys() == NAMES.keys()
    for key, array in NAMES.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        np.testing.assert_array_equal(found[key], array)
    assert checkpoints.inspect(source).metadata == {"step": 7, "name": "a", "sizes": [1, 2]}
    checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert checkpoints.verify(source, tmp_path / "out").passed


def test_pickles_of_protocol_0_are_refused_with_the_others(tmp_path):
    with pytest.raises(CheckpointError, match=r"which is refused; save it again with pickle's protocol 2 or a later"):
        checkpoints.read(put(tmp_path / "x.pkl", TREE, 0))
    assert checkpoints.read(put(tmp_path / "y.pkl", TREE, 2)).keys() == NAMES.keys()


def test_files_of_joblib_are_refused_with_what_to_save(tmp_path):
    joblib = pytest.importorskip("joblib")
    joblib.dump(TREE, tmp_path / "x.pkl")
    with pytest.raises(CheckpointError, match=r"x\.pkl: is of joblib\.dump: save the dict of arrays that joblib\.load"):
        checkpoints.read(tmp_path / "x.pkl")
    (tmp_path / "y.pkl").write_bytes(b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n.")
    with pytest.raises(CheckpointError, match=r"is of joblib\.dump"):
        checkpoints.read(tmp_path / "y.pkl")


def test_pickled_states_of_nnx_are_refused_with_what_to_save(tmp_path):
    source = tmp_path / "x.pkl"  # pickle.dumps of flax.nnx.State, which is made without a call of its class
    source.write_bytes(b"\x80\x02cflax.nnx.statelib\nState\n)\x81}X\x01\x00\x00\x00wK\x01sb.")
    with pytest.raises(CheckpointError, match=r"it is flax\.nnx\.statelib\.State; save its flax\.nnx\.to_pure_dict$"):
        checkpoints.read(source)


@pytest.mark.parametrize(("tree", "message"), [
    (W, r"x\.pkl: is a single array without a name; save a dict of arrays, and convert that$"),
    ({3, 4}, r"x\.pkl: holds no array of NumPy or JAX$"),
    (pickle.PickleBuffer, r"x\.pkl: holds no array of NumPy or JAX; it is _?pickle\.PickleBuffer$"),
])  # fmt: skip
def test_files_without_named_arrays_are_refused(tmp_path, tree, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read(put(tmp_path / "x.pkl", tree))


def test_pickled_tensors_are_refused_with_torch_save(tmp_path):
    source = tmp_path / "x.pkl"  # {"w": torch.storage._load_from_bytes()}
    source.write_bytes(b"\x80\x02}X\x01\x00\x00\x00wctorch.storage\n_load_from_bytes\n)Rs.")
    with pytest.raises(CheckpointError, match=r"w is torch.storage._load_from_bytes; torch.save saves tensors$"):
        checkpoints.read(source)


Moments = collections.namedtuple("Moments", ["count", "mu"])


def test_objects_with_arrays_are_never_passed_over(tmp_path):
    torch = b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\n)RK\x00)))tR"
    tensor = b"\x80\x02}(X\x01\x00\x00\x00w%sX\x01\x00\x00\x00t%su." % (pickle.dumps(W, 2)[2:-1], torch)
    trees = {
        "opt.0": {"w": W, "opt": (Moments(np.int32(1), {"w": W}), ())},
        "m": {"w": W, "m": np.ma.masked_array(W, W > 0)},
        "o": {"w": W, "o": types.SimpleNamespace(inner=[{"w": W}])},
        "t": tensor,
        "names": {"w": W, "names": np.array(["a", "b"])},
    }
    for name, tree in trees.items():
        source = tmp_path / f"{name}.pkl"
        source.write_bytes(tree if isinstance(tree, bytes) else pickle.dumps(tree, 2))
        with pytest.raises(
            CheckpointError, match=rf"{name} of .* can't be read: it is an (object|array) of .*--drop leaves it out"
        ):
            checkpoints.convert(source, tmp_path / "out", to_layout="same")
        checkpoints.convert(source, tmp_path / f"{name}.npz", to_layout="same", drop=[name])
        np.testing.assert_array_equal(checkpoints.read(tmp_path / f"{name}.npz")["w"], W)


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed(tmp_path):
    source = put(tmp_path / "x.pkl", {"w": W, "state": Evil(tmp_path / "made")})
    assert checkpoints.read(source).keys() == {"w"}
    (note,) = checkpoints.inspect(source).notes
    assert note == "skipped, as they are neither arrays nor plain values: state (posix.mkdir)"
    with pytest.raises(CheckpointError, match=r"holds no array of NumPy or JAX; state is posix.mkdir$"):
        checkpoints.read(put(tmp_path / "y.pkl", {"state": Evil(tmp_path / "made")}))
    assert not (tmp_path / "made").exists()


class Frozen:
    """Is pickled as dicts that can't be changed are."""

    def __init__(self, inner):
        self.inner = inner

    def __reduce__(self):
        return Frozen, (self.inner,)


@pytest.mark.parametrize(
    ("module", "name"),
    [("haiku._src.data_structures", name) for name in ("FlatMapping", "FlatMap", "frozendict")]
    + [("flax.core.frozen_dict", "FrozenDict")],
)
def test_frozen_dicts_are_dicts(tmp_path, module, name):
    tree = Frozen({"a": Frozen({"w": W}), "b": [Frozen({"w": W + 1})], "rate": 0.5})
    source = tmp_path / "x.pkl"
    made_here = f"c{Frozen.__module__}\nFrozen\n"
    source.write_bytes(pickle.dumps(tree, 2).replace(made_here.encode(), f"c{module}\n{name}\n".encode()))
    found = checkpoints.read(source)
    assert found.keys() == {"a.w", "b.0.w"}
    np.testing.assert_array_equal(found["b.0.w"], W + 1)
    assert checkpoints.inspect(source).metadata == {"rate": 0.5}
    assert not checkpoints.inspect(source).notes


def edited(tree, old, new):
    data = pickle.dumps(tree, 2)
    assert old in data
    return data.replace(old, new)


HOSTILE = {
    "objects": pickle.dumps({"w": np.array([{}, 1], object)}),
    "texts": pickle.dumps({"w": np.array(["a"])}),
    "records": pickle.dumps({"w": np.zeros(2, [("x", "f4")])}),
    "fewer bytes": edited({"w": np.zeros(3, np.uint8)}, b"K\x03\x85", b"K\x04\x85"),
    "a negative size": edited({"w": np.zeros(3, np.uint8)}, b"K\x03\x85", b"J\xff\xff\xff\xff\x85"),
    "no array": pickle.dumps({"a": 1}),
    "text": b"not a pickle",
    "nothing": b"",
    "cut short": pickle.dumps({"w": np.zeros(3)})[:-9],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_other_pickles_are_refused_in_a_line(tmp_path, case):
    source = tmp_path / "x.pkl"
    source.write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_tree_within_itself_is_refused(tmp_path):
    tree = {"w": W}
    tree["self"] = [tree]
    with pytest.raises(CheckpointError, match=r"nested too deeply"):
        checkpoints.read(put(tmp_path / "x.pkl", tree))
