"""Leaves as ``equinox.tree_serialise_leaves`` writes them: `numpy.save` of each, one after the other."""

from __future__ import annotations

import io
import json

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError

W = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
LEAVES = [
    W, W.astype(ml_dtypes.bfloat16), np.asfortranarray(W), W.astype(">f8"), np.asfortranarray(W.astype(">i4")),
    (W + 1j).astype(">c8"),
    np.array(True), np.float32(0.5), np.zeros((0, 3), np.float16), np.asfortranarray(W.astype(ml_dtypes.bfloat16)),
]  # fmt: skip


def serialised(leaves):
    stream = io.BytesIO()
    for leaf in leaves:
        np.save(stream, leaf)
    return stream.getvalue()


@pytest.mark.parametrize("line", [None, {"width": 6, "names": ["a\n", "b"]}])
def test_leaves_are_read_by_number(tmp_path, line):
    source = tmp_path / "x.eqx"
    source.write_bytes((b"" if line is None else json.dumps(line).encode() + b"\n") + serialised(LEAVES))
    found = checkpoints.read(source)
    assert list(found) == [str(number) for number in range(len(LEAVES))]
    for array, leaf in zip(found.values(), LEAVES, strict=True):
        assert (array.dtype, array.shape) == (leaf.dtype.newbyteorder("<"), leaf.shape)
        np.testing.assert_array_equal(array, leaf)
    assert checkpoints.inspect(source).metadata == ({} if line is None else {"hyperparameters": line})
    checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert checkpoints.verify(source, tmp_path / "out").passed


HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "no JSON": b"{]\n" + serialised([W]),
    "cut short": serialised([W])[:-3],
    "a cut header": serialised([W, W])[: len(serialised([W])) + 40],
    "texts": serialised([np.array(["a"])]),
    "more behind": serialised([W]) + b"x",
    "a huge shape": serialised([W]).replace(b"(2, 3)", b"(2, 9999999999999999999)"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_other_files_are_refused_in_a_line(tmp_path, case):
    source = tmp_path / "x.eqx"
    source.write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_objects_are_not_unpickled(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.array([{}], object), allow_pickle=True)
    (tmp_path / "x.eqx").write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match=r"leaf 0 is an array of objects$"):
        checkpoints.read(tmp_path / "x.eqx")
