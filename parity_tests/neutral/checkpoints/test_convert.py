"""Checkpoints converted, verified, interrupted, resumed and damaged; `test_containers*` has the containers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import types

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import WeightsMismatchError, checkpoints
from attn_bridge.checkpoints import execution, modules
from attn_bridge.checkpoints.containers.base import CheckpointError, DiskFullError
from attn_bridge.checkpoints.containers.safetensors import SafetensorsWriter
from attn_bridge.cli.app import run
from attn_bridge.models import layouts
from attn_bridge.models.layouts import LayoutError, SettingError
from attn_bridge.printable import shell_word

from .checkpoints import CONFIG, SIZES, attention, bert, gpt, llama, whole

FILES = ["x.safetensors", "x.pt", "x.npz", "x.msgpack"]
"""One name per container that needs no framework."""

WHOLE = {"hf-gpt2": gpt, "hf-bert": bert, "hf-llama": llama}
LAYOUTS = [name for name in layouts.names() if name != "flax"]
DTYPES = ["float64", "float32", "float16", "bfloat16"]


def made(name, dtype="float32", seed=0):
    """Return tensors of that layout, what it drops among them."""
    if name in WHOLE:
        canonical = WHOLE[name](2, seed=seed)
    else:
        canonical = whole(name, 2, seed=seed) if layouts.find(name).whole else attention("net.att.", seed=seed)
    theirs = layouts.find(name).from_canonical(canonical, **SIZES)
    theirs = {key: array.astype(np.dtype(dtype)) for key, array in theirs.items()}
    extra = {
        "hf-gpt2": {"transformer.h.0.attn.bias": np.tri(7, dtype=np.uint8)[None, None]},
        "hf-bert": {"embeddings.position_ids": np.arange(9)[None], "pooler.dense.bias": np.float32([1, 2])},
        "hf-llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": np.float32([0.5, 0.25])},
        "hf-qwen3-next": {"mtp.fc.weight": np.float32([[1, 2], [3, 4]])},
        "meta-llama": {"rope.freqs": np.float32([0.5, 0.25])},
        "book": {"net.att.mask": np.triu(np.ones((5, 5), np.float32), 1)},
        "fused-qkv": {"net.att.mask": np.triu(np.ones((5, 5), bool), 1)},
    }
    return theirs | extra.get(name, {})


def write(path, arrays, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(arrays, path, metadata)
    return path


def folder(path, name="hf-gpt2", dtype="float32", seed=0):
    write(path / "model.safetensors", made(name, dtype, seed), {"format": "pt"})
    (path / "config.json").write_text('{"n_head": 3, "num_attention_heads": 2}')
    return path


def sharded(path, count=4, seed=0, layers=4, width=6):
    """Write a GPT-2 in several files with an index, as the hub has it."""
    arrays = layouts.find("hf-gpt2").from_canonical(gpt(layers, seed=seed, width=width))
    weights = {
        name: f"model-{i * count // len(arrays) + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(arrays)
    }
    for file in set(weights.values()):
        write(path / file, {name: arrays[name] for name in arrays if weights[name] == file}, {"format": "pt"})
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return path


def bits(arrays):
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def tree(path):
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_and_container_goes_to_its_twin_and_back_byte_for_byte(tmp_path, name, file, dtype):
    source = write(tmp_path / "source.safetensors", made(name, dtype), {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    there = checkpoints.convert(source, tmp_path / file, from_layout=name).target
    assert checkpoints.inspect(there).layout == ("torch" if name in ("nnx-mha", "linen-mha") else "flax")
    assert checkpoints.verify(source, there).passed
    (tmp_path / "config.json").unlink()  # the manifest remembers what the way back needs
    back = checkpoints.convert(there, tmp_path / "back.safetensors", to_layout=name).target
    assert bits(checkpoints.read(back)) == bits(checkpoints.read(source))
    assert checkpoints.open(back).metadata == {"format": "pt"}
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("other", ["fused-qkv", "torch-mha", "nnx-mha", "book", "torch"])
def test_one_outside_layout_becomes_another(tmp_path, other):
    source = write(tmp_path / "source.safetensors", made("linen-mha"))
    there = checkpoints.convert(source, tmp_path / "there.npz", to_layout=other, settings={"num_heads": 4}).target
    wanted = layouts.find(other).from_canonical(attention("net.att."), num_heads=4)
    assert bits(checkpoints.read(there)) == bits(wanted)


def test_whatever_is_not_a_float_passes_through_and_a_cast_leaves_it(tmp_path):
    arrays = made("book") | {"net.att.mask": np.triu(np.ones((5, 5), bool), 1)}
    arrays["scale"] = np.arange(6, dtype=np.int64) << 40
    arrays["shift"] = np.arange(6).astype(ml_dtypes.float8_e4m3fn)
    from attn_bridge.checkpoints import containers
    from attn_bridge.checkpoints.containers.base import TensorInfo

    source = tmp_path / "source.safetensors"
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    writer = containers.make_writer("safetensors", source, infos, {})
    for name, array in arrays.items():
        writer.write(name, array)
    writer.finish()
    result = checkpoints.convert(source, tmp_path / "there.safetensors", dtype="bf16")
    found = checkpoints.read(result.target)
    assert found["scale"].dtype == np.int64
    assert np.array_equal(found["scale"], arrays["scale"])
    assert found["shift"].dtype == ml_dtypes.float8_e4m3fn
    assert found["net.att.W_query.kernel"].dtype == ml_dtypes.bfloat16
    assert result.changed["net.att.W_query.kernel"] == 48
    assert checkpoints.verify(source, result.target).passed


def test_a_cast_rounds_once(tmp_path):
    values = np.array(
        [1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-50, 1e300, np.nan, -0.0, 2**-140 * 1.5]
    )
    source = write(tmp_path / "a.safetensors", {"scale": values, "shift": np.float64([3.0, 1 / 3])})
    found = checkpoints.read(checkpoints.convert(source, tmp_path / "b.npz", dtype="bf16").target)["scale"]
    wanted = [1.0078125, 1.0, 1.015625, -1.0078125, np.inf, np.nan, -0.0, float(np.float32(2**-140 * 1.5))]
    assert np.array_equal(found.astype(np.float64)[:7], wanted[:7], equal_nan=True)
    assert found.dtype.name == "bfloat16"


def test_the_number_of_heads_is_remembered(tmp_path):
    source = write(tmp_path / "a.safetensors", made("nnx-mha"))
    there = checkpoints.convert(source, tmp_path / "b.npz").target
    back = checkpoints.convert(there, tmp_path / "c.safetensors", to_layout="nnx-mha").target
    assert bits(checkpoints.read(back)) == bits(checkpoints.read(source))


def test_a_folder_goes_to_flax_and_back_file_by_file(tmp_path):
    source = sharded(tmp_path / "hf")
    (source / "config.json").write_text('{"n_head": 2}')
    there = checkpoints.convert(source, tmp_path / "flax").target
    assert sorted(tree(there)) == sorted([*tree(source), "attn-bridge.json"])
    back = checkpoints.convert(there, tmp_path / "back", to_layout="hf-gpt2").target
    found = tree(back)
    assert found.pop("attn-bridge.json")
    assert found == tree(source)


def test_the_same_source_and_options_give_the_same_bytes(tmp_path):
    source = sharded(tmp_path / "hf")
    first, second = (tree(checkpoints.convert(source, tmp_path / name).target) for name in ("one", "two"))
    assert first == second
    assert str(tmp_path).encode() not in first["attn-bridge.json"]


@pytest.mark.parametrize("memory", [None, 128 << 20 | 32 << 20])
def test_a_piece_at_a_time_gives_the_same_bytes(tmp_path, monkeypatch, memory):
    from attn_bridge.checkpoints import execution

    source = sharded(tmp_path / "hf", width=64)
    whole = tree(checkpoints.convert(source, tmp_path / "whole").target)
    monkeypatch.setattr(execution.checks, "MIN", 64)
    monkeypatch.setattr(execution.conversion, "budget_of", lambda plan, most: 500 if memory else 3000)
    assert tree(checkpoints.convert(source, tmp_path / "pieces", max_memory=memory).target) == whole
    for file in FILES[1:]:
        there = checkpoints.convert(source, tmp_path / file).target
        assert checkpoints.verify(source, there).passed


def test_tied_weights_that_differ_are_not_dropped(tmp_path):
    arrays = {**gpt(1, tied=False), "tok_emb.weight": gpt(1)["tok_emb.weight"] + 1}
    source = write(tmp_path / "source.safetensors", arrays)
    with pytest.raises(CheckpointError, match=r"out_head\.weight is not the same as tok_emb\.weight .*--set tie=0"):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2")
    assert not (tmp_path / "hf").exists()
    there = checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2", settings={"tie": 0}).target
    assert np.array_equal(checkpoints.read(there)["lm_head.weight"], arrays["out_head.weight"])
    assert checkpoints.verify(source, there).passed


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found(tmp_path, file):
    source = folder(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / file).target
    assert run(["verify", str(there)]) == 0
    data = bytearray(there.read_bytes())
    wanted = checkpoints.read(source)["transformer.h.1.mlp.c_fc.weight"].tobytes()
    place = bytes(data).index(wanted) + 37
    data[place] ^= 4
    there.write_bytes(data)
    for paths in ([there], [source, there]):
        assert run(["verify", *map(str, paths)]) == 1
    found = checkpoints.verify(None, there)
    assert list(found.problems) == ["trf_blocks.1.ff.layers.0.kernel"]


@pytest.mark.parametrize("target", ["folder", "x.orbax", "x.dcp"])
def test_a_flipped_bit_in_a_folder_is_found(tmp_path, target):
    source = folder(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / target).target
    assert checkpoints.verify(source, there).passed
    wanted = checkpoints.read(source)["transformer.h.1.mlp.c_fc.weight"].tobytes()
    (file,) = (path for path in there.rglob("*") if path.is_file() and wanted in path.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(wanted) + 101] ^= 64
    file.write_bytes(data)
    assert list(checkpoints.verify(None, there).problems) == ["trf_blocks.1.ff.layers.0.kernel"]
    assert list(checkpoints.verify(source, there).problems) == ["trf_blocks.1.ff.layers.0.kernel"]


def test_a_target_without_digests_is_held_against_its_source(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / "x.npz").target
    (tmp_path / "x.npz.attn-bridge.json").unlink()
    assert run(["verify", str(there)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {there} has no manifest beside it")
    assert checkpoints.verify(source, there).passed
    assert not checkpoints.verify(folder(tmp_path / "other", seed=1), there).passed


def test_an_existing_target_stays_unless_it_may_go(tmp_path):
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", seed=1)
    for name in ("flax", "flax.npz"):
        there = checkpoints.convert(one, tmp_path / name).target
        before = tree(tmp_path)
        with pytest.raises(CheckpointError, match=r"exists; --overwrite \(in Python, overwrite=True\) replaces it$"):
            checkpoints.convert(two, there)
        assert tree(tmp_path) == before
        checkpoints.convert(two, there, overwrite=True)
        assert checkpoints.verify(two, there).passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.safetensors", "x"], "missing.safetensors"),
        (["hf", "no/such/folder/x"], "no/such/folder"),
        (["hf", "hf"], "must not be in one another"),
        (["hf", "hf/inside"], "must not be in one another"),
        (["hf", "x", "--to", "foo"], "layout (foo) must be one of torch"),
        (["hf", "x", "--format", "foo"], "foo"),
        (["hf", "x", "--dtype", "int8"], "dtype (int8) must be one of bf16, f16, f32, f64"),
        (["hf", "x", "--to", "nnx-mha", "--set", "num_heads=0"], "num_heads (0) must be a whole number of at least 1"),
        (["hf", "x", "--set", "foo=1"], "--set foo: hf-gpt2 and flax take"),
        (["hf", "x", "--set", "foo"], "--set takes KEY=VALUE"),
        (["hf", "x", "--max-memory", "much"], "--max-memory (much) must be a size"),
        (["hf", "x", "--max-memory", "1MiB"], "max-memory (1048576) must be at least"),
        (["hf", "x", "--rules", "none.toml"], "none.toml"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    folder(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert run(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert {path: data for path, data in tree(tmp_path).items() if ".partial" not in path} == before


def test_missing_and_unknown_tensors_are_refused(tmp_path):
    arrays = made("hf-gpt2")
    del arrays["transformer.ln_f.bias"]
    with pytest.raises(WeightsMismatchError, match=r"missing: transformer\.ln_f\.bias"):
        checkpoints.convert(write(tmp_path / "a.safetensors", arrays), tmp_path / "x.npz")
    arrays = made("hf-gpt2") | {"surprise": np.ones(3, np.float32)}
    source = write(tmp_path / "b.safetensors", arrays)
    with pytest.raises(LayoutError, match="does not know surprise"):
        checkpoints.convert(source, tmp_path / "x.npz")
    with pytest.raises(WeightsMismatchError, match="unexpected: surprise"):
        checkpoints.convert(source, tmp_path / "x.npz", from_layout="hf-gpt2")
    there = checkpoints.convert(source, tmp_path / "x.npz", to_layout="same").target
    assert bits(checkpoints.read(there)) == bits(arrays)


def test_heads_are_read_from_the_config(tmp_path):
    source = folder(tmp_path / "hf", "hf-bert")
    there = checkpoints.convert(source, tmp_path / "x.npz", to_layout="nnx-mha").target
    assert checkpoints.read(there)["layers.0.att.query.kernel"].shape == (6, 2, 3)
    (source / "config.json").unlink()
    with pytest.raises(SettingError, match="--set num_heads=N"):
        checkpoints.convert(source, tmp_path / "y.npz", to_layout="nnx-mha")


def test_a_dry_run_reads_no_data_and_writes_nothing(tmp_path, monkeypatch, capsys):
    from attn_bridge.checkpoints.containers.safetensors import SafetensorsReader

    source = folder(tmp_path / "hf")
    before = tree(tmp_path)
    monkeypatch.setattr(SafetensorsReader, "read_range", None)
    assert run(["convert", str(source), str(tmp_path / "x"), "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "trf_blocks.1.att.W_query.kernel" in table
    assert "would write 37 tensors" in table
    assert tree(tmp_path) == before
    assert run(["convert", str(source), str(tmp_path / "x"), "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 37


@pytest.mark.parametrize(("options", "memory"), [
    ([], "peak memory about 140.0 MiB"),  # three times the tensor, and what Python takes
    (["--max-memory", "134MiB"], "peak memory about 134.0 MiB"),
    (["--task-bytes", "1MiB"], "peak memory of each worker about 202.0 MiB"),
    (["--workers", "2"], "peak memory of each worker about 202.0 MiB"),  # whose shares are two tasks, at least
    (["--workers", "2", "--task-bytes", "64KiB"], "peak memory of each worker about 200.1 MiB"),
    (["--workers", "2", "--max-memory", "402MiB"], "peak memory of each worker about 201.0 MiB"),
])  # fmt: skip
def test_a_plan_says_how_much_memory_it_takes(tmp_path, options, memory, capsys):
    np.savez(tmp_path / "x.npz", x=np.ones((1024, 1024), np.float32))
    places = [str(tmp_path / name) for name in ("x.npz", "y.npz")]
    assert run(["convert", *places, "--to", "same", "--dry-run", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(memory)


def test_inspect_says_what_is_there(tmp_path, capsys):
    assert run(["inspect", str(sharded(tmp_path / "hf"))]) == 0
    shown = capsys.readouterr().out
    assert "transformer.h.{i}.attn.c_attn.weight (x 4)" in shown
    assert "safetensors, layout hf-gpt2, 52 tensors" in shown
    assert run(["inspect", str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "hf-gpt2"


def test_inspect_takes_the_format_that_an_extension_does_not_say(tmp_path, capsys):
    there = checkpoints.convert(folder(tmp_path / "hf"), tmp_path / "x.npz", to_layout="same").target
    there.rename(tmp_path / "weights.dat")
    assert run(["inspect", str(tmp_path / "weights.dat")]) == 2
    assert "its extension says no format; name one of safetensors, torch" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "weights.dat"), "--format", "npz"]) == 0
    assert "npz, layout hf-gpt2" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "weights.dat"), "--format", "zip"]) == 2
    assert capsys.readouterr().err == (
        "error: the format zip is unknown; known are safetensors, torch, npz, msgpack, orbax, dcp\n"
    )


RULES = """
[[rule]]
torch = ["enc.{i}.q", "enc.{i}.k"]
flax = "encoder.{i}.qk"
pattern = "(h d) e -> e (h p d)"
part = "p"
h = 2

[[rule]]
torch = "enc.{i}.scale"
flax = "scales"
pattern = "d -> l d"
stack = "l"

[[rule]]
torch = "enc.{i}.mask"
drop = "it is computed"
"""


def test_rules_of_ones_own_lead_there_and_back(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    random_ = np.random.default_rng(0)
    arrays = {f"enc.{i}.{name}": random_.normal(size=(4, 3)) for i in range(2) for name in ("q", "k")}
    arrays |= {f"enc.{i}.scale": random_.normal(size=5) for i in range(2)} | {"enc.0.mask": np.ones(3)}
    source = write(tmp_path / "a.safetensors", arrays)
    there = checkpoints.convert(source, tmp_path / "b.npz", rules=rules).target
    found = checkpoints.read(there)
    assert {name: array.shape for name, array in found.items()} == {
        "encoder.0.qk": (3, 8),
        "encoder.1.qk": (3, 8),
        "scales": (2, 5),
    }
    assert np.array_equal(found["encoder.1.qk"].reshape(3, 2, 2, 2)[:, :, 1], arrays["enc.1.k"].T.reshape(3, 2, 2))
    assert checkpoints.verify(source, there, rules=rules).passed
    back = checkpoints.convert(there, tmp_path / "c.safetensors", rules=rules).target
    assert bits(checkpoints.read(back)) == bits(arrays)


FUSED = {
    "counted": """
[[rule]]
torch = "h.{i}.qkv"
flax = ["layer_{i}.q", "layer_{i}.k", "layer_{i}.v"]
pattern = "(p h c) d -> d h c"
part = "p"
h = 2
""",
    "along": """
[[rule]]
torch = "h.{i}.qkv"
flax = ["layer_{i}.q", "layer_{i}.k", "layer_{i}.v"]
pattern = "o d -> d o"
along = "o"
split = [6, 6, 6]
""",
}
"""A tensor of torch's that is three of Flax's."""


@pytest.mark.parametrize("kind", FUSED)
def test_rules_take_a_fused_tensor_of_torch_apart(tmp_path, kind):
    rules = tmp_path / "rules.toml"
    rules.write_text(FUSED[kind] + '[[rule]]\nflax = ["rng.count", "rng.key"]\ndrop = "random state"\n')
    random_ = np.random.default_rng(0)
    arrays = {f"h.{i}.qkv": random_.normal(size=(18, 5)) for i in range(2)}
    source = write(tmp_path / "a.safetensors", arrays)
    there = checkpoints.convert(source, tmp_path / "b.safetensors", rules=rules).target
    found = checkpoints.read(there)
    assert len(found) == 6
    assert checkpoints.inspect(there).layout == "rules.toml flax"
    for i in range(2):
        for part, array in zip("qkv", np.split(arrays[f"h.{i}.qkv"], 3), strict=True):
            wanted = array.reshape(2, 3, 5).transpose(2, 0, 1) if kind == "counted" else array.T
            np.testing.assert_array_equal(found[f"layer_{i}.{part}"], wanted)
    assert checkpoints.verify(source, there, rules=rules).passed
    back = checkpoints.convert(there, tmp_path / "c.safetensors", rules=rules).target
    assert bits(checkpoints.read(back)) == bits(arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('flax = "scales"', 'flax = ["scales", "more"]\n#'), "line 9: enc.{i}.scale: names on both sides"),
        (('flax = "encoder.{i}.qk"', 'flax = ["encoder.{i}.qk"]'), "line 2: one of torch and flax may be a list"),
        (("pattern =", "pattern = 3 #"), "line 2: pattern must be a text"),
        (("(h p d)", "(h p e)"), "line 2: encoder"),
        (("h = 2", "h = 0"), "line 2: h must be a size"),
        (('flax = "scales"', ""), "line 9: a rule needs the keys torch and flax"),
        (("enc.{i}.q", "enc.{k}.q"), "not {k}"),
        (("h = 2", "optional = true"), "line 2: optional is no key of a rule"),
        (("[[rule]]\ntorch = [", "[rule\ntorch = ["), "rules.toml"),
    ],
)  # fmt: skip
def test_errors_in_rules_point_at_the_line(tmp_path, change, message):
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.replace(*change))
    source = write(tmp_path / "a.safetensors", {"enc.0.q": np.ones((4, 3))})
    with pytest.raises(ValueError, match=r"rules\.toml") as caught:
        checkpoints.convert(source, tmp_path / "b.npz", rules=rules)
    assert message in str(caught.value)


def test_a_source_that_changes_under_way_is_noticed(tmp_path):
    source = sharded(tmp_path / "hf")
    touched = []

    def touch(done, total, name):
        if name and not touched:
            touched.append(name)
            file = source / "model-00004-of-00004.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoints.convert(source, tmp_path / "flax", progress=touch)
    assert not (tmp_path / "flax").exists()


def test_a_full_disk_leaves_nothing_and_can_be_resumed_from(tmp_path):
    source = sharded(tmp_path / "hf", width=64)
    undisturbed = tree(checkpoints.convert(source, tmp_path / "whole").target)
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        f"from attn_bridge.cli.app import run; sys.exit(run(['convert', {str(source)!r}, {str(tmp_path / 'flax')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "flax").exists()
    checkpoints.convert(source, tmp_path / "flax", resume=True)
    assert tree(tmp_path / "flax") == undisturbed


def failing(monkeypatch, error, after=4):
    """Have the disk fail at a tensor, and return no longer failing."""
    write_range, calls = SafetensorsWriter.write_range, []

    def fail(self, name, start, data):
        calls.append(name)
        if len(calls) > after:
            raise error
        write_range(self, name, start, data)

    monkeypatch.setattr(SafetensorsWriter, "write_range", fail)
    return lambda: monkeypatch.setattr(SafetensorsWriter, "write_range", write_range)


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (CheckpointError("x: can't be written: Input/output error"), "error: x: can't be written: Input/output", 2),
        (KeyboardInterrupt(), "error: interrupted", 130),
        (OSError("no more"), "error: no more", 2),
    ],
)
def test_what_a_failed_run_leaves_is_named_with_what_resumes_and_removes_it(
    tmp_path, monkeypatch, capsys, error, line, status
):
    source, target = sharded(tmp_path / "hf"), tmp_path / "a flax"
    heal = failing(monkeypatch, error)
    assert run(["convert", str(source), str(target)]) == status
    said = capsys.readouterr().err
    staging = tmp_path / ".a flax.partial"
    assert said.startswith(line)
    assert said.endswith(
        f"; {staging} holds what was written: --resume goes on from it, rm -r '{staging}' removes it\n"
    )
    assert said.count("\n") == 1
    heal()
    assert checkpoints.convert(source, target, resume=True).resumed == 4
    assert not staging.exists()


@pytest.mark.parametrize(
    ("error", "after", "name"),
    [
        (DiskFullError("x: can't be written: No space left on device"), 4, "flax"),
        (CheckpointError("x: can't be written: Input/output error"), 0, "flax"),
        (KeyboardInterrupt(), 0, "flax"),
    ],
)
def test_a_full_disk_and_a_run_that_nothing_can_go_on_from_leave_nothing(
    tmp_path, monkeypatch, capsys, error, after, name
):
    source = sharded(tmp_path / "hf")
    failing(monkeypatch, error, after)
    assert run(["convert", str(source), str(tmp_path / name)]) in (2, 130)
    assert ".partial" not in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


def test_an_interrupt_before_anything_is_written_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(staging, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(execution.conversion, "recover", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.convert(sharded(tmp_path / "hf"), tmp_path / "x")
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("target", ["x", "x.npz", "x.pt", "x.msgpack", "x.orbax", "x.dcp"])
def test_a_disk_that_is_really_full_keeps_nothing_of_a_run(tmp_path, monkeypatch, capsys, target):
    source = sharded(tmp_path / "hf", width=32)
    pwrite, written = os.pwrite, []

    def full(number, data, start):
        written.append(len(data))
        if sum(written) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(number, data, start)

    monkeypatch.setattr(os, "pwrite", full)
    assert run(["convert", str(source), str(tmp_path / target)]) == 2
    said = capsys.readouterr().err
    assert said.endswith("can't be written: No space left on device\n")
    assert said.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_target_that_may_not_be_written_to_is_one_line(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    (tmp_path / "locked").mkdir(mode=0o555)
    assert run(["convert", str(source), str(tmp_path / "locked" / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'locked'} can't be written to")


SLOW = """
import sys, time
from attn_bridge import checkpoints
checkpoints.convert(sys.argv[1], sys.argv[2], resume=True, progress=lambda done, total, name: time.sleep(0.004))
"""


@pytest.mark.parametrize("target", ["flax", "flax.npz"])
def test_kills_at_any_moment_leave_all_or_nothing_and_resuming_ends_alike(tmp_path, target):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = checkpoints.convert(source, tmp_path / f"whole{target}").target
    wanted = tree(undisturbed) if undisturbed.is_dir() else undisturbed.read_bytes()
    moments, there = random.Random(7), tmp_path / target
    for _ in range(15):
        process = subprocess.Popen([sys.executable, "-c", SLOW, str(source), str(there)], stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.1, 0.9))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if there.exists():
            break
    assert not there.exists() or (tree(there) if there.is_dir() else there.read_bytes()) == wanted
    if not there.exists():
        checkpoints.convert(source, there, resume=True)
    assert (tree(there) if there.is_dir() else there.read_bytes()) == wanted
    assert checkpoints.verify(source, there).passed


@pytest.mark.parametrize("file", ["flax.safetensors", "flax.msgpack"])
def test_resuming_a_single_file_skips_what_is_there(tmp_path, file):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = checkpoints.convert(source, tmp_path / f"whole{file}").target.read_bytes()

    def stop(done, total, name):
        if done > total * 0.6:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        checkpoints.convert(source, tmp_path / file, progress=stop)
    result = checkpoints.convert(source, tmp_path / file, resume=True)
    assert result.resumed > 5
    assert result.target.read_bytes() == undisturbed


@pytest.mark.parametrize(("file", "settings"), [("flax.dcp", {}), ("flax.orbax", {"ocdbt": 1})])
def test_resuming_a_folder_of_another_container_skips_what_is_there(tmp_path, file, settings):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = tree(checkpoints.convert(source, tmp_path / f"whole{file}", settings=settings).target)
    interrupted(source, tmp_path / file, settings=settings)
    result = checkpoints.convert(source, tmp_path / file, resume=True, settings=settings)
    assert result.resumed > 5
    assert tree(result.target) == undisturbed
    assert checkpoints.verify(source, tmp_path / file).passed
    again = checkpoints.convert(source, tmp_path / file, overwrite=True, settings=settings)
    assert tree(again.target) == undisturbed


def test_ocdbt_is_a_setting_of_orbax_alone(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    assert run(["convert", str(source), str(tmp_path / "x.orbax"), "--set", "ocdbt=1"]) == 0
    assert json.loads((tmp_path / "x.orbax" / "_METADATA").read_text())["use_ocdbt"] is True
    assert run(["convert", str(source), str(tmp_path / "y.orbax"), "--set", "ocdbt=0", "--to", "same"]) == 0
    assert json.loads((tmp_path / "y.orbax" / "_METADATA").read_text())["use_ocdbt"] is False
    assert run(["verify", str(source), str(tmp_path / "x.orbax")]) == 0
    assert run(["convert", str(tmp_path / "x.orbax"), str(tmp_path / "back"), "--to", "hf-gpt2"]) == 0
    assert tree(tmp_path / "back").keys() >= {"model.safetensors"}
    capsys.readouterr()
    assert run(["convert", str(source), str(tmp_path / "z.orbax"), "--set", "ocdbt=2", "--dry-run"]) == 2
    assert capsys.readouterr().err == "error: --set ocdbt=2: must be 0 or 1\n"
    assert run(["convert", str(source), str(tmp_path / "z"), "--set", "ocdbt=1"]) == 2
    assert "ocdbt" in capsys.readouterr().err


def test_resuming_skips_what_is_there_and_redoes_what_was_damaged(tmp_path):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = tree(checkpoints.convert(source, tmp_path / "whole").target)

    class StoppedError(Exception):
        pass

    def stop(done, total, name):
        if done > total * 0.6:
            raise StoppedError

    with pytest.raises(StoppedError):
        checkpoints.convert(source, tmp_path / "flax", progress=stop)
    staging = tmp_path / ".flax.partial"
    written = len((staging / "journal").read_text().splitlines()) - 1
    file = staging / "payload" / "model-00001-of-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    result = checkpoints.convert(source, tmp_path / "flax", resume=True)
    assert 5 < result.resumed == written - 1
    assert tree(tmp_path / "flax") == undisturbed
    assert not staging.exists()


def interrupted(source, target, is_killed=False, **options):
    """Convert more than half of it; a run that is killed can't clean up behind it."""
    staging = target.parent / f".{target.name}.partial"
    aside = target.parent / "aside"

    def stop(done, total, name):
        if done > total * 0.6:
            shutil.copytree(staging, aside)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        checkpoints.convert(source, target, progress=stop, **options)
    if is_killed:
        shutil.rmtree(staging, ignore_errors=True)
        aside.rename(staging)
    else:
        shutil.rmtree(aside)


def test_a_resumed_run_counts_the_casts_of_the_one_before(tmp_path):
    source = sharded(tmp_path / "hf", width=32)
    whole = checkpoints.convert(source, tmp_path / "whole", dtype="bf16")
    interrupted(source, tmp_path / "flax", dtype="bf16")
    result = checkpoints.convert(source, tmp_path / "flax", dtype="bf16", resume=True)
    assert result.resumed > 5
    assert result.changed == whole.changed
    assert min(whole.changed.values()) > 0
    assert tree(tmp_path / "flax") == tree(tmp_path / "whole")  # and nothing of it is in the output


def test_what_can_not_be_gone_on_with_is_begun_anew_and_said(tmp_path, capsys):
    source = sharded(tmp_path / "hf", width=32)
    for name, reason in (("x.npz", "a file of npz is written"), ("x", "")):
        interrupted(source, tmp_path / name, is_killed=True)
        assert run(["convert", str(source), str(tmp_path / name), "--resume"]) == 0
        shown = capsys.readouterr().out
        assert ("were there from before" in shown) == (not reason)
        assert ("restarted: " + reason in shown) == bool(reason)
    assert run(["convert", str(source), str(tmp_path / "x"), "--resume", "--overwrite"]) == 0
    assert "restarted: no interrupted run of this very conversion was found" in capsys.readouterr().out
    interrupted(source, tmp_path / "x", overwrite=True)
    payload = tmp_path / ".x.partial" / "payload"
    for file in payload.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    assert run(["convert", str(source), str(tmp_path / "x"), "--resume", "--overwrite"]) == 0
    assert "restarted: nothing of what was written is intact" in capsys.readouterr().out
    assert checkpoints.verify(source, tmp_path / "x").passed


def test_two_conversions_to_one_place_do_not_meet(tmp_path):
    source = folder(tmp_path / "hf")

    def again(done, total, name):
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            checkpoints.convert(source, tmp_path / "x")

    checkpoints.convert(source, tmp_path / "x", progress=again)


NEWER = '{"attn-bridge": 9, "layout": "flax", "dtype": "", "source": {}, "tensors": {}, "restore": {}}'


@pytest.mark.parametrize("damage", [NEWER, "[", '{"attn-bridge": 1, "layout": 3}', "null"])
def test_a_damaged_manifest_is_named(tmp_path, damage):
    there = checkpoints.convert(folder(tmp_path / "hf"), tmp_path / "x.npz").target
    (tmp_path / "x.npz.attn-bridge.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"x\.npz\.attn-bridge\.json can't be used: .*; remove it"):
        checkpoints.verify(None, there)


MEMORY = """
import sys
import numpy as np
from attn_bridge import checkpoints
import attn_bridge.checkpoints.execution, attn_bridge.models.layouts

def peak():  # exec does not reset what getrusage says
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

idle = peak()
checkpoints.convert(sys.argv[1], sys.argv[2], max_memory=int(sys.argv[3]) or None)
print(peak() - idle)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("most", "file"), [(0, "x.safetensors"), (200 << 20, "x.safetensors"), (200 << 20, "x.npz")])
def test_memory_stays_within_bounds(tmp_path, most, file):
    size = 4096 + 512  # 81 MiB in float32
    canonical = {"tok_emb.weight": np.ones((3, 4), np.float32)}
    for name in ("W_query", "W_key", "W_value"):
        canonical[f"{name}.weight"] = np.full((size, size), 2.5, np.float32)
    source = write(tmp_path / "source.safetensors", canonical)
    del canonical
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(source), str(tmp_path / file), str(most)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    used = int(done.stdout) * 1024
    assert used < ((most - (64 << 20)) if most else 3 * size * size * 4 + (200 << 20))


@pytest.mark.parametrize("shape", [(13, 6), (9, 6), (6, 11), (22, 3)])
def test_a_head_of_another_shape_is_not_tied_whatever_its_first_bytes_are(tmp_path, shape):
    arrays = gpt(1, tied=False)
    embedding = arrays["tok_emb.weight"]
    arrays["out_head.weight"] = np.resize(embedding, shape)
    source = write(tmp_path / "source.safetensors", arrays)
    with pytest.raises(
        LayoutError, match=r"out_head\.weight .* can't be tied to tok_emb\.weight \(11, 6\); --set tie=0"
    ):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2")
    there = checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2", settings={"tie": 0}).target
    assert checkpoints.read(there)["lm_head.weight"].shape == shape


RULE = "[[rule]]\ntorch = {}\nflax = {}\n"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (RULE.format('"x.{i}.w"', '"y"'), "must hold the same placeholders"),
        (RULE.format('"x"', '"y.{i}"'), "must hold the same placeholders"),
        (RULE.format('"x.w"', '"y"') + 'pattern = "a -> l a"\nstack = "l"', "but for the {i} that stack counts"),
        (RULE.format('"{prefix}x"', '"y"'), "must hold the same placeholders"),
        (RULE.format('["x", "y"]', '"z"') + 'pattern = "a -> a"\nalong = "a"\nsplit = [4, -1]', "split must hold"),
        (RULE.format('["x", "y"]', '"z"') + 'pattern = "a -> a"\nalong = "a"\nsplit = "ab"', "split must be a list"),
        (RULE.format('"x.{i}"', '"y"') + 'pattern = "a -> l a"\nstack = "l"\nl = 9', "'l', which is counted"),
        (RULE.format('"x.0.w"', '"y"') + RULE.format('"x.1.w"', '"y"'), "x.0.w and x.1.w would both be y"),
    ],
)  # fmt: skip
def test_rules_that_would_lose_tensors_or_fail_on_the_way_back_are_refused(tmp_path, capsys, rules, message):
    (tmp_path / "rules.toml").write_text(rules)
    source = write(tmp_path / "a.safetensors", {"x.0.w": np.ones(3), "x.1.w": np.zeros(3)})
    assert run(["convert", str(source), str(tmp_path / "b.npz"), "--rules", str(tmp_path / "rules.toml")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b.npz").exists()


def test_rules_whose_two_sides_cover_the_same_names_go_back_by_the_manifest(tmp_path):
    (tmp_path / "rules.toml").write_text(RULE.format('"x"', '"x"') + 'pattern = "a b c -> c a b"')
    source = write(tmp_path / "a.safetensors", {"x": np.arange(24.0).reshape(2, 3, 4)})
    there = checkpoints.convert(source, tmp_path / "b.npz", rules=tmp_path / "rules.toml").target
    assert checkpoints.read(there)["x"].shape == (4, 2, 3)
    back = checkpoints.convert(there, tmp_path / "c.safetensors", rules=tmp_path / "rules.toml").target
    assert bits(checkpoints.read(back)) == bits(checkpoints.read(source))


@pytest.mark.parametrize(("arguments", "shape"), [(["--from", "torch"], (4, 2, 3)), (["--to", "torch"], (3, 4, 2))])
def test_rules_whose_two_sides_cover_the_same_names_go_the_way_that_is_asked_for(tmp_path, arguments, shape):
    (tmp_path / "rules.toml").write_text(RULE.format('"x"', '"x"') + 'pattern = "a b c -> c a b"')
    source = write(tmp_path / "a.safetensors", {"x": np.arange(24.0).reshape(2, 3, 4)})
    target = tmp_path / "b.npz"
    assert run(["convert", str(source), str(target), "--rules", str(tmp_path / "rules.toml"), *arguments]) == 0
    assert checkpoints.read(target)["x"].shape == shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "rules.toml", "--to", "hf-bert"], "--to (hf-bert) must be torch or flax beside --rules"),
        (["--rules", "rules.toml", "--from", "flax", "--to", "flax"], "must be the two sides of the rules"),
        (["--to", "same", "--set", "foo=1"], "--set foo: the layout stays"),
        (["--to", "same", "--from", "hf-bert"], "unexpected: "),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path, monkeypatch, capsys, arguments, message):
    folder(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert run(["convert", "hf", "x", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_numbers_in_names_may_be_of_any_size(tmp_path, capsys):
    for name, layout in (("transformer.h.{}.ln_1.weight", "hf-gpt2"), ("trf_blocks.{}.norm1.scale", "torch")):
        source = write(tmp_path / f"{layout}.safetensors", {name.format("9" * 300): np.ones(2, np.float32)})
        assert run(["convert", str(source), str(tmp_path / "x"), "--from", layout]) == 2
        assert capsys.readouterr().err.startswith("error: weights do not match: missing: ")


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path, capsys):
    source = write(tmp_path / "a.safetensors", {"a[/x].scale": np.ones(2), ":bomb:.shift": np.ones(3)})
    assert run(["inspect", str(source)]) == 0
    assert "a[/x].scale" in (shown := capsys.readouterr().out)
    assert ":bomb:.shift" in shown
    assert run(["convert", str(source), str(tmp_path / "x"), "--to", "same", "--dry-run"]) == 0
    assert "a[/x].scale" in capsys.readouterr().out


def test_a_checkpoint_without_tensors_is_one_line(tmp_path, capsys):
    source = write(tmp_path / "a.safetensors", {})
    assert run(["inspect", str(source)]) == 0
    assert "it holds no tensor" in capsys.readouterr().out
    assert run(["verify", str(source), str(source)]) == 2
    assert capsys.readouterr().err == "error: it holds no tensor\n"


def test_the_folder_one_is_in_is_a_source_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(folder(tmp_path / "hf"))
    assert run(["convert", ".", "../flax"]) == 0
    monkeypatch.chdir(tmp_path / "flax")
    assert run(["verify", "../hf", "."]) == 0


@pytest.mark.parametrize("report", ["hf/model.safetensors", "x.npz", "x.npz.attn-bridge.json", "other.pt", "hf/r.json"])
def test_a_report_never_goes_over_a_checkpoint(tmp_path, monkeypatch, capsys, report):
    folder(tmp_path / "hf")
    write(tmp_path / "other.pt", {})
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert run(["convert", "hf", "x.npz", "--json", report]) == 2
    assert run(["verify", "--json", "hf/model.safetensors", "x.npz"]) == 2
    assert all(line.startswith("error: --json") for line in capsys.readouterr().err.splitlines())
    assert tree(tmp_path) == before


def test_a_huge_bound_on_memory_is_none(tmp_path):
    assert run(["convert", str(folder(tmp_path / "hf")), str(tmp_path / "x"), "--max-memory", "9" * 400]) == 0


@pytest.mark.parametrize(
    ("name", "kind"), [("hf-bert", "roberta"), ("hf-bert", "electra"), ("hf-gpt2", "imagegpt"), ("hf-llama", "gemma")]
)
def test_models_of_another_kind_with_the_same_names_are_refused(tmp_path, capsys, name, kind):
    source = folder(tmp_path / "hf", name)
    (source / "config.json").write_text(json.dumps({"model_type": kind}))
    assert run(["convert", str(source), str(tmp_path / "x")]) == 2
    assert f"the names fit {name}, which is for " in (said := capsys.readouterr().err)
    assert f"config.json says {kind}, which may mean other things by them; --from {name} takes them as they are" in said
    assert f"config.json says {kind}" in checkpoints.inspect(source).why
    assert checkpoints.convert(source, tmp_path / "x", from_layout=name).target.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON object, got []"),
        ('"x"', 'must hold a JSON object, got "x"'),
        ("{", "can't be read as JSON: "),
        ("\xff", "can't be read as JSON: "),
        ("[" * 100_000, "can't be read as JSON: "),
        ('{"tie_word_embeddings": 7}', "tie_word_embeddings (7) of config.json must be true or false"),
        ('{"tie_word_embeddings": "yes"}', 'tie_word_embeddings ("yes") of config.json must be true or false'),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path, capsys, text, message):
    source = folder(tmp_path / "hf")
    (source / "config.json").write_bytes(text.encode("latin-1"))
    assert run(["convert", str(source), str(tmp_path / "x")]) == 2
    assert message in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert len(said) < 1000
    assert checkpoints.convert(source, tmp_path / "y.npz", to_layout="same").target.exists()  # which needs no config


@pytest.mark.parametrize("value", [0, -3, True, 1.5, "12", [12], 1 << 31, 10**400])
def test_a_size_in_a_config_that_can_be_none_is_refused(tmp_path, value):
    source = write(tmp_path / "x.safetensors", made("linen-mha"))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": value}))
    with pytest.raises(LayoutError, match=r"^num_attention_heads \(.* of config.json must be a whole number from 1 to"):
        checkpoints.convert(source, tmp_path / "y.npz", to_layout="nnx-mha")
    assert not (tmp_path / "y.npz").exists()


TRIANGLE = np.tri(7, dtype=np.uint8)[None, None]


@pytest.mark.parametrize(
    ("layout", "name", "array"),
    [
        ("hf-gpt2", "transformer.h.0.attn.bias", np.ones((1, 1, 7, 7), np.uint8)),
        ("hf-gpt2", "transformer.h.0.attn.bias", 1 - TRIANGLE),
        ("hf-gpt2", "transformer.h.0.attn.bias", TRIANGLE[..., :5]),
        ("hf-gpt2", "transformer.h.0.attn.bias", np.tri(3000, k=1, dtype=np.float32)),
        ("hf-gpt2", "transformer.h.0.attn.masked_bias", np.array(0, np.float32)),
        ("hf-bert", "embeddings.position_ids", np.arange(9)[None] + 2),
        ("hf-bert", "embeddings.token_type_ids", np.int64([[0, 0, 1]])),
        ("hf-llama", "model.layers.0.self_attn.rotary_emb.inv_freq", np.float32([0.5, 0.7])),
        ("meta-llama", "rope.freqs", np.float32([0.5, np.nan])),
        ("book", "net.att.mask", np.tri(5, dtype=np.float32)),
        ("book", "net.att.mask", np.triu(np.ones((5, 5), np.float32))),
        ("fused-qkv", "net.att.mask", np.zeros((5, 5), bool)),
        ("fused-qkv", "net.att.mask", np.zeros(0, np.float32)),
    ],
)
def test_what_is_left_out_for_a_reason_has_to_be_what_the_reason_says(tmp_path, capsys, layout, name, array):
    source = write(tmp_path / "source.safetensors", made(layout) | {name: array})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert run(["convert", str(source), str(tmp_path / "x.npz"), "--from", layout]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {source}: {name} is not what it would be left out as: ")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "source.safetensors"]


@pytest.mark.parametrize(
    ("layout", "arrays"),
    [
        ("hf-gpt2", {"transformer.h.0.attn.bias": np.tri(3000, dtype=bool)[None, None]}),
        ("hf-gpt2", {"transformer.h.1.attn.masked_bias": np.array(-1e4, np.float32)}),
        ("hf-bert", {"embeddings.token_type_ids": np.zeros((1, 9), np.int64)}),
        ("hf-bert", {"embeddings.position_ids": np.stack([np.arange(5)] * 2).astype(np.float32)}),
        ("book", {"net.att.mask": np.triu(np.full((5, 5), -np.inf, ml_dtypes.bfloat16), 1)}),
    ],
)
def test_what_is_what_its_reason_says_is_left_out(tmp_path, layout, arrays):
    source = write(tmp_path / "source.safetensors", made(layout) | arrays)
    assert checkpoints.convert(source, tmp_path / "x.npz", from_layout=layout).target.exists()


def test_overwriting_never_takes_a_folder_of_other_things(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    write(tmp_path / "home" / "old.safetensors", {"x": np.ones(2)})
    (tmp_path / "home" / "thesis").mkdir()
    (tmp_path / "home" / "thesis" / "text").write_text("x")
    before = tree(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "home"), "--overwrite"]) == 2
    assert "is a folder of other things than a checkpoint" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_devices_pipes_and_sockets_are_never_replaced(tmp_path, capsys, kind, options):
    source, target = folder(tmp_path / "hf"), tmp_path / "x.npz"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(target))
    else:
        try:
            os.mknod(target, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this user can make no device")
    before = target.lstat()
    assert run(["convert", str(source), str(target), *options]) == 2
    assert capsys.readouterr().err == f"error: {target} is a device, a pipe or a socket, which is never replaced\n"
    assert os.path.samestat(before, target.lstat())
    assert {one.name for one in tmp_path.iterdir()} == {"hf", "x.npz"}


def test_a_staging_folder_that_is_a_link_or_someone_elses_is_left_alone(tmp_path):
    source = folder(tmp_path / "hf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("x")
    (tmp_path / ".a.npz.partial").symlink_to(tmp_path / "mine")
    shared = folder(tmp_path / ".b.npz.partial")
    before = tree(tmp_path)
    for name in ("a.npz", "b.npz"):
        with pytest.raises(CheckpointError, match=r"partial is in the way"):
            checkpoints.convert(source, tmp_path / name)
    with pytest.raises(CheckpointError, match="must not be in one another"):
        checkpoints.convert(shared, tmp_path / "b.npz")
    assert tree(tmp_path) == before


def test_links_are_replaced_and_never_followed(tmp_path):
    source = folder(tmp_path / "hf")
    real = tree(folder(tmp_path / "real", seed=1))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "dangling"):
        there = checkpoints.convert(source, tmp_path / name, overwrite=True).target
        assert not there.is_symlink()
        assert checkpoints.verify(source, there).passed
    assert tree(tmp_path / "real") == real
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CheckpointError, match="is a link to itself"):
        checkpoints.convert(source, tmp_path / "loop", overwrite=True)
    with pytest.raises(CheckpointError, match="the name is too long"):
        checkpoints.convert(source, tmp_path / ("x" * 250))


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "lines\nof two", "back\\slash\t", "\udcff"])
def test_a_name_in_a_command_is_one_word_on_one_line(name):
    word = shell_word(name)
    assert word.isprintable()
    said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert said == os.fsencode(name)


def test_a_refusal_leaves_no_staging_folder(tmp_path):
    arrays = {**gpt(1, tied=False), "tok_emb.weight": gpt(1)["tok_emb.weight"] + 1}
    source = write(tmp_path / "source.safetensors", arrays)
    with pytest.raises(CheckpointError, match="can't be tied"):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2")
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


STOPPED = """
import os, pathlib, sys
from attn_bridge.cli.app import run
left, rename = [int(sys.argv[1])], pathlib.Path.replace
def replace(self, target):
    left[0] -= 1
    if left[0] < 0:
        os._exit(77)
    return rename(self, target)
pathlib.Path.replace = replace
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.parametrize("old", ["none", "file", "folder"])
def test_a_kill_between_any_two_renames_is_undone_or_finished(tmp_path, old):
    source = write(tmp_path / "source.safetensors", made("hf-bert"))
    wanted, before = tmp_path / "wanted", tmp_path / "before"
    for path in (wanted, before):
        path.mkdir()
    if old != "none":
        checkpoints.convert(source, before / "x", format="torch" if old == "file" else "safetensors")
    arguments = ["convert", str(source), "--format", "npz", "--to", "torch", "--overwrite"]
    assert run([*arguments, str(wanted / "x")]) == 0
    for stop in range(6):
        place = tmp_path / f"at {stop}"
        shutil.copytree(before, place)
        code = [sys.executable, "-c", STOPPED, str(stop), *arguments, str(place / "x")]
        done = subprocess.run(code, capture_output=True, text=True)
        assert done.returncode in (0, 77), done.stderr
        if done.returncode == 77:  # without --overwrite: what was there is back, or the new one is whole
            status = run([*arguments[:-1], str(place / "x"), "--resume"])
            shown = {path: data for path, data in tree(place).items() if ".partial" not in path}
            assert shown == (tree(wanted) if status == 0 else tree(before))
            assert run([*arguments, str(place / "x"), "--resume"]) == 0
        assert tree(place) == tree(wanted)
    assert done.returncode == 0


@pytest.mark.parametrize("change", ["flip", "remove"])
def test_what_was_kept_aside_is_checked_before_it_comes_back(tmp_path, change):
    there = checkpoints.convert(write(tmp_path / "a.safetensors", made("hf-bert")), tmp_path / "x.npz").target
    kept = tmp_path / "x.npz.attn-bridge.kept"
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    if change == "remove":
        kept.unlink()
    found = checkpoints.verify(None, there)
    assert not found.passed
    assert all(name.endswith("(kept aside)") for name in found.problems)
    for layout in ("hf-bert", "torch"):
        with pytest.raises(CheckpointError, match="which was kept aside"):
            checkpoints.convert(there, tmp_path / layout, to_layout=layout)


@pytest.mark.parametrize(
    "part",
    [
        {"settings": []},
        {"settings": {"prefix": []}},
        {"settings": {"prefix": "../"}},
        {"order": [[]]},
        {"dropped": {}},
        {"files": [1]},
        {"files": {"wte.weight": "../x.safetensors"}},
        {"files": {"transformer.wte.weight": "../x.safetensors"}},
        {"metadata": 3},
        {"metadata": {"files": 3}, "files": {"a": "b.safetensors"}},
    ],
)
def test_a_hostile_manifest_is_one_line_or_does_no_harm(tmp_path, capsys, part):
    source = folder(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / "x.npz").target
    path = tmp_path / "x.npz.attn-bridge.json"
    document = json.loads(path.read_text())
    document["restore"]["hf-gpt2"] |= part
    path.write_text(json.dumps(document))
    before = tree(tmp_path)
    status = run(["convert", str(there), str(tmp_path / "back"), "--to", "hf-gpt2"])
    error = capsys.readouterr().err
    found = tree(tmp_path)
    if status:
        assert status == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert found == before
    else:
        assert {name: data for name, data in found.items() if not name.startswith("back/")} == before
        assert bits(checkpoints.read(tmp_path / "back")) == bits(checkpoints.read(source))


def test_metadata_of_a_file_may_be_called_files_and_index(tmp_path):
    source = write(tmp_path / "a.safetensors", made("torch"), {"files": "x"})
    for name in ("x.npz", "x"):
        there = checkpoints.convert(source, tmp_path / name).target
        back = checkpoints.convert(there, tmp_path / f"{name}.safetensors", to_layout="torch").target
        assert back.read_bytes() == source.read_bytes()


def test_a_cast_that_overflows_says_so_in_the_report_alone(tmp_path, capsys, recwarn):
    source = write(tmp_path / "a.safetensors", {"x.scale": np.array([1e300, 1.0])})
    assert run(["convert", str(source), str(tmp_path / "b.npz"), "--dtype", "f16"]) == 0
    assert "the cast changed 1 elements" in capsys.readouterr().out
    assert not recwarn.list


def test_the_folder_of_a_single_file_leads_to_its_manifest(tmp_path):
    source = write(tmp_path / "a.safetensors", made("hf-bert"))
    (tmp_path / "there").mkdir()
    checkpoints.convert(source, tmp_path / "there" / "x.npz")
    back = checkpoints.convert(tmp_path / "there", tmp_path / "back.safetensors", to_layout="hf-bert").target
    assert bits(checkpoints.read(back)) == bits(checkpoints.read(source))


def test_what_was_kept_aside_is_cast_by_the_way_back_alone(tmp_path):
    arrays = made("hf-bert")
    source = write(tmp_path / "a.safetensors", arrays)
    aside = {name for name in arrays if "pooler" in name or "position_ids" in name}
    assert len(aside) == 2
    there = checkpoints.convert(source, tmp_path / "x.npz").target
    narrow = checkpoints.read(
        checkpoints.convert(there, tmp_path / "b.safetensors", to_layout="hf-bert", dtype="bf16").target
    )
    wanted = {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array for name, array in arrays.items()
    }
    assert bits(narrow) == bits(wanted)
    there = checkpoints.convert(source, tmp_path / "y.npz", dtype="bf16").target
    back = checkpoints.read(checkpoints.convert(there, tmp_path / "c.safetensors", to_layout="hf-bert").target)
    assert bits(back) == bits({name: arrays[name] if name in aside else wanted[name] for name in arrays})


def test_loading_from_the_folder_of_a_single_file_finds_its_manifest(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    arrays = made("hf-gpt2")
    checkpoints.convert(write(tmp_path / "a.safetensors", arrays), tmp_path / "there" / "x.npz")
    wanted = layouts.find("hf-gpt2").to_canonical({name: arrays[name] for name in arrays if ".attn.bias" not in name})
    loaded = {}
    backend = types.SimpleNamespace(
        describe_weights=lambda module: {name: (array.shape, "float32") for name, array in wanted.items()},
        shared_names=lambda module: set(),
        together=lambda module: contextlib.nullcontext(),
        prepare_weights=lambda module, found, adopt: lambda: loaded.update(found),
    )
    monkeypatch.setattr(modules.backends, "load", lambda side: backend)
    modules.load("torch", tmp_path / "there", None, None, None)
    assert bits(loaded) == bits(wanted)
    (tmp_path / "there" / "x.npz.attn-bridge.json").write_text(NEWER)
    with pytest.raises(CheckpointError, match="no manifest of version 1"):
        modules.load("torch", tmp_path / "there", None, None, None)


def test_a_source_of_other_names_than_the_one_it_was_made_of_is_no_list_of_all_names(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    ours = checkpoints.convert(source, tmp_path / "ours", to_layout="torch").target
    again = checkpoints.convert(ours, tmp_path / "again", to_layout="hf-gpt2").target
    assert run(["verify", str(ours), str(again)]) == 0
    capsys.readouterr()
    assert run(["verify", str(source), str(again)]) == 2
    error = capsys.readouterr().err
    assert f"{again} was made of a checkpoint of layout torch, which {source} is not (" in error
    assert error.count("transformer.") == 1
    assert "more do not fit); verify it against the very checkpoint that it was made of" in error
