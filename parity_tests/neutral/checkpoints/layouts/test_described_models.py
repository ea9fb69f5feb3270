"""A config.json that describes another model than the file holds: refused before a target that would not load."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.models import layouts, parts

BLOCK, HEADS, GROUPS, WIDTH, INNER = "model.layers.0", 4, 2, 8, 10
CONFIG = {
    "model_type": "llama", "vocab_size": 7, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": 2, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (7, WIDTH), "lm_head.weight": (7, WIDTH), "model.norm.weight": (WIDTH,),
    f"{BLOCK}.input_layernorm.weight": (WIDTH,), f"{BLOCK}.post_attention_layernorm.weight": (WIDTH,),
    f"{BLOCK}.self_attn.q_proj.weight": (WIDTH, WIDTH), f"{BLOCK}.self_attn.k_proj.weight": (4, WIDTH),
    f"{BLOCK}.self_attn.v_proj.weight": (4, WIDTH), f"{BLOCK}.self_attn.o_proj.weight": (WIDTH, WIDTH),
    f"{BLOCK}.mlp.gate_proj.weight": (INNER, WIDTH), f"{BLOCK}.mlp.up_proj.weight": (INNER, WIDTH),
    f"{BLOCK}.mlp.down_proj.weight": (WIDTH, INNER),
}  # fmt: skip
BIASES = {f"{BLOCK}.self_attn.{one}_proj.bias": (WIDTH if one in "qo" else 4,) for one in "qkvo"}


def test_a_part_with_a_mark_is_left_out_where_a_name_has_the_mark():
    vision, further = (
        parts.OmittedPart("vision."),
        parts.OmittedPart("{prefix}layers.{i}.", "further", "eh_proj.weight"),
    )
    names = ["vision.x", *(f"model.layers.{name}" for name in ("1.mlp.w", "2.mlp.w", "2.eh_proj.weight", "12.mlp.w"))]
    left_out = parts.apart([vision, further], names, ("model.", ""))
    assert left_out == {"vision.x": vision, **dict.fromkeys(names[2:4], further)}


def folder(path, config, more=()):
    rng = np.random.default_rng(3)
    shapes = {**SHAPES, **dict(more)}
    path.mkdir()
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


CASES = {
    "biases of a Qwen 2": ({"model_type": "qwen2"}, (), f"config.json has {BLOCK}.self_attn.q_proj.bias and 2 more, "
                           "which the source lacks; convert it with its own config if the source is right"),
    "biases by a switch": ({"attention_bias": True}, (), f"config.json has {BLOCK}.self_attn.q_proj.bias and 3 more, "
                           "which the source lacks; set attention_bias to false if the source is right"),
    "norms of a Qwen 3": ({"model_type": "qwen3"}, (), f"config.json has {BLOCK}.self_attn.q_norm.weight and 1 more"),
    "biases of the file": ({"attention_bias": False}, BIASES, "source has model.layers.0.self_attn.k_proj.bias and 3 "
                           "more, which the model of config.json lacks; set attention_bias to true if the source is"),
}  # fmt: skip


@pytest.mark.parametrize("target", ["flax", "torch", "vllm"])
@pytest.mark.parametrize("case", CASES)
def test_models_of_another_config_are_refused_before_anything_is_written(tmp_path, case, target):
    config, more, message = CASES[case]
    source = folder(tmp_path / "source", config, more)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.convert(source, tmp_path / "out", to_layout=target)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
    checkpoints.convert(source, tmp_path / "same", to_layout="same")


def test_models_of_their_config_are_converted(tmp_path):
    biased = folder(tmp_path / "biased", {"attention_bias": True}, BIASES)
    other = folder(tmp_path / "other", {"model_type": "unheard_of"})
    for source, options in ((biased, {}), (other, {"from_layout": "hf-llama"})):
        target = tmp_path / f"{source.name} out"
        checkpoints.convert(source, target, **options)
        assert checkpoints.verify(source, target).passed


@pytest.mark.parametrize("target", ["flax", "vllm"])
def test_a_head_that_was_trained_apart_needs_a_config_that_says_so(tmp_path, target):
    source = folder(tmp_path / "source", {"tie_word_embeddings": True})
    message = (
        r"^lm_head\.weight must hold the numbers of model\.embed_tokens\.weight, to which config\.json ties it "
        r"\(tie_word_embeddings\); set that to false where the head was trained apart$"
    )
    settings = {"tie": 0} if target == "vllm" else {}
    with pytest.raises(CheckpointError, match=message):
        checkpoints.convert(source, tmp_path / "out", to_layout=target, settings=settings)
    assert not (tmp_path / "out").exists()
    arrays = safetensors.numpy.load_file(source / "model.safetensors")
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    safetensors.numpy.save_file(arrays, source / "model.safetensors", {"format": "pt"})
    checkpoints.convert(source, tmp_path / "out", to_layout=target, settings=settings)


def test_the_layout_of_the_config_is_named_where_its_names_fit_only_others():
    names = [
        *(name for name in SHAPES if "post_" not in name),
        *(f"{BLOCK}.self_attn.{one}_norm.weight" for one in "qk"),
    ]
    with pytest.raises(layouts.LayoutError, match=r"hf-cohere comes closest, but does not know .*q_norm\.weight"):
        layouts.detect(names, "cohere")


@pytest.mark.parametrize("changes", [{}, {"model_type": "mixtral", "num_hidden_layers": 2}])
def test_a_number_that_a_config_leaves_out_is_no_evidence(tmp_path, changes):
    experts = {
        f"model.layers.{layer}.block_sparse_moe.{name}.weight": shape
        for layer in range(2)
        for name, shape in [("gate", (3, WIDTH))]
        + [
            (f"experts.{one}.w{way}", (WIDTH, INNER) if way == 2 else (INNER, WIDTH))
            for one in range(3)
            for way in (1, 2, 3)
        ]
    }
    second = {name.replace("layers.0", "layers.1"): shape for name, shape in SHAPES.items()}
    source = folder(tmp_path / "source", changes, {**second, **(experts if changes else {})})
    arrays = safetensors.numpy.load_file(source / "model.safetensors")
    if changes:
        arrays = {name: value for name, value in arrays.items() if ".mlp." not in name}
        safetensors.numpy.save_file(arrays, source / "model.safetensors", {"format": "pt"})
    else:
        config = json.loads((source / "config.json").read_text())
        with pytest.raises(layouts.LayoutError, match="the file has 2 layers"):
            checkpoints.convert(source, tmp_path / "x")
        del config["num_hidden_layers"]
        (source / "config.json").write_text(json.dumps(config))
    assert checkpoints.convert(source, tmp_path / "x").target.exists()
