"""Quantised files and folders: what is refused, what goes along, interrupted runs, and memory."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.cli.app import run
from attn_bridge.models.layouts import LayoutError
from parity_tests.support.calls import cover

from ..checkpoint_files import MEMORY, interrupted
from .test_dequantize import E4M3, F4, STEM, U8, converted, expanded, float8, multiplied, mxfp4, same, write


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a_blocks": np.zeros((1, 2, 1, 16), U8)}, r"a_blocks has no a_scales beside it"),
        ({"a_scales": np.zeros((1, 2, 1), U8)}, r"a_scales has no a_blocks beside it"),
        ({"a.scales": np.ones((2, 1), F4)}, r"a.scales is float32, where MXFP4 has uint8: its method is not known"),
        ({"a.blocks": np.zeros((1, 2, 1, 16), U8), "a_scales": np.zeros((1, 2, 1), U8)}, r"a.blocks has no a.scales"),
        ({"a_blocks": np.zeros((1, 2, 1, 8), U8), "a_scales": np.zeros((1, 2, 1), U8)},
         r"a_blocks must have the shape \(experts, rows, groups, 16\) to be MXFP4, got \(1, 2, 1, 8\)"),
        ({"a_blocks": np.zeros((2, 1, 16), U8), "a_scales": np.zeros((2, 1), U8)}, r"a_blocks must have the shape"),
        ({"a.blocks": np.zeros((1, 16), U8), "a.scales": np.zeros((1,), U8)}, r"a.blocks must have the shape"),
        ({"a_blocks": np.zeros((1, 2, 1, 16), U8), "a_scales": np.zeros((1, 1, 2), U8)},
         r"a_scales must have the shape \(1, 2, 1\) to go with a_blocks"),
        ({"a_blocks": np.zeros((1, 2, 1, 16), np.int8), "a_scales": np.zeros((1, 2, 1), U8)}, "a_blocks must be uint8"),
        ({"a_blocks": np.zeros((1, 2, 1, 16), U8), "a_scales": np.zeros((1, 2, 1), F4)}, r"a_scales must be uint8"),
        ({"a_blocks": np.zeros((1, 2, 1, 16), U8), "a_scales": np.zeros((1, 2, 1), U8), "a": np.ones(3)},
         r"both a and a_blocks are there"),
        ({"a_blocks": np.zeros((1, 2, 1, 16), U8), "a_scales": np.zeros((1, 2, 1), U8),
          "a.blocks": np.ones((1, 2, 1, 16), U8), "a.scales": np.ones((1, 2, 1), U8)},
         r"both a_blocks and a.blocks are"),
        ({"w.weight": np.zeros((3, 3), E4M3)}, r"w.weight is float8_e4m3fn and has no w.weight_scale_inv"),
        ({"w.weight_scale_inv": np.ones((1, 1), F4)}, r"w.weight_scale_inv is a scale without w.weight"),
        ({"w.weight_scale": np.ones((1, 1), F4)}, r"w.weight_scale is a scale without w.weight"),
        ({"w.weight": np.ones((3, 3), F4), "w.weight_scale_inv": np.ones((1, 1), F4)},
         r"w.weight must be float8_e4m3fn or float8_e5m2 to go with w.weight_scale_inv, got float32"),
        ({"w.weight": np.zeros((3, 3), ml_dtypes.float8_e4m3fnuz), "w.weight_scale_inv": np.ones((1, 1), F4)},
         r"w.weight must be float8_e4m3fn or float8_e5m2"),
        ({"w.weight": np.zeros((3, 3), E4M3), "w.weight_scale_inv": np.ones((2, 1), F4)},
         r"w.weight_scale_inv must have the shape \(1, 1\) to go with w.weight \(3, 3\), one for each block of"),
        ({"w.weight": np.zeros((300, 3), E4M3), "w.weight_scale_inv": np.ones((1, 1), F4)}, r"the shape \(3, 1\)"),
        ({"w.weight": np.zeros((3, 3), E4M3), "w.weight_scale_inv": np.ones((1, 1), np.float64)},
         r"w.weight_scale_inv must be one of float32, bfloat16, float16, float8_e8m0fnu, uint8, got float64"),
        ({"w.weight": np.zeros((3, 2), E4M3), "w.weight_scale": np.ones((3,), F4)},
         r"w.weight_scale must have the shape \(3, 1\)"),
        ({"w.weight": np.zeros((4, 4), E4M3), "w.weight_scale": np.ones((2, 2), F4)}, r"weight_scale must have"),
        ({"w.weight": np.zeros(3, E4M3), "w.weight_scale_inv": np.ones(1, F4)}, r"w.weight must have rows and columns"),
        ({"w.weight": np.zeros((3, 3), E4M3), "w.weight_scale_inv": np.ones((1, 1), F4), "w.weight_scale": np.ones(1)},
         r"w.weight has w.weight_scale_inv and w.weight_scale; how they go together"),
        ({"w.weight": np.zeros((3, 3), E4M3), "w.weight_scale": np.ones(1, F4), "w.weight_zero_point": np.ones(1, U8)},
         r"w.weight has w.weight_scale and w.weight_zero_point"),
        ({"w.weight": np.ones((3, 3), F4)}, r"nothing of it is quantised in a way that is known"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_one_line(tmp_path, capsys, arrays, message):
    source = write(tmp_path / "x.safetensors", arrays)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.convert(source, tmp_path / "y.safetensors", to_layout="same", dequantize=True)
    assert "\n" not in str(caught.value)
    assert run(["convert", str(source), str(tmp_path / "y.npz"), "--to", "same", "--dequantize"]) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"weight_block_size": [0, 128]}, "weight_block_size of config.json must be two whole numbers from 1 on"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [True, 128]}, "weight_block_size"),
        ({"weight_block_size": [10**30, 128]}, "weight_block_size"),
        ({"weight_block_size": "128"}, "weight_block_size"),
        ({"weight_block_size": [2, 2]}, r"the shape \(2, 2\) to go with w"),
        ("fp8", "quantization_config of config.json must be an object"),
    ],
)
def test_a_config_that_says_no_blocks_is_refused(tmp_path, said, message):
    source = write(tmp_path / "x.safetensors", {"w": np.zeros((3, 3), E4M3), "w_scale_inv": np.ones((1, 1), F4)})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "y.safetensors", to_layout="same", dequantize=True)


def test_the_block_size_of_a_model_within_a_model_is_found_and_left_out(tmp_path):
    numbers, factors = float8((40, 24), (16, 8))
    source = tmp_path / "hf"
    source.mkdir()
    write(source / "model.safetensors", {"w": numbers, "w_scale_inv": factors})
    text = {"hidden_size": 3, "quantization_config": {"weight_block_size": [16, 8]}}
    (source / "config.json").write_text(json.dumps({"model_type": "two", "text_config": text}))
    found = converted(source, tmp_path / "x")
    assert same(found["w"], multiplied(numbers, expanded(factors, (40, 24), (16, 8)), "bf16"))
    said = json.loads((tmp_path / "x" / "config.json").read_text())
    assert said == {"model_type": "two", "text_config": {"hidden_size": 3}}


def test_scales_of_activations_are_kept_aside(tmp_path, capsys):
    numbers, factors = float8((6, 40), (6, 40))
    arrays = {"a.weight": numbers, "a.weight_scale": factors.reshape(1), "a.input_scale": np.float32([0.5])}
    source = write(tmp_path / "x.safetensors", {**arrays, "b.input_scale": np.float32([2])})
    assert run(["convert", str(source), str(tmp_path / "y"), "--to", "same", "--dequantize"]) == 0
    assert "kept aside: a.input_scale: a scale of activations" in capsys.readouterr().out
    assert checkpoints.read(tmp_path / "y").keys() == {"a.weight", "b.input_scale"}
    assert checkpoints.verify(source, tmp_path / "y").passed
    kept = checkpoints.open(tmp_path / "y" / "attn-bridge.kept", format="safetensors")
    assert [array.tolist() for array in kept.values()] == [[0.5]]


def test_tensors_without_numbers_are_dequantised_too(tmp_path):
    arrays = {
        "a_blocks": np.zeros((0, 4, 2, 16), U8),
        "a_scales": np.zeros((0, 4, 2), U8),
        "b_blocks": np.zeros((2, 4, 0, 16), U8),
        "b_scales": np.zeros((2, 4, 0), U8),
        "w": np.zeros((0, 3), E4M3),
        "w_scale_inv": np.zeros((0, 1), F4),
    }
    found = converted(write(tmp_path / "x.safetensors", arrays), tmp_path / "y.safetensors")
    assert {name: array.shape for name, array in found.items()} == {"a": (0, 64, 4), "b": (2, 0, 4), "w": (0, 3)}


def folder(path, layers=2):
    """Write a quantised folder of many tensors and return it."""
    path.mkdir()
    arrays = {}
    for i in range(layers):
        blocks, scales = mxfp4((3, 64, 8, 16), seed=i, low=100, high=140)
        numbers, factors = float8((200, 130), seed=i)
        stem = STEM.replace("0", str(i))
        arrays |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"w{i}.weight": numbers}
        arrays |= {f"w{i}.weight_scale_inv": factors, f"n{i}.weight": np.float32([1.5, 0.1])}
    write(path / "model.safetensors", arrays)
    config = {"model_type": "own", "quantization_config": {"quant_method": "fp8"}, "hidden_size": 3}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_says_what_was_read_and_written_and_is_verified(tmp_path, capsys):
    source = folder(tmp_path / "hf")
    target = tmp_path / "same"
    assert run(["convert", str(source), str(target), "--to", "same", "--dequantize", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "2 tensors of MXFP4 become bfloat16, two numbers to a byte times its scale, rounded once" in shown
    assert "float8_e4m3fn in blocks of 128 x 128 become bfloat16, each number times its scale, rounded once" in shown
    assert run(["convert", str(source), str(target), "--dequantize", "--to", "same", "--dry-run", "--json", "-"]) == 0
    planned = {one["name"]: one["sources"] for one in json.loads(capsys.readouterr().out)["tensors"]}
    assert planned[STEM] == [f"{STEM}_blocks", f"{STEM}_scales"]
    assert planned["w1.weight"] == ["w1.weight", "w1.weight_scale_inv"]
    assert run(["convert", str(source), str(target), "--to", "same", "--dequantize"]) == 0
    assert run(["verify", str(source), str(target)]) == 0
    found = checkpoints.read(target)
    assert {array.dtype.name for array in found.values()} == {"bfloat16", "float32"}  # the norms stay as they are
    assert json.loads((target / "config.json").read_text()) == {"model_type": "own", "hidden_size": 3}
    said = json.loads((target / "attn-bridge.json").read_text())
    originals = {name for name in checkpoints.read(source) if not name.startswith("n")}
    assert said["source"]["quantised"].keys() == originals
    assert said["tensors"].keys() == found.keys()
    again = checkpoints.convert(source, tmp_path / "again", to_layout="same", dequantize=True).target
    for file in target.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    (again / "attn-bridge.json").unlink()
    seen = checkpoints.verify(source, again, to_layout="same", dequantize=True)
    assert (seen.passed, seen.by_digest) == (True, False)
    assert not checkpoints.verify(source, again, to_layout="same").passed
    arrays = checkpoints.read(source)
    arrays["w1.weight_scale_inv"][-1, -1] *= 1 + 2**-20  # few numbers of that block are rounded to others
    write(source / "model.safetensors", arrays)
    broken = checkpoints.verify(source, target)
    assert broken.problems["w1.weight_scale_inv"] == "has other bytes than when it was converted"


def test_without_the_option_quantised_tensors_stay_and_layouts_name_it(tmp_path):
    source = folder(tmp_path / "hf")
    same_bytes = checkpoints.convert(source, tmp_path / "same", to_layout="same").target
    assert "quantization_config" in (same_bytes / "config.json").read_text()
    for name in (f"{STEM}_blocks", f"{STEM}_scales", "model.layers.0.self_attn.q_proj.weight_scale_inv"):
        arrays = {"model.embed_tokens.weight": np.ones((3, 4), F4), name: np.zeros((1, 1, 1, 16), U8)}
        arrays["model.layers.0.self_attn.sinks"] = np.ones(4, F4)
        there = write(tmp_path / "x.safetensors", arrays)
        with pytest.raises(LayoutError, match=r"--dequantize makes bfloat16 of"):
            checkpoints.convert(there, tmp_path / "flax")


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_interrupted_run_goes_on(tmp_path, is_killed):
    source = folder(tmp_path / "hf", 4)
    options = {"to_layout": "same", "dequantize": True, "dtype": "f16"}
    whole = checkpoints.convert(source, tmp_path / "whole", **options)
    interrupted(source, tmp_path / "x", is_killed, **options)
    assert not (tmp_path / "x").exists()
    result = checkpoints.convert(source, tmp_path / "x", resume=True, **options)
    assert result.resumed > 3
    assert (result.changed, result.digests) == (whole.changed, whole.digests)
    for file in whole.target.iterdir():
        assert (tmp_path / "x" / file.name).read_bytes() == file.read_bytes()
    assert checkpoints.verify(source, tmp_path / "x").passed


def test_a_resumed_run_starts_again_where_the_blocks_have_another_size(tmp_path):
    source = folder(tmp_path / "hf", 4)
    interrupted(source, tmp_path / "x", to_layout="same", dequantize=True)
    said = {"quantization_config": {"weight_block_size": [127, 128]}}  # as many blocks, and others
    (source / "config.json").write_text(json.dumps(said))
    result = checkpoints.convert(source, tmp_path / "x", to_layout="same", dequantize=True, resume=True)
    assert "no interrupted run" in result.restart_reason


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@cover.some("kind", ["mxfp4", "float8"], ["mxfp4"])
def test_memory_stays_within_bounds(tmp_path, kind):
    size = 96 << 20
    if kind == "mxfp4":
        arrays = {"a_blocks": ("uint8", (6, 4096, 256, 16)), "a_scales": ("uint8", (6, 4096, 256))}
    else:
        arrays = {
            "w": ("float8_e4m3fn", (size // 8192 * 2, 8192)),
            "w_scale_inv": ("float32", (size // 8192 // 64, 64)),
        }
    source = tmp_path / "x.safetensors"
    writer = containers.make_writer("safetensors", source, [TensorInfo(name, *one) for name, one in arrays.items()], {})
    writer.finish()  # as large as it says, and a hole
    code = MEMORY.replace("max_memory=", "to_layout='same', dequantize=True, max_memory=")
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "y.safetensors"), str(200 << 20)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert checkpoints.inspect(tmp_path / "y.safetensors").nbytes == 4 * size
    assert int(done.stdout) * 1024 < (200 - 64) << 20
