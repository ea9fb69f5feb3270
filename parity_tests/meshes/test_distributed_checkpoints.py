"""Distributed checkpoints between torch's own processes and ours, which are one."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import open_reader
from attn_bridge.checkpoints.containers.dcp import writer
from attn_bridge.checkpoints.containers.torch_file import Stored
from torch_attn.backend import to_numpy

from ..fuzz.samples import assert_same, read, write
from .processes.sharded_checkpoints import MESHES, run, values

WANTED = {name: to_numpy(tensor) for name, tensor in values().items()}
"""The whole tensors as arrays."""


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Folders that ranks saved, by name of their mesh, and whether all ranks loaded ours right."""
    folder = tmp_path_factory.mktemp("distributed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHUNK", 24)
        write("dcp", folder / "ours", WANTED)
    return folder, run(folder, folder / "ours")


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_load_what_we_wrote_each_its_own_part(mesh, exchanged):
    assert [found[mesh] for found in exchanged[1]] == [True] * 4


@pytest.mark.parametrize("mesh", MESHES)
def test_files_of_several_ranks_are_read_whole_and_in_parts(mesh, exchanged):
    folder = exchanged[0] / mesh
    assert (len(list(folder.glob("*.distcp"))) == 4) == (mesh == "one axis")
    assert_same(read(folder), WANTED)
    with open_reader(folder) as reader:
        assert reader.format == "dcp"
        assert reader.metadata == {"lr": 0.5}
        for name, array in WANTED.items():
            data = array.tobytes()
            for start in range(0, array.nbytes, 7):
                for stop in range(start, array.nbytes + 1, 11):
                    assert bytes(reader.read_range(name, start, stop)) == data[start:stop]


@pytest.mark.parametrize("mesh", MESHES)
def test_columns_are_read_from_all_chunks_that_hold_them(mesh, exchanged, monkeypatch):
    amounts = []
    whole = Stored.read
    monkeypatch.setattr(
        Stored, "read", lambda one, start, stop: amounts.append(stop - start) or whole(one, start, stop)
    )
    with open_reader(exchanged[0] / mesh) as reader:
        for name in ("rows.weight", "grid.weight", "cube.weight"):
            array = WANTED[name]
            rows = array.reshape(array.shape[0], -1)
            for first in range(rows.shape[1]):
                amounts.clear()
                block = np.zeros((array.shape[0] - 1, rows.shape[1] - first), array.dtype)
                reader.read_rows(name, rows.shape[1] + first, rows.shape[1], block)
                assert block.tobytes() == rows[1:, first:].tobytes(), name
                assert block.nbytes <= sum(amounts) + rows.itemsize * rows.shape[1]
                assert sum(amounts) <= 2 * array.nbytes


@pytest.mark.parametrize("mesh", MESHES)
def test_chunks_are_cut_anew_on_the_way_to_another_container(mesh, exchanged, tmp_path, monkeypatch):
    checkpoints.convert(exchanged[0] / mesh, tmp_path / "one.safetensors", to_layout="same")
    assert_same(read(tmp_path / "one.safetensors"), WANTED)
    assert checkpoints.verify(exchanged[0] / mesh, tmp_path / "one.safetensors").passed
    monkeypatch.setattr(writer, "CHUNK", 100)
    checkpoints.convert(exchanged[0] / mesh, tmp_path / "two.dcp", to_layout="same")
    assert_same(read(tmp_path / "two.dcp"), WANTED)
    assert open_reader(tmp_path / "two.dcp").metadata == {"lr": 0.5}
