"""GGUF files: the numbers of every type that is read, the model's config, and what is refused by which words."""

from __future__ import annotations

import json
import re
import struct
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import open_reader
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.quantised import Dequantised
from attn_bridge.cli.app import run
from attn_bridge.models import layouts
from parity_tests.support.files import gguf_files

LAYER = {
    "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8), "mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12), "input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,),
}  # fmt: skip
EXPERTS = ("gate_proj", (12, 8)), ("down_proj", (8, 12)), ("up_proj", (12, 8))
NORMS = {f"{one}_feedforward_layernorm.weight": (8,) for one in ("pre", "post")}
MORE = {
    "llama": {},
    "mixtral": {"block_sparse_moe.gate.weight": (3, 8)}
    | {f"block_sparse_moe.experts.{j}.{name}.weight": shape for j in range(3)
       for name, (_, shape) in zip(("w1", "w2", "w3"), EXPERTS, strict=True)},
    "qwen3_moe": {"mlp.gate.weight": (3, 8), **{f"self_attn.{one}_norm.weight": (4,) for one in "qk"}}
    | {f"mlp.experts.{j}.{name}.weight": shape for j in range(3) for name, shape in EXPERTS},
    "gemma2": NORMS,
    "gemma3_text": {**NORMS, **{f"self_attn.{one}_norm.weight": (4,) for one in "qk"}},
    "qwen2": {f"self_attn.{one}_proj.bias": (size,) for one, size in (("q", 8), ("k", 4), ("v", 4))},
    "qwen3": {f"self_attn.{one}_norm.weight": (4,) for one in "qk"},
}  # fmt: skip
OF_KIND = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0,
               "query_pre_attn_scalar": 4},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 4},
}  # fmt: skip
CONFIG = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 16, "vocab_size": 7,
    "rope_parameters": {"rope_theta": 5e5},
}  # fmt: skip
GPT2_LAYER = {
    "ln_1.weight": (8,), "ln_1.bias": (8,), "ln_2.weight": (8,), "ln_2.bias": (8,), "attn.c_attn.weight": (8, 24),
    "attn.c_attn.bias": (24,), "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": (8,), "mlp.c_fc.weight": (8, 32),
    "mlp.c_fc.bias": (32,), "mlp.c_proj.weight": (32, 8), "mlp.c_proj.bias": (8,),
}  # fmt: skip
GPT2 = {"n_positions": 5, "n_embd": 8, "n_layer": 2, "n_head": 2, "layer_norm_epsilon": 1e-5, "vocab_size": 7}


def model(kind, *, tied=False):
    """Return the tensors of a model by the names of `transformers`, and its config.json."""
    rng = np.random.default_rng(4)
    if kind == "gpt2":
        shapes = {f"transformer.h.{i}.{name}": shape for i in range(2) for name, shape in GPT2_LAYER.items()}
        shapes |= {"transformer.wte.weight": (7, 8), "transformer.wpe.weight": (5, 8)}
        shapes |= {f"transformer.ln_f.{leaf}": (8,) for leaf in ("weight", "bias")}
    else:
        layer = LAYER | MORE[kind]
        if kind in ("mixtral", "qwen3_moe"):
            layer = {name: shape for name, shape in layer.items() if not name.startswith(("mlp.up", "mlp.down"))}
            layer.pop("mlp.gate_proj.weight")
        shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
        shapes |= {"model.embed_tokens.weight": (7, 8), "model.norm.weight": (8,)}
        shapes |= {} if tied else {"lm_head.weight": (7, 8)}
    state = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return state, {"model_type": kind, **(GPT2 if kind == "gpt2" else CONFIG), **OF_KIND.get(kind, {})}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe", "gemma2", "gemma3_text"])
def test_models_become_those_of_transformers(tmp_path, kind, tied):
    state, config = model(kind, tied=tied)
    source = gguf_files.converted(tmp_path / "x.gguf", state, config)
    target = tmp_path / "out"
    layout = f"hf-{kind.replace('_', '-')}"
    checkpoints.convert(source, target, to_layout=layout)
    assert checkpoints.verify(source, target).passed
    found = checkpoints.read(target)
    assert found.keys() == state.keys()
    for name, array in state.items():
        if kind.startswith("gemma") and array.ndim == 1:
            array = (array + np.float32(1)) - np.float32(1)
        np.testing.assert_array_equal(found[name], array)
    written = json.loads((target / "config.json").read_text())
    wanted = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert {key: written[key] for key in wanted} == wanted
    assert written["tie_word_embeddings"] == (tied or kind == "gpt2")
    assert (written["bos_token_id"], written["eos_token_id"], written["torch_dtype"]) == (1, 2, "float32")
    assert written.get("rope_theta") == (None if kind == "gpt2" else 5e5)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "TQ2_0", "MXFP4"]
)
def test_quantised_types_become_the_numbers_of_the_package(tmp_path, kind):
    data = gguf_files.blocks(kind, (6, 512))
    norm = np.float32([1.5, -2])
    source = gguf_files.write(tmp_path / "x.gguf", "llama", {}, {"a.weight": (kind, data), "b": norm})
    exact = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(exact).all()
    assert len(np.unique(exact)) > 30
    for word, dtype in ((None, np.float32), ("bf16", ml_dtypes.bfloat16)):
        target = tmp_path / f"{word}.safetensors"
        checkpoints.convert(source, target, to_layout="same", dequantize=True, dtype=word)
        assert checkpoints.verify(source, target).passed
        np.testing.assert_array_equal(checkpoints.read(target)["a.weight"], exact.astype(dtype))
        np.testing.assert_array_equal(checkpoints.read(target)["b"], norm.astype(dtype))
    with open_reader(source) as reader:
        found = Dequantised(reader, {}, "float32")
        for start, stop in ((0, 1), (30, 34), (255, 257), (500, 1600), (3071, 3072)):
            part = np.frombuffer(found.read_range("a.weight", 4 * start, 4 * stop), np.float32)
            np.testing.assert_array_equal(part, exact.reshape(-1)[start:stop])
        into = np.empty((2, 40), np.float32)
        found.read_rows("a.weight", 250, 1024, into)
        np.testing.assert_array_equal(into, exact[:3:2, 250:290])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_floating_point_is_read_as_it_is(tmp_path, dtype):
    arrays = {"a": np.random.default_rng(1).normal(size=(3, 5)).astype(dtype), "b": np.ones(7, np.float32)}
    source = gguf_files.write(tmp_path / "x.gguf", "gemma", {"block_count": 2}, arrays)
    found = checkpoints.read(source)
    assert {name: (array.dtype, array.tobytes()) for name, array in found.items()} == {
        name: (array.dtype, array.tobytes()) for name, array in arrays.items()
    }
    checkpoints.convert(source, tmp_path / "out", to_layout="same")
    assert not (tmp_path / "out" / "config.json").exists()
    assert checkpoints.inspect(source).metadata["gemma.block_count"] == 2


def test_experts_in_one_quantised_tensor_are_dequantised(tmp_path):
    data = gguf_files.blocks("Q8_0", (3, 4, 64))
    source = gguf_files.write(tmp_path / "x.gguf", "llama", {}, {"a": ("Q8_0", data), "b": np.ones(2, np.float32)})
    checkpoints.convert(source, tmp_path / "x.npz", to_layout="same", dequantize=True)
    exact = gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoints.read(tmp_path / "x.npz")["a"], exact.reshape(3, 4, 64))


def factors(factor):
    """Return what llama.cpp's converter writes for Llama 3.1: `LlamaModel.generate_extra_tensors`."""
    found = []
    for frequency in 1 / 5e5 ** (np.arange(0, 32, 2) / 32):
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1) / 3
        scaled = factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if length < 2048 else scaled)
    return np.float32(found)


def test_scaling_of_llama_3_is_found_in_its_factors(tmp_path):
    keys = gguf_files.keys_of(model("llama")[1] | {"head_dim": 32})
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert len(set(factors(8))) == 3
    for number in (1, 8, 32):
        source = gguf_files.write(tmp_path / "x.gguf", "llama", keys, {"rope_freqs.weight": factors(number)})
        with open_reader(source) as reader:
            assert reader.config["rope_scaling"] == scaling | {"factor": number}
    for wrong in (factors(8) + np.float32(0.01), factors(8) * np.float32(0), -factors(8)):
        other = gguf_files.write(tmp_path / "y.gguf", "llama", keys, {"rope_freqs.weight": wrong})
        with (
            open_reader(other) as reader,
            pytest.raises(CheckpointError, match=r"rope_freqs.weight are not the factors of Llama 3.1's scaling"),
        ):
            _ = reader.config


def test_factors_of_frequencies_are_kept_aside(tmp_path):
    state, config = model("llama")
    keys = config | {"rope_parameters": {"rope_theta": 5e7}}
    source = gguf_files.converted(tmp_path / "x.gguf", state | {"rope_freqs.weight": np.float32([1, 8])}, keys)
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama")
    assert checkpoints.read(tmp_path / "out").keys() == state.keys()
    assert checkpoints.verify(source, tmp_path / "out").passed


def refusal(tmp_path, source, **options):
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"to_layout": "same"}, {"to_layout": "hf-llama"}])
def test_quantised_types_are_named_where_they_stay(tmp_path, options):
    tensors = {"token_embd.weight": ("Q4_K", gguf_files.blocks("Q4_K", (2, 256)))}
    source = gguf_files.write(tmp_path / "x.gguf", "llama", {}, tensors)
    message = refusal(tmp_path, source, **options)
    assert message.endswith("is quantised by GGUF, Q4_K; --dequantize makes floating point of it")


KEYS = {
    "expert_count": 4, "expert_shared_count": 1,
    "rope.scaling.type": "longrope", "attention.sliding_window": 9, "rope.dimension_count": 2,
    "attention.causal": 0, "attention.temperature_scale": 0.5, "rope.scaling.yarn_attn_factor": 2.0,
    "rope.scaling.attn_factor": 2.0, "swiglu_clamp_exp": 3.0,
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_make_another_model_are_refused(tmp_path, key):
    state, config = model("llama")
    tensors = {gguf_files.named(name): array for name, array in state.items()}
    keys = gguf_files.keys_of(config) | {key: KEYS[key]}
    source = gguf_files.write(tmp_path / "x.gguf", "llama", keys, tensors)
    assert str(source) in refusal(tmp_path, source)


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 8}
OF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALINGS = {
    "a factor alone": ({"rope.scaling.factor": 4.0}, LINEAR),
    "the old key": ({"rope.scale_linear": 4.0}, LINEAR),
    "a factor of 1": ({"rope.scaling.factor": 1.0}, None),
    "yarn": ({f"rope.scaling.{key}": value for key, value in YARN.items()}, OF_YARN),
    "yarn with its ramp": (
        {
            f"rope.scaling.{key}": value
            for key, value in {**YARN, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}.items()
        },
        {**OF_YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    ),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_scaling_of_positions_is_that_of_llama_cpp(tmp_path, case):
    keys, scaling = SCALINGS[case]
    keys = gguf_files.keys_of(model("llama")[1]) | keys
    source = gguf_files.write(tmp_path / "x.gguf", "llama", keys, {"output_norm.weight": np.ones(8, np.float32)})
    with open_reader(source) as reader:
        assert reader.config.get("rope_scaling") == scaling


@pytest.mark.parametrize("setting", [{"num_heads": 4}, {"num_kv_heads": 2}])
def test_heads_that_contradict_the_config_are_refused(tmp_path, setting):
    state, config = model("llama")
    source = gguf_files.converted(tmp_path / "x.gguf", state, config)
    ((name, value),) = setting.items()
    message = rf"--set {name}={value}: the model's config gives {value // 2}$"
    with pytest.raises(layouts.LayoutError, match=message):
        checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama", settings=setting)
    checkpoints.convert(source, tmp_path / "hf", to_layout="hf-llama")
    with pytest.raises(layouts.LayoutError, match=message):
        checkpoints.convert(tmp_path / "hf", tmp_path / "out.pth", to_layout="meta-llama", settings=setting)
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama", settings={name: value // 2})


def test_other_architectures_are_named(tmp_path):
    state, config = model("llama")
    tensors = {gguf_files.named(name): array for name, array in state.items()}
    source = gguf_files.write(tmp_path / "x.gguf", "gemma", gguf_files.keys_of(config), tensors)
    message = refusal(tmp_path, source)
    assert "general.architecture (gemma) must be llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, gpt2" in message


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("llama", "adapter", "is a LoRA adapter without its base: llama.cpp's llama-export-lora merges it"),
        ("imatrix", None, "is an importance matrix, which guides quantising, and holds no weights"),
        ("llama", "imatrix", "is an importance matrix"),
        ("clip", "mmproj", "is the part of a multimodal model that reads images or sound"),
        ("controlvector", None, "is a control vector, which is added to activations"),
    ],
)
def test_files_of_llama_cpp_that_are_no_models_are_named(tmp_path, architecture, kind, message):
    said = {b"general.architecture": architecture} | ({} if kind is None else {b"general.type": kind})
    keys = [key(name, 8, struct.pack("<Q", len(text)) + text.encode()) for name, text in said.items()]
    source = tmp_path / "x.gguf"
    source.write_bytes(header([(b"a", (3,), 0, 0)], b"".join(keys), len(keys)) + bytes(12))
    assert message in refusal(tmp_path, source)
    assert message in checkpoints.inspect(source).why
    checkpoints.convert(source, tmp_path / "same.npz", to_layout="same")


def test_a_vocabulary_alone_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(header([], key(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama"), 1))
    assert "is a vocabulary without weights; convert the model itself" in refusal(tmp_path, tmp_path / "x.gguf")


def test_types_that_are_not_read_are_named(tmp_path):
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]), np.uint8)
    source = gguf_files.write(tmp_path / "x.gguf", "llama", {}, {"a": ("Q8_K", data), "b": np.ones(3, np.float32)})
    message = refusal(tmp_path, source, to_layout="same", dequantize=True)
    assert "it is quantised by GGUF as Q8_K, which is not read; convert the model that it was made of; --" in message
    checkpoints.convert(source, tmp_path / "rest.npz", to_layout="same", drop="a")


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    data = gguf_files.blocks("Q8_0", (2, 32))
    source = gguf_files.write(tmp_path / "x.gguf", "llama", {}, {"a": ("Q8_0", data), "b": np.ones(3, np.float32)})
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refusal(tmp_path, source, to_layout="same", dequantize=True).endswith("pip install 'attn-bridge[gguf]'")
    assert run(["inspect", str(source)]) == 0
    assert re.search(r"^a +Q8_0 +2 x 34 ", capsys.readouterr().out, re.MULTILINE)


def header(tensors, keys=b"", keys_count=0, version=3, count=None):
    """Return a header of entries (name, sizes, type, offset)."""
    data = b"GGUF" + struct.pack("<IQQ", version, len(tensors) if count is None else count, keys_count) + keys
    for name, sizes, kind, offset in tensors:
        data += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(sizes))
        data += struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)
    return data + bytes(-len(data) % 32)


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HOSTILE = {
    "nothing": (b"", "is no GGUF file"),
    "another file": (b"PK\3\4" + bytes(60), "is no GGUF file"),
    "version 1": (header([], version=1), "is GGUF of version 1"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8),
        "are read: gguf-convert-endian of the gguf package makes one",
    ),
    "a billion tensors": (header([], count=1 << 40), "claims 1099511627776 tensors"),
    "cut short": (header([(b"a", (4,), 0, 0)])[:40], "the file ends in its header"),
    "a long text": (header([], key(b"k", 8, struct.pack("<Q", 1 << 60)), 1), "the file ends in its header"),
    "a long array": (header([], key(b"k", 9, struct.pack("<IQ", 4, 1 << 50)), 1), "is an array of"),
    "nested arrays": (header([], key(b"k", 9, struct.pack("<IQ", 9, 2)), 1), "is an array of 2 items of type 9"),
    "an unknown value": (header([], key(b"k", 77, b""), 1), "a value of the unknown type 77"),
    "a key twice": (header([], key(b"k", 7, b"\1") * 2, 2), "its header has k twice"),
    "a name of bytes": (header([(b"\xff\xfe", (4,), 0, 0)]) + bytes(16), "is not UTF-8"),
    "a name twice": (header([(b"a", (4,), 0, 0), (b"a", (4,), 0, 32)]) + bytes(64), "has the tensor a twice"),
    "overlaps": (header([(b"a", (16,), 0, 0), (b"b", (4,), 0, 32)]) + bytes(64), "a and b overlap"),
    "beyond the end": (header([(b"a", (4,), 0, 1 << 62)]), "ends at byte"),
    "more than a file": (header([(b"a", (1 << 62, 1 << 62), 0, 0)]), "which no file can hold"),
    "half a block": (header([(b"a", (31,), 8, 0)]) + bytes(64), "must have rows of whole blocks of 32 numbers"),
    "many axes": (header([(b"a", (1,) * 9, 0, 0)]) + bytes(64), "has 9 axes"),
    "odd alignment": (header([], key(b"general.alignment", 4, struct.pack("<I", 24)), 1), "must be a power of two"),
    "a part of several": (
        header([(b"a", (4,), 0, 0)], key(b"split.count", 2, struct.pack("<H", 3)), 1) + bytes(32),
        "is one of 3 files of a model (split.count), whose names must be NAME-00001-of-00003.gguf",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files_are_refused_in_a_line(tmp_path, case):
    data, message = HOSTILE[case]
    source = tmp_path / "x.gguf"
    source.write_bytes(data)
    assert message in refusal(tmp_path, source, to_layout="same")


def test_a_folder_with_a_single_file_is_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    state, config = model("llama")
    gguf_files.converted(folder / "x.gguf", state, config)
    checkpoints.convert(folder, tmp_path / "out", to_layout="hf-llama")
    assert checkpoints.read(tmp_path / "out").keys() == state.keys()


def test_a_split_model_is_read_from_any_of_its_files(tmp_path):
    state, config = model("llama")
    whole, folder = gguf_files.converted(tmp_path / "x.gguf", state, config), tmp_path / "parts"
    folder.mkdir()
    paths = gguf_files.split(whole, folder, 3)
    wanted = checkpoints.read(whole)
    for source in (folder, paths[0], paths[2]):
        found = checkpoints.read(source)
        assert found.keys() == wanted.keys()
        assert all((found[name] == array).all() for name, array in wanted.items())
    checkpoints.convert(folder, tmp_path / "hf", to_layout="hf-llama")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_size"] == 8
    assert checkpoints.read(tmp_path / "hf").keys() == state.keys()
    data = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    assert "split.no (2) and split.count (3) must be 1 and 3, by its name" in refusal(
        tmp_path, folder, to_layout="same"
    )
    paths[1].unlink()
    message = refusal(tmp_path, folder, to_layout="same")
    assert "is one of 3 files of a model, of which x-00002-of-00003.gguf is missing" in message
    paths[1].write_bytes(data)
    (folder / "other.gguf").write_bytes(whole.read_bytes())
    assert "does not determine which checkpoint is meant" in refusal(tmp_path, folder, to_layout="same")


def test_the_27_b_gemma_scales_by_its_width(tmp_path):
    keys = gguf_files.keys_of(model("gemma3_text")[1]) | {
        "block_count": 62, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        "attention.sliding_window_pattern": [True, False] * 31,
    }  # fmt: skip
    source = gguf_files.write(tmp_path / "x.gguf", "gemma3", keys, {"output_norm.weight": np.ones(8, np.float32)})
    with open_reader(source) as reader:
        config = reader.config
    assert config["query_pre_attn_scalar"] == CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 31
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_matrices_in_float16_beside_vectors_in_float32_are_noted(tmp_path):
    source = gguf_files.converted(tmp_path / "x.gguf", *model("llama"), kind="F16")
    notes = checkpoints.plan(source, tmp_path / "out").notes
    wanted = "float16 and float32 stay as they are; torch loads such a model in the wider one, --dtype casts here"
    assert wanted in notes
    assert wanted not in checkpoints.plan(source, tmp_path / "out", dtype="f16").notes
