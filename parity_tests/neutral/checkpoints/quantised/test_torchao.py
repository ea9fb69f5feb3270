"""torchao in safetensors: dequantised to the exact product where the metadata describes the tensor, else named."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import make_writer
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo

RNG = np.random.default_rng(5)
LAYER = "model.layers.0.self_attn.q_proj"
SCHEME = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
NORM = np.float32([1.5, 2.5, -3]).astype(ml_dtypes.bfloat16)

CODES = RNG.integers(-128, 128, size=(6, 64)).astype(np.int8)
FLOAT8 = RNG.normal(size=(6, 64)).astype(ml_dtypes.float8_e4m3fn)
CASES = {
    "rows": ("Int8Tensor", [1, 64], CODES, np.float32, (6, 1), False),
    "rows with zero points": ("Int8Tensor", [1, 64], CODES, np.float32, (6, 1), True),
    "whole": ("Int8Tensor", [6, 64], CODES, ml_dtypes.bfloat16, (1, 1), True),
    "groups": ("IntxUnpackedToInt8Tensor", [1, 32], CODES, ml_dtypes.bfloat16, (6, 2), True),
    "float8 rows": ("Float8Tensor", [1, 64], FLOAT8, np.float32, (6, 1), False),
    "float8 blocks": ("Float8Tensor", [4, 32], FLOAT8, np.float32, (2, 2), False),
}
"""Case -> class, rows and columns per scale, numbers, dtype and shape of scales, and whether there are zero points."""


def parts(case):
    """Return a matrix of torchao as its tensors, the text on it, and the product."""
    kind, block, numbers, dtype, shape, has_zeros = CASES[case]
    scales = np.abs(RNG.normal(size=shape) + 0.1).astype(dtype)
    zeros = RNG.integers(-9, 9, size=shape).astype(np.int8)
    tensors = {
        "_weight_qdata": numbers,
        "_weight_scale": scales,
        **({"_weight_zero_point": zeros} if has_zeros else {}),
    }
    rows, columns = (np.arange(size) // one for size, one in zip(numbers.shape, block, strict=True))
    spread = [one.astype(np.float64)[rows][:, columns] for one in (scales, zeros if has_zeros else zeros * 0)]
    about = {"_type": kind, "_data": {"block_size": block, "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}}
    return tensors, about, (numbers.astype(np.float64) - spread[1]) * spread[0]


def put(folder, tensors, about, *, scheme=SCHEME, file="model.safetensors", layer=LAYER, parameter="weight"):
    folder.mkdir(exist_ok=True)
    named = {"model.norm.weight": NORM} if file == "model.safetensors" else {}
    named |= {f"{layer}.{ending}": array for ending, array in tensors.items()}
    metadata = {"format": "pt", f"{layer}.{parameter}": about if isinstance(about, str) else json.dumps(about)}
    metadata |= {"tensor_names": json.dumps([*named]), "model.norm.weight": json.dumps({"_type": "Tensor"})}
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in named.items()]
    writer = make_writer("safetensors", folder / file, infos, metadata)
    for name, array in named.items():
        writer.write(name, array)
    writer.finish()
    (folder / "config.json").write_text(json.dumps({} if scheme is None else {"quantization_config": scheme}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_weights_of_torchao_are_the_exact_product(tmp_path, case):
    tensors, about, exact = parts(case)
    source = put(tmp_path / "in", tensors, about)
    for word, dtype in (("f64", np.float64), ("f32", np.float32), (None, ml_dtypes.bfloat16)):
        target = tmp_path / str(word)
        options = {"to_layout": "same", "dequantize": True}
        checkpoints.convert(source, target, dtype=word, **options)
        assert checkpoints.verify(source, target).passed
        found = checkpoints.open(target)
        assert found.keys() == {"model.norm.weight", f"{LAYER}.weight"}
        np.testing.assert_array_equal(found[f"{LAYER}.weight"], exact.astype(dtype))
        assert found.metadata["files"] == {"model.safetensors": {"format": "pt"}}
        assert json.loads((target / "config.json").read_text()) == {}


@pytest.mark.parametrize(
    ("kind", "block", "scales"),
    [
        ("Float8Tensor", [1, 1, 64], (4, 6, 1)),
        ("Float8Tensor", [1, 3, 32], (4, 2, 2)),
        ("Int8Tensor", [2, 6, 64], (2, 1, 1)),
        ("Int8Tensor", [4, 6, 64], (1, 1, 1)),
    ],
)
def test_experts_in_one_parameter_are_the_exact_product(tmp_path, kind, block, scales):
    dtype = np.int8 if kind == "Int8Tensor" else ml_dtypes.float8_e4m3fn
    numbers = (RNG.normal(size=(4, 6, 64)) * 20).astype(dtype)
    factors = np.abs(RNG.normal(size=scales) + 0.1).astype(np.float32)
    spread = factors.astype(np.float64)
    for axis, (size, one) in enumerate(zip(numbers.shape, block, strict=True)):
        spread = np.take(spread, np.arange(size) // one, axis)
    tensors = {"_gate_up_proj_qdata": numbers, "_gate_up_proj_scale": factors}
    source = put(tmp_path / "in", tensors, {"_type": kind, "_data": {"block_size": block}}, parameter="gate_up_proj")
    checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True, dtype="f32")
    assert checkpoints.verify(source, tmp_path / "out").passed
    made = checkpoints.read(tmp_path / "out")
    assert made.keys() == {"model.norm.weight", f"{LAYER}.gate_up_proj"}
    np.testing.assert_array_equal(
        made[f"{LAYER}.gate_up_proj"], (numbers.astype(np.float64) * spread).astype(np.float32)
    )


def test_experts_that_are_not_read_are_named_beside_matrices_that_are(tmp_path):
    tensors, about, _ = parts("rows")
    experts = {"_up_proj_qdata": np.zeros((2, 6, 8, 4), np.int32), "_up_proj_scale_and_zero": np.ones((2, 8, 6, 2))}
    source = put(tmp_path / "in", tensors | experts, about)
    with pytest.raises(CheckpointError, match=r"_up_proj_qdata is of torchao, .* no class for it; save its dequant"):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True)


def test_static_scales_of_activations_are_kept_aside(tmp_path):
    tensors, about, exact = parts("rows")
    static = {"_weight_act_quant_scale": np.ones((1, 1), np.float32)}
    source = put(tmp_path / "in", tensors | static, about)
    checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True, dtype="f32")
    made = checkpoints.read(tmp_path / "out")
    assert made.keys() == {"model.norm.weight", f"{LAYER}.weight"}
    np.testing.assert_array_equal(made[f"{LAYER}.weight"], exact.astype(np.float32))


def test_each_file_describes_its_own_tensors(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map, exact = {}, {}
    for number, case in enumerate(("groups", "float8 rows")):
        tensors, about, product = parts(case)
        layer = f"model.layers.{number}.mlp.up_proj"
        source = put(tmp_path / "in", tensors, about, file=names[number], layer=layer)
        weight_map |= {f"{layer}.{ending}": names[number] for ending in tensors}
        exact[f"{layer}.weight"] = product.astype(np.float32)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True, dtype="f32").target
    found = checkpoints.read(target)
    assert {name: array.tobytes() for name, array in found.items()} == {n: one.tobytes() for n, one in exact.items()}


@pytest.mark.parametrize("scheme", [SCHEME, None])
def test_weights_of_torchao_that_stay_are_named(tmp_path, scheme):
    tensors, about, _ = parts("rows")
    source = put(tmp_path / "in", tensors, about, scheme=scheme)
    by = r"torchao \(config.json\)" if scheme else rf"the names of its tensors \({LAYER}._weight_qdata\)"
    with pytest.raises(CheckpointError, match=rf"is quantised by {by}; --dequantize makes floating point of it$"):
        checkpoints.convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"--drop leaves out .*_weight_scale, without which .*_weight_qdata are"):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", drop=["*_weight_scale"])


REFUSED = {
    "class": (lambda tensors, about: about | {"_type": "MXTensor"}, "its metadata says MXTensor; save its dequant"),
    "no method": (lambda tensors, about: about | {"_type": "Int4Tensor"}, "says Int4Tensor; convert the model that it"),
    "no class": (lambda tensors, about: {}, "its metadata has no class for it; save its"),
    "no JSON": (lambda tensors, about: "[" * 9000, "its metadata has no class for it; save its"),
    "no values": (lambda tensors, about: {"_type": "Int8Tensor"}, r"for blocks of None is no matrix of Int8Tensor"),
    "block": (lambda tensors, about: about | {"_data": {"block_size": [0, 64]}}, r"for blocks of \[0, 64\] is no"),
    "words": (lambda tensors, about: about | {"_data": {"block_size": ["1", 64]}}, "is no matrix of Int8Tensor"),
    "cube": (lambda tensors, about: about | {"_data": {"block_size": [1, 1, 64]}}, "is no matrix of Int8Tensor"),
    "finer": (lambda tensors, about: about | {"_data": {"block_size": [1, 32]}}, r"must have the shape \(6, 2\) to go"),
    "float8": (lambda tensors, about: about | {"_type": "Float8Tensor"}, "is no matrix of Float8Tensor"),
    "inputs": (
        lambda tensors, about: tensors.update(_weight_act_pre_scale=np.ones(64, np.float32)),
        "scales the inputs",
    ),
    "rows": (lambda tensors, about: about | {"_data": {"block_size": [1]}}, "is no matrix of Int8Tensor"),
    "zeros": (lambda tensors, about: tensors.update(_weight_zero_point=np.zeros((6, 1), np.int32)), "int32 .6, 1.$"),
    "scales": (lambda tensors, about: tensors.update(_weight_scale=np.ones((6, 1), np.int32)), "with int32 scales for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_of_torchao_is_named(tmp_path, case):
    tensors, about, _ = parts("rows")
    change, message = REFUSED[case]
    changed = change(tensors, about)
    source = put(tmp_path / "in", tensors, about if changed is None else changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "out").exists()
