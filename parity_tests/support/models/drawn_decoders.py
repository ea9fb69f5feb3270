"""Decoders drawn at random: what a family reads, with a few parts changed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from attn_bridge import masks
from attn_bridge.models import families
from attn_bridge.specs.blocks.feed_forward import FeedForwardConfig
from attn_bridge.specs.decoder_model import DecoderConfig
from attn_bridge.specs.grouped_query_attention import QKNorm
from attn_bridge.specs.position import Rotary
from attn_bridge.specs.rope_scaling import LinearScaling, Llama3Scaling, LongRoPEScaling, NTKScaling, YaRNScaling

VOCABULARY = 31
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "query_pre_attn_scalar": 5,
    "kv_lora_rank": 6,
    "q_lora_rank": 5,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 9,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "rotary_dim": 8,
    "is_decoder": True,
    "embedding_size": 32,
}

LATENT = ("axk1", "deepseek", "glm_moe_dsa", "glm4_moe_lite", "minicpm3", "youtu")
"""Begins of families with as many keys as queries, which are made of a latent."""


OWN_KEYS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"head_dim": None},
    "big_bird": {"attention_type": "original_full"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 5},
    "mamba": {"state_size": 5, "time_step_rank": 3},
    "falcon_mamba": {"state_size": 5, "time_step_rank": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"head_dim": 12, "v_head_dim": 8},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "jamba": {"mamba_d_state": 5, "mamba_dt_rank": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 5, "attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 5, "mamba_d_ssm": 32, "mamba_rms_norm": True},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 5,
        "ssm_state_size": 3,
        "n_groups": 2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "llama4_text": {"no_rope_layer_interval": 2, "attention_chunk_size": 4, "intermediate_size_mlp": 18},
    "cohere2_moe": {"first_k_dense_replace": 1, "num_shared_experts": 1, "sliding_window_pattern": 2},
    "kimi_linear": {
        "linear_num_heads": 2,
        "linear_head_dim": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_key_value_heads": 4,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.0],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 6,
        "laurel_rank": 3,
        "altup_num_inputs": 3,
    },
    "gemma4_text": {
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 6,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "num_experts": 4,
        "moe_intermediate_size": 6,
    },
    "gemma4_unified_text": {
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": {"rope_theta": 500.0}, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 0.4},
        "ffn_config": {"ffn_hidden_size": 6, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_state": 5,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}


def own_keys(model_type: str) -> dict[str, Any]:
    """Return the keys that a family of 4 heads takes other values of than most."""
    keys: dict[str, Any] = {"num_key_value_heads": 4} if model_type.startswith(LATENT) else {}
    family = families.FAMILIES.get(model_type)
    decoder_keys = family.description.keys if family else {}
    of_decoder = {key: SIZES[usual] for usual, key in decoder_keys.items() if usual in SIZES}
    return keys | of_decoder | OWN_KEYS.get(model_type, {})


def draw(model_type: str, seed: int) -> DecoderConfig:
    """Return a decoder of a family with up to three changes, which may make it one of no family."""
    rng = random.Random(f"{model_type} {seed}")
    config = families.find_decoder({"model_type": model_type, **SIZES, **own_keys(model_type)})
    for _ in range(seed % 4):
        try:
            config = _changed(config, rng)
        except ValueError:  # a change that does not fit the others
            continue
    return config


def _changed(config: DecoderConfig, rng: random.Random) -> DecoderConfig:
    kind = rng.choice(["attention"] * 5 + ["feed_forward", "eps", "model"])
    if kind == "model":
        changes: list[dict[str, Any]] = [
            {"tie": not config.tie}, {"embedding_scale": 2.5}, {"logit_scale": 0.47}, {"logit_softcap": 6.0}
        ]  # fmt: skip
        return dataclasses.replace(config, **rng.choice(changes))
    chosen = rng.choice([range(len(config.blocks)), [rng.randrange(len(config.blocks))]])
    eps, number = rng.choice([1e-3, 1e-6]), rng.random()
    blocks = []
    for place, block in enumerate(config.blocks):
        if kind == "eps":
            block = dataclasses.replace(block, norm=dataclasses.replace(block.norm, eps=eps))
        elif place in chosen:
            draw = random.Random(number)  # the same change for all that are alike
            part = getattr(block, kind)
            if part is None:
                blocks.append(block)
                continue
            new = _feed_forward(part, draw) if kind == "feed_forward" else _attention(part, draw)
            block = dataclasses.replace(block, **{kind: new})
        blocks.append(block)
    norm = config.norm
    if kind == "eps" and norm is not None:
        norm = dataclasses.replace(norm, eps=eps)
    return dataclasses.replace(config, blocks=tuple(blocks), norm=norm)


def _attention(attention: Any, rng: random.Random) -> Any:
    changes = {
        "position": rng.choice([None, Rotary(rng.choice([1e4, 77.5, 5e5]), rng.choice([None, 4]), scaling=None),
                                Rotary(rng.choice([1e4, 5e5]), scaling=_scaling(rng))]),
        "mask": rng.choice([masks.causal(), masks.sliding_window(rng.choice([2, 4]))]),
        "scale": rng.choice([0.25, 0.4, 1 / 3, 7**-0.5, 1e-300]),
        "qkv_bias": rng.random() < 0.7,
        "out_bias": rng.random() < 0.5,
        "qk_norm": rng.choice([None, QKNorm(), QKNorm("full", 1e-3), QKNorm(unit_offset=True), QKNorm(rotated=True)]),
        "dropout": 0.1,
        "softcap": rng.choice([None, 2.0]),
        "clip": rng.choice([None, 0.4]),
        "num_kv_heads": rng.choice([1, 2, 4]),
    }  # fmt: skip
    name = rng.choice(list(changes))
    known = {field.name for field in dataclasses.fields(attention)}
    together = {name, "key_bias"} if name == "qkv_bias" else {name}
    return dataclasses.replace(attention, **dict.fromkeys(together & known, changes[name]))


def _scaling(rng: random.Random) -> Any:
    short, long = (tuple(first + step / 7 for step in range(4)) for first in (1.1, 2.3))
    return rng.choice(
        [
            LinearScaling(2.5),
            NTKScaling(3.0, 20),
            YaRNScaling(4.0, 16, mscale=0.8, mscale_all_dim=rng.choice([None, 0.7]), truncate=rng.random() < 0.5),
            Llama3Scaling(4.0, 1.0, 4.0, 16),
            LongRoPEScaling(short, long, rng.choice([6, 16]), rng.choice([0.5, 2.0])),
        ]
    )


def _feed_forward(layers: Any, rng: random.Random) -> Any:
    if isinstance(layers, FeedForwardConfig):
        changes = [{"activation": "gelu"}, {"activation": "relu"}, {"bias": not layers.bias}, {"hidden_dim": 10}]
        return dataclasses.replace(layers, **rng.choice(changes))
    router = layers.router
    routers = [{"normalise": not router.normalise}, {"scale": 1.3}, {"groups": None}]
    more = [{"router": dataclasses.replace(router, **one)} for one in routers]
    return dataclasses.replace(layers, **rng.choice([*more, {"top_k": 1}, {"shared": None, "shared_gate": False}]))
