"""vLLM's parameters: one matrix for query, key and value, one for gate and up, two for all experts of a layer."""

import json

import numpy as np
import pytest
import safetensors.numpy

from attn_bridge import checkpoints
from attn_bridge.models import layouts
from attn_bridge.models.libraries import vllm as library

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 16, 12, 4, 2, 6, 3
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
    "vocab_size": 11,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen3": {**SIZES, "model_type": "qwen3", "attention_bias": True},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {**SIZES, "model_type": "qwen3_moe", "num_experts": EXPERTS, "moe_intermediate_size": HIDDEN},
    "llama": {**SIZES, "model_type": "llama"},
}


LAYER, OURS = "model.layers.0.", "trf_blocks.0."
FORMS = {
    "llama": (("input_layernorm", "post_attention_layernorm"), ("norm1", "norm2")),
    "gemma": (("input_layernorm", "post_feedforward_layernorm"), ("norm1", "post_norm1")),
    "olmo2": (("post_attention_layernorm", "post_feedforward_layernorm"), ("post_norm1", "post_norm2")),
    "mixtral": (("input_layernorm", "block_sparse_moe.gate"), ("norm1", "ff.experts.0.fc1")),
}


@pytest.mark.parametrize("kind", FORMS)
def test_the_names_of_either_side_show_the_kind_of_block(kind):
    theirs, ours = FORMS[kind]
    assert library.form_of_theirs({f"{LAYER}{name}.weight": () for name in theirs}, {}) == {"kind": kind}
    assert library.form_of_ours({f"{OURS}{name}.weight": () for name in ours}, {}) == {"kind": kind}


def model(folder, kind):
    """Write a folder of `transformers`; return its arrays, and by hand those of vLLM."""
    random, hf, vllm = np.random.default_rng(5), {}, {}

    def draw(name, *shape):
        hf[name] = array = random.normal(size=shape).astype(np.float32)
        return array

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        vllm[name] = draw(name, 11, WIDTH)
    vllm["model.norm.weight"] = draw("model.norm.weight", WIDTH)
    for layer in (f"model.layers.{number}." for number in range(2)):
        for leaf in ("weight", *(["bias"] if kind == "qwen3" else [])):
            tail = [WIDTH] if leaf == "weight" else []
            vllm[f"{layer}self_attn.qkv_proj.{leaf}"] = np.concatenate([
                draw(f"{layer}self_attn.{one}_proj.{leaf}", heads * HEAD_DIM, *tail)
                for one, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            ])  # fmt: skip
            out = [WIDTH, HEADS * HEAD_DIM] if leaf == "weight" else [WIDTH]
            vllm[f"{layer}self_attn.o_proj.{leaf}"] = draw(f"{layer}self_attn.o_proj.{leaf}", *out)
        for one in ("q", "k") if kind.startswith("qwen3") else ():
            vllm[f"{layer}self_attn.{one}_norm.weight"] = draw(f"{layer}self_attn.{one}_norm.weight", HEAD_DIM)
        for one in ("input_layernorm", "post_attention_layernorm"):
            vllm[f"{layer}{one}.weight"] = draw(f"{layer}{one}.weight", WIDTH)
        if kind in ("qwen3", "llama"):
            both = [draw(f"{layer}mlp.{one}_proj.weight", HIDDEN, WIDTH) for one in ("gate", "up")]
            vllm[f"{layer}mlp.gate_up_proj.weight"] = np.concatenate(both)
            vllm[f"{layer}mlp.down_proj.weight"] = draw(f"{layer}mlp.down_proj.weight", WIDTH, HIDDEN)
            continue
        home = layer + ("block_sparse_moe" if kind == "mixtral" else "mlp")
        one, two, three = ("w1", "w2", "w3") if kind == "mixtral" else ("gate_proj", "down_proj", "up_proj")
        vllm[f"{home}.gate.weight"] = draw(f"{home}.gate.weight", EXPERTS, WIDTH)
        gates, ups = ([draw(f"{home}.experts.{j}.{name}.weight", HIDDEN, WIDTH) for j in range(EXPERTS)]
                      for name in (one, three))  # fmt: skip
        vllm[f"{home}.experts.w13_weight"] = np.concatenate([gates, ups], axis=1)
        downs = [draw(f"{home}.experts.{j}.{two}.weight", WIDTH, HIDDEN) for j in range(EXPERTS)]
        vllm[f"{home}.experts.w2_weight"] = np.stack(downs)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    safetensors.numpy.save_file(hf, folder / "model.safetensors", {"format": "pt"})
    return hf, vllm


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_has_the_parameters_of_vllm_and_comes_back(tmp_path, kind):
    hf, vllm = model(tmp_path / "hf", kind)
    checkpoints.convert(tmp_path / "hf", tmp_path / "vllm", to_layout="vllm")
    found = checkpoints.read(tmp_path / "vllm")
    assert found.keys() == vllm.keys()
    assert all((found[name] == array).all() and found[name].dtype == array.dtype for name, array in vllm.items())
    assert json.loads((tmp_path / "vllm" / "config.json").read_text()) == MODELS[kind]
    checkpoints.convert(tmp_path / "hf", tmp_path / "torch", to_layout="torch")
    checkpoints.convert(tmp_path / "torch", tmp_path / "again", to_layout="vllm")
    assert all((array == found[name]).all() for name, array in checkpoints.read(tmp_path / "again").items())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(MODELS[kind]))
    safetensors.numpy.save_file(vllm, bare / "model.safetensors", {"format": "pt"})
    checkpoints.convert(bare, tmp_path / "back", from_layout="vllm", to_layout=f"hf-{kind.replace('_', '-')}")
    back = checkpoints.read(tmp_path / "back")
    assert back.keys() == hf.keys()
    assert all((back[name] == array).all() for name, array in hf.items())


def test_names_that_phi_3_has_as_well_are_those_of_phi_3():
    plain = {"model.embed_tokens.weight": (11, 16), "lm_head.weight": (11, 16), "model.norm.weight": (16,)}
    plain |= {f"model.layers.0.{name}": shape for name, shape in {
        "self_attn.qkv_proj.weight": (48, 16), "self_attn.o_proj.weight": (16, 24), "mlp.gate_up_proj.weight": (24, 16),
        "mlp.down_proj.weight": (16, 12), "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
    }.items()}  # fmt: skip
    assert layouts.detect(plain).name == "hf-phi3"
    assert layouts.detect(plain, "phi3").name == "hf-phi3"
    with pytest.raises(
        layouts.LayoutError, match=r"config.json says llama, .*; --from vllm takes them as those of vLLM"
    ):
        layouts.detect(plain, "llama")
    assert layouts.detect({**plain, "model.layers.0.self_attn.qkv_proj.bias": (48,)}, "qwen2").name == "vllm"


def test_heads_of_vllm_without_a_config_are_asked_for(tmp_path):
    _, vllm = model(tmp_path / "hf", "llama")
    safetensors.numpy.save_file(vllm, tmp_path / "bare.safetensors", {"format": "pt"})
    options = {"from_layout": "vllm", "to_layout": "hf-llama"}
    with pytest.raises(layouts.LayoutError, match="need --set num_heads=N and --set num_kv_heads=N"):
        checkpoints.plan(tmp_path / "bare.safetensors", tmp_path / "x", **options)
    plan = checkpoints.plan(
        tmp_path / "bare.safetensors", tmp_path / "x", settings={"num_heads": HEADS, "num_kv_heads": 2}, **options
    )
    assert len(plan.targets) == len(checkpoints.read(tmp_path / "hf"))
