"""Checkpoints converted to other layouts and containers, and back; what is verified, planned and inspected."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import modules, verification
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.workers import conducting
from attn_bridge.cli.app import run
from attn_bridge.models import layouts
from attn_bridge.models.layouts import LayoutError, SettingError
from parity_tests.support.calls import cover

from ..checkpoint_files import MEMORY, NEWER, bits, folder, made, sharded, tree, write
from ..checkpoints import CONFIG, attention, gpt

FILES = ["x.safetensors", "x.pt", "x.npz", "x.msgpack"]
"""One name per container that needs no framework."""

LAYOUTS = [name for name in layouts.names() if name != "flax"]
DTYPES = ["float64", "float32", "float16", "bfloat16"]


@cover.rotated(("name", "case"), LAYOUTS, [(file, dtype) for file in FILES for dtype in DTYPES])
def test_every_layout_and_container_goes_to_its_twin_and_back_byte_for_byte(tmp_path, name, case):
    file, dtype = case
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
    assert found["shift"].dtype == ml_dtypes.float8_e4m3fn
    assert found["net.att.W_query.kernel"].dtype == ml_dtypes.bfloat16
    assert result.changed["net.att.W_query.kernel"] == 48
    assert checkpoints.verify(source, result.target).passed


def test_a_cast_rounds_once(tmp_path):
    values = np.array(
        [1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-50, 1e300, np.nan, -0.0, 2**-140 * 1.5]
    )
    source = write(tmp_path / "a.safetensors", {"scale": values, "shift": np.linspace(3.0, 1 / 3, 8)})
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
    source = sharded(tmp_path / "hf", width=32)
    whole = tree(checkpoints.convert(source, tmp_path / "whole").target)
    monkeypatch.setattr(verification, "MIN", 64)
    monkeypatch.setattr(conducting, "budget_of", lambda plan, most: 500 if memory else 3000)
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
    (["--max-memory", "160MiB"], "peak memory about 140.0 MiB"),
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
    assert "its extension says no format; it is a file of npz: --source-format npz reads it" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "weights.dat"), "--format", "npz"]) == 0
    assert "npz, layout hf-gpt2" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "weights.dat"), "--format", "zip"]) == 2
    assert capsys.readouterr().err == (
        "error: the format zip is unknown; "
        "known are safetensors, torch, npz, msgpack, orbax, dcp, gguf, pickle, equinox, keras\n"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@cover.some(
    "case", [(0, "x.safetensors"), (200 << 20, "x.safetensors"), (200 << 20, "x.npz")], always=[(200 << 20, "x.npz")]
)
def test_memory_stays_within_bounds(tmp_path, case):
    most, file = case
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


@pytest.mark.parametrize("settings", [{}, {"tie": 0}])
@pytest.mark.parametrize("shape", [(13, 6), (9, 6), (6, 11), (22, 3)])
def test_a_head_must_have_the_shape_of_the_embeddings(tmp_path, shape, settings):
    arrays = gpt(1, tied=False)
    arrays["out_head.weight"] = np.resize(arrays["tok_emb.weight"], shape)
    source = write(tmp_path / "source.safetensors", arrays)
    with pytest.raises(
        LayoutError, match=r"^(tok_emb|out_head)\.weight is .*, which does not fit .* would be \d+ and \d+"
    ):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2", settings=settings)
    assert not (tmp_path / "hf").exists()


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


def test_the_folder_one_is_in_is_a_source_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(folder(tmp_path / "hf"))
    assert run(["convert", ".", "../flax"]) == 0
    monkeypatch.chdir(tmp_path / "flax")
    assert run(["verify", "../hf", "."]) == 0


def test_a_huge_bound_on_memory_is_none(tmp_path):
    assert run(["convert", str(folder(tmp_path / "hf")), str(tmp_path / "x"), "--max-memory", "9" * 400]) == 0


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
    again = checkpoints.convert(ours, tmp_path / "again", to_layout="flax").target
    assert run(["verify", str(ours), str(again)]) == 0
    capsys.readouterr()
    assert run(["verify", str(source), str(again)]) == 2
    error = capsys.readouterr().err
    assert f"{again} was made of a checkpoint of layout torch, which {source} is not (" in error
    assert error.count("transformer.") == 1
    assert "more do not fit); verify it against the very checkpoint that it was made of" in error
