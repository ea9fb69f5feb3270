"""GPTQ, AWQ and bitsandbytes: dequantised to the exact product, in pieces as whole, and named where they can't be."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import make_writer, open_reader
from attn_bridge.checkpoints.containers.base import CheckpointError, TensorInfo
from attn_bridge.checkpoints.quantised import Dequantised
from attn_bridge.models import layouts
from parity_tests.support.files.quantised_files import SCHEMES, gptq

from ..checkpoints import llama

WEIGHT = np.random.default_rng(2).normal(size=(32, 48))
NORM = np.float16([1.5, 2.5, -3])
NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight")


def put(folder, tensors, scheme=None, **config):
    """Write a folder of tensors and its config.json."""
    folder.mkdir(exist_ok=True)
    infos = [TensorInfo(name, array.dtype.name, array.shape) for name, array in tensors.items()]
    writer = make_writer("safetensors", folder / "model.safetensors", infos, {"format": "pt"})
    for name, array in tensors.items():
        writer.write(name, array)
    writer.finish()
    said = {**config, **({} if scheme is None else {"quantization_config": scheme})}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def quantised(folder, name):
    make, scheme = SCHEMES[name]
    tensors, exact = make(WEIGHT)
    tensors = {f"layer.proj.{ending}": array for ending, array in tensors.items()}
    return put(folder, {"layer.norm.weight": NORM, **tensors}, scheme), exact


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_the_exact_product(tmp_path, name):
    source, exact = quantised(tmp_path / "in", name)
    for word, dtype in (("f64", np.float64), ("f32", np.float32), ("bf16", ml_dtypes.bfloat16)):
        target = tmp_path / word
        checkpoints.convert(source, target, to_layout="same", dequantize=True, dtype=word)
        assert checkpoints.verify(source, target).passed
        found = checkpoints.read(target)
        assert found.keys() == {"layer.norm.weight", "layer.proj.weight"}
        np.testing.assert_array_equal(found["layer.proj.weight"], exact.astype(dtype))
        np.testing.assert_array_equal(found["layer.norm.weight"], NORM.astype(dtype))
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


@pytest.mark.parametrize("name", SCHEMES)
def test_pieces_are_those_of_the_whole(tmp_path, name):
    source, exact = quantised(tmp_path / "in", name)
    with open_reader(source) as reader:
        found = Dequantised(reader, json.loads((source / "config.json").read_text()), "float64")
        (tensor,) = found.quantised.values()
        flat = exact.T if tensor.file_shape != exact.shape else exact
        for start, stop in ((0, 1), (37, 43), (39, 211), (5, 960), (951, 960)):
            data = found.read_range(tensor.numbers, 8 * start, 8 * stop)
            np.testing.assert_array_equal(np.frombuffer(data), flat.reshape(-1)[start:stop])
        rows, columns = flat.shape
        for row, step, left, right in ((0, 1, 3, 10), (2, 3, 0, columns), (rows - 7, 2, 5, 6)):
            into = np.empty(((rows - row + step - 1) // step, right - left))
            found.read_rows(tensor.numbers, row * columns + left, step * columns, into)
            np.testing.assert_array_equal(into, flat[row::step, left:right])


def test_default_dtype_is_that_of_the_rest_of_the_model(tmp_path):
    source, _ = quantised(tmp_path / "in", "awq")
    target = checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True).target
    assert {info.dtype for info in checkpoints.inspect(target).tensors.values()} == {"float16"}


GPTQ4 = SCHEMES["gptq 4"][1]
REFUSED = {
    "GPTQ, 3 bit": {"quant_method": "gptq", "bits": 3, "group_size": 8},
    "GPTQ, 4 bit": {**GPTQ4, "checkpoint_format": "marlin"},
    "AWQ, 4 bit": {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemv"},
    "AWQ, 3 bit": {"quant_method": "awq", "bits": 3, "group_size": 8},
    "AQLM": {"quant_method": "aqlm", "nbits_per_codebook": 16},
    "HQQ, 4 bit": {"quant_method": "hqq", "bits": 4},
    "compressed-tensors, marlin-24, 4 bit": {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    },
}
LAYER = "model.layers.0.self_attn.q_proj"
BY_NAME = {
    "EXL3": {"trellis": np.zeros((4, 4, 64), np.int16), "suh": np.ones(64, np.float16)},
    "EXL2": {"q_weight": np.zeros((8, 8), np.int32), "q_scale": np.zeros((2, 8), np.int32)},
    "quanto of 4 bit": {"weight._data._data": np.zeros((4, 8), np.uint8), "weight._shift": np.ones((8, 1), np.float32)},
    "quanto": {"weight._data": np.zeros((8, 8), np.int8), "weight._scale": np.ones((8, 1), np.float32)},
    "EETQ": {"weight": np.zeros((8, 8), np.int8), "weight_scales": np.ones(8, np.float16)},
    "HQQ": {"W_q": np.zeros((8, 8), np.uint8), "zero": np.ones((8, 1), np.float32)},
}  # fmt: skip
"""Method -> what its files hold of a matrix, where config.json does not name it."""


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_schemes_are_named_from_the_config(tmp_path, words, dequantize):
    tensors = {f"{LAYER}.{ending}": array for ending, array in gptq(WEIGHT)[0].items()}
    source = put(tmp_path / "in", tensors, REFUSED[words], model_type="llama")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", dequantize=dequantize)
    assert str(caught.value).startswith(f"{source} is quantised by {words} (config.json), which can't be dequantised: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("method", BY_NAME)
def test_methods_that_config_json_does_not_name_are_named_by_their_tensors(tmp_path, method, dequantize):
    tensors = {f"{LAYER}.{ending}": array for ending, array in BY_NAME[method].items()}
    source = put(tmp_path / "in", tensors, model_type="llama")
    name = method.removesuffix(" of 4 bit")
    message = rf"is quantised by {name} \(the names of its tensors, {LAYER}\..*\), which can't be dequantised: this"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "out", dequantize=dequantize)


def test_float8_of_modelopt_is_dequantised_and_its_other_algorithms_are_named(tmp_path):
    numbers = np.float32([[1, -2, 3], [4, 5, -6]]).astype(ml_dtypes.float8_e4m3fn)
    scales = {"weight_scale": np.float32(0.5), "input_scale": np.float32(0.1), "k_scale": np.float32(0.25)}
    tensors = {f"{LAYER}.{name}": np.asarray(array) for name, array in {"weight": numbers, **scales}.items()}
    source = put(tmp_path / "in", tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, model_type="llama")
    target = checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True).target
    found = checkpoints.read(target)
    np.testing.assert_array_equal(found[f"{LAYER}.weight"], numbers.astype(np.float32) / 2)
    assert f"{LAYER}.k_scale" not in found
    source = put(tmp_path / "nv", tensors, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, model_type="llama")
    with pytest.raises(CheckpointError, match=r"by ModelOpt, W4A8_AWQ \(config.json\), .* quant_algo must be FP8 or"):
        checkpoints.convert(source, tmp_path / "out", dequantize=True)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])  # mlx_lm writes either, or both
def test_weights_of_mlx_are_named_with_its_own_remedy(tmp_path, key):
    tensors = {f"{LAYER}.weight": np.zeros((8, 2), np.uint32), f"{LAYER}.scales": np.ones((8, 1), np.float16),
               f"{LAYER}.biases": np.ones((8, 1), np.float16)}  # fmt: skip
    source = put(tmp_path / "in", tensors, model_type="llama", **{key: {"group_size": 16, "bits": 4}})
    for dequantize in (True, False):
        with pytest.raises(CheckpointError, match=r"by MLX, 4 bit \(config.json\).*mlx_lm.convert --dequantize makes"):
            checkpoints.convert(source, tmp_path / "out", dequantize=dequantize)
    assert "quantised by MLX, 4 bit" in checkpoints.inspect(source).why


@pytest.mark.parametrize(
    ("name", "words"), [("gptq 4", "GPTQ, 4 bit"), ("awq", "AWQ, 4 bit"), ("int8", "bitsandbytes, 8 bit")]
)
def test_quantised_weights_are_named_where_they_stay(tmp_path, name, words):
    make, scheme = SCHEMES[name]
    tensors = {f"{LAYER}.{ending}": array for ending, array in make(WEIGHT)[0].items()}
    source = put(tmp_path / "in", tensors, scheme, model_type="llama")
    message = rf"is quantised by {words} \(config.json\); --dequantize makes floating point of it$"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "out")
    checkpoints.convert(source, tmp_path / "same.npz", to_layout="same")
    assert checkpoints.read(tmp_path / "same.npz").keys() == tensors.keys()


def test_zero_points_without_a_config_are_refused(tmp_path):
    tensors = {f"{LAYER}.{ending}": array for ending, array in gptq(WEIGHT)[0].items()}
    source = put(tmp_path / "in", tensors)
    with pytest.raises(CheckpointError, match=r"form of its zero points is in a config.json's quantization_config"):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True)


BROKEN = {
    "lacks zero points": ("gptq 4", {"qzeros": None}, r"has no layer\.proj\.qzeros beside it"),
    "zero points of other groups": (
        "gptq 4",
        {"qzeros": np.zeros((4, 3), np.int32)},
        r"qzeros must have the shape \(6, 4\)",
    ),
    "a group beyond the last": ("gptq 4", {"g_idx": np.full(48, 6, np.int32)}, r"g_idx must give 8 inputs to group 0"),
    "a negative group": (
        "gptq 4",
        {"g_idx": np.full(48, -1, np.int32)},
        r"g_idx must give 8 inputs to group 0, got 0$",
    ),
    "a group for all": ("gptq 4", {"g_idx": np.zeros(48, np.int32)}, r"g_idx must give 8 inputs to group 0, got 48$"),
    "an uneven group": (
        "gptq 4",
        {"g_idx": np.int32([0] * 8 + [1] * 7 + [2] * 9 + [3] * 8 + [4] * 8 + [5] * 8)},
        r"g_idx must give 8 inputs to group 1, got 7$",
    ),
    "words of 64 bits": ("awq", {"qweight": np.zeros((48, 4), np.int64)}, r"must be a matrix of int32 to be AWQ"),
    "scales of another dtype": ("awq", {"scales": np.zeros((6, 32))}, r"scales must be a matrix of float16"),
    "too few codes": ("nf4", {"weight": np.zeros((7, 1), np.uint8)}, r"proj\.weight must have 768 elements"),
    "too few scales": ("nf4", {"weight.absmax": np.zeros(2, np.float32)}, r"absmax must have 96 elements"),
    "no table": ("nf4", {"weight.quant_map": None}, r"has no layer\.proj\.weight\.quant_map beside it"),
    "a shape of text": (
        "nf4",
        {"weight.quant_state.bitsandbytes__nf4": np.frombuffer(b'{"shape": "ab", "blocksize": 4}', np.uint8)},
        r"must give shape and blocksize of layer\.proj\.weight",
    ),
    "a shape beyond memory": (
        "nf4",
        {
            "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
                b'{"shape": [1099511627776, 8], "blocksize": 4}', np.uint8
            )
        },
        r"must have \d+ elements",
    ),
    "an offset beyond float64": (
        "nf4 nested",
        {
            "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
                b'{"shape": [32, 48], "blocksize": 16, "nested_blocksize": 4, "nested_offset": 1' + b"0" * 400 + b"}",
                np.uint8,
            )
        },
        r"must give shape and blocksize of layer\.proj\.weight",
    ),
    "rows of another number": ("int8", {"SCB": np.zeros(3, np.float32)}, r"SCB must have one float32 for each row"),
    "another order": ("int8", {"weight_format": np.uint8(2).reshape(())}, r"weight_format must be 0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_go_together_are_refused(tmp_path, case):
    name, changes, message = BROKEN[case]
    make, scheme = SCHEMES[name]
    tensors = {**make(WEIGHT)[0], **changes}
    tensors = {f"layer.proj.{ending}": array for ending, array in tensors.items() if array is not None}
    source = put(tmp_path / "in", tensors, scheme)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("gptq shuffled", "g_idx"), ("gptq 4", "scales"), ("awq", "qzeros"), ("int8", "SCB"),
        ("nf4 nested", "weight.nested_absmax"), ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ],
)  # fmt: skip
def test_scales_are_not_dropped_without_their_numbers(tmp_path, name, dropped, dequantize):
    source, _ = quantised(tmp_path / "in", name)
    message = rf"--drop leaves out layer\.proj\.{dropped}, without which layer\.proj\.\w+ are codes that mean nothing"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "out", to_layout="same", dequantize=dequantize, drop=f"*.{dropped}")
    checkpoints.convert(source, tmp_path / "rest", to_layout="same", drop="*.proj.*")
    assert checkpoints.read(tmp_path / "rest").keys() == {"layer.norm.weight"}


@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
def test_scales_of_float8_are_not_dropped_alone(tmp_path, ending):
    numbers = WEIGHT.astype(ml_dtypes.float8_e4m3fn)
    tensors = {f"{LAYER}.weight": numbers, f"{LAYER}.weight{ending}": np.float32([2.5]), "router_scale": np.ones(3)}
    source = put(tmp_path / "in", tensors, {"quant_method": "fp8"}, model_type="llama")
    with pytest.raises(CheckpointError, match=rf"--drop leaves out {LAYER}\.weight{ending}, without which"):
        checkpoints.convert(source, tmp_path / "out", drop="*_scale*")
    checkpoints.convert(source, tmp_path / "rest", to_layout="same", drop="router_scale")


@pytest.mark.parametrize("name", ["gptq shuffled", "awq", "nf4"])
def test_originals_of_scaled_queries_are_kept_and_restored(tmp_path, name):
    make, scheme = SCHEMES[name]
    rng = np.random.default_rng(7)
    sizes = {"self_attn.q_proj": (48, 48), "self_attn.k_proj": (16, 48), "self_attn.v_proj": (16, 48),
             "self_attn.o_proj": (48, 48), "mlp.gate_proj": (32, 48), "mlp.up_proj": (32, 48),
             "mlp.down_proj": (48, 32)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": rng.normal(size=(7, 48)).astype(np.float16)}
    tensors |= {name: np.float16(rng.normal(size=48)) for name in ("model.norm.weight", *NORMS)}
    exact = {}
    for layer, shape in sizes.items():
        parts, weight = make(rng.normal(size=shape))
        tensors |= {f"model.layers.0.{layer}.{ending}": array for ending, array in parts.items()}
        exact[f"model.layers.0.{layer}.weight"] = weight.astype(np.float32)
    config = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6,
              "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 7, "tie_word_embeddings": True}  # fmt: skip
    source = put(tmp_path / "in", tensors, scheme, model_type="llama", **config)
    target = checkpoints.convert(source, tmp_path / "out", to_layout="maxtext", dequantize=True, dtype="f32").target
    assert checkpoints.verify(source, target).passed
    checkpoints.convert(source, tmp_path / "plain", to_layout="same", dequantize=True, dtype="f32")
    wanted = checkpoints.read(checkpoints.convert(tmp_path / "plain", tmp_path / "wanted", to_layout="maxtext").target)
    assert {key: array.tobytes() for key, array in checkpoints.read(target).items()} == {
        key: array.tobytes() for key, array in wanted.items()
    }
    found = checkpoints.read(checkpoints.convert(target, tmp_path / "back", to_layout="hf-llama").target)
    for layer, array in exact.items():
        np.testing.assert_array_equal(found[layer], array)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_numbers_without_scales_are_noted(tmp_path, dtype):
    tensors = {f"trf_blocks.0.att.{name}.weight": np.ones((4, 4), dtype) for name in ("W_query", "W_key", "W_value")}
    source = put(tmp_path / "in", {**tensors, "trf_blocks.0.norm1.scale": np.ones(4, np.float32)})
    (note,) = checkpoints.plan(source, tmp_path / "out").notes
    assert note == (
        f"copied as they are, as nothing beside them scales them: 3 tensors of {np.dtype(dtype).name}, such as "
        "trf_blocks.0.att.W_query.weight"
    )
    assert not checkpoints.plan(source, tmp_path / "out", to_layout="same").notes


def test_a_config_that_describes_no_tensor_is_noted(tmp_path):
    arrays = layouts.find("hf-llama").from_canonical(llama(2))
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    source = put(tmp_path / "in", arrays, scheme, model_type="llama", tie_word_embeddings=False)
    (note,) = checkpoints.plan(source, tmp_path / "out", to_layout="hf-llama").notes
    assert note == "left out of config.json: quantization_config (GPTQ, 4 bit), as no tensor is quantised"
