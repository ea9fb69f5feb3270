"""Every key of a config.json of Llama 4 and Cohere 2 with experts: another value changes both alike, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ...support.models import changed_keys
from ...support.models.decoder_oracle import LLAMA3, YARN

FULL, CHUNKED, SLIDING = "full_attention", "chunked_attention", "sliding_attention"
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    LLAMA3,
    {**LLAMA3, "high_freq_factor": 1.0},
    YARN,
    {"rope_type": "mystery"},
]
COMMON = [
    {"vocab_size": 35},
    {"hidden_size": 16},
    {"intermediate_size": 11},
    {"num_attention_heads": 6, "num_key_value_heads": 3},
    {"num_key_value_heads": 1},
    {"head_dim": 8},
    *({"hidden_act": name} for name in ("gelu", "relu", "quick_gelu", "gelu_new", "relu2", "mish", "xielu")),
    {"max_position_embeddings": 9},
    {"initializer_range": 0.5},
    {"use_cache": False},
    {"pad_token_id": None},
    {"pad_token_id": 3},
    {"attention_bias": False},
    {"attention_bias": True},
    {"attention_dropout": 0.3},
    {"num_experts_per_tok": 1},
    {"num_experts_per_tok": 5},
    {"num_experts_per_tok": 6},
    {"output_router_logits": True},
    {"chunk_size_feed_forward": 2},
    {"mlp_bias": True},
    {"sliding_window": 3},
    {"rope_theta": 33.0},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    *({"rope_parameters": {"rope_theta": 90.0, **scaling}, "max_position_embeddings": 6} for scaling in SCALINGS),
]
OF_LLAMA4 = [
    {"rms_norm_eps": 0.3},
    {"tie_word_embeddings": True},
    {"intermediate_size_mlp": 9},
    {"num_local_experts": 3},
    {"moe_layers": [0, 3]},
    {"moe_layers": []},
    {"moe_layers": [0, 9]},
    {"moe_layers": "all"},
    {"interleave_moe_layer_step": 1},
    {"interleave_moe_layer_step": 3},
    {"interleave_moe_layer_step": 9},
    {"use_qk_norm": False},
    {"router_aux_loss_coef": 0.5},
    {"router_jitter_noise": 0.5},
    {"num_hidden_layers": 6, "no_rope_layers": None},
    {"num_key_value_heads": 4},
    {"no_rope_layers": [0, 1, 1, 0]},
    {"no_rope_layers": [1, 1, 1, 1]},
    {"no_rope_layers": [0, 0, 0, 0]},
    {"no_rope_layers": []},
    {"no_rope_layers": None},
    {"no_rope_layers": [1, 0]},
    {"no_rope_layers": [2, 0, 1, 1]},
    {"no_rope_layers": None, "no_rope_layer_interval": 2},
    {"no_rope_layers": None, "no_rope_layer_interval": 1},
    {"no_rope_layer_interval": 2},
    {"attention_chunk_size": 3},
    {"attention_chunk_size": 90},
    {"attention_chunk_size": None},
    {"layer_types": [FULL, CHUNKED, CHUNKED, FULL]},
    {"layer_types": [FULL] * 4},
    {"layer_types": [FULL, SLIDING, FULL, FULL], "sliding_window": 4},
    {"layer_types": [FULL]},
    {"attn_temperature_tuning": False},
    {"attn_temperature_tuning": 4},
    {"floor_scale": 2},
    {"floor_scale": 90},
    {"attn_scale": 0.2},
    {"attn_scale": 0.0},
    {"attn_scale": -0.5},
]
OF_COHERE = [
    {"layer_norm_eps": 0.3},
    {"num_hidden_layers": 2, "layer_types": None, "mlp_layer_types": None},
    {"num_key_value_heads": None},
    {"rms_norm_eps": 0.3},
    {"tie_word_embeddings": False},
    {"logit_scale": 1.0},
    {"logit_scale": 0.0},
    {"sliding_window": 90},
    {"sliding_window": None},
    {"num_experts": 6},
    {"num_shared_experts": 0},
    {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
    {"shared_expert_combination_strategy": "product"},
    {"expert_selection_fn": "softmax"},
    {"expert_selection_fn": "softmax", "norm_topk_prob": False},
    {"expert_selection_fn": "tanh"},
    {"norm_topk_prob": False},
    {"prefix_dense_intermediate_size": None},
    {"prefix_dense_intermediate_size": 7},
    {"prefix_dense_sliding_window_pattern": 2},
    {"mlp_layer_types": ["dense", "sparse", "dense", "dense"]},
    {"mlp_layer_types": ["dense", "sparse", "dense", "dense"], "prefix_dense_sliding_window_pattern": 2},
    {"mlp_layer_types": ["dense"] * 4},
    {"mlp_layer_types": ["sparse"] * 4},
    {"mlp_layer_types": ["sparse"]},
    {"mlp_layer_types": ["sparse", "other", "sparse", "sparse"]},
    {"mlp_layer_types": None},
    {"mlp_layer_types": None, "first_k_dense_replace": 2},
    {"layer_types": None},
    {"layer_types": None, "sliding_window_pattern": 2},
    {"layer_types": None, "sliding_window_pattern": 2, "first_k_dense_replace": 1, "mlp_layer_types": None},
    {
        "layer_types": None,
        "first_k_dense_replace": 3,
        "mlp_layer_types": None,
        "prefix_dense_sliding_window_pattern": 2,
        "sliding_window_pattern": 1,
    },
    {"layer_types": [FULL] * 4},
    {"layer_types": [SLIDING] * 4},
    {"layer_types": [FULL, CHUNKED, FULL, FULL], "attention_chunk_size": 3},
]
REFUSED = {
    *("hidden_act", "num_experts_per_tok", "rope_scaling", "moe_layers", "no_rope_layers", "attention_chunk_size"),
    *("layer_types", "attn_temperature_tuning", "attn_scale", "logit_scale", "sliding_window", "mlp_layer_types"),
    *("shared_expert_combination_strategy", "expert_selection_fn", "rope_parameters"),
}
"""Keys of which some value is refused."""

CASES = [("llama4", changes) for changes in COMMON + OF_LLAMA4] + [
    ("cohere2-moe", changes) for changes in COMMON + OF_COHERE
]


@pytest.mark.parametrize("case", CASES, ids=changed_keys.name_of)
def test_a_value_gives_the_logits_of_transformers_or_is_refused(tmp_path, case):
    changed_keys.check(*case, REFUSED, tmp_path)


def test_all_keys_have_another_value():
    assert changed_keys.unchanged("llama4_text", COMMON + OF_LLAMA4) == set()
    assert changed_keys.unchanged("cohere2_moe", COMMON + OF_COHERE) == set()
