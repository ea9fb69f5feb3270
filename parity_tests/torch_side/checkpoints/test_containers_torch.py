"""Containers of weights against torch itself: what it saves is read, what we write it loads, bit for bit."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import safetensors.torch
import torch

from attn_bridge.checkpoints.containers import CheckpointError, open_reader, strided

from ...fuzz.samples import HELD, assert_same, random_arrays, read, write


def to_torch(array):
    """Return a tensor of the same bits."""
    kind = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=kind)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=kind).reshape(array.shape)


def assert_same_tensors(found, wanted):
    """Compare names, dtypes, shapes and bits of tensors with arrays."""
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        tensor = found[name]
        assert (name, tensor.dtype, tensor.shape) == (name, getattr(torch, array.dtype.name), array.shape)
        assert bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) == array.tobytes(), name


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_our_file(mmap, tmp_path):
    arrays = random_arrays(HELD["torch"])
    path = write("torch", tmp_path / "x.pt", arrays, {"kind": "test"})
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert type(found) is dict
    assert list(found) == list(arrays)
    assert_same_tensors(found, arrays)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values()) or not mmap
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_we_read_a_file_of_torch(tmp_path):
    arrays = random_arrays(HELD["torch"])
    torch.save({name: to_torch(array) for name, array in arrays.items()}, tmp_path / "x.pt")
    assert_same(read(tmp_path / "x.pt"), arrays)


def test_torch_and_we_agree_on_safetensors_in_every_dtype(tmp_path):
    arrays = random_arrays(HELD["safetensors"])
    path = write("safetensors", tmp_path / "x.safetensors", arrays)
    assert_same_tensors(safetensors.torch.load_file(path), arrays)
    safetensors.torch.save_file({name: to_torch(array) for name, array in arrays.items()}, tmp_path / "y.safetensors")
    assert_same(read(tmp_path / "y.safetensors"), arrays)


def test_a_module_s_state_and_its_parameters_are_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    wanted = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    torch.save(module.state_dict(), tmp_path / "state.pt")
    assert_same(read(tmp_path / "state.pt"), wanted)
    torch.save(collections.OrderedDict(module.named_parameters()), tmp_path / "parameters.pt")
    parameters = {name: one.detach().numpy() for name, one in module.named_parameters()}
    assert_same(read(tmp_path / "parameters.pt"), parameters)


def test_a_training_checkpoint_is_read_with_its_metadata(tmp_path):
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    whole = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "x", "none": {}}
    torch.save(whole, tmp_path / "x.pt")
    with open_reader(tmp_path / "x.pt") as reader:
        assert reader.tensors["model.weight"].shape == (4, 3)
        assert (
            reader.read("optimizer.state.0.exp_avg").tobytes()
            == optimizer.state[module.weight]["exp_avg"].numpy().tobytes()
        )
        assert (reader.metadata["epoch"], reader.metadata["name"], reader.metadata["none"]) == (3, "x", {})
        assert reader.metadata["optimizer.param_groups"][0]["betas"] == [0.9, 0.999]


def test_tensors_of_one_storage_are_each_read_whole(tmp_path):
    base = torch.randn(6, 4)
    torch.save({"all": base, "rows": base[2:4], "tied": base}, tmp_path / "x.pt")
    assert_same(read(tmp_path / "x.pt"), {"all": base.numpy(), "rows": base[2:4].numpy(), "tied": base.numpy()})


@pytest.mark.parametrize("part", [1 << 24, 64, 1])
def test_tensors_in_any_order_are_gathered(part, tmp_path, monkeypatch):
    monkeypatch.setattr(strided, "PART", part)
    base = torch.randn(6, 4, 5)
    views = {
        "turned": base.permute(2, 0, 1),
        "swapped": base.transpose(0, 1),
        "column": base[:, 1, 3],
        "steps": base[::2, 1:, ::3],
        "repeated": base[:1, :1].expand(3, 2, 5),
        "overlapping": base.reshape(-1).as_strided((5, 4), (1, 2), 7),
        "bfloat16": base.to(torch.bfloat16).mT,
    }
    torch.save(views, tmp_path / "x.pt")
    with open_reader(tmp_path / "x.pt") as reader:
        for name, view in views.items():
            wanted = view.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert reader.read(name).tobytes() == wanted, name
            assert reader.tensors[name].shape == tuple(view.shape)
            assert bytes(reader.read_range(name, 5, 17)) == wanted[5:17]


def test_a_file_whose_checksums_torch_left_out_is_read(tmp_path):
    tensor = torch.arange(100.0)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": tensor}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(read(tmp_path / "x.pt"), {"a": tensor.numpy()})


class Payload:
    """What a hostile file carries: opening a file for writing, as a sign that it ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("where", ["leaf", "key", "inner"])
def test_a_payload_beside_tensors_is_skipped_by_name(where, tmp_path):
    payload = Payload(tmp_path / "ran")
    beside = {"leaf": {"b": payload}, "key": {payload: 1}, "inner": {"b": [{"c": payload}]}}[where]
    torch.save({"a": torch.arange(3), **beside}, tmp_path / "x.pt")
    with open_reader(tmp_path / "x.pt") as reader:
        assert reader.read("a").tolist() == [0, 1, 2]
        assert ".open)" in reader.notes[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["whole", "list"])
def test_a_pickle_that_runs_code_is_refused(where, tmp_path):
    payload = Payload(tmp_path / "ran")
    whole = {
        "whole": payload,
        "list": {"a": [payload]},
    }[where]
    torch.save(whole, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"its pickle refers to \w+\.open, which is refused$"):
        open_reader(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2), "holds a single tensor, not a dict of them"),
        (lambda: [1, 2], "holds a list, not a dict of tensors"),
        (lambda: {"a": float("nan")}, "a is neither a tensor nor a plain value: nan"),
        (lambda: {"a": 1j}, "a is neither a tensor nor a plain value: 1j"),
        (lambda: {1: torch.ones(1), "1": torch.ones(1)}, "1 comes twice"),
        (lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "a.b comes twice, as keys are joined by dots, "),
        (lambda: {"": torch.ones(1)}, "is empty"),
        (lambda: {(1, 2): torch.ones(1)}, "x.pt: a key of its dicts is of the type tuple; save it below text"),
        (lambda: torch.nn.Linear(1, 1), "its pickle refers to torch.nn.modules.linear.Linear, which is refused"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "a is a sparse tensor; save its to_dense()"),
        (
            lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
            "a is marked as conjugated or negated; save its resolve_conj().resolve_neg()",
        ),
        (lambda: {"a": torch.ones(2, dtype=torch.complex32)}, "a is of the dtype torch.complex32, which is not read;"),
        (
            lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)},
            "a is a quantised tensor; save its dequantize()",
        ),
        (lambda: {"a": torch.zeros(1).expand(1 << 40)}, "a of shape [1099511627776] repeats a storage of 1 elements"),
        (lambda: {"a\x1b[31m": torch.ones(1)}, "the name a\\x1b[31m has control characters"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_objects_than_dicts_of_tensors_are_refused(make, message, tmp_path):
    torch.save(make(), tmp_path / "x.pt")
    with pytest.raises(CheckpointError) as caught:
        open_reader(tmp_path / "x.pt")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_dicts_within_dicts_without_end_are_refused(tmp_path):
    deep = {"a": torch.ones(1)}
    for _ in range(70):
        deep = {"a": deep}
    torch.save(deep, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        open_reader(tmp_path / "x.pt")
    wide = {"a": 1}
    for _ in range(40):
        wide = {"a": wide, "b": wide}
    torch.save(wide, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="repeated too often"):
        open_reader(tmp_path / "y.pt")
    loop = {"a": torch.ones(1)}
    loop["b"] = loop
    torch.save(loop, tmp_path / "z.pt")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        open_reader(tmp_path / "z.pt")


def test_files_of_old_torch_are_refused_with_what_to_do(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch < 1.6; load it with torch.load\(path, weights_only=True\)"):
        open_reader(tmp_path / "old.pt")


def test_torch_loads_names_of_any_script(tmp_path):
    arrays = {"слой.вес": np.ones(3, np.float32), "a b/c": np.ones(2, np.float32)}
    path = write("torch", tmp_path / "x.pt", arrays)
    assert_same_tensors(torch.load(path, weights_only=True), arrays)
    assert_same(read(path), arrays)
