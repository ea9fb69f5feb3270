"""compressed-tensors and NVFP4: the package's own numbers, in pieces as whole, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import open_reader
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.quantised import Dequantised
from parity_tests import goldens

from .test_quantised_schemes import put

GOLDENS = Path(goldens.__file__).with_name("compressed.safetensors")
NORM = {"layer.norm.weight": np.float16([1.5, -2]).astype(ml_dtypes.bfloat16)}
with open_reader(GOLDENS) as _reader:
    CONFIGS = {name: json.loads(text) for name, text in _reader.metadata.items() if name != "format"}
    TENSORS = {name: _reader.read(name) for name in _reader.tensors}


def tensors_of(name, **changes):
    parts = {ending: TENSORS[f"{name}/{ending}"] for ending in _endings(name)} | changes
    return {f"layer.proj.{ending}": array for ending, array in parts.items() if array is not None} | NORM


def _endings(name):
    return [key.rpartition("/")[2] for key in TENSORS if key.startswith(f"{name}/") and not key.endswith("/exact")]


def dequantised(tmp_path, tensors, scheme, **options):
    source = put(tmp_path / "in", tensors, scheme)
    target = tmp_path / "out.safetensors"
    checkpoints.convert(source, target, to_layout="same", dequantize=True, **options)
    assert checkpoints.verify(source, target).passed
    return checkpoints.read(target)


def differences(got, wanted):
    return np.flatnonzero(got.view(np.uint16) != wanted.view(np.uint16)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_the_package(tmp_path, name):
    found = dequantised(tmp_path, tensors_of(name), CONFIGS[name])
    assert found.keys() == {"layer.proj.weight", *NORM}
    assert differences(found["layer.proj.weight"], TENSORS[f"{name}/exact"]) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_are_those_of_the_whole(tmp_path, name):
    source = put(tmp_path / "in", tensors_of(name), CONFIGS[name])
    exact = TENSORS[f"{name}/exact"]
    with open_reader(source) as reader:
        found = Dequantised(reader, {"quantization_config": CONFIGS[name]}, "bfloat16")
        (tensor,) = found.quantised.values()
        for start, stop in ((0, 1), (37, 43), (39, 211), (5, 960), (1151, 1152)):
            data = found.read_range(tensor.numbers, 2 * start, 2 * stop)
            np.testing.assert_array_equal(np.frombuffer(data, exact.dtype), exact.reshape(-1)[start:stop])
        for row, step, left, right in ((0, 1, 3, 10), (2, 3, 0, 64), (11, 2, 5, 6), (3, 4, 17, 63)):
            into = np.empty((len(range(row, 18, step)), right - left), exact.dtype)
            found.read_rows(tensor.numbers, row * 64 + left, step * 64, into)
            np.testing.assert_array_equal(into, exact[row::step, left:right])


def test_groups_of_columns_may_be_in_any_order(tmp_path):
    name = "packed 4 bit, zeros"
    order = np.random.default_rng(0).permutation(64)
    groups = np.empty(64, np.int32)
    groups[order] = np.arange(64) // 16
    codes = np.random.default_rng(1).integers(0, 16, (18, 64))
    words = (codes.reshape(18, 8, 8) << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)
    zeros = TENSORS[f"{name}/weight_zero_point"].view(np.uint32)
    zeros = (zeros[np.arange(18) // 8] >> (4 * (np.arange(18) % 8)).astype(np.uint32)[:, None] & 15).astype(np.float64)
    found = dequantised(tmp_path, tensors_of(name, weight_packed=words, weight_g_idx=groups), CONFIGS[name])
    scales = TENSORS[f"{name}/weight_scale"].astype(np.float64)[:, groups]
    wanted = ((codes - zeros[:, groups]) * scales).astype(ml_dtypes.bfloat16)
    assert differences(found["layer.proj.weight"], wanted) == []


def test_scales_of_scales_multiply_in_modelopt(tmp_path):
    packed, scales = TENSORS["NVFP4/weight_packed"], TENSORS["NVFP4/weight_scale"]
    overall = np.float32(1) / TENSORS["NVFP4/weight_global_scale"].reshape(())
    tensors = tensors_of("NVFP4", weight_packed=None, weight_global_scale=None, weight=packed, weight_scale_2=overall,
                         input_scale=np.float32(2).reshape(()))  # fmt: skip
    found = dequantised(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, dtype="f32")
    assert "layer.proj.input_scale" not in found
    table = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([table, -table])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(18, 64)
    wanted = table[codes] * (scales.astype(np.float32) * overall).repeat(16, axis=1)
    np.testing.assert_array_equal(found["layer.proj.weight"], wanted)


def test_layers_may_differ_in_format(tmp_path):
    names = ("int8 by blocks", "packed 4 bit", "NVFP4", "MXFP8")
    tensors = {
        f"{number}.{key.removeprefix('layer.')}": array
        for number, name in enumerate(names)
        for key, array in tensors_of(name).items()
    }
    groups = {f"group_{number}": CONFIGS[name]["config_groups"]["group_0"] for number, name in enumerate(names)}
    scheme = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    found = dequantised(tmp_path, tensors, scheme)
    for number, name in enumerate(names):
        assert differences(found[f"{number}.proj.weight"], TENSORS[f"{name}/exact"]) == []


REFUSED = {
    "no scales": ("packed 4 bit", {"weight_scale": None}, {}, r"weight_packed has no layer\.proj\.weight_scale beside"),
    "no shape": ("packed 4 bit", {"weight_shape": None}, {}, r"needs two whole numbers \.weight_shape beside it"),
    "a lying shape": (
        "packed 4 bit",
        {"weight_shape": np.int64([18, 1 << 60])},
        {},
        r"weight_shape must be the shape of .*weight_packed \(18, 8\) unpacked",
    ),
    "a shape of other bits": (
        "packed 4 bit",
        {"weight_shape": np.int64([18, 96])},
        {},
        r"\(18, 8\) for 96 columns fits no one number of bits",
    ),
    "words with gaps": (
        "packed 3 bit, zeros",
        {"weight_shape": np.int64([18, 16]), "weight_packed": np.zeros((18, 2), np.int32)},
        {},
        r"fits no one number of bits of config\.json, packed without gaps",
    ),
    "scales of another shape": (
        "packed 4 bit",
        {"weight_scale": np.ones((9, 4), ml_dtypes.bfloat16)},
        {},
        r"weight_scale \(9, 4\) has no scale for all",
    ),
    "zeros of another shape": (
        "packed 4 bit, zeros",
        {"weight_zero_point": np.zeros((18, 4), np.int32)},
        {},
        r"must have int8 \(18, 4\) or int32 \(3, 4\)",
    ),
    "a group that is not there": (
        "packed 4 bit",
        {"weight_g_idx": np.arange(64, dtype=np.int32)},
        {},
        r"weight_g_idx must give 16 inputs to group 0, got 1",
    ),
    "no scale for all": ("NVFP4", {"weight_global_scale": None}, {}, r"is NVFP4, which has one scale of float32"),
    "scales of other groups": (
        "NVFP4",
        {"weight_scale": np.ones((18, 2), ml_dtypes.float8_e4m3fn)},
        {},
        r"fit neither NVFP4 \(8 bytes",
    ),
    "scaled inputs": (
        "NVFP4",
        {"pre_quant_scale": np.ones(64, np.float32)},
        {},
        r"layer\.proj\.pre_quant_scale scales the inputs of its layer",
    ),
    "sparse": ("int8 by rows", {}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"its weights are sparse"),
    "rotated": ("int8 by rows", {}, {"transform_config": {"config_groups": {"u": {}}}}, r"its weights are rotated"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_go_together_are_refused(tmp_path, case):
    name, changes, settings, message = REFUSED[case]
    source = put(tmp_path / "in", tensors_of(name, **changes), {**CONFIGS[name], **settings})
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "dropped"),
    [("packed 4 bit", "weight_shape"), ("packed 4 bit, zeros", "weight_zero_point"), ("NVFP4", "weight_scale"),
     ("NVFP4", "weight_global_scale"), ("int8 by rows, zeros", "weight_zero_point")],
)  # fmt: skip
def test_scales_are_not_dropped_without_their_numbers(tmp_path, name, dropped):
    source = put(tmp_path / "in", tensors_of(name), CONFIGS[name])
    with pytest.raises(CheckpointError, match=rf"leaves out layer\.proj\.{dropped}, without which layer\.proj\.weight"):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", drop=f"*.{dropped}")


@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_weights_are_named_where_they_stay(tmp_path, name):
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {key.replace("layer.proj", layer): array for key, array in tensors_of(name).items()}
    source = put(tmp_path / "in", tensors, CONFIGS[name], model_type="llama")
    bits = "".join(digit for digit in name if digit.isdigit()) or "4"
    words = rf"is quantised by compressed-tensors, {CONFIGS[name]['format']}, {bits} bit \(config.json\); --dequantize "
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoints.convert(source, tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["weight_packed", "weight"])
def test_experts_in_one_tensor_of_integers_are_refused_with_the_remedy(tmp_path, kind):
    numbers = np.zeros((4, 8, 2), np.int32 if kind == "weight_packed" else np.int8)
    tensors = {f"a.experts.up.{kind}": numbers, "a.experts.up.weight_scale": np.ones((4, 8, 1), np.float32)}
    source = put(tmp_path / "in", tensors)
    with pytest.raises(CheckpointError, match=r"are read of MXFP4 and float8: convert the model that it was made of$"):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True)
