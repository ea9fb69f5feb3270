"""Files that each rank saved its own parts to, by torch's own processes, read as one checkpoint."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader

from ..fuzz.samples import assert_same, read
from .processes.rank_files import MESHES, run

KINDS = ("tensors", "model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of the files of ranks, by name of their mesh."""
    folder = tmp_path_factory.mktemp("ranks")
    run(folder)
    return folder


@pytest.fixture
def three(saved, tmp_path):
    """A copy of three ranks' files, to be changed."""
    shutil.copytree(saved / "three", tmp_path / "three")
    return tmp_path / "three" / "tensors"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_files_of_all_ranks_are_one_checkpoint(mesh, kind, saved):
    folder = saved / mesh / kind
    wanted = read(saved / mesh / f"{kind}.pt")
    pattern = folder / ("rank*_step_7.pt" if kind == "tensors" else "model_*.pt")
    for path in (folder, min(folder.glob(pattern.name)), pattern):
        assert_same(read(path), wanted)


@pytest.mark.parametrize("mesh", MESHES)
def test_any_range_of_a_tensor_in_parts_is_right(mesh, saved):
    wanted = read(saved / mesh / "tensors.pt")
    with open_reader(saved / mesh / "tensors") as reader:
        for name, array in wanted.items():
            data = array.tobytes()
            for start in range(0, array.nbytes, 5):
                for stop in range(start, array.nbytes + 1, 9):
                    assert bytes(reader.read_range(name, start, stop)) == data[start:stop]
            for first in range(array.shape[-1] if array.ndim > 1 else 0):
                block = np.zeros((array.shape[0] - 1, array.shape[1] - first), array.dtype)
                reader.read_rows(name, array.shape[1] + first, array.shape[1], block)
                assert block.tobytes() == array[1:, first:].tobytes()


def test_ranks_are_converted_and_verified(saved, tmp_path):
    source = saved / "grid" / "model"
    report = checkpoints.convert(source, tmp_path / "one.safetensors", to_layout="same")
    assert report.target.is_file()
    assert_same(read(tmp_path / "one.safetensors"), read(saved / "grid" / "model.pt"))
    assert checkpoints.verify(source, tmp_path / "one.safetensors").passed


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_rank_is_named(three):
    (three / "rank1_step_7.pt").unlink()
    for path in (three, three / "rank0_step_7.pt", three / "*.pt"):
        assert "has the parts of 2 of 3 ranks; missing: rank 1 (rank1_step_7.pt); put" in refused(path)
    (three / "rank2_step_7.pt").unlink()
    assert "has the parts of 1 of 3 ranks; missing: rank 1 (rank1_step_7.pt), rank 2" in refused(three)


def test_a_rank_missing_in_a_mesh_of_two_axes_is_named_with_its_place(saved, tmp_path):
    shutil.copytree(saved / "grid" / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*_rank_2.pt"))
    found = refused(tmp_path / "model")
    assert "missing: rank 2 at [1, 0] of its mesh [2, 2] (model_world_size_4_rank_2.pt)" in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: shutil.copy(folder / "rank0_step_7.pt", folder / "rank1_step_7.pt"), "missing: rank 1;"),
        (
            lambda folder: shutil.copy(folder.parent.parent / "rank3_step_7.pt", folder),
            "is a DTensor in some of its files",
        ),
    ],
    ids=["twice", "another run"],
)
def test_files_that_contradict_each_other_are_refused(change, reason, three, saved):
    shutil.copy(saved / "grid" / "tensors" / "rank3_step_7.pt", three.parent.parent)
    change(three)
    assert reason in refused(three)


def test_replicas_with_different_numbers_are_refused(saved, three):
    path = three / "rank2_step_7.pt"
    data = path.read_bytes()
    plain = read(saved / "three" / "tensors.pt")["state.plain"].tobytes()
    assert data.count(plain) == 1
    changed = data.replace(plain, plain[:-1] + bytes([plain[-1] ^ 1]))
    path.write_bytes(changed)
    assert "checksum" in refused(three) or "different numbers" in refused(three)


def test_a_pattern_for_other_files_is_refused(three, tmp_path):
    assert "matches no file" in refused(three / "x*.pt")
    shutil.copy(three.parent / "tensors.pt", three / "whole.pt")
    assert "are not those of the ranks of one run" in refused(three / "*.pt")
