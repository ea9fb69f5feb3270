"""GGUF files as llama.cpp's converter writes them, by the `gguf` package, and what dequantising them gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray
Types = gguf.GGMLQuantizationType

NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "transformer.h.": "blk.", "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
"""Part of a name of `transformers` -> what llama.cpp has in its place."""

GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip

EXPERTS = {"block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "w1": "ffn_gate_exps",
           "w2": "ffn_down_exps", "w3": "ffn_up_exps", "gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps",
           "up_proj": "ffn_up_exps"}  # fmt: skip

ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
"""``model_type`` -> architecture, where they differ."""


def named(name: str, kind: str = "") -> str:
    """Return llama.cpp's name of a tensor of `transformers`."""
    if ".experts." in name:
        block, _, matrix = name.partition(".experts.")
        return f"blk.{block.split('.')[2]}.{EXPERTS[matrix.split('.')[1]]}.weight"
    if name.endswith((".block_sparse_moe.gate.weight", ".mlp.gate.weight")):
        return f"blk.{name.split('.')[2]}.ffn_gate_inp.weight"
    for theirs, ours in GEMMA.items() if kind.startswith("gemma") else ():
        name = name.replace(theirs, ours)
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(array: Array, heads: int) -> Array:
    """Return a projection of queries or keys as llama.cpp turns it: `LlamaModel.permute` of its converter."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return the bytes of random blocks of a type, with scales that are small numbers of float16."""
    numbers, size = gguf.GGML_QUANT_SIZES[Types[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), np.uint8)
    scales = {
        "Q4_0": (0,),
        "Q8_0": (0,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "MXFP4": (),
        "TQ2_0": (64,),
        "TQ1_0": (52,),
        "IQ1_M": (),
    }.get(kind, (0,))
    if kind == "MXFP4":
        data[..., 0] = rng.integers(120, 126, data.shape[:-1])
    for at in scales:
        small = rng.uniform(0.01, 0.05, data.shape[:-1]).astype(np.float16)
        data[..., at : at + 2] = small[..., None].view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def write(path: Path, kind: str, keys: Mapping[str, Any], tensors: Mapping[str, Array | tuple[str, Array]]) -> Path:
    """Write a file: tensors by their names, as arrays, or as the name of a type and its bytes.

    Keys are those of the architecture, but for those behind a slash.
    """
    writer = gguf.GGUFWriter(path, kind)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    for key, value in keys.items():
        full = key.removeprefix("/") if key.startswith("/") else f"{kind}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(full, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=Types[tensor[0]])
        elif tensor.dtype.name == "bfloat16":
            writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=Types.BF16)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a decoder that llama.cpp's converter writes, of a config.json."""
    if config["model_type"] == "gpt2":
        return {
            "context_length": config["n_positions"], "embedding_length": config["n_embd"],
            "feed_forward_length": 4 * config["n_embd"], "block_count": config["n_layer"],
            "attention.head_count": config["n_head"], "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }  # fmt: skip
    rope = config.get("rope_parameters") or {}
    more: dict[str, Any] = {}
    if "num_experts_per_tok" in config:
        more["expert_used_count"] = config["num_experts_per_tok"]
        more["expert_count"] = config.get("num_experts", config.get("num_local_experts"))
    if "moe_intermediate_size" in config:
        more["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["model_type"].startswith("gemma"):
        more["attention.sliding_window"] = config["sliding_window"]
        more |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if config.get(key)}
    return {
        **more,
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"], "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "vocab_size": config["vocab_size"],
    }  # fmt: skip


def converted(path: Path, state: Mapping[str, Array], config: Mapping[str, Any], kind: str = "F32") -> Path:
    """Write a model of `transformers` as llama.cpp's converter does: norms and biases in float32."""
    tensors: dict[str, Array | tuple[str, Array]] = {}
    kind_of_model = config["model_type"]
    for name, array in fused(state).items():
        if kind_of_model.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if kind_of_model in ("llama", "mixtral") and ("q_proj" in name or "k_proj" in name):
            array = interleaved(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if ".c_" in name and array.ndim == 2:  # a Conv1D
            array = np.ascontiguousarray(array.T)
        plain = array.ndim == 1 or kind == "F32"
        tensors[named(name, kind_of_model)] = (
            array if plain else (kind, gguf.quantize(np.ascontiguousarray(array), Types[kind]))
        )
    keys = {**keys_of(config), "/tokenizer.ggml.bos_token_id": 1, "/tokenizer.ggml.eos_token_id": 2}
    return write(path, ARCHITECTURES.get(kind_of_model, kind_of_model), keys, tensors)


def fused(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return a model whose experts' matrices of a layer are one array each, under the name of the first."""
    found: dict[str, Array] = {}
    for name, array in state.items():
        if ".experts." not in name:
            found[name] = array
        elif ".experts.0." in name:
            rest = (name.replace(".experts.0.", f".experts.{number}.") for number in range(len(state)))
            found[name] = np.stack([state[one] for one in rest if one in state])
    return found


def split(path: Path, folder: Path, count: int) -> list[Path]:
    """Cut a file into several, as llama-gguf-split does, all keys in the first; return them."""
    reader = gguf.GGUFReader(path)
    architecture = str(bytes(reader.fields["general.architecture"].parts[-1]), "utf-8")
    paths = []
    for number in range(count):
        paths.append(folder / f"x-{number + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(paths[-1], architecture)
        for name, field in reader.fields.items() if number == 0 else ():
            if not name.startswith(("GGUF.", "general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.scores")):
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def through(array: Array, kind: str) -> Array:
    """Return the numbers that an array has once it is quantised."""
    code = Types[kind]
    numbers: Array = gguf.dequantize(gguf.quantize(array, code), code)
    return numbers
