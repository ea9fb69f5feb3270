"""Every key of a config.json of LFM3: another value gives the logits of `transformers`, or is refused."""

from __future__ import annotations

import pytest
import torch

import torch_attn
from attn_bridge import checkpoints
from attn_bridge.models import families
from torch_attn.backend import to_numpy

from ...support.models import changed_keys
from ...support.models.decoder_oracle import DECODERS, YARN, run

SLIDING, FULL = "sliding_attention", "full_attention"
PROPORTIONAL, LOCAL = DECODERS["lfm3"][1]["rope_parameters"].values()
CASES = [
    {"vocab_size": 35},
    {"hidden_size": 16},
    {"intermediate_size": 11},
    {"num_hidden_layers": 2, "layer_types": ["conv", SLIDING]},
    {"num_hidden_layers": 7, "layer_types": None},
    {"num_hidden_layers": 4},
    {"num_attention_heads": 2},
    {"num_key_value_heads": 1},
    {"head_dim": 6},
    {"max_position_embeddings": 9},
    {"initializer_range": 0.5},
    {"norm_eps": 0.3},
    {"rms_norm_eps": 0.3},
    {"use_cache": False},
    {"pad_token_id": 3},
    {"tie_word_embeddings": False},
    {"conv_bias": True},
    {"conv_L_cache": 2},
    {"sliding_window": 2},
    {"sliding_window": 90},
    {"sliding_window": None},
    {"use_sandwich_norm": False},
    {"use_attention_gate": False},
    {"attention_bias": True},
    {"attention_bias": True, "use_attention_gate": False},
    {"attention_dropout": 0.3},
    {"rope_theta": 33.0},
    {"rope_parameters": None},
    {"rope_parameters": {FULL: PROPORTIONAL}},
    {"rope_parameters": {FULL: LOCAL, SLIDING: PROPORTIONAL}},
    {"rope_parameters": {FULL: {**PROPORTIONAL, "factor": 2.0}, SLIDING: LOCAL}},
    {"rope_parameters": {FULL: {**LOCAL, "partial_rotary_factor": 0.5}, SLIDING: LOCAL}},
    {"rope_parameters": {FULL: {**YARN, "rope_theta": 90.0}, SLIDING: LOCAL}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"layer_types": ["conv"] * 3},
    {"layer_types": [FULL] * 3},
    {"layer_types": [SLIDING, "conv", FULL]},
    {"layer_types": ["conv", "linear_attention", FULL]},
]
REFUSED = {
    *("attention_bias", "sliding_window", "rope_parameters", "rope_scaling", "layer_types", "num_hidden_layers"),
}
"""Keys of which some value is refused."""


@pytest.mark.parametrize("case", CASES, ids=lambda changes: changed_keys.name_of(("lfm3", changes)))
def test_a_value_gives_the_logits_of_transformers_or_is_refused(tmp_path, case):
    changed_keys.check("lfm3", case, REFUSED, tmp_path)


def test_all_keys_have_another_value():
    assert changed_keys.unchanged("lfm3", CASES) == set()


def test_a_gate_with_biases_is_refused_by_name():
    message = r"^attention_bias \(True\) of lfm3 is not supported, only False or None$"
    with pytest.raises(ValueError, match=message):
        families.find_decoder({"model_type": "lfm3", **DECODERS["lfm3"][1], "attention_bias": True})


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layers_are_read_by_the_names_of_files_and_of_memory(layer):
    oracle = run("lfm3")
    config = {"model_type": "lfm3", **DECODERS["lfm3"][1]}
    files = dict(checkpoints.read(oracle.folder))
    memory = {name: to_numpy(tensor) for name, tensor in oracle.model.state_dict().items()}
    assert files.keys() != memory.keys()
    first, second = (torch_attn.from_hf(config, layer, state).state_dict() for state in (files, memory))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
