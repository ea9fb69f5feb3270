"""A source whose bytes differ from the digests next to it is not converted."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError

ARRAYS = {
    f"W_{name}.weight": np.arange(12, dtype=np.float32).reshape(4, 3) + number
    for number, name in enumerate(("query", "key", "value"))
}


@pytest.fixture(params=["file.safetensors", "folder"])
def converted(request, tmp_path):
    """Return a checkpoint with digests, and the file with its tensors."""
    save_file(ARRAYS, tmp_path / "source.safetensors")
    target = checkpoints.convert(tmp_path / "source.safetensors", tmp_path / request.param, to_layout="flax").target
    return target, target if target.is_file() else target / "model.safetensors"


def test_a_flipped_bit_is_refused_by_name(converted, tmp_path):
    target, file = converted
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"W_value\.kernel has other bytes than when it was written; if that is"):
        checkpoints.convert(target, tmp_path / "back.npz")
    assert not (tmp_path / "back.npz").exists()


def test_an_edit_on_purpose_is_converted_without_the_manifest(converted, tmp_path):
    target, file = converted
    arrays = {name: array + 1 for name, array in load_file(file).items()}
    save_file(arrays, file)
    with pytest.raises(
        CheckpointError, match=r"and 2 more; if that is meant, remove [a-z.]*attn-bridge\.json next to it$"
    ):
        checkpoints.convert(target, tmp_path / "back.safetensors")
    for path in file.parent.glob("*attn-bridge.json"):
        path.unlink()
    checkpoints.convert(target, tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    np.testing.assert_array_equal(back["W_key.weight"], ARRAYS["W_key.weight"] + 1)


def test_an_unchanged_source_is_converted(converted, tmp_path):
    checkpoints.convert(converted[0], tmp_path / "back.safetensors")
    assert {name: array.tolist() for name, array in load_file(tmp_path / "back.safetensors").items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
