"""Models of `transformers` as their makers, and the book, would have written them: names, and how numbers lie.

The names of the book's models are those of llms-from-scratch 1.0.19 (`Llama3Model`, `Qwen3Model`) and, for Gemma 3, of
``ch05/12_gemma3/standalone-gemma3.ipynb`` of its repository. Nothing here is made by the layouts that it is to test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

State = dict[str, Tensor]


def state_of(folder: Path) -> State:
    """Return the tensors of a folder of one file."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def turned(weight: Tensor, heads: int) -> Tensor:
    """Return rows as `transformers` permutes them on the way in, backwards."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def meta(state: Mapping[str, Tensor], heads: int, kv_heads: int, *, frequencies: bool = True) -> State:
    """Return a Llama, Mistral or Mixtral under Meta's names."""
    found = {"tok_embeddings.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    if "lm_head.weight" in state:
        found["output.weight"] = state["lm_head.weight"]
    if frequencies:
        found["rope.freqs"] = torch.tensor([1.0, 0.1])
    for own in _blocks(state, "model.layers."):
        theirs, attention = own.removeprefix("model."), f"{own}self_attn."
        found[f"{theirs}attention.wq.weight"] = turned(state[f"{attention}q_proj.weight"], heads)
        found[f"{theirs}attention.wk.weight"] = turned(state[f"{attention}k_proj.weight"], kv_heads)
        found[f"{theirs}attention.wv.weight"] = state[f"{attention}v_proj.weight"]
        found[f"{theirs}attention.wo.weight"] = state[f"{attention}o_proj.weight"]
        found[f"{theirs}attention_norm.weight"] = state[f"{own}input_layernorm.weight"]
        found[f"{theirs}ffn_norm.weight"] = state[f"{own}post_attention_layernorm.weight"]
        if f"{own}mlp.up_proj.weight" in state:
            for name, hf in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                found[f"{theirs}feed_forward.{name}.weight"] = state[f"{own}mlp.{hf}_proj.weight"]
        sparse = f"{own}block_sparse_moe."
        for name in [name for name in state if name.startswith(sparse)]:
            found[f"{theirs}feed_forward.{name.removeprefix(sparse)}"] = state[name]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def openais(state: Mapping[str, Tensor]) -> State:
    """Return a gpt-oss as OpenAI's own files have it."""
    found = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "unembedding.weight": state["lm_head.weight"],
        "norm.scale": state["model.norm.weight"],
    }
    for number, own in enumerate(_blocks(state, "model.layers.")):
        theirs = f"block.{number}."
        for leaf in ("weight", "bias"):
            projections = [state[f"{own}self_attn.{name}_proj.{leaf}"] for name in "qkv"]
            found[f"{theirs}attn.qkv.{leaf}"] = torch.cat(projections)
            found[f"{theirs}attn.out.{leaf}"] = state[f"{own}self_attn.o_proj.{leaf}"]
            found[f"{theirs}mlp.gate.{leaf}"] = state[f"{own}mlp.router.{leaf}"]
        found[f"{theirs}attn.sinks"] = state[f"{own}self_attn.sinks"]
        found[f"{theirs}attn.norm.scale"] = state[f"{own}input_layernorm.weight"]
        found[f"{theirs}mlp.norm.scale"] = state[f"{own}post_attention_layernorm.weight"]
        for number_of, name in ((1, "gate_up_proj"), (2, "down_proj")):
            weight = state[f"{own}mlp.experts.{name}"].transpose(1, 2).contiguous()  # theirs is (experts, out, in)
            found[f"{theirs}mlp.mlp{number_of}_weight"] = weight
            found[f"{theirs}mlp.mlp{number_of}_bias"] = state[f"{own}mlp.experts.{name}_bias"]
    return {name: tensor.contiguous() for name, tensor in found.items()}


_BOOKS_NORMS = {
    "llama3": ("norm1.weight", "norm2.weight"),
    "qwen3": ("norm1.scale", "norm2.scale"),
    "gemma3": ("input_layernorm.scale", "post_attention_layernorm.scale"),
}
_FEED_FORWARD = {"gate_proj": "fc1", "up_proj": "fc2", "down_proj": "fc3"}


def books(state: Mapping[str, Tensor], model: str) -> State:
    """Return a Llama, Qwen 3 (also with experts) or Gemma 3 as the book's model of that name has it."""
    leaf, blocks = "weight" if model == "llama3" else "scale", "blocks." if model == "gemma3" else "trf_blocks."
    found = {
        "tok_emb.weight": state["model.embed_tokens.weight"],
        f"final_norm.{leaf}": state["model.norm.weight"],
        "out_head.weight": state.get("lm_head.weight", state["model.embed_tokens.weight"]),
    }
    for own in _blocks(state, "model.layers."):
        theirs = own.replace("model.layers.", blocks)
        for name, hf in (("W_query", "q_proj"), ("W_key", "k_proj"), ("W_value", "v_proj"), ("out_proj", "o_proj")):
            found[f"{theirs}att.{name}.weight"] = state[f"{own}self_attn.{hf}.weight"]
        for name in ("q_norm", "k_norm"):
            if model != "llama3":
                found[f"{theirs}att.{name}.scale"] = state[f"{own}self_attn.{name}.weight"]
        for hf, name in _FEED_FORWARD.items():
            if f"{own}mlp.{hf}.weight" in state:
                found[f"{theirs}ff.{name}.weight"] = state[f"{own}mlp.{hf}.weight"]
        if f"{own}mlp.gate.weight" in state:
            found[f"{theirs}ff.gate.weight"] = state[f"{own}mlp.gate.weight"]
        experts = f"{own}mlp.experts."
        for name in [name for name in state if name.startswith(experts)]:
            number, hf, _ = name.removeprefix(experts).split(".")
            found[f"{theirs}ff.{_FEED_FORWARD[hf]}.{number}.weight"] = state[name]
        first, second = _BOOKS_NORMS[model]
        found[theirs + first] = state[f"{own}input_layernorm.weight"]
        found[theirs + second] = state[f"{own}post_attention_layernorm.weight"]
        if model == "gemma3":
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                found[f"{theirs}{name}.scale"] = state[f"{own}{name}.weight"]
    return {name: tensor.clone() for name, tensor in found.items()}


def write(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], *, params: bool = False) -> Path:
    """Write a folder: Meta's ``consolidated.00.pth`` and ``params.json``, or safetensors and ``config.json``."""
    folder.mkdir(parents=True)
    if params:
        torch.save(dict(state), folder / "consolidated.00.pth")
    else:
        safetensors.torch.save_file(dict(state), folder / "model.safetensors")
    (folder / ("params.json" if params else "config.json")).write_text(json.dumps(config))
    return folder


def split(state: Mapping[str, Tensor], parts: int, *, vocabulary: bool = True) -> list[State]:
    """Return a Llama under Meta's names as so many files have it; those before Llama 3 split the embeddings' width."""
    axes = {**dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), 0), **dict.fromkeys(("wo", "w2"), 1)}
    axes["tok_embeddings"] = 0 if vocabulary else 1
    found: list[State] = [{} for _ in range(parts)]
    for name, tensor in state.items():
        axis = axes.get(name.removesuffix(".weight").rpartition(".")[2])
        pieces = [tensor] * parts if axis is None else tensor.chunk(parts, axis)
        for one, piece in zip(found, pieces, strict=True):
            one[name] = piece.clone()
    return found


def _blocks(state: Mapping[str, Tensor], stem: str) -> list[str]:
    numbers = {int(name.removeprefix(stem).partition(".")[0]) for name in state if name.startswith(stem)}
    return [f"{stem}{number}." for number in sorted(numbers)]
