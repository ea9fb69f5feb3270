"""Sizes of the tiny instances of classes of `transformers`, by the keys of their configs; values of keys that scale."""

from __future__ import annotations

from attn_bridge.whole_files import JsonObject

LAYERS = 4
"""Blocks of a tiny instance, as many as the pattern of layers that most families with two kinds repeat."""

HEADS = 4
"""Query heads of a tiny instance."""

DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("decoder_layers", "num_decoder_layers", "encoder_layers", "num_encoder_layers"),
)
"""Keys of the number of blocks."""

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts."""

LONG = {"attention_type": "original_full"}
"""Key of a kind of attention that differs from others beyond the lengths of samples (BigBird) -> the kind of ours."""

SIZES: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 40),
    **dict.fromkeys(DEPTHS, LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 16,
    "rotary_dim": 8,
    "vocab_size": 70,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("sliding_window", "window_size"), 4),
    "attention_types": [[["global", "local"], LAYERS // 2]],
    **dict.fromkeys(COUNTS, 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 3),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 20),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 28),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 3),
    "n_group": 3,
    "topk_group": 2,
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    "decoder_sparse_step": 2,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "is_decoder": True,
    "embedding_size": 64,
    "input_embedding_size": 36,
    "output_embedding_size": 44,
    **LONG,
}
"""Sizes of tiny instances, of the keys that a config has.

The window is shorter than the samples. A fourth of a head is an even number of channels, which may turn alone. Widths
of experts are unlike all others, and two experts make a group. So are widths of latents, whose layers have as many keys
as queries and no other width of a head. An encoder is as deep as the decoder, whose cache some classes make as deep.
"""

_LENDING: JsonObject = {
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 70,
    "hidden_size_per_layer_input": 12,
}
"""Sizes of classes whose last layers read the keys of the last ones before them, which must be of the same kinds."""

_SCANNED: JsonObject = {"intermediate_size": 128, "state_size": 5, "time_step_rank": 3}
"""Sizes of Mamba, whose configs hold the channels next to the factor that they follow from."""

_HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)

OWN_SIZES: dict[str, JsonObject] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 5, "attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 5, "mamba_d_ssm": 32},
    "falcon_mamba": _SCANNED,
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_state": 5, "layer_types": _HYBRID},
    "jamba": {"mamba_d_state": 5, "mamba_dt_rank": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "linear_num_heads": 2,
        "linear_head_dim": 4,
        "layer_types": _HYBRID,
        "num_experts_per_token": 3,
        "topk_group": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba": _SCANNED,
    "mamba2": {"num_heads": 16, "head_dim": 8, "n_groups": 2, "state_size": 5},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 5,
        "ssm_state_size": 3,
        "n_groups": 2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")}
    },
    "dbrx": {
        "attn_config.clip_qkv": 0.4,
        "attn_config.rope_theta": 10000.0,
        "attn_config.kv_n_heads": 2,
        "ffn_config.ffn_hidden_size": 20,
        "ffn_config.moe_num_experts": 6,
        "ffn_config.moe_top_k": 3,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma3n_text": _LENDING,
    "gemma4_text": {**_LENDING, "global_head_dim": 32},
    "gemma4_unified_text": {**_LENDING, "global_head_dim": 32},
    "phi4_multimodal": {
        **{f"{part}_config.{key}": 8 for part in ("vision", "audio") for key in ("hidden_size", "intermediate_size")},
        **{f"{part}_config.num_attention_heads": 2 for part in ("vision", "audio")},
        "vision_config.num_hidden_layers": 1,
        "audio_config.num_blocks": 1,
        "audio_config.nemo_conv_channels": 8,
        **{f"audio_config.{kind}_out_channel": 8 for kind in ("ext_pw", "depthwise_separable")},
    },
}
"""Sizes of classes that can't be made from those that classes have in common, or are large with them alone."""

READ_BY_NAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "rope_parameters", "sliding_window", "attention_dropout"),
)
"""Keys that every description reads, by these names."""

LATENT = "kv_lora_rank"
"""Key of the width of the latent that keys and values are made of."""

ODD: dict[str, object] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), 0.05),
    "attention_multiplier": 0.41,
    "residual_multiplier": 0.63,
    **dict.fromkeys(("embedding_multiplier", "scale_emb"), 1.7),
    "scale_depth": 1.1,
    "dim_model_base": 40,
    "logits_scaling": 1.9,
    "logit_scale": 0.37,
    "query_pre_attn_scalar": 11,
    "attn_logit_softcapping": 1.3,
    "final_logit_softcapping": 1.1,
    "clip_qkv": 0.4,
    "softmax_scale": 0.41,
    "router_jitter_noise": 0.2,
    **dict.fromkeys(
        ("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor", "route_scale"), 1.3
    ),
}
"""Values of keys that scale something, so far from 1 that a proposal without them is wrong."""
