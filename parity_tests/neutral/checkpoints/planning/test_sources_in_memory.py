"""Arrays that a program loads itself, as the source of a conversion."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.models import layouts

from ..checkpoints import SIZES, whole

ARRAYS = {"a.w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3).astype(ml_dtypes.bfloat16)}


class Lazy(Mapping):
    """Loads an array when it is asked for, and notes which."""

    def __init__(self, arrays):
        self.arrays, self.loaded = arrays, []

    def __getitem__(self, name):
        self.loaded.append(name)
        return self.arrays[name].copy()

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self):
        return len(self.arrays)


def check(path, arrays=ARRAYS):
    found = checkpoints.read(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype.newbyteorder("<"), array.shape)
        assert found[name].tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("make", [dict, Lazy, lambda arrays: iter(arrays.items()), lambda arrays: list(arrays.items())])
def test_mappings_and_pairs_are_sources(tmp_path, make):
    checkpoints.convert(make(ARRAYS), tmp_path / "x.safetensors", to_layout="same")
    check(tmp_path / "x.safetensors")


def test_a_lazy_mapping_is_read_twice_an_array(tmp_path):
    lazy = Lazy(ARRAYS)
    assert len(checkpoints.plan(lazy, tmp_path / "x.npz", to_layout="same").targets) == 2
    assert sorted(lazy.loaded) == ["a.w", "b"]
    lazy.loaded.clear()
    checkpoints.convert(lazy, tmp_path / "x.npz", to_layout="same")
    assert sorted(lazy.loaded) == ["a.w", "a.w", "b", "b"]


def test_arrays_of_any_order_are_written_in_order(tmp_path):
    arrays = {"f": np.asfortranarray(ARRAYS["a.w"]), "big": ARRAYS["a.w"].astype(">f4"), "every": np.arange(9)[::2]}
    checkpoints.convert(arrays, tmp_path / "out", to_layout="same")
    check(tmp_path / "out", arrays)


def test_models_in_memory_get_the_bytes_of_files(tmp_path):
    arrays = layouts.find("hf-llama").from_canonical(whole("hf-llama", 2), **SIZES)
    checkpoints.convert(arrays, tmp_path / "ours", to_layout="flax")
    np.savez(tmp_path / "x.npz", **arrays)
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "file", to_layout="flax")
    (mine,), (other,) = ((tmp_path / name).glob("*.safetensors") for name in ("ours", "file"))
    assert mine.read_bytes() == other.read_bytes()
    assert checkpoints.verify(tmp_path / "x.npz", tmp_path / "ours").passed


def test_files_of_the_current_folder_are_not_taken(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "here" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    checkpoints.convert(ARRAYS, tmp_path / "out", to_layout="same")
    assert not {path.name for path in (tmp_path / "out").iterdir()} & {"config.json", "tokenizer.json"}


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (3, {}, TypeError, "source must be a path, a mapping of names to arrays or pairs, got int"),
        ([ARRAYS], {}, TypeError, "source must hold pairs of a name and an array, got dict"),
        ({"a": "text"}, {}, TypeError, "a must be an array, got str"),
        ({"a": np.array([None])}, {}, TypeError, "a must be an array, got ndarray"),
        ([("a", np.ones(1)), ("a", np.ones(1))], {}, ValueError, "a comes twice"),
        ({"a\n": np.ones(1)}, {}, ValueError, "control characters"),
        ({"a": np.array(["x"])}, {}, ValueError, "a has the unknown dtype"),
        (ARRAYS, {"workers": 2}, ValueError, "workers needs a source in files; this one is in memory"),
        (ARRAYS, {"resume": True}, ValueError, "resume needs a source in files"),
    ],
)  # fmt: skip
def test_other_sources_are_refused(tmp_path, source, options, error, message):
    with pytest.raises(error, match=message):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", **options)
    assert not list(tmp_path.iterdir())


def test_an_array_that_changes_its_shape_is_refused(tmp_path):
    class Changing(Lazy):
        def __getitem__(self, name):
            return np.ones(1 + len(self.loaded)) if super().__getitem__(name) is not None else None

    with pytest.raises(ValueError, match=r"a was float64 \(2,\) when it was planned, and is float64 \(3,\) now"):
        checkpoints.convert(Changing({"a": np.ones(1)}), tmp_path / "out", to_layout="same")
    assert not (tmp_path / "out").exists()
