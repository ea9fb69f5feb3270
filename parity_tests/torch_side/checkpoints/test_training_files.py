"""Files of trainers: all that ``torch.load(weights_only=True)`` reads, and objects of classes that are not here."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError, open_reader


@pytest.fixture
def lost(monkeypatch):
    """Return classes of a module that is gone when the file is read."""
    module = types.ModuleType("lost_trainer")
    monkeypatch.setitem(sys.modules, "lost_trainer", module)

    @dataclasses.dataclass
    class Config:
        width: int = 3

    class Tree(dict):
        pass

    class Items(list):
        pass

    for kind in (Config, Tree, Items):
        kind.__module__, kind.__qualname__ = "lost_trainer", kind.__name__
        setattr(module, kind.__name__, kind)
    return module


def save(path, value):
    torch.save(value, path)
    return path


VALUES = {
    "a_set": ({3, 5}, [3, 5]),
    "a_dtype": (torch.bfloat16, "torch.bfloat16"),
    "a_device": (torch.device("cuda", 1), "cuda:1"),
    "a_cpu": (torch.device("cpu"), "cpu"),
    "a_layout": (torch.strided, "torch.strided"),
    "a_counter": (collections.Counter({7: 2}), {"7": 2}),
    "an_ordered_dict": (collections.OrderedDict(b=1), {"b": 1}),
    "a_size": (torch.Size([2, 3]), [2, 3]),
    "a_scalar": (np.float64(0.25), 0.25),
    "an_int": (np.int64(-4), -4),
    "a_bool": (np.bool_(True), True),
}


def flat(name, value):
    return {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_beside_tensors_are_read(name, tmp_path):
    value, wanted = VALUES[name]
    with open_reader(save(tmp_path / "x.pt", {"w": torch.arange(3.0), name: value})) as reader:
        assert reader.read("w").tolist() == [0, 1, 2]
        assert reader.metadata == flat(name, wanted)
        assert not reader.notes


@pytest.mark.parametrize("value", [b"abc\xff", bytearray(b"abc"), 1 + 2j, float("nan"), {"x": {(1, 2): 3}}])
def test_values_that_json_has_not_are_skipped_by_name(value, tmp_path):
    with open_reader(save(tmp_path / "x.pt", {"w": torch.arange(3.0), "odd": value})) as reader:
        assert list(reader.tensors) == ["w"]
        assert reader.metadata == {}
        assert "odd" in reader.notes[0]


def test_every_rebuilt_tensor_is_read(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    marked = base.clone()
    marked.note = "kept"
    stateful = torch.nn.Parameter(base + 2)
    stateful.note = "kept"
    frozen = torch.nn.Parameter(base + 1, requires_grad=False)
    tensors = {"marked": marked, "frozen": frozen, "stateful": stateful, "buffer": torch.nn.Buffer(base + 4)}
    path = save(tmp_path / "x.pt", tensors)
    torch.load(path, weights_only=True)
    with open_reader(path) as reader:
        assert {name: reader.read(name).tolist() for name in tensors} == {
            name: one.tolist() for name, one in tensors.items()
        }


def test_tensors_of_lists_are_named_by_their_number(tmp_path):
    held = {"rng": [torch.arange(2), torch.arange(3)], "pair": (torch.ones(1), {"b": torch.zeros(2)}, 4)}
    with open_reader(save(tmp_path / "x.pt", held)) as reader:
        assert {name: info.shape for name, info in reader.tensors.items()} == {
            "rng.0": (2,),
            "rng.1": (3,),
            "pair.0": (1,),
            "pair.1.b": (2,),
        }
        assert reader.metadata == {"pair.2": 4}


def test_a_list_of_tensors_is_read(tmp_path):
    with open_reader(save(tmp_path / "x.pt", [torch.arange(2), {"a": torch.ones(3)}])) as reader:
        assert list(reader.tensors) == ["0", "1.a"]
        assert reader.read("0").tolist() == [0, 1]


def test_keys_that_are_no_names_are_skipped(tmp_path):
    stoi = {"\n": 0, " ": 1, "": 2, ".": 3, "a": 4}
    held = {"w": torch.ones(2), "stoi": stoi, "groups": {(0, 1): torch.ones(3)}, "a": {"b": 1}, "a.b": 2}
    with open_reader(save(tmp_path / "x.pt", held)) as reader:
        assert list(reader.tensors) == ["w"]
        assert reader.metadata == {"stoi. ": 1, "stoi..": 3, "stoi.a": 4, "a.b": 1}
        assert reader.unread == {"groups.(tuple)": "a key of its dicts is of the type tuple; save it below text"}
        assert all(name in reader.notes[0] for name in (r"stoi.\n", "stoi. (", "a.b"))


def lightning(lost, weights):
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": weights,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": torch.tensor(1.5), "cls": lost.Config}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "hyper_parameters": lost.Tree(width=lost.Config(4), lr=np.float64(0.5), items=lost.Items([1, 2])),
        "factory": collections.defaultdict(list, a=[1]),
    }


def test_classes_outside_the_weights_are_skipped_by_name(lost, tmp_path):
    path = save(tmp_path / "last.ckpt", lightning(lost, {"model.w": torch.arange(4.0)}))
    del sys.modules["lost_trainer"]
    with open_reader(path) as reader:
        assert reader.read("state_dict.model.w").tolist() == [0, 1, 2, 3]
        assert "optimizer_states.0.state.0.exp_avg" in reader.tensors
        assert reader.metadata["epoch"] == 3
        (note,) = reader.notes
    assert "lost_trainer.Config" in note
    assert "hyper_parameters (lost_trainer.Tree)" in note
    assert "factory (collections.defaultdict)" in note


def gpt2(tmp_path):
    from parity_tests.neutral.checkpoints.checkpoint_files import sharded

    plain = sharded(tmp_path / "hf", width=16)
    return plain, {name: torch.from_numpy(np.array(one)) for name, one in checkpoints.read(plain).items()}


def test_a_lightning_file_converts_as_its_weights_do(lost, tmp_path):
    plain, weights = gpt2(tmp_path)
    path = save(tmp_path / "last.ckpt", lightning(lost, {f"model.{name}": one for name, one in weights.items()}))
    found = checkpoints.plan(path, tmp_path / "out", strip="state_dict.model.")
    assert any("hyper_parameters (lost_trainer.Tree)" in note for note in found.notes)
    checkpoints.convert(path, tmp_path / "out", strip="state_dict.model.")
    checkpoints.convert(plain, tmp_path / "wanted")
    found, wanted = (checkpoints.read(tmp_path / name) for name in ("out", "wanted"))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert checkpoints.verify(path, tmp_path / "out").passed


def deepspeed(lost, weights):
    return {
        "module": weights,
        "ds_config": lost.Config(),
        "ds_version": "0.15",
        "dp_world_size": 2,
        "sparse_tensor_module_names": {"a", "b"},
        "param_shapes": [collections.OrderedDict(w=torch.Size([2]))],
        "optimizer": {"fp32": [torch.ones(3)], "scaler": lost.Config()},
    }


def test_a_deepspeed_file_is_read(lost, tmp_path):
    path = save(tmp_path / "mp_rank_00_model_states.pt", deepspeed(lost, {"w": torch.arange(2.0)}))
    with open_reader(path) as reader:
        assert set(reader.tensors) == {"module.w", "optimizer.fp32.0"}
        assert "ds_config (lost_trainer.Config)" in reader.notes[0]


def odd_tensors(lost):
    return {
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "object": lost.Tree(w=torch.ones(2)),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sparse", "quantised", "meta", "object"])
def test_a_tensor_that_cannot_be_read_is_an_error_where_it_is_wanted(name, lost, tmp_path):
    _, weights = gpt2(tmp_path)
    odd = odd_tensors(lost)[name]
    inside = save(tmp_path / "in.pt", {"model": {**weights, "lm_head.weight": odd}})
    with pytest.raises(CheckpointError, match=r"model\.lm_head\.weight"):
        checkpoints.convert(inside, tmp_path / "out", strip="model.")
    assert not (tmp_path / "out").exists()
    outside = save(tmp_path / "beside.pt", {"model": weights, "ema": {"lm_head.weight": odd}})
    plan = checkpoints.plan(outside, tmp_path / "out", strip="model.")
    assert any("ema.lm_head.weight" in note for note in plan.notes)
    dropped = checkpoints.plan(inside, tmp_path / "out", strip="model.", drop="model.lm_head*")
    assert any("model.lm_head.weight" in note for note in dropped.notes)


def test_a_pickled_module_is_refused_with_what_to_do(tmp_path):
    path = save(tmp_path / "x.pt", torch.nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"refers to torch\.nn\.modules\.linear\.Linear.*state_dict"):
        open_reader(path)


@pytest.mark.parametrize("name", ["weights.dat", "weights.safetensors"])
def test_a_container_is_named_where_the_extension_lies(name, tmp_path):
    _, weights = gpt2(tmp_path)
    path = save(tmp_path / name, weights)
    with pytest.raises(CheckpointError):
        checkpoints.plan(path, tmp_path / "out")
    checkpoints.convert(path, tmp_path / "out", source_format="torch")
    assert checkpoints.verify(path, tmp_path / "out", source_format="torch").passed


def test_a_module_is_not_loaded_from_a_file_with_a_tensor_that_cannot_be_read(lost, tmp_path):
    from torch_attn import MultiHeadAttention
    from torch_attn import checkpoints as ours

    module = MultiHeadAttention(8, 8, 4, 0.0, 2)
    held = {**module.state_dict(), "odd": lost.Tree(w=torch.ones(2))}
    with pytest.raises(CheckpointError, match=r"odd of .* its pickle refers to lost_trainer\.Tree"):
        ours.load(save(tmp_path / "x.pt", held), module)


def test_the_command_takes_the_container_and_names_what_it_skips(lost, tmp_path, capsys):
    from attn_bridge.cli.app import run

    _, weights = gpt2(tmp_path)
    path = save(tmp_path / "weights.safetensors", {**weights, "config": lost.Config()})
    assert run(["convert", str(path), str(tmp_path / "out"), "--source-format", "torch"]) == 0
    assert "config (lost_trainer.Config)" in capsys.readouterr().out
    assert run(["verify", str(path), str(tmp_path / "out"), "--source-format", "torch"]) == 0
    assert run(["plan", str(path), str(tmp_path / "again"), "--source-format", "torch"]) == 0
    assert run(["plan", str(path), str(tmp_path / "again"), "--source-format", "tosh"]) == 2
    assert "the format tosh is unknown" in capsys.readouterr().err


def test_a_tensor_in_parts_is_whole_where_one_rank_has_all_and_named_where_not(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        torch.save({"x": DTensor.from_local(torch.ones(3), mesh, [Replicate()])}, tmp_path / "x.pt")
        torch.save({"x": DTensor.from_local(torch.ones(3), mesh, [Partial()])}, tmp_path / "y.pt")
    finally:
        torch.distributed.destroy_process_group()
    assert checkpoints.read(tmp_path / "x.pt")["x"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"x is a DTensor placed as _?Partial; save its full_tensor\(\)"):
        checkpoints.inspect(tmp_path / "y.pt")
