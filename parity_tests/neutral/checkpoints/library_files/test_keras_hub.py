"""Backbones of KerasHub: their files become the models of `transformers` that compute the same.

The kernels are made here as KerasHub's own converters make them of `transformers`, by NumPy alone. Logits of both
libraries agreed for every class below (KerasHub 0.32, 12 blocks, windows and scaling shorter than the input).
"""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.models import layouts

from .test_keras_files import saved

HEADS, GROUPS, DIM, WIDTH, INNER = 3, 1, 4, 12, 10
FAMILIES = {
    "llama": ("llama", "layer_norm", "LlamaBackbone", "llama_backbone"),
    "mistral": ("mistral", "layer_normalization", "MistralBackbone", "mistral_backbone"),
    "qwen2": ("qwen", "layer_norm", "QwenBackbone", "qwen_backbone"),
    "qwen3": ("qwen3", "layer_norm", "Qwen3Backbone", "qwen3_backbone"),
}
CONFIG = {
    "name": "x", "trainable": True, "dropout": 0, "vocabulary_size": 7, "num_layers": 2, "num_query_heads": HEADS,
    "num_key_value_heads": GROUPS, "hidden_dim": WIDTH, "intermediate_dim": INNER, "layer_norm_epsilon": 1e-5,
    "rope_max_wavelength": 500.0,
}  # fmt: skip
OF_KIND = {
    "llama": {"rope_position_scaling_factor": 1.0},
    "mistral": {"sliding_window": 5, "head_dim": DIM, "rope_scaling_factor": 1.0},
    "qwen2": {"use_sliding_window_attention": False, "sliding_window_size": 9, "rope_scaling_factor": 1.0},
    "qwen3": {"sliding_window_size": None, "head_dim": DIM, "rope_scaling_factor": 1.0},
}


def decoder(kind, *, tied=False, layers=2):
    """Return the same random weights by the names of `transformers` and of KerasHub."""
    rng = np.random.default_rng(1)
    drawn = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    family, norm, _, _ = FAMILIES[kind]
    theirs, keras = {}, {}

    def put(name, path, array, change=lambda array: array):
        theirs[f"model.{name}"], keras[f"layers/{path}"] = array, change(array)

    put("embed_tokens.weight", "reversible_embedding/vars/0", drawn(7, WIDTH))
    put("norm.weight", f"{family}_{norm}/vars/0", drawn(WIDTH))
    if not tied:
        theirs["lm_head.weight"] = drawn(7, WIDTH)
        keras["layers/reversible_embedding/vars/1"] = theirs["lm_head.weight"].T
    for layer in range(layers):
        block = f"{family}_transformer_decoder{f'_{layer}' if layer else ''}"
        attention, stem = f"{block}/_self_attention_layer", f"layers.{layer}"
        put(f"{stem}.input_layernorm.weight", f"{block}/_self_attention_layernorm/vars/0", drawn(WIDTH))
        put(f"{stem}.post_attention_layernorm.weight", f"{block}/_feedforward_layernorm/vars/0", drawn(WIDTH))
        for name, dense, shape in (("gate", "gate", (INNER, WIDTH)), ("up", "intermediate", (INNER, WIDTH)),
                                   ("down", "output", (WIDTH, INNER))):  # fmt: skip
            put(
                f"{stem}.mlp.{name}_proj.weight",
                f"{block}/_feedforward_{dense}_dense/vars/0",
                drawn(*shape),
                np.transpose,
            )
        for name, heads in (("query", HEADS), ("key", GROUPS), ("value", GROUPS)):
            path, ours = f"{attention}/_{name}_dense", f"{stem}.self_attn.{name[0]}_proj"
            into = lambda array, heads=heads: array.T.reshape(WIDTH, heads, DIM)  # noqa: E731
            put(f"{ours}.weight", f"{path}/vars/0", drawn(heads * DIM, WIDTH), into)
            if kind == "qwen2":
                split = lambda array, heads=heads: array.reshape(heads, DIM)  # noqa: E731
                put(f"{ours}.bias", f"{path}/vars/1", drawn(heads * DIM), split)
            if kind == "qwen3" and name != "value":
                put(f"{stem}.self_attn.{name[0]}_norm.weight", f"{path}_layer_norm/vars/0", drawn(DIM))
        out_of = lambda array: array.T.reshape(HEADS, DIM, WIDTH)  # noqa: E731
        put(f"{stem}.self_attn.o_proj.weight", f"{attention}/_output_dense/vars/0", drawn(WIDTH, HEADS * DIM), out_of)
    return theirs, keras


def serialised(kind, **more):
    settings = {**CONFIG, **OF_KIND[kind], **more}
    return {"module": "keras_hub.x", "class_name": FAMILIES[kind][2], "config": settings}


def preset(folder, kind, arrays, **more):
    folder.mkdir()
    saved(folder / "model.weights.h5", arrays)
    (folder / "config.json").write_text(json.dumps(serialised(kind, **more)))
    return folder


def check(path, wanted):
    found = checkpoints.read(path)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == np.ascontiguousarray(array).tobytes() for name, array in wanted.items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_presets_become_models_of_transformers(tmp_path, kind, tied):
    theirs, keras = decoder(kind, tied=tied)
    source = preset(tmp_path / "preset", kind, keras)
    assert checkpoints.inspect(source).layout == f"keras-{kind}"
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama")
    check(tmp_path / "out", theirs)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == (kind, tied)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, GROUPS)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (500.0, 1e-5)
    assert checkpoints.verify(source, tmp_path / "out").passed


def test_blocks_are_in_the_order_of_their_numbers(tmp_path):
    theirs, keras = decoder("llama", layers=11)
    source = preset(tmp_path / "preset", "llama", keras, num_layers=11)
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama")
    check(tmp_path / "out", theirs)


def test_a_task_is_its_backbone_without_its_optimizer(tmp_path):
    theirs, keras = decoder("llama")
    task = {name.replace("layers/", "layers/llama_backbone/layers/", 1): array for name, array in keras.items()}
    weights = saved(tmp_path / "w.h5", {**task, "optimizer/vars/0": np.int32(3), "optimizer/vars/1": np.float32(1)})
    document = {"class_name": "LlamaCausalLM", "config": {"backbone": serialised("llama"), "preprocessor": None}}
    with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(document))
        archive.writestr("model.weights.h5", weights.read_bytes())
    notes = checkpoints.plan(tmp_path / "x.keras", tmp_path / "out", to_layout="hf-llama").notes
    assert any("optimizer.vars.0" in note for note in notes)
    checkpoints.convert(tmp_path / "x.keras", tmp_path / "out", to_layout="hf-llama")
    check(tmp_path / "out", theirs)


def test_the_way_back_is_bit_for_bit(tmp_path):
    _, keras = decoder("qwen2")
    source = preset(tmp_path / "preset", "qwen2", keras)
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama")
    checkpoints.convert(tmp_path / "out", tmp_path / "back.npz", to_layout="keras-qwen2")
    check(tmp_path / "back.npz", {name.replace("/", "."): array for name, array in keras.items()})


def test_weights_alone_without_a_head_are_tied(tmp_path):
    theirs, keras = decoder("llama", tied=True)
    checkpoints.convert(saved(tmp_path / "x.weights.h5", keras), tmp_path / "out", to_layout="hf-llama")
    check(tmp_path / "out", theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"]})


def test_scaling_of_llama_3_and_windows_are_in_the_config(tmp_path):
    _, keras = decoder("llama")
    scaling = {"rope_frequency_adjustment_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
               "rope_pretraining_sequence_length": 16}  # fmt: skip
    checkpoints.convert(preset(tmp_path / "a", "llama", keras, **scaling), tmp_path / "out", to_layout="hf-llama")
    wanted = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 16}  # fmt: skip
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == wanted
    _, keras = decoder("mistral")
    checkpoints.convert(preset(tmp_path / "b", "mistral", keras), tmp_path / "out2", to_layout="hf-llama")
    assert json.loads((tmp_path / "out2" / "config.json").read_text())["sliding_window"] == 5


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"rope_scaling_factor": 2.0},
            r"rope_scaling_factor \(2\.0\) of a QwenBackbone makes a model that is not read",
        ),
        ({"use_sliding_window_attention": True}, r"use_sliding_window_attention \(True\) of a QwenBackbone"),
        ({"invented": 3}, r"invented \(3\) of a QwenBackbone makes a model that is not read"),
        ({"num_query_heads": -4}, r"num_attention_heads"),
    ],
)
def test_settings_that_make_another_model_are_refused(tmp_path, more, reason):
    source = preset(tmp_path / "preset", "qwen2", decoder("qwen2")[1], **more)
    with pytest.raises(ValueError, match=reason) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout="hf-llama")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_gpt2_becomes_that_of_transformers(tmp_path):
    rng = np.random.default_rng(2)
    theirs, keras = {}, {}

    def put(name, path, shape, reshaped=None):
        theirs[f"transformer.{name}"] = rng.normal(size=shape).astype(np.float32)
        keras[f"layers/{path}"] = theirs[f"transformer.{name}"].reshape(reshaped or shape)

    put("wte.weight", "reversible_embedding/vars/0", (7, 8))
    put("wpe.weight", "position_embedding/vars/0", (5, 8))
    for number, leaf in enumerate(("weight", "bias")):
        put(f"ln_f.{leaf}", f"layer_normalization/vars/{number}", (8,))
    for layer in range(2):
        block, stem = f"transformer_decoder{f'_{layer}' if layer else ''}", f"h.{layer}"
        attention = f"{block}/_self_attention_layer"
        for number, leaf in enumerate(("weight", "bias")):
            put(f"{stem}.ln_1.{leaf}", f"{block}/_self_attention_layer_norm/vars/{number}", (8,))
            put(f"{stem}.ln_2.{leaf}", f"{block}/_feedforward_layer_norm/vars/{number}", (8,))
        for name, shape in (("c_fc", (8, 12)), ("c_proj", (12, 8))):
            dense = f"{block}/_feedforward_{'intermediate' if name == 'c_fc' else 'output'}_dense"
            put(f"{stem}.mlp.{name}.weight", f"{dense}/vars/0", shape)
            put(f"{stem}.mlp.{name}.bias", f"{dense}/vars/1", shape[1:])
        put(f"{stem}.attn.c_proj.weight", f"{attention}/output_dense/vars/0", (8, 8), (2, 4, 8))
        put(f"{stem}.attn.c_proj.bias", f"{attention}/output_dense/vars/1", (8,))
        fused = {
            leaf: rng.normal(size=(*shape, 24)).astype(np.float32) for leaf, shape in (("weight", (8,)), ("bias", ()))
        }
        theirs |= {f"transformer.{stem}.attn.c_attn.{leaf}": array for leaf, array in fused.items()}
        for part, name in enumerate(("query", "key", "value")):
            mine = slice(8 * part, 8 * part + 8)
            keras[f"layers/{attention}/{name}_dense/vars/0"] = fused["weight"][:, mine].reshape(8, 2, 4)
            keras[f"layers/{attention}/{name}_dense/vars/1"] = fused["bias"][mine].reshape(2, 4)
    settings = {"vocabulary_size": 7, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12,
                "dropout": 0.1, "max_sequence_length": 5}  # fmt: skip
    source = tmp_path / "preset"
    source.mkdir()
    saved(source / "model.weights.h5", keras)
    (source / "config.json").write_text(json.dumps({"class_name": "GPT2Backbone", "config": settings}))
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-gpt2")
    check(tmp_path / "out", theirs)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[key] for key in ("model_type", "n_head", "n_inner", "n_positions")] == ["gpt2", 2, 12, 5]


def test_a_layer_is_not_numbered_0(tmp_path):
    layout = layouts.find("keras-llama")
    names = ["layers.llama_transformer_decoder._feedforward_gate_dense.vars.0"]
    assert layout.select(names) == names
    assert not layout.select(["layers.llama_transformer_decoder_0._feedforward_gate_dense.vars.0"])
    assert not layout.select(["layers.llama_transformer_decoder_01._feedforward_gate_dense.vars.0"])


GEMMA = {
    "vocabulary_size": 7, "num_layers": 2, "num_query_heads": HEADS, "num_key_value_heads": GROUPS,
    "hidden_dim": WIDTH, "head_dim": DIM, "layer_norm_epsilon": 1e-6, "dropout": 0, "query_head_dim_normalize": True,
    "attention_logit_soft_cap": None, "final_logit_soft_cap": None, "sliding_window_size": 4,
    "use_sliding_window_attention": False, "use_post_ffw_norm": False, "use_post_attention_norm": False,
}  # fmt: skip
POSTS = {"use_post_ffw_norm": True, "use_post_attention_norm": True, "use_sliding_window_attention": True}
GEMMA3 = {
    **POSTS, "intermediate_dim": INNER, "use_query_key_norm": True, "image_size": None, "vision_encoder": None,
    "use_bidirectional_attention": False, "is_embedding_model": False, "local_rope_scaling_factor": 1.0,
    "global_rope_scaling_factor": 8.0, "pooling_intermediate_dim": None, "embedding_dim": None,
}  # fmt: skip
CAPS = {"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0}
GEMMAS = {
    "gemma": ("GemmaBackbone", "hf-llama", {"intermediate_dim": 2 * INNER}),
    "gemma2": ("GemmaBackbone", "hf-gemma", {"intermediate_dim": 2 * INNER, **POSTS, **CAPS}),
    "gemma3_text": ("Gemma3Backbone", "hf-gemma", GEMMA3),
}


def gemma(kind):
    """Return the same random weights by the names of `transformers` and of KerasHub."""
    rng, theirs, keras = np.random.default_rng(4), {}, {}

    def put(name, path, shape, change=lambda array: array):
        theirs[f"model.{name}"] = rng.normal(size=shape).astype(np.float32)
        keras[f"layers/{path}"] = change(theirs[f"model.{name}"])

    put("embed_tokens.weight", "reversible_embedding/vars/0", (7, WIDTH))
    put("norm.weight", "rms_normalization/vars/0", (WIDTH,))
    first = {"input": "pre_attention", "post_attention": "pre_ffw"}
    others = {"input": "pre_attention", "post_attention": "post_attention", "pre_feedforward": "pre_ffw",
              "post_feedforward": "post_ffw"}  # fmt: skip
    for layer in range(2):
        block = f"gemma{'3' * (kind == 'gemma3_text')}_decoder_block{f'_{layer}' if layer else ''}"
        stem = f"layers.{layer}"
        for name, path in (first if kind == "gemma" else others).items():
            put(f"{stem}.{name}_layernorm.weight", f"{block}/{path}_norm/vars/0", (WIDTH,))
        for name, path, shape in (("gate", "gating_ffw", (INNER, WIDTH)), ("up", "gating_ffw_2", (INNER, WIDTH)),
                                  ("down", "ffw_linear", (WIDTH, INNER))):  # fmt: skip
            put(f"{stem}.mlp.{name}_proj.weight", f"{block}/{path}/vars/0", shape, np.transpose)
        for name, heads in (("query", HEADS), ("key", GROUPS), ("value", GROUPS)):
            path = f"{block}/attention/{name}"
            put(f"{stem}.self_attn.{name[0]}_proj.weight", f"{path}_dense/vars/0", (heads * DIM, WIDTH),
                lambda array, heads=heads: array.reshape(heads, DIM, WIDTH).swapaxes(1, 2))  # fmt: skip
            if kind == "gemma3_text" and name != "value":
                put(f"{stem}.self_attn.{name[0]}_norm.weight", f"{path}_norm/vars/0", (DIM,))
        put(f"{stem}.self_attn.o_proj.weight", f"{block}/attention/output_dense/vars/0", (WIDTH, HEADS * DIM),
            lambda array: array.T.reshape(HEADS, DIM, WIDTH))  # fmt: skip
    return theirs, keras


def saved_gemma(folder, kind, **more):
    theirs, keras = gemma(kind)
    folder.mkdir()
    saved(folder / "model.weights.h5", keras)
    document = {"class_name": GEMMAS[kind][0], "config": {**GEMMA, **GEMMAS[kind][2], **more}}
    (folder / "config.json").write_text(json.dumps(document))
    return folder, theirs, keras


@pytest.mark.parametrize("kind", GEMMAS)
def test_gemma_becomes_that_of_transformers(tmp_path, kind):
    source, theirs, keras = saved_gemma(tmp_path / "preset", kind)
    own = f"keras-{kind.removesuffix('_text')}"
    assert checkpoints.inspect(source).layout == own
    checkpoints.convert(source, tmp_path / "out", to_layout=GEMMAS[kind][1])
    check(tmp_path / "out", theirs)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["intermediate_size"], config["tie_word_embeddings"]) == (kind, INNER, True)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    wanted = {
        "gemma": {"rms_norm_eps": 1e-6, "head_dim": DIM},
        "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "gemma3_text": {"sliding_window": 4, "rope_local_base_freq": 1e4, "rope_theta": 1e6,
                        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": DIM},
    }[kind]  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted
    checkpoints.convert(tmp_path / "out", tmp_path / "back.npz", to_layout=own)
    check(tmp_path / "back.npz", {name.replace("/", "."): array for name, array in keras.items()})


def test_the_scale_of_gemmas_scores_is_that_of_its_width_where_the_switch_says_so(tmp_path):
    source, *_ = saved_gemma(tmp_path / "preset", "gemma2", query_head_dim_normalize=False, num_query_heads=HEADS)
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-gemma")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["query_pre_attn_scalar"] == WIDTH // HEADS


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("gemma", {"final_logit_soft_cap": 30.0}, "final_logit_soft_cap without both of Gemma 2's norms of a GemmaB"),
        ("gemma", {"query_head_dim_normalize": False}, "query_head_dim_normalize without both of Gemma 2's norms"),
        ("gemma3_text", {"vision_encoder": {"class_name": "x"}}, "vision_encoder .* of a Gemma3Backbone makes a model"),
        ("gemma3_text", {"use_query_key_norm": False}, r"use_query_key_norm \(False\) of a Gemma3Backbone makes"),
        ("gemma3_text", {"local_rope_scaling_factor": 2.0}, r"local_rope_scaling_factor \(2.0\) of a Gemma3Backbone"),
    ],
)
def test_settings_of_gemma_that_make_another_model_are_refused(tmp_path, kind, more, reason):
    source, *_ = saved_gemma(tmp_path / "preset", kind, **more)
    with pytest.raises(ValueError, match=reason):
        checkpoints.convert(source, tmp_path / "out", to_layout=GEMMAS[kind][1])


def test_bert_becomes_that_of_transformers_with_its_activation(tmp_path):
    rng, theirs, keras, width = np.random.default_rng(5), {}, {}, HEADS * DIM

    def put(name, path, shape, *, is_turned=True, split=None):
        theirs[name] = rng.normal(size=shape).astype(np.float32)
        array = theirs[name].T if is_turned and len(shape) == 2 else theirs[name]
        keras[f"layers/{path}"] = array.reshape(split) if split else array

    for name, path, size in (("word", "reversible_embedding", 7), ("position", "position_embedding", 9),
                             ("token_type", "embedding", 2)):  # fmt: skip
        put(f"embeddings.{name}_embeddings.weight", f"{path}/vars/0", (size, width), is_turned=False)
    norms = {"embeddings.LayerNorm": "layer_normalization"}
    for layer in range(2):
        stem, block = f"encoder.layer.{layer}", f"transformer_encoder{f'_{layer}' if layer else ''}"
        norms[f"{stem}.attention.output.LayerNorm"] = f"{block}/_self_attention_layer_norm"
        norms[f"{stem}.output.LayerNorm"] = f"{block}/_feedforward_layer_norm"
        for name in ("query", "key", "value"):
            path = f"{block}/_self_attention_layer/{name}_dense/vars"
            split = {"weight": (width, HEADS, DIM), "bias": (HEADS, DIM)}
            put(f"{stem}.attention.self.{name}.weight", f"{path}/0", (width, width), split=split["weight"])
            put(f"{stem}.attention.self.{name}.bias", f"{path}/1", (width,), split=split["bias"])
        path = f"{block}/_self_attention_layer/output_dense/vars"
        put(f"{stem}.attention.output.dense.weight", f"{path}/0", (width, width), split=(HEADS, DIM, width))
        put(f"{stem}.attention.output.dense.bias", f"{path}/1", (width,))
        for name, path, shape in (
            ("intermediate", "intermediate", (INNER, width)),
            ("output", "output", (width, INNER)),
        ):
            put(f"{stem}.{name}.dense.weight", f"{block}/_feedforward_{path}_dense/vars/0", shape)
            put(f"{stem}.{name}.dense.bias", f"{block}/_feedforward_{path}_dense/vars/1", shape[:1])
    for name, path in norms.items():
        put(f"{name}.weight", f"{path}/vars/0", (width,))
        put(f"{name}.bias", f"{path}/vars/1", (width,))
    pooler = {f"layers/dense/vars/{number}": np.zeros((width, width)[number:], np.float32) for number in (0, 1)}
    source = tmp_path / "preset"
    source.mkdir()
    saved(source / "model.weights.h5", keras | pooler)
    settings = {"vocabulary_size": 7, "num_layers": 2, "num_heads": HEADS, "hidden_dim": width, "dropout": 0.1,
                "intermediate_dim": INNER, "max_sequence_length": 9, "num_segments": 2}  # fmt: skip
    (source / "config.json").write_text(json.dumps({"class_name": "BertBackbone", "config": settings}))
    assert checkpoints.inspect(source).layout == "keras-bert"
    checkpoints.convert(source, tmp_path / "out", to_layout="hf-bert")
    check(tmp_path / "out", theirs)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["hidden_act"], config["layer_norm_eps"]) == (
        "bert",
        "gelu_pytorch_tanh",
        1e-12,
    )
