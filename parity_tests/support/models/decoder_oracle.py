"""The oracle of whole decoders: tiny random `transformers` models, what they give, and folders that hold them.

Models are built and run in `promoted` of the judge, in float64 throughout.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from attn_parity.frameworks.torch.running.promotion import promoted
from torch_attn.backend import to_numpy

from ..files.folders import new_folder
from .hf_configs import LATENT_HEADS
from .hf_oracle import EXPERTS, GATED, INDEXED, LLAMA3, SIZES, YARN, padding

VOCABULARY, TOKENS = 31, 13
WHOLE = {**SIZES, "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}

MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 96, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.9, 4.2],
    "rope_theta": 500.0,
}

TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
KIMI = {
    **LATENT_HEADS,
    **EXPERTS,
    "num_key_value_heads": WHOLE["num_attention_heads"],
    "linear_num_heads": 3,
    "linear_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "num_experts": 8,
    "num_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "num_expert_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-3,
}
GEMMA4 = {
    "head_dim": 6,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
    },
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**WHOLE, "mlp_bias": True, "attention_bias": True, "rope_theta": 500.0}),
    "llama-3.2": ("llama", {**WHOLE, "head_dim": 8, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**WHOLE, "sliding_window": 4, "hidden_act": "gelu"}),
    "ministral": (
        "ministral",
        {
            **WHOLE,
            "head_dim": 6,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen2": ("qwen2", {**WHOLE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**WHOLE, "head_dim": 6, "rms_norm_eps": 1e-3}),
    "gemma2": (
        "gemma2",
        {
            **WHOLE,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **WHOLE,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 5,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 70.0,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **WHOLE,
            "num_hidden_layers": 5,
            "head_dim": 6,
            "intermediate_size": [20, 18, 20, 18, 20],
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
            "sliding_window": 4,
            "rope_local_base_freq": 70.0,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 5,
            "vocab_size_per_layer_input": 29,
            "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.9, 0.0],
            "laurel_rank": 3,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "pad_token_id": None,  # whose row, 0, has no gradient in transformers, but stands for unknown tokens
            "rms_norm_eps": 1e-3,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **WHOLE,
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 5,
            "vocab_size_per_layer_input": 33,
            "rms_norm_eps": 1e-3,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            **WHOLE,
            **GEMMA4,
            **EXPERTS,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_k_eq_v": False,
            "attention_bias": True,
            "hidden_activation": "silu",
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 7,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {
            **WHOLE,
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "cohere-compass": (
        "cohere_compass_text",
        {
            **WHOLE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 4,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0, "mrope_section": [1, 1, 1]},
                "full_attention": None,
            },
            "logit_scale": 0.7,
        },
    ),
    "cohere-compass-scaled": (
        "cohere_compass_text",
        {**WHOLE, "rope_parameters": {"full_attention": {**YARN, "rope_theta": 70.0}}, "attention_bias": True},
    ),
    "dbrx": (
        "dbrx",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 96,
            "rope_theta": 500.0,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 7, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "olmo": ("olmo", {**WHOLE, "clip_qkv": 0.7}),
    "olmo2": ("olmo2", {**WHOLE, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "relu2"}),
    "olmo3": ("olmo3", {**WHOLE, "sliding_window": 4, "num_hidden_layers": 4, "rope_theta": 500000.0}),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 6, "pad_token_id": 0}),
    "gpt-oss": (
        "gpt_oss",
        {
            **WHOLE,
            **EXPERTS,
            "head_dim": 8,
            "sliding_window": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_scaling": {**YARN, "truncate": False},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **WHOLE,
            **LATENT_HEADS,
            **EXPERTS,
            "mlp_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **WHOLE,
            **LATENT_HEADS,
            **EXPERTS,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 7,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek-v3.2": (
        "deepseek_v32",
        {
            **WHOLE,
            **LATENT_HEADS,
            **EXPERTS,
            **INDEXED,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 7,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "glm-5": (
        "glm_moe_dsa",
        {
            **WHOLE,
            **LATENT_HEADS,
            **EXPERTS,
            **INDEXED,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            **WHOLE,
            **GATED,
            **EXPERTS,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 9,
            "mlp_only_layers": [2],
            "norm_topk_prob": True,
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            **WHOLE,
            **GATED,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 3,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {
            **WHOLE,
            **GATED,
            **EXPERTS,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 9,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 8,
            "n_groups": 3,
            "state_size": 5,
            "layer_norm_epsilon": 1e-3,
            "chunk_size": 4,
        },
    ),
    "mamba": (
        "mamba",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "state_size": 5,
            "time_step_rank": 3,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "falcon-mamba": (
        "falcon_mamba",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "state_size": 5,
            "time_step_rank": 3,
            "conv_kernel": 3,
            "expand": 5,
            "intermediate_size": 40,
            "mixer_rms_eps": 1e-3,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **WHOLE,
            "layer_types": ["conv", "full_attention", "conv"],
            "norm_eps": 1e-3,
            "intermediate_size": 31,
            "block_multiple_of": 8,
            "rope_theta": 500.0,
        },
    ),
    "modernbert": (
        "modernbert-decoder",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "norm_eps": 1e-3,
            "norm_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "attention_bias": True,
            "local_attention": 7,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mimo": (
        "mimo_v2_flash",
        {
            **WHOLE,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "head_dim": 12,
            "v_head_dim": 5,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "attention_value_scale": 0.6,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "moe_intermediate_size": 7,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.3,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "lfm3": (
        "lfm3",
        {
            **WHOLE,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "norm_eps": 1e-3,
            "head_dim": 8,
            "intermediate_size": 31,
            "conv_L_cache": 5,
            "sliding_window": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **WHOLE,
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "jamba": (
        "jamba",
        {
            **WHOLE,
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 3,
            "mamba_conv_bias": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "bamba": (
        "bamba",
        {
            **WHOLE,
            **MAMBA,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attn_layer_indices": [1],
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **WHOLE,
            **MAMBA,
            "mamba_d_ssm": 48,
            "head_dim": 4,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.75,
            "key_multiplier": 0.5,
            "attention_in_multiplier": 1.25,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.5,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.5, 1.75, 0.625, 1.25, 1.5],
            "mlp_multipliers": [0.6, 1.7],
            "mamba_rms_norm": True,
        },
    ),
    "falcon-h1-without-norms": (
        "falcon_h1",
        {
            **WHOLE,
            **MAMBA,
            "mamba_d_ssm": 30,
            "mamba_d_head": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "ssm_multipliers": [1.5, 0.75, 1.25, 0.5, 1.75],
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 5,
            "n_groups": 2,
            "ssm_state_size": 3,
            "conv_kernel": 3,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "granite-4": (
        "granitemoehybrid",
        {
            **WHOLE,
            **EXPERTS,
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 9,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "granite-4-dense": (
        "granitemoehybrid",
        {
            **WHOLE,
            **MAMBA,
            "layer_types": ["full_attention", "mamba", "mamba"],
            "shared_intermediate_size": 9,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
    "minimax": (
        "minimax",
        {
            **WHOLE,
            **EXPERTS,
            "head_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 1.7,
            "full_attn_beta_factor": 0.6,
            "linear_attn_alpha_factor": 2.3,
            "linear_attn_beta_factor": 0.6,
            "mlp_alpha_factor": 1.4,
            "mlp_beta_factor": 0.6,
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **WHOLE,
            **KIMI,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 4,
            "attention_bias": True,
        },
    ),
    "kimi-linear-without-latent-queries": (
        "kimi_linear",
        {
            **WHOLE,
            **KIMI,
            "q_lora_rank": None,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_renormalize": False,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 4,
                "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        {
            **WHOLE,
            "rope_theta": None,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 3,
            "rms_norm_eps": 1e-3,
        },
    ),
    "olmo-hybrid-with-positions": (
        "olmo_hybrid",
        {
            **WHOLE,
            "num_hidden_layers": 4,
            "rope_scaling": YARN,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "granite",
        {
            **WHOLE,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
        },
    ),
    "gpt2": ("gpt2", {**GPT2, "n_inner": 14}),
    "gpt2-scaled": (
        "gpt2",
        {
            **GPT2,
            "activation_function": "quick_gelu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "phi3": ("phi3", {**WHOLE, "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "phi3-short": (
        "phi3",
        {**WHOLE, "rope_scaling": LONGROPE, "original_max_position_embeddings": 96, "max_position_embeddings": 250},
    ),
    "phi3-long": (
        "phi3",
        {
            **WHOLE,
            "rope_scaling": {**LONGROPE, "type": "su"},
            "original_max_position_embeddings": 8,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-partial": (
        "phi3",
        {
            **WHOLE,
            "hidden_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi4-multimodal": (
        "phi4_multimodal",
        {
            **WHOLE,
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 8,
            "vision_config": {**TOWER, "num_hidden_layers": 1, "image_size": 28, "crop_size": 28},
            "audio_config": {
                **TOWER,
                "num_blocks": 1,
                "nemo_conv_channels": 8,
                "ext_pw_out_channel": 8,
                "depthwise_separable_out_channel": 8,
            },
        },
    ),
    "diffllama": ("diffllama", {**WHOLE, "attention_bias": True}),
    "smollm3": ("smollm3", {**WHOLE, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 4}),
    "llama4": (
        "llama4_text",
        {
            **WHOLE,
            "num_hidden_layers": 4,
            "head_dim": 6,
            "intermediate_size": 9,
            "intermediate_size_mlp": 20,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 4,
            "attn_scale": 0.7,
            "floor_scale": 3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "llama4-without-norms": (
        "llama4_text",
        {
            **WHOLE,
            "num_hidden_layers": 2,
            "no_rope_layer_interval": 2,
            "layer_types": ["full_attention", "chunked_attention"],
            "attention_chunk_size": 5,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "num_local_experts": 3,
            "rope_scaling": LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2-moe": (
        "cohere2_moe",
        {
            **WHOLE,
            **EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 6,
            "sliding_window": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "prefix_dense_intermediate_size": 13,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "logit_scale": 0.7,
        },
    ),
    "cohere2-moe-by-softmax": (
        "cohere2_moe",
        {
            **WHOLE,
            **EXPERTS,
            "head_dim": 6,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("mixtral", {**WHOLE, **EXPERTS, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **WHOLE,
            **EXPERTS,
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
}
"""Name -> ``model_type`` and keys of a config.json."""


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A model of `transformers` in float64, and what it gives.

    Attributes:
        model: the model.
        folder: what its `save_pretrained` wrote.
        ids: the tokens, ``(B, T)``.
        mask: which of them count, bool ``(B, T)``.
        positions: theirs, ``(B, T)``.
        hidden: what goes into each block, and what comes out of the norm behind the last, ``(B, T, D)`` each.
        logits: ``(B, T, V)``.
    """

    model: Any
    folder: Path
    ids: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    hidden: tuple[np.ndarray, ...]
    logits: np.ndarray


def build(name: str, seed: int = 0) -> Any:
    """Return a model with weights that hide nothing: no zeros, no ones."""
    return make(*DECODERS[name], seed)


def make(model_type: str, sizes: dict[str, Any], seed: int = 0) -> Any:
    """Return the same of a ``model_type`` and keys of a config.json."""
    sizes = copy.deepcopy(sizes)  # a config writes into the dicts that it is given, and models share some
    config = transformers.AutoConfig.for_model(model_type, **sizes, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    lift(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in [*model.parameters(), *_learned_buffers(model)]:
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model


def lift(model: torch.nn.Module) -> None:
    """Set constants that `transformers` rounds, whatever the dtype of a model, to float64."""
    embeddings = model.get_input_embeddings()
    if hasattr(embeddings, "scalar_embed_scale"):  # which transformers rounds to float32, as it does its tables
        embeddings.embed_scale = torch.tensor(embeddings.scalar_embed_scale, dtype=torch.float64)
    for module in model.modules():
        if type(module).__name__ == "BloomGelu":  # which has sqrt(2 / pi) to 8 digits
            module.forward = functools.partial(torch.nn.functional.gelu, approximate="tanh")
        if type(module).__name__ == "Llama4TextDecoderLayer" and not module.self_attn.use_rope:
            _count_tokens_in_temperature(module)


def _count_tokens_in_temperature(layer: Any) -> None:
    """Let the temperature of Llama 4 grow with positions, as in a row without padding.

    `transformers` counts padding on the left there, although its chunks begin behind it.
    """
    attention, at = layer.self_attn, {}
    if not attention.attn_temperature_tuning:
        return

    def factor(positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p((positions + 1) // attention.floor_scale) * attention.attn_scale + 1.0

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        at["positions"] = kwargs["position_ids"]

    def scale(_: Any, args: Any, query: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(query.shape[1])  # of a call without a cache
        return query * (factor(at["positions"]) / factor(slots))[..., None]

    layer.register_forward_pre_hook(keep, with_kwargs=True)
    attention.q_proj.register_forward_hook(scale)


def _learned_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        one for name, one in model.named_buffers() if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
    ]


@functools.cache
def run(name: str, padded: str = "none", seed: int = 0) -> Oracle:
    """Return what a model gives for a batch without padding, or with padding on the ``left`` or ``right``."""
    with promoted(), torch.no_grad():
        model, generator = build(name, seed), torch.Generator().manual_seed(seed + 1)
        ids = torch.randint(1, VOCABULARY, (3, TOKENS), generator=generator)
        mask = torch.from_numpy(padding(padded, TOKENS).copy())
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        at = {} if DECODERS[name][0] == "bloom" else {"position_ids": positions}
        found = model(ids, attention_mask=mask.long(), **at, output_hidden_states=True, use_cache=False)
    folder = new_folder("decoder-") / name
    model.save_pretrained(folder)
    hidden = tuple(map(to_numpy, found.hidden_states))
    if DECODERS[name][0] == "gemma3n_text":  # whose streams come first
        hidden = tuple(np.moveaxis(each, 0, 2) if each.ndim == 4 else each for each in hidden)
    if DECODERS[name][0] in ("mamba", "mamba2", "falcon_mamba"):  # which lists what comes out of its blocks
        hidden = (to_numpy(model.get_input_embeddings()(ids)), *hidden[:-2], hidden[-1])
    return Oracle(model, folder, ids.numpy(), mask.numpy(), positions.numpy(), hidden, to_numpy(found.logits))
