"""The oracle of the families: tiny random `transformers` models, and what happens in the attention of their layers.

A model is run as it is, from embeddings to its last layer, so that its masks, positions and cache are its own. A hook
writes down what goes into the attention of a layer and what comes out. For an oracle in float64 the model is built and
run in `promoted` of the judge: `transformers` keeps rotary tables, norms and softmax in float32 otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

import torch_attn
from attn_parity.frameworks.torch.running.promotion import promoted
from attn_parity.results.findings import TensorVerdict
from attn_parity.verdict.criterion import decide
from attn_parity.verdict.measures import measure
from torch_attn.backend import from_numpy, to_numpy

from .hf_configs import LATENT_HEADS

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 1, "experts_implementation": "eager"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {**SIZES, **LATENT_HEADS, "first_k_dense_replace": 2}
INDEXED = {"index_n_heads": 8, "index_head_dim": 6, "index_topk": 3}
"""Heads enough that no two scores of an indexer are zero, and so equal."""
GATED = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
QWEN_EXPERTS = {"num_experts": 2, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4}
SLIDING = {"sliding_window": 4, "head_dim": 8}


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny model, and the layers to look at.

    Attributes:
        model_type: its family.
        sizes: keys of its config.
        layers: their indices; of each kind one.
        attention: name of the attention within a layer.
        layers_at: path of the list of layers.
    """

    model_type: str
    sizes: dict[str, Any]
    layers: tuple[int, ...] = (1,)
    attention: str = "self_attn"
    layers_at: str = "layers"


CASES = {
    "llama": Case("llama", {**SIZES, "attention_bias": True, "rope_theta": 500.0}),
    "llama-3.1": Case("llama", {**SIZES, "head_dim": 8, "rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama-linear": Case("llama", {**SIZES, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-yarn": Case("llama", {**SIZES, "head_dim": 12, "rope_scaling": YARN}),
    "llama-dynamic": Case("llama", {**SIZES, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "llama-partial": Case("llama", {**SIZES, "partial_rotary_factor": 0.5}),
    "llama-multi-query": Case("llama", {**SIZES, "num_key_value_heads": 1}),
    "mistral": Case("mistral", {**SIZES, "sliding_window": 4}),
    "mistral-full": Case("mistral", {**SIZES, "sliding_window": None, "head_dim": 6}),
    "qwen2": Case("qwen2", SIZES),
    "qwen2-sliding": Case(
        "qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, layers=(0, 1)
    ),
    "qwen3": Case("qwen3", {**SIZES, "head_dim": 6, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "granite": Case("granite", {**SIZES, "attention_multiplier": 0.3, "attention_bias": True}),
    "smollm3": Case(
        "smollm3", {**SIZES, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 4}, layers=(0, 1)
    ),
    "llama4": Case(
        "llama4_text",
        {
            **SIZES,
            "head_dim": 6,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 4,
            "attention_bias": True,
            "attn_temperature_tuning": False,  # which counts padding; `lift` of the whole decoder mends it
        },
        layers=(0, 1),
    ),
    "cohere2-moe": Case(
        "cohere2_moe",
        {
            **SIZES,
            **EXPERTS,
            **SLIDING,
            "num_experts": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
        layers=(0, 1),
    ),
    "mixtral": Case("mixtral", {**SIZES, **EXPERTS, "num_local_experts": 2, "sliding_window": 4}),
    "qwen3-moe": Case("qwen3_moe", {**SIZES, **EXPERTS, "num_experts": 2, "moe_intermediate_size": 4, "head_dim": 8}),
    "gemma2": Case(
        "gemma2", {**SIZES, **SLIDING, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0}, layers=(0, 1)
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            **SIZES,
            **SLIDING,
            "query_pre_attn_scalar": 5,
            "sliding_window_pattern": 2,
            "rope_theta": 900.0,
            "rope_local_base_freq": 70.0,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        },
        layers=(0, 1),
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {**SIZES, **SLIDING, **EXPERTS, "num_local_experts": 2, "rope_scaling": {**YARN, "truncate": False}},
        layers=(0, 1),
    ),
    "olmo": Case("olmo", {**SIZES, "attention_bias": True}),
    "olmo-clipped": Case("olmo", {**SIZES, "clip_qkv": 0.7}),
    "olmo2": Case("olmo2", {**SIZES, "rms_norm_eps": 1e-3}),
    "olmo3": Case(
        "olmo3",
        {**SIZES, "sliding_window": 4, "num_hidden_layers": 4, "rope_theta": 500000.0, "rope_scaling": YARN},
        layers=(2, 3),
    ),
    "bloom": Case(
        "bloom", {"vocab_size": 11, "hidden_size": 24, "n_layer": 2, "n_head": 6}, (1,), "self_attention", "h"
    ),
    "qwen3-next": Case("qwen3_next", {**SIZES, **GATED, **EXPERTS, **QWEN_EXPERTS}, layers=(3,)),
    "qwen3.5": Case("qwen3_5_text", {**SIZES, **GATED}, layers=(3,)),
    "qwen3.5-experts": Case("qwen3_5_moe_text", {**SIZES, **GATED, **EXPERTS, **QWEN_EXPERTS}, layers=(3,)),
    "deepseek-v2": Case("deepseek_v2", {**LATENT, "attention_bias": True}),
    "deepseek-v2-lite": Case(
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": Case(
        "deepseek_v3", {**LATENT, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6}, "rms_norm_eps": 1e-3}
    ),
    "deepseek-v3-linear": Case(
        "deepseek_v3", {**LATENT, "rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}
    ),
    "deepseek-v3-halves": Case("deepseek_v3", {**LATENT, "rope_interleave": False, "attention_bias": True}),
    "deepseek-v3.2": Case("deepseek_v32", {**LATENT, **INDEXED, "rope_scaling": {**YARN, "mscale_all_dim": 0.6}}),
    "glm-5": Case("glm_moe_dsa", {**LATENT, **INDEXED, "attention_bias": True}, layers=(0, 1)),
    "gpt2": Case(
        "gpt2",
        {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 100_064, "attn_pdrop": 0.0},
        attention="attn",
        layers_at="h",
    ),
    "ministral": Case(
        "ministral", {**SIZES, **SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, layers=(0, 1)
    ),
    "phi3": Case("phi3", {**SIZES, "sliding_window": 4}),
    "diffllama": Case("diffllama", {**SIZES, "head_dim": 6, "attention_bias": True}, layers=(0, 1)),
    "diffllama-many-heads": Case(
        "diffllama",
        {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-2, "rope_theta": 500.0},
    ),
}

LAYERS = [(name, layer) for name, case in CASES.items() for layer in case.layers]
"""(name of a case, index of a layer)."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of the attention of a layer.

    Attributes:
        hidden: what goes in, ``(B, T, d)``.
        output: what comes out, ``(B, T, d)``.
        positions: the position of each token, ``(B, T)``.
        mask: which of the tokens so far count, bool ``(B, S)``.
    """

    hidden: np.ndarray
    output: np.ndarray
    positions: np.ndarray
    mask: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Which of the tokens at hand count, bool ``(B, T)``; what comes out of the others means nothing."""
        return self.mask[:, -self.hidden.shape[1] :]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The attention of one layer of a model.

    Attributes:
        config: the model's config.json.
        index: index of the layer.
        state: its arrays under the names of `transformers`, with their prefix.
        steps: the calls.
    """

    config: dict[str, Any]
    index: int
    state: dict[str, np.ndarray]
    steps: tuple[Step, ...]


def padding(kind: str, tokens: int) -> np.ndarray:
    """Return the mask ``(3, tokens)`` of a batch without padding, or with padding on the ``left`` or ``right``."""
    lengths = {"none": (tokens,) * 3}.get(kind, (tokens, tokens - 3, tokens // 2))
    mask = np.arange(tokens) < np.array(lengths)[:, None]
    return mask[:, ::-1] if kind == "left" else mask


def run(name: str, index: int, **how: Any) -> Layer:
    """Run a model and return what the attention of a layer did; see `run_layers`."""
    return run_layers(name, **how)[index]


@functools.cache
def run_layers(
    name: str,
    *,
    padded: str = "none",
    tokens: int = 11,
    steps: tuple[int, ...] = (),
    start: int = 0,
    dtype: str = "float64",
    seed: int = 0,
) -> dict[int, Layer]:
    """Run a model and return index -> what the attention of the layer did, of the case's layers.

    Args:
        name: a key of `CASES`.
        padded: ``none``, ``left`` or ``right``; what comes after the first call has no padding.
        tokens: length of the sequences.
        steps: tokens of each call with a cache; none is one call without.
        start: position of the first token.
        dtype: ``float64`` is promoted; any other is what `transformers` makes of it.
        seed: of weights and inputs.
    """
    case = CASES[name]
    with promoted() if dtype == "float64" else contextlib.nullcontext(), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        config, model = build(case, dtype, generator)
        width = config.hidden_size
        embeddings = torch.randn(3, tokens, width, generator=generator).to(getattr(torch, dtype))
        mask = torch.from_numpy(padding(padded, steps[0] if steps else tokens).copy())
        mask = torch.nn.functional.pad(mask, (0, tokens - mask.shape[1]), value=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0) + start
        calls: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {index: [] for index in case.layers}
        attention = {index: model.get_submodule(f"{case.layers_at}.{index}.{case.attention}") for index in case.layers}
        for index, module in attention.items():
            module.register_forward_hook(functools.partial(_write_down, calls[index]), with_kwargs=True)
        cache = transformers.DynamicCache(config=config) if steps else None
        places, stop = [], 0
        for count in steps or (tokens,):
            begin, stop = stop, stop + count
            at = {} if name == "bloom" else {"position_ids": positions[:, begin:stop]}
            model(
                inputs_embeds=embeddings[:, begin:stop],
                attention_mask=mask[:, :stop].long(),
                past_key_values=cache,
                use_cache=cache is not None,
                **at,
            )
            places.append((positions[:, begin:stop].numpy(), mask[:, :stop].numpy()))
    found = {}
    for index, module in attention.items():
        prefix = f"model.{case.layers_at}.{index}.{case.attention}."
        state = {prefix + key: to_numpy(tensor) for key, tensor in module.state_dict().items()}
        done = tuple(Step(*map(to_numpy, call), *place) for call, place in zip(calls[index], places, strict=True))
        found[index] = Layer(json.loads(config.to_json_string()), index, state, done)
    return found


def build(case: Case, dtype: str, generator: torch.Generator) -> tuple[Any, torch.nn.Module]:
    """Return the config and the model of a case with weights that hide nothing: no zeros, no ones."""
    sizes = copy.deepcopy(case.sizes)
    config = transformers.AutoConfig.for_model(case.model_type, **sizes, attn_implementation="eager")
    model = transformers.AutoModel.from_config(config).eval().to(getattr(torch, dtype))
    for parameter in model.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
        parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) + 0.1)
    return config, model


def _write_down(calls: list[Any], module: Any, args: Any, kwargs: Any, output: Any) -> None:
    hidden = args[0] if args else kwargs["hidden_states"]
    residual = args[1] if len(args) > 1 and type(module).__name__ == "BloomAttention" else 0.0
    calls.append((hidden.clone(), output[0] - residual))


def torch_outputs(
    layer: Layer, dtype: str | None = None, state: Mapping[str, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Return what our torch module makes of every call; with a cache where there are several.

    Args:
        layer: the calls.
        dtype: of weights and inputs; None leaves them as they are.
        state: other weights than the layer's.
    """
    arrays = layer.state if state is None else state
    if dtype is not None:
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    module = torch_attn.from_hf(layer.config, layer.index, arrays)
    cache = module.init_cache(len(layer.steps[0].mask), layer.steps[-1].mask.shape[1]) if len(layer.steps) > 1 else None
    found = []
    with torch.no_grad():
        for step in layer.steps:
            hidden = from_numpy(step.hidden if dtype is None else step.hidden.astype(dtype))
            at = {"attention_mask": torch.tensor(step.mask), "positions": torch.tensor(step.positions)}
            if cache is None:
                found.append(to_numpy(module(hidden, **at)))
            else:
                out, cache = module(hidden, cache=cache, **at)
                found.append(to_numpy(out))
    return found


FIRST_POSITION = {"float32": 0, "bfloat16": 1000}
"""Where roundings are looked at: rotary tables in bfloat16 show there; angles in float32 would hide all else there."""


def judge_layer(name: str, index: int, dtype: str, outputs: Callable[[Layer], list[np.ndarray]]) -> TensorVerdict:
    """Return the judge's verdict on the roundings of our module; what is exact is our torch module in float64.

    Args:
        name: a key of `CASES`.
        index: of the layer.
        dtype: the precision.
        outputs: gives what our module makes of every call.
    """
    calls = []
    for seed in range(3):
        start = 0 if name == "bloom" else FIRST_POSITION[dtype]
        layer = run(name, index, padded="left", start=start, dtype=dtype, seed=seed)
        (step,), (ours,), (exact,) = layer.steps, outputs(layer), torch_outputs(layer, "float64")
        calls.append((step.output[step.rows], ours[step.rows], exact[step.rows]))
    return judge_roundings(calls, dtype)


def judge_roundings(calls: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], dtype: str) -> TensorVerdict:
    """Return the judge's verdict on our roundings: what it calls Flax is ours in either framework, and torch is theirs.

    Args:
        calls: one per seed: what `transformers` gives, what ours gives, both in `dtype`, and the float64 result.
        dtype: the precision.
    """
    measures = []
    for seed, (theirs, ours, exact) in enumerate(calls):
        assert theirs.dtype.name == ours.dtype.name == dtype
        assert exact.dtype == np.float64
        scale = float(np.abs(exact).max())
        kind: dict[str, Any] = {"kind_scale": scale, "dtype": dtype, "group": seed, "weights": "own", "sample": seed}
        measures.append(measure(theirs, ours, exact, exact, **kind))
    return decide("output", "output", "output", theirs.shape, dtype, measures, sides=("flax",))
