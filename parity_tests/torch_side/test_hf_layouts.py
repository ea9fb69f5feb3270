"""Folders of transformers, every family that a layout is for, to Flax's names and back to the same logits."""

from __future__ import annotations

import pytest
import torch
import transformers

from attn_bridge import checkpoints

IDS = torch.arange(14).reshape(2, 7) % 11
GROUPED = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT = {"vocab_size": 31, "n_positions": 16, "n_embd": 8, "n_head": 2, "n_layer": 2}
BERT = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
T = transformers
FAMILIES = {
    "gpt2": ("hf-gpt2", T.GPT2LMHeadModel, T.GPT2Config, GPT),
    "gpt2-bare": ("hf-gpt2", T.GPT2Model, T.GPT2Config, GPT),
    "gpt2-untied": ("hf-gpt2", T.GPT2LMHeadModel, T.GPT2Config, {**GPT, "tie_word_embeddings": False}),
    "bert": ("hf-bert", T.BertModel, T.BertConfig, BERT),
    "bert-masked": ("hf-bert", T.BertForMaskedLM, T.BertConfig, BERT),
    "llama": ("hf-llama", T.LlamaForCausalLM, T.LlamaConfig, GROUPED),
    "llama-tied": ("hf-llama", T.LlamaForCausalLM, T.LlamaConfig, {**GROUPED, "tie_word_embeddings": True}),
    "llama-bare": ("hf-llama", T.LlamaModel, T.LlamaConfig, GROUPED),
    "mistral": ("hf-llama", T.MistralForCausalLM, T.MistralConfig, {**GROUPED, "sliding_window": 4}),
    "qwen2": ("hf-llama", T.Qwen2ForCausalLM, T.Qwen2Config, GROUPED),
    "qwen3": ("hf-llama", T.Qwen3ForCausalLM, T.Qwen3Config, {**GROUPED, "head_dim": 6}),
}


def saved(folder, kind, config, sizes, shard):
    model = kind(config(**sizes)).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def result(model):
    with torch.no_grad():
        return model(IDS)[0]


@pytest.mark.parametrize("shard", ["1GB", "4KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_with_the_same_bytes_and_logits(tmp_path, family, shard):
    layout, kind, config, sizes = FAMILIES[family]
    model = saved(tmp_path / "hf", kind, config, sizes, shard)
    assert checkpoints.inspect(tmp_path / "hf").layout == layout
    flax = checkpoints.convert(tmp_path / "hf", tmp_path / "flax").target
    assert checkpoints.inspect(flax).layout == "flax"
    assert checkpoints.verify(tmp_path / "hf", flax).passed
    back = checkpoints.convert(flax, tmp_path / "back", to_layout=layout).target
    for file in (tmp_path / "hf").glob("model*"):
        assert (back / file.name).read_bytes() == file.read_bytes(), file.name
    assert torch.equal(result(kind.from_pretrained(back).eval()), result(model))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_projection_is_where_the_module_has_it(tmp_path, family):
    _, kind, config, sizes = FAMILIES[family]
    model = saved(tmp_path / "hf", kind, config, sizes, "1GB")
    found = checkpoints.read(checkpoints.convert(tmp_path / "hf", tmp_path / "x.npz").target)
    for ours, theirs in (("W_query", "q_proj"), ("W_key", "k_proj"), ("W_value", "v_proj"), ("out_proj", "o_proj")):
        weight = model.model.layers[1].self_attn.get_submodule(theirs).weight.detach().numpy()
        assert (found[f"trf_blocks.1.att.{ours}.kernel"] == weight.T).all()
    assert (found["out_head.kernel"] == model.lm_head.weight.detach().numpy().T).all()
