"""Conversions in object stores keep many requests under way, and have the store do what it can do itself."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.remote import joining
from parity_tests.neutral.checkpoints.test_written_stores import ours, theirs

SIZES = [3, 500_000, 17, 0, 1_200_001, 1_100_000, 9, 3_000_001, 40_000, 1, 1_300_000, 2_200_000, 1_100_000, 5]
"""Elements of tensors of 42 MB: large ones, small ones, an empty one, and one that is cut."""

NAMES = ["x.safetensors", "folder", "x.msgpack", "x.dcp", "x.orbax", "ocdbt"]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint in one file, and one in three."""
    root = tmp_path_factory.mktemp("large")
    random = np.random.default_rng(7)
    tensors = {f"t{index:02d}": random.standard_normal(size, np.float32) for index, size in enumerate(SIZES)}
    np.savez(root / "x.npz", **tensors)
    (root / "folder").mkdir()
    for part, names in enumerate(np.array_split(list(tensors), 3)):
        np.savez(root / "part.npz", **{name: tensors[name] for name in names})
        checkpoints.convert(root / "part.npz", root / "folder" / f"{part}.safetensors", to_layout="same")
    for beside in (root / "folder").glob("*.json"):
        beside.unlink()
    return root


@pytest.mark.parametrize("name", NAMES)
def test_whoever_publishes_has_the_store_copy_what_is_large(store, large, tmp_path, monkeypatch, name):
    sent = []
    read_part = joining.read_part

    def noted(staged, part):
        sent.append(part.size)
        return read_part(staged, part)

    monkeypatch.setattr(joining, "read_part", noted)
    source = large / ("folder" if name == "folder" else "x.npz")
    options = {"to_layout": "same"}
    if name == "folder":
        options["format"] = "safetensors"
    if name == "ocdbt":
        options |= {"format": "orbax", "settings": {"ocdbt": 1}}
    wanted = ours(source, tmp_path, name, **options)
    workers = 1 if name == "folder" else 3  # where a share ends within 5 MiB of a file's beginning, that much is sent
    for index in range(workers):
        checkpoints.convert_share(source, f"s3://bucket/{name}", index, workers, **options)
    assert theirs(store) == wanted
    assert not store.uploads
    assert sum(sent) < 2 << 20
