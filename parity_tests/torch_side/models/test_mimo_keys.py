"""Every key of a config.json of MiMo-V2-Flash: another value gives the logits of `transformers`, or is refused."""

from __future__ import annotations

import pytest

from ...support.models import changed_keys
from ...support.models.decoder_oracle import DECODERS, YARN

SLIDING, FULL = "sliding_attention", "full_attention"
GLOBAL, LOCAL = DECODERS["mimo"][1]["rope_parameters"].values()
CASES = [
    {"vocab_size": 35},
    {"hidden_size": 16},
    {"intermediate_size": 11},
    {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "mlp_layer_types": ["dense", "sparse", "dense"]},
    {"num_hidden_layers": 7, "layer_types": None, "mlp_layer_types": None},
    {"num_attention_heads": 4},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 8},
    {"hidden_act": "gelu"},
    {"hidden_act": "mish"},
    {"max_position_embeddings": 9},
    {"initializer_range": 0.5},
    {"rms_norm_eps": 0.3},
    {"use_cache": False},
    {"tie_word_embeddings": True},
    {"attention_bias": False},
    {"attention_dropout": 0.3},
    {"moe_intermediate_size": 5},
    {"num_experts_per_tok": 3},
    {"output_router_logits": True},
    {"n_routed_experts": 9},
    {"num_local_experts": 9},
    {"routed_scaling_factor": None},
    {"routed_scaling_factor": 0.7},
    {"n_group": 1, "topk_group": 1},
    {"n_group": 2, "topk_group": 1},
    {"norm_topk_prob": False},
    {"pad_token_id": 3},
    {"head_dim": 16},
    {"v_head_dim": 12},
    {"v_head_dim": 15},
    {"sliding_window": 2},
    {"sliding_window": 90},
    {"sliding_window_size": 4},
    {"sliding_window": None},
    {"layer_types": [FULL] * 4},
    {"layer_types": [SLIDING] * 4},
    {"layer_types": ["chunked_attention"] * 4},
    {"mlp_layer_types": ["sparse"] * 4},
    {"mlp_layer_types": ["dense"] * 4},
    {"attention_value_scale": None},
    {"attention_value_scale": 1.4},
    {"rope_parameters": None, "head_dim": 12},
    {"rope_parameters": {FULL: GLOBAL}},
    {"rope_parameters": {FULL: LOCAL, SLIDING: GLOBAL}},
    {"rope_parameters": {FULL: {**GLOBAL, "partial_rotary_factor": 1.0}, SLIDING: LOCAL}},
    {"rope_parameters": {FULL: {**YARN, "rope_theta": 90.0}, SLIDING: LOCAL}},
    {"rope_theta": 33.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
]
REFUSED = {
    *("hidden_act", "num_key_value_heads", "sliding_window", "layer_types", "rope_parameters", "rope_scaling"),
    *("mlp_layer_types", "head_dim"),
}
"""Keys of which some value is refused."""


@pytest.mark.parametrize("case", CASES, ids=lambda changes: changed_keys.name_of(("mimo", changes)))
def test_a_value_gives_the_logits_of_transformers_or_is_refused(tmp_path, case):
    changed_keys.check("mimo", case, REFUSED, tmp_path)


def test_all_keys_have_another_value():
    assert changed_keys.unchanged("mimo_v2_flash", CASES) == set()
