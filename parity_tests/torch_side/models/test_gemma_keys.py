"""Every key of a config.json of Gemma 3n and 4: another value gives the logits of `transformers`, or is refused."""

from __future__ import annotations

import pytest

from ...support.models import changed_keys
from ...support.models.decoder_oracle import DECODERS, YARN

SLIDING, FULL = "sliding_attention", "full_attention"
LOCAL, PROPORTIONAL = DECODERS["gemma4"][1]["rope_parameters"].values()
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3, "moe_intermediate_size": 6}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 90.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 90.0}
STRETCHED = {**YARN, "rope_theta": 90.0}
COMMON = [
    {"vocab_size": 35, "vocab_size_per_layer_input": 36},
    {"hidden_size": 16},
    {"intermediate_size": 11},
    {"num_attention_heads": 2},
    {"num_attention_heads": 6, "num_key_value_heads": 3},
    {"num_key_value_heads": 1},
    {"head_dim": 8},
    *({"hidden_activation": name} for name in ("gelu", "relu", "silu", "quick_gelu", "gelu_new", "relu2", "mish")),
    {"max_position_embeddings": 9},
    {"initializer_range": 0.5},
    {"rms_norm_eps": 0.3},
    {"use_cache": False},
    {"pad_token_id": None},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
    {"attention_dropout": 0.3},
    {"sliding_window": 2},
    {"sliding_window": 90},
    {"final_logit_softcapping": 2.0},
    {"vocab_size_per_layer_input": 37},
    {"vocab_size_per_layer_input": 27},
    {"hidden_size_per_layer_input": 3},
    {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},  # with shared keys, transformers fails
    {"num_kv_shared_layers": 0},
    {"num_kv_shared_layers": 1},
    {"num_kv_shared_layers": 4},
    {"num_kv_shared_layers": 9},
    {"chunk_size_feed_forward": 2},
    {"mlp_bias": True},
    {"query_pre_attn_scalar": 9},
    {"attn_logit_softcapping": 2.0},
    {"rope_theta": 33.0},
    {"rope_local_base_freq": 33.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"use_bidirectional_attention": "all"},
    {"use_bidirectional_attention": True},
    {"rope_parameters": {SLIDING: LINEAR, FULL: LOCAL}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: LINEAR}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: DYNAMIC}, "max_position_embeddings": 6},
    {"rope_parameters": {SLIDING: LOCAL, FULL: STRETCHED}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: {**LOCAL, "partial_rotary_factor": 0.5}}},
    {"rope_parameters": {SLIDING: PROPORTIONAL, FULL: LOCAL}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: {**PROPORTIONAL, "factor": 2.0}}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: {**PROPORTIONAL, "partial_rotary_factor": 1.0}}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: {**PROPORTIONAL, "partial_rotary_factor": 0.0}}},
    {"rope_parameters": {SLIDING: LOCAL, FULL: None}},
    {"rope_parameters": LOCAL},
    {"rope_parameters": None},
    {"layer_types": [SLIDING, FULL] * 4},
    {"layer_types": [FULL, SLIDING]},
    {"layer_types": None, "num_kv_shared_layers": 0},
    {"num_hidden_layers": 7},
]
OF_GEMMA4 = [
    {"final_logit_softcapping": None},
    {"layer_types": [FULL] * 6},
    {"layer_types": [SLIDING] * 6, "num_kv_shared_layers": 0},
    {"use_bidirectional_attention": "vision"},
    {"attention_k_eq_v": False},
    {"global_head_dim": 6},
    {"global_head_dim": None},
    {"num_global_key_value_heads": 2},
    {"num_global_key_value_heads": None},
    {"attention_k_eq_v": False, "num_global_key_value_heads": 1},
    {"use_double_wide_mlp": False},
    EXPERTS,
    {**EXPERTS, "num_experts": None},
    {**EXPERTS, "enable_moe_block": False},
    {"per_layer_config": {str(layer): {"head_dim": 8} for layer in (1, 3, 5)}},
    {"per_layer_config": {"1": {"head_dim": 8}}},
    {"per_layer_config": {str(layer): {"num_key_value_heads": 1} for layer in (0, 2, 4)}},
    {"per_layer_config": {"0": {"sliding_window": 2}}},
    {"per_layer_config": {"0": {"intermediate_size": 8}}},
    {"per_layer_config": {}},
    {"num_hidden_layers": 12, "layer_types": [SLIDING, FULL] * 6},  # whose numbers transformers pads: "01" to "11"
]
OF_GEMMA3N = [
    {"layer_types": [FULL] * 5},
    {"layer_types": [SLIDING] * 5},
    {"intermediate_size": [20, 18, 20, 18, 21]},
    {"intermediate_size": [20, 18]},
    {"activation_sparsity_pattern": [0.0] * 5},
    {"activation_sparsity_pattern": [-0.5, 0.99, 0.0, 0.1, 0.5]},
    {"activation_sparsity_pattern": [0.5]},
    {"activation_sparsity_pattern": None},
    {"activation_sparsity_pattern": 0.5},
    {"altup_active_idx": 0},
    {"altup_active_idx": 2},
    {"altup_active_idx": 3},
    {"altup_coef_clip": 0.01},
    {"altup_correct_scale": False},
    {"altup_num_inputs": 2},
    {"altup_num_inputs": 1},
    {"laurel_rank": 5},
]
REFUSED = {
    *("hidden_activation", "use_bidirectional_attention", "num_kv_shared_layers", "layer_types", "per_layer_config"),
    *("vocab_size_per_layer_input", "hidden_size_per_layer_input", "num_experts", "num_hidden_layers", "rope_scaling"),
    *("rope_parameters", "global_head_dim", "altup_coef_clip", "altup_num_inputs", "intermediate_size"),
    *("activation_sparsity_pattern", "altup_active_idx", "num_hidden_layers"),
}
"""Keys of which some value is refused."""

CASES = [
    *((name, changes) for name in ("gemma4", "gemma4-unified") for changes in COMMON + OF_GEMMA4),
    *(("gemma3n", changes) for changes in COMMON + OF_GEMMA3N),
]


@pytest.mark.parametrize("case", CASES, ids=changed_keys.name_of)
def test_a_value_gives_the_logits_of_transformers_or_is_refused(tmp_path, case):
    changed_keys.check(*case, REFUSED, tmp_path)


def test_all_keys_have_another_value():
    changes = [changes for _, changes in CASES]
    for model_type in ("gemma4_text", "gemma4_unified_text", "gemma3n_text"):
        assert changed_keys.unchanged(model_type, changes) == set()
