"""Distributed checkpoints against torch itself, in one process: what it saves is read, what we write it loads."""

from __future__ import annotations

import collections
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader
from attn_bridge.checkpoints.containers.dcp import reader as dcp_reader
from attn_bridge.checkpoints.containers.dcp import writer as dcp_writer

from ...fuzz.samples import HELD, assert_same, random_arrays, read, write
from .test_containers_torch import Payload, assert_same_tensors, to_torch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled.*", "ignore:.*no_dist.*")


def save(state, folder, **options):
    """Save a state dict from one process, and return the folder."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def blank(arrays):
    """Return tensors of the shapes and dtypes of arrays."""
    return {name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype.name)) for name, one in arrays.items()}


def loaded(path, state):
    """Return a state dict with what a checkpoint has."""
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("is_one_file_per_rank", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_torch_saves_is_read_in_every_dtype(is_one_file_per_rank, threads, tmp_path):
    arrays = random_arrays(HELD["dcp"])
    state = {name: to_torch(array) for name, array in arrays.items()}
    path = save(state, tmp_path / "x", single_file_per_rank=is_one_file_per_rank, thread_count=threads)
    assert_same(read(path), arrays)


@pytest.mark.parametrize(("chunk", "file"), [(1 << 26, 1 << 32), (16, 1 << 32), (40, 3000)])
def test_torch_loads_what_we_write_in_every_dtype(chunk, file, tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_writer, "CHUNK", chunk)
    monkeypatch.setattr(dcp_writer, "FILE", file)
    arrays = random_arrays(HELD["dcp"] - {"bool"}) | {"bool": np.array([True, False])}
    path = write(
        "dcp", tmp_path / "x", arrays, {"step": 7, "options": {"betas": [0.9, 0.999], "name": "ä", "no": None}}
    )
    found = loaded(path, blank(arrays) | {"step": 0, "options": None})
    assert found.pop("step") == 7
    assert found.pop("options") == {"betas": [0.9, 0.999], "name": "ä", "no": None}
    assert_same_tensors(found, arrays)
    assert (len(list(path.glob("*.distcp"))) > 1) == (file == 3000)


def test_torch_finds_all_tensors_of_ours_by_their_names(tmp_path):
    arrays = random_arrays({"float32"}, shapes=[(3, 5), ()])
    path = write("dcp", tmp_path / "x", {f"layer.0.{name}": one for name, one in arrays.items()}, {"step": 1})
    format_utils.dcp_to_torch_save(path, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.pop("step") == 1
    assert_same_tensors(found, {f"layer.0.{name}": one for name, one in arrays.items()})


def test_nested_tensors_have_dotted_names(tmp_path):
    a, b = torch.randn(3, 4), torch.arange(5)
    state = {
        "model": collections.OrderedDict({"a.weight": a, "turned": a.T, "parameter": torch.nn.Parameter(a)}),
        "list": [b, {"c": b}],
        "step": 3,
        "lr": 0.25,
        "name": "x",
        "betas": (0.9, 0.999),
        "nothing": None,
    }
    path = save(state, tmp_path / "x")
    wanted = {
        "model.a.weight": a.numpy(),
        "model.turned": np.ascontiguousarray(a.numpy().T),
        "model.parameter": a.numpy(),
        "list.0": b.numpy(),
        "list.1.c": b.numpy(),
    }
    assert_same(read(path), wanted)
    with open_reader(path) as reader:
        known = {"step": 3, "lr": 0.25, "name": "x", "betas": [0.9, 0.999], "nothing": None}
        found = {name: value for name, value in reader.metadata.items() if name in known}
        assert found == {name: known[name] for name in found}
        assert {"step", "lr", "name"} <= found.keys()


def test_a_module_and_its_optimizer_are_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    path = save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    found = read(path)
    assert found["model.0.weight"].tobytes() == module[0].weight.detach().numpy().tobytes()
    moment = optimizer.state[module[0].weight]["exp_avg"].numpy()
    assert found["optimizer.state.0.exp_avg"].tobytes() == moment.tobytes()


def test_a_checkpoint_goes_there_and_back_with_its_values(tmp_path):
    state = {"a": torch.randn(5, 3), "step": 3, "rates": {"lr": 0.5}}
    path = save(state, tmp_path / "x")
    checkpoints.convert(path, tmp_path / "y.safetensors", to_layout="same")
    checkpoints.convert(tmp_path / "y.safetensors", tmp_path / "back.dcp", to_layout="same")
    found = loaded(tmp_path / "back.dcp", {"a": torch.zeros(5, 3), "step": 0, "rates": {"lr": 0.0}})
    assert torch.equal(found["a"], state["a"])
    assert (found["step"], found["rates"]) == (3, {"lr": 0.5})
    checkpoints.convert(tmp_path / "y.safetensors", tmp_path / "again.dcp", to_layout="same")
    for name in (".metadata", "__0_0.distcp"):
        assert (tmp_path / "again.dcp" / name).read_bytes() == (tmp_path / "back.dcp" / name).read_bytes()


class Unknown:
    """An object of a class of one's own."""


def test_other_objects_are_named_or_refused_but_never_built(tmp_path):
    harmless = save({"a": torch.ones(2), "seen": {1, 2}, "raw": b"ab"}, tmp_path / "x")
    with open_reader(harmless) as reader:
        assert set(reader.metadata[dcp_reader.UNREAD]) == {"seen", "raw"}
    assert set(read(harmless)) == {"a"}
    for name, value in {"unknown": Unknown(), "payload": Payload(tmp_path / "ran")}.items():
        with pytest.raises(CheckpointError, match=rf"{name}: its pickle refers to .*, which is refused$"):
            open_reader(save({"a": torch.ones(2), name: value}, tmp_path / name))
    assert not (tmp_path / "ran").exists()


def test_states_in_memory_files_are_left_out_and_named(tmp_path):
    weight, state = torch.randn(3, 4), io.BytesIO(b"as Megatron saves the state of TransformerEngine")
    dcp.save({"a.weight": weight, "a._extra_state": state}, checkpoint_id=str(tmp_path / "x"))
    with open_reader(tmp_path / "x") as reader:
        assert reader.tensors.keys() == {"a.weight"}
        assert list(reader.metadata["entries that are no plain values"]) == ["a._extra_state"]
    target = checkpoints.convert(tmp_path / "x", tmp_path / "out", to_layout="same").target
    np.testing.assert_array_equal(checkpoints.read(target)["a.weight"], weight.numpy())


def test_metadata_of_older_torch_and_pickles_is_read(tmp_path, monkeypatch):
    path = save({"a": torch.randn(3, 2), "step": 1}, tmp_path / "x")
    whole = pickle.loads((path / ".metadata").read_bytes())
    wanted = read(path)
    formats = type(whole.state_dict_metadata["a"].properties.__getstate__()[3])
    for reduce in (lambda self, _: (type(self), (self.value,)), lambda self, _: (getattr, (type(self), self.name))):
        monkeypatch.setattr(formats, "__reduce_ex__", reduce)  # as from Python 3.11.4 on, and before
        for protocol in range(2, 6):
            (path / ".metadata").write_bytes(pickle.dumps(whole, protocol))
            assert_same(read(path), wanted)
    for name in ("storage_meta", "version"):
        delattr(whole, name)
    (path / ".metadata").write_bytes(pickle.dumps(whole))
    assert_same(read(path), wanted)


def test_a_tensor_stored_through_an_extension_is_refused(tmp_path):
    path = save({"a": torch.randn(3, 2)}, tmp_path / "x")
    whole = pickle.loads((path / ".metadata").read_bytes())
    for place in whole.storage_data.values():
        place.transform_descriptors = ["stream.zstd"]
    (path / ".metadata").write_bytes(pickle.dumps(whole))
    with pytest.raises(CheckpointError, match="a was stored by the extension"):
        open_reader(path)


def test_files_of_safetensors_in_a_distributed_checkpoint_are_named(tmp_path):
    state = {name: torch.arange(6.0).reshape(2, 3) + number for number, name in enumerate("ab")}
    kind = dcp.filesystem.SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path / "x", serialization_format=kind)
    dcp.save(state, storage_writer=writer, no_dist=True)
    named = (
        r"x/__0_0\.distcp: is a file of safetensors.* --source-format safetensors reads it .*; give this file as SRC$"
    )
    with pytest.raises(CheckpointError, match=named):
        checkpoints.read(tmp_path / "x")
    source = tmp_path / "x" / "__0_0.distcp"
    checkpoints.convert(source, tmp_path / "y.npz", to_layout="same", source_format="safetensors")
    found = checkpoints.read(tmp_path / "y.npz")
    assert all((found[name] == tensor.numpy()).all() for name, tensor in state.items())


def test_state_that_is_not_flattened_is_refused_with_how_to_save_it(tmp_path):
    state = {"model": {"w": torch.ones(2), "list": [torch.ones(1)]}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "x", planner=planner, no_dist=True)
    with pytest.raises(CheckpointError, match=r"x: holds no tensor but objects, such as model: save it with keys that"):
        checkpoints.read(tmp_path / "x")
