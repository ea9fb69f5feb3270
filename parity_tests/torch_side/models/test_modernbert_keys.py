"""Every key of a config of ModernBERT's decoder: another value gives the logits of `transformers`, or is refused."""

from __future__ import annotations

import pytest

from ...support.models import changed_keys
from ...support.models.decoder_oracle import DECODERS, YARN

SLIDING, FULL = "sliding_attention", "full_attention"
GLOBAL, LOCAL = DECODERS["modernbert"][1]["rope_parameters"].values()
CASES = [
    {"vocab_size": 35},
    {"hidden_size": 16},
    {"intermediate_size": 11},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 7},
    {"num_attention_heads": 2},
    *({"hidden_activation": name} for name in ("silu", "gelu_new", "relu", "mish")),
    *({"classifier_activation": name} for name in ("silu", "gelu_new", "relu", "mish")),
    {"max_position_embeddings": 9},
    {"initializer_range": 0.5},
    {"initializer_cutoff_factor": 1.0},
    {"norm_eps": 0.3},
    {"norm_bias": False},
    {"pad_token_id": 3},
    {"cls_token_id": 3},
    {"sep_token_id": 3},
    {"attention_bias": False},
    {"attention_dropout": 0.3},
    {"embedding_dropout": 0.3},
    {"mlp_bias": False},
    {"mlp_dropout": 0.3},
    {"decoder_bias": False},
    {"classifier_dropout": 0.3},
    {"classifier_bias": False},
    {"use_cache": False},
    {"local_attention": 4},
    {"local_attention": 90},
    {"local_attention": 1},
    {"local_attention": None},
    {"sliding_window": 2},
    {"global_attn_every_n_layers": 2},
    {"layer_types": [FULL] * 4},
    {"layer_types": [SLIDING, FULL] * 2},
    {"layer_types": ["chunked_attention"] * 4},
    {"tie_word_embeddings": False},
    {"rope_parameters": None},
    {"rope_parameters": None, "global_rope_theta": 33.0, "local_rope_theta": 44.0},
    {"rope_parameters": {FULL: GLOBAL}},
    {"rope_parameters": {FULL: {"rope_type": "default"}, SLIDING: LOCAL}},
    {"rope_parameters": {FULL: {**YARN, "rope_theta": 90.0}, SLIDING: LOCAL}},
    {"rope_parameters": {FULL: {**GLOBAL, "partial_rotary_factor": 0.5}, SLIDING: LOCAL}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"head_dim": 5},
]
REFUSED = {
    *("hidden_activation", "classifier_activation", "local_attention", "layer_types", "rope_scaling", "head_dim"),
}
"""Keys of which some value is refused."""


@pytest.mark.parametrize("case", CASES, ids=lambda changes: changed_keys.name_of(("modernbert", changes)))
def test_a_value_gives_the_logits_of_transformers_or_is_refused(tmp_path, case):
    changed_keys.check("modernbert", case, REFUSED, tmp_path)


def test_all_keys_have_another_value():
    assert changed_keys.unchanged("modernbert-decoder", CASES) <= {"sliding_window"}
