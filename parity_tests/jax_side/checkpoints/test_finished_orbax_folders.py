"""Orbax's marker of finished folders: written last, and Orbax's own manager keeps the folders that have it."""

from __future__ import annotations

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import options

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, TensorInfo, make_writer
from attn_bridge.checkpoints.containers.orbax import reader as orbax_reader
from attn_bridge.checkpoints.containers.orbax import writer as orbax_writer

MARKER = "commit_success.txt"
ARRAYS = {"layer.kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "layer.bias": np.ones(3, np.float32)}


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "source.npz", **ARRAYS)
    return tmp_path / "source.npz"


def convert(source, target, *, by_worker=False, **more):
    options = {"to_layout": "same", "format": "orbax", **more}
    if by_worker:
        return checkpoints.convert_share(source, target, 0, 1, **options).result
    return checkpoints.convert(source, target, **options)


@pytest.mark.parametrize("mode", ["ATOMIC_RENAME", "COMMIT_FILE"])
@pytest.mark.parametrize("more", [{}, {"settings": {"ocdbt": 1}}, {"by_worker": True}])
def test_the_manager_keeps_and_lists_our_step(source, tmp_path, mode, more):
    run = tmp_path / "run"
    run.mkdir()
    convert(source, run / "7", **more)
    atomicity = options.AtomicityOptions(mode=options.AtomicityMode[mode])
    chosen = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, atomicity_options=atomicity)
    with ocp.CheckpointManager(run, options=chosen, item_names=("state",)) as manager:
        assert manager.all_steps() == [7]
        state = ocp.args.StandardSave({"x": np.ones(2)})
        manager.save(8, args=ocp.args.Composite(state=state))  # waits for the cleanup
        manager.wait_until_finished()
        assert manager.all_steps() == [7, 8]
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(run / "7")["layer"]
    assert {f"layer.{name}": array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }


@pytest.mark.parametrize("more", [{}, {"settings": {"ocdbt": 1}}])
def test_the_marker_is_the_last_file_and_the_same_anywhere(source, tmp_path, monkeypatch, more):
    written = []
    put = orbax_writer.put

    def noted(path, data):
        written.append((path.name, sorted(one.name for one in path.parent.iterdir())))
        put(path, data)

    monkeypatch.setattr(orbax_writer, "put", noted)
    markers = [convert(source, tmp_path / name, **more).target / MARKER for name in ("one", "two")]
    assert markers[0].read_bytes() == markers[1].read_bytes() != b""
    (before,) = [inside for name, inside in written[: len(written) // 2] if name == MARKER]
    assert written[len(written) // 2 - 1][0] == MARKER
    assert {*before, MARKER} == {one.name for one in markers[0].parent.iterdir()}


@pytest.mark.parametrize("format", ["orbax", "orbax+ocdbt"])
def test_a_run_that_goes_on_removes_the_marker_first(tmp_path, format):
    infos = [TensorInfo(name, "float32", array.shape) for name, array in ARRAYS.items()]
    for last in (False, True):
        writer = make_writer(format, tmp_path / "payload", infos, {})
        assert not (tmp_path / "payload" / MARKER).exists()
        for name, array in ARRAYS.items():
            writer.write(name, array)
        assert not (tmp_path / "payload" / MARKER).exists()
        writer.finish()
        assert (tmp_path / "payload" / MARKER).exists(), last


def test_a_folder_that_orbax_has_yet_to_rename_is_refused(source, tmp_path):
    folder = convert(source, tmp_path / "7").target
    for name in ("7.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-17"):
        folder = folder.rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name}: is an unfinished save of Orbax"):
            checkpoints.inspect(folder)


def test_a_folder_without_a_marker_is_read_from_a_disk(source, tmp_path):
    folder = convert(source, tmp_path / "7").target
    (folder / MARKER).unlink()
    assert checkpoints.inspect(folder).tensors.keys() == ARRAYS.keys()


def test_a_folder_of_googles_store_needs_the_marker(source, tmp_path, monkeypatch):
    folder = convert(source, tmp_path / "run").target

    class Stored(type(folder)):
        protocol = "gs"

    monkeypatch.setattr(orbax_reader, "RemotePath", Stored)
    assert orbax_reader.OrbaxReader(Stored(folder)).tensors.keys() == ARRAYS.keys()
    (folder / MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"is an unfinished save of Orbax: commit_success\.txt, which"):
        orbax_reader.OrbaxReader(Stored(folder))


def test_a_tensor_cannot_have_the_name_of_the_marker(tmp_path):
    with pytest.raises(CheckpointError, match=r"commit_success\.txt is a name that Orbax keeps for itself"):
        make_writer("orbax", tmp_path / "x", [TensorInfo(MARKER, "float32", (2,))], {})
