"""The model of a GGUF file as a config.json of `transformers`: Llama (Mistral, Mixtral), Qwen 2 and 3, Gemma, GPT-2."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....printable import printable
from ....whole_files import JsonObject
from ..base import Reader
from ..files import bad

ARCHITECTURE = "general.architecture"
HEAD, TABLE, FACTORS = "output.weight", "token_embd.weight", "rope_freqs.weight"

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Scaling of Llama 3.1 and later; a GGUF stores the resulting factors instead of these."""

CLOSE = 1e-4
"""Relative difference of float32 factors that are the same ones."""

NEUTRAL = {"attention.causal": True, "rope.scaling.attn_factor": 1, "rope.scaling.yarn_attn_factor": 1,
           "rope.scaling.yarn_ext_factor": 1}  # fmt: skip
"""Values that keys unread by the config's code must have; all other such keys must be 0, or change the model."""

UNUSED = {"vocab_size", "expert_used_count", "rope.scaling.finetuned", "rope.scaling.original_context_length",
          "pooling_type", "tensor_data_layout", "attention.head_count_kv"}  # fmt: skip
"""Keys that change nothing where the config's code does not read them."""


class _Keys:
    """Values of an architecture's keys."""

    def __init__(self, path: Path, values: Mapping[str, object]):
        self._path, self._values = path, values
        self._read: set[str] = set()
        self.kind = values.get(ARCHITECTURE)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise bad(self._path, f"{self.kind}.{key} ({printable(value, 40)}) must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise bad(self._path, f"{self.kind}.{key} ({printable(value, 40)}) must be a positive number")
        return float(str(np.float32(value)))  # the shortest number that float32 rounds to it: 1e-05

    def get(self, key: str, default: float | None = None) -> Any:
        self._read.add(key)
        return self._values.get(f"{self.kind}.{key}", default)

    def check_rest(self) -> None:
        """Refuse keys that were not read, and change the model."""
        for name, value in self._values.items():
            key = name.removeprefix(f"{self.kind}.")
            if key != name and key not in self._read | UNUSED and value != NEUTRAL.get(key, 0):
                raise bad(
                    self._path, f"{printable(name)} ({printable(value, 40)}) makes a model that is not read from GGUF"
                )


def of(path: Path, values: Mapping[str, object], reader: Reader) -> JsonObject:
    """Return the config.

    Args:
        path: of the file.
        values: its header's.
        reader: its tensors.

    Raises:
        CheckpointError: another architecture, or a value that is missing, of the wrong kind, or of another model.
    """
    keys = _Keys(path, values)
    _check_purpose(path, values, reader)
    if not isinstance(keys.kind, str) or keys.kind not in _KINDS:
        raise bad(path, f"{ARCHITECTURE} ({printable(keys.kind, 40)}) must be {', '.join(_KINDS)} to be converted; "
                  "--to same changes the container alone")  # fmt: skip
    value = _KINDS[keys.kind](path, keys, reader)
    keys.check_rest()
    table = reader.tensors.get(TABLE)
    numbers = table.shape[0] if table is not None and table.shape else keys.size("vocab_size")
    tied = {"vocab_size": numbers, "tie_word_embeddings": HEAD not in reader.tensors}
    return {"model_type": keys.kind, **value, **tied, **_tokens(values, numbers), **_dtype(reader)}


PURPOSES = {
    "adapter": "is a LoRA adapter without its base: llama.cpp's llama-export-lora merges it into a GGUF of the base; "
    "convert that",
    "imatrix": "is an importance matrix, which guides quantising, and holds no weights; convert the model itself",
    "controlvector": "is a control vector, which is added to activations; convert the model itself",
    "mmproj": "is the part of a multimodal model that reads images or sound; convert the GGUF of its language model",
    "clip": "is the part of a multimodal model that reads images or sound; convert the GGUF of its language model",
    "vocab": "is a vocabulary without weights; convert the model itself",
}
"""Value of ``general.type`` or ``general.architecture`` -> what such a file is, and a remedy."""


def _check_purpose(path: Path, values: Mapping[str, object], reader: Reader) -> None:
    """Refuse files that hold no model."""
    kinds = [values.get("general.type"), values.get(ARCHITECTURE)]
    kinds += [] if reader.tensors or reader.unread else ["vocab"]
    for kind in kinds:
        if isinstance(kind, str) and kind in PURPOSES:
            raise bad(path, PURPOSES[kind])


TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
"""Key of a config.json -> the word in GGUF's key for it."""


def _tokens(values: Mapping[str, object], count: int) -> dict[str, int]:
    """Return the ids of special tokens, those that the vocabulary has."""
    token_ids = {key: values.get(f"tokenizer.ggml.{word}_token_id") for key, word in TOKENS.items()}
    return {key: value for key, value in token_ids.items() if type(value) is int and 0 <= value < count}


def _dtype(reader: Reader) -> dict[str, str]:
    """Return the dtype that most numbers have which are not quantised; quantised ones take it as well."""
    sizes: collections.Counter[str] = collections.Counter()
    for info in reader.tensors.values():
        if "float" in info.dtype:
            sizes[info.dtype] += info.nbytes // info.itemsize
    return {"torch_dtype": sizes.most_common(1)[0][0]} if sizes else {}


def _decoder(path: Path, keys: _Keys, reader: Reader) -> JsonObject:
    width, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", max(width // heads, 1))
    is_gemma = str(keys.kind).startswith("gemma")
    if (
        keys.size("attention.value_length", head_dim) != head_dim
        or keys.size("rope.dimension_count", head_dim) != head_dim
    ):
        raise bad(path, f"{keys.kind} has heads of several sizes, or turns a part of them, which is not read from GGUF")
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = _scaling(path, keys, reader, theta, head_dim)
    return {
        "architectures": [ARCHITECTURES[str(keys.kind)]],
        "hidden_size": width,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **({"hidden_activation": "gelu_pytorch_tanh"} if is_gemma else {"hidden_act": "silu"}),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "max_position_embeddings": keys.size("context_length"),
        **({"rope_scaling": scaling} if scaling else {}),
    }


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def _llama(path: Path, keys: _Keys, reader: Reader) -> JsonObject:
    config = _decoder(path, keys, reader)
    if not keys.get("expert_count", 0):
        return {**config, "attention_bias": False, "mlp_bias": False}
    return {
        **config,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def _qwen(path: Path, keys: _Keys, reader: Reader) -> JsonObject:
    bias = {"attention_bias": False} if keys.kind == "qwen3" else {}
    return {**_decoder(path, keys, reader), **bias, "use_sliding_window": False}


def _qwen3_moe(path: Path, keys: _Keys, reader: Reader) -> JsonObject:
    """Return the config of Qwen3-MoE; llama.cpp makes the weights of the chosen experts add up to 1."""
    return {
        **_decoder(path, keys, reader),
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the model by which llama.cpp knows the one that scales scores by its width, and not by its heads."""


def _gemma(path: Path, keys: _Keys, reader: Reader) -> JsonObject:
    """Return the config of Gemma 2, or of the text model of Gemma 3."""
    config = _decoder(path, keys, reader)
    kind, layers, head_dim = str(keys.kind), config["num_hidden_layers"], config["head_dim"]
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == GEMMA_27B[kind] else head_dim
    config |= {"query_pre_attn_scalar": scalar, "attention_bias": False,
              "sliding_window": keys.size("attention.sliding_window")}  # fmt: skip
    keys.get("attention.scale")  # of the same number
    if kind == "gemma2":
        caps = (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
        return {**config, **{key: keys.number(key, default) for key, default in caps},
                "layer_types": _kinds(path, keys, layers, 2)}  # fmt: skip
    local = keys.number("rope.freq_base_swa", 10000.0)
    cap = keys.get("final_logit_softcapping")
    soft = {} if cap is None else {"final_logit_softcapping": keys.number("final_logit_softcapping")}
    # Gemma 3's default for layers with full attention; that of `_decoder` is Llama's.
    theta = config["rope_theta"] if keys.get("rope.freq_base") is not None else 1_000_000.0
    return {**config, **soft, "model_type": "gemma3_text", "rope_theta": theta, "rope_local_base_freq": local,
            "layer_types": _kinds(path, keys, layers, 6)}  # fmt: skip


def _kinds(path: Path, keys: _Keys, layers: int, usual: int) -> list[str]:
    """Return the kinds of layers: every n-th layer has full attention, or a list selects the layers with a window."""
    pattern = keys.get("attention.sliding_window_pattern", usual)
    slides = [bool((number + 1) % pattern) for number in range(layers)] if type(pattern) is int and pattern else pattern
    if not isinstance(slides, list) or len(slides) != layers or not all(isinstance(one, bool) for one in slides):
        raise bad(path, f"{keys.kind}.attention.sliding_window_pattern ({printable(pattern, 40)}) must be a whole "
                  f"number or say of each of {layers} layers whether it has the window")  # fmt: skip
    return [f"{'sliding' if one else 'full'}_attention" for one in slides]


def _gpt2(path: Path, keys: _Keys, reader: Reader) -> JsonObject:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": keys.size("embedding_length"),
        "n_inner": keys.size("feed_forward_length"),
        "n_layer": keys.size("block_count"),
        "n_head": keys.size("attention.head_count"),
        "n_positions": keys.size("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_KINDS: dict[str, Callable[[Path, _Keys, Reader], JsonObject]] = {
    "llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "qwen3moe": _qwen3_moe, "gemma2": _gemma, "gemma3": _gemma,
    "gpt2": _gpt2,
}  # fmt: skip
"""Architecture -> what reads its keys."""


def _scaling(path: Path, keys: _Keys, reader: Reader, theta: float, head_dim: int) -> JsonObject:
    """Return how positions are scaled; {} where they are not."""
    kind = keys.get("rope.scaling.type")
    factors = reader.tensors.get(FACTORS)
    if factors is not None:
        if factors.dtype != "float32" or factors.shape != (head_dim // 2,) or kind not in (None, "none"):
            raise bad(path, f"{FACTORS} {factors.shape} must have a float32 for each of {head_dim // 2} frequencies")
        return _llama3(path, reader.read(FACTORS).astype(np.float64), theta, head_dim)
    if kind == "none":
        return {}
    if kind in (None, "linear"):  # llama.cpp's default, which old files name by another key
        key = "rope.scale_linear" if keys.get("rope.scaling.factor") is None else "rope.scaling.factor"
        factor = keys.number(key, 1.0 if kind is None else None)
        return {"rope_type": "linear", "factor": factor} if kind or factor != 1 else {}
    if kind == "yarn":
        ramp = {
            name: keys.number(f"rope.scaling.yarn_{name}")
            for name in ("beta_fast", "beta_slow")
            if keys.get(f"rope.scaling.yarn_{name}") is not None
        }
        original = keys.size("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": keys.number("rope.scaling.factor"),
                "original_max_position_embeddings": original, **ramp}  # fmt: skip
    raise bad(path, f"{keys.kind}.rope.scaling.type ({printable(kind, 40)}) must be linear or yarn")


def _llama3(path: Path, factors: np.ndarray, theta: float, head_dim: int) -> JsonObject:
    """Return the scaling of Llama 3.1 that gives these factors."""
    factor = float(f"{factors.max():.6g}") if factors.size else math.nan
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, reach = LLAMA3.values()
    with np.errstate(all="ignore"):
        # By wavelength (transformers' rope type llama3): short ones as they are, long ones divided by the factor, and
        # between them an interpolation.
        smooth = (reach / lengths - low) / (high - low)
        wanted = np.where(
            lengths < reach / high, 1, np.where(lengths > reach / low, factor, 1 / ((1 - smooth) / factor + smooth))
        )
        is_close = bool(np.all(np.abs(factors - wanted) <= CLOSE * np.abs(wanted)))
    if not is_close or not factor > 0:
        raise bad(path, f"{FACTORS} are not the factors of Llama 3.1's scaling, so that its config is unknown")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
