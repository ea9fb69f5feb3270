"""Folders of Orbax without OCDBT made to do harm: refused in one line."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from parity_tests.fuzz.samples import write
from parity_tests.support.processes.memory import resident_memory

from ..refusals import MAX_MEMORY, assert_says, refusal, refusal_below, refused


def folder(tmp_path, **changes):
    """Write a folder of Orbax and change its _METADATA."""
    path = write("orbax", tmp_path / "x.orbax", {"a.b": np.arange(6, dtype=np.int32).reshape(2, 3)})
    said = json.loads((path / "_METADATA").read_text())
    (entry,) = said["tree_metadata"].values()
    for key, value in changes.items():
        entry[key] = value
    (path / "_METADATA").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["..", "b"], "is empty or has a dot"),
        (["a.b"], "is empty or has a dot"),
        (["", "b"], "is empty or has a dot"),
        ([], "is empty or has a dot"),
        (["a\x1b"], "has control characters"),
        (["n" * 2000], "is longer than 1000 characters"),
        (["/etc"], "is not named as one of its folder"),
        (["gone"], "can't be opened|TensorStore"),
    ],
)
def test_keys_of_orbax_that_are_none_are_refused(keys, message, tmp_path):
    path = folder(tmp_path, key_metadata=[{"key": key, "key_type": 2} for key in keys])
    with resident_memory() as peak:
        assert_says(refused(path), *message.split("|"))
    assert peak.bytes < MAX_MEMORY


def test_texts_of_orbax_are_named_and_skipped(tmp_path):
    path = write("orbax", tmp_path / "x.orbax", {"a": np.ones(3, np.float32)})
    said = json.loads((path / "_METADATA").read_text())
    entry = {"key_metadata": [{"key": "b", "key_type": 2}], "value_metadata": {"value_type": "string"}}
    said["tree_metadata"]["('b',)"] = entry
    (path / "_METADATA").write_text(json.dumps(said))
    with open_reader(path) as reader:
        assert reader.notes == ("skipped, as they are texts: b",)
        assert reader.tensors.keys() == {"a"}


@pytest.mark.parametrize("value", [None, [], {"key": 1}, [{"key": 1}], [1], "a"])
def test_entries_of_orbax_that_are_none_are_refused(value, tmp_path):
    found = refusal(folder(tmp_path, key_metadata=value))
    assert "without key_metadata and value_metadata" in found or "is empty or has a dot" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1 << 40, 3]}, "has 1 chunks; its shape [1099511627776, 3] needs 549755813888"),
        ({"shape": [-1, 3]}, "negative size"),
        ({"shape": [1 << 62, 3], "chunks": [1 << 62, 3]}, "which no file can hold"),
        ({"shape": [1 << 50, 3], "chunks": [1 << 50, 3]}, "a chunk has"),
        ({"chunks": [2]}, "has chunks [2] for the shape [2, 3]"),
        ({"chunks": [0, 3]}, "has chunks [0, 3] for the shape [2, 3]"),
        ({"chunks": [1, 3]}, "has 1 chunks; its shape [2, 3] needs 2"),
        ({"dtype": "<c8"}, "has 24 bytes; a chunk has 48"),
        ({"dtype": "<f16"}, "unknown dtype"),
    ],
)
def test_arrays_of_zarr_that_claim_more_than_is_there_are_refused(change, message, tmp_path):
    path = folder(tmp_path)
    file = path / "a.b" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert message in refusal_below(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1 << 40], "chunks": [1 << 40]}, "0: has 24 bytes; a chunk has 4398046511104"),
        ({"shape": [], "chunks": []}, "0: has 24 bytes; a chunk has 4"),
        ({"shape": [6], "chunks": [3]}, "has 1 chunks; its shape [6] needs 2"),
    ],
)
def test_a_chunk_that_claims_more_is_refused_before_anything_is_written(change, message, tmp_path):
    path = folder(tmp_path)
    (path / "a.b" / "0.0").rename(path / "a.b" / "0")
    file = path / "a.b" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(path, tmp_path / "y.npz", to_layout="same")
    assert str(caught.value).endswith(message)
    assert [one.name for one in tmp_path.iterdir()] == ["x.orbax"]


def test_a_chunk_by_another_name_is_missing(tmp_path):
    path = folder(tmp_path)
    (path / "a.b" / "0.0").rename(path / "a.b" / "0.1")
    assert "lacks the chunk 0.0 of 1 that its shape [2, 3] needs" in refusal_below(path)


def test_a_pipe_in_place_of_metadata_is_not_waited_for(tmp_path):
    path = folder(tmp_path)
    (path / "a.b" / ".zarray").unlink()
    os.mkfifo(path / "a.b" / ".zarray")
    assert "a.b/.zarray: is not a file" in refusal_below(path)


def test_links_and_missing_chunks_of_orbax_are_refused(tmp_path):
    path = folder(tmp_path)
    chunk = path / "a.b" / "0.0"
    chunk.rename(tmp_path / "secret")
    assert "has 0 chunks; its shape [2, 3] needs 1" in refusal_below(path)
    chunk.symlink_to(tmp_path / "secret")
    assert "is a link out of its folder" in refusal_below(path)
    chunk.unlink()
    chunk.write_bytes(b"x" * 23)
    assert "has 23 bytes; a chunk has 24" in refusal_below(path)
    (path / "_METADATA").write_text("{}")
    assert "has no tree_metadata" in refusal_below(path)
