"""The configs of whole encoders and decoders, as families read them: what is refused, and what training alone does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attn_bridge.models import families
from attn_bridge.specs import CrossAttentionConfig, DecoderConfig, EncoderDecoderConfig
from attn_bridge.specs.as_json import as_json, from_json

PAIRS = sorted(name for name, family in families.FAMILIES.items() if family.whole is EncoderDecoderConfig)
SMALL = {"vocab_size": 20, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "decoder_attention_heads": 3}
SMALL |= {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 3}


def read(name: str, **changes: object) -> EncoderDecoderConfig:
    return families.find_encoder_decoder({"model_type": name, **SMALL, "encoder_attention_heads": 4, **changes})


@pytest.mark.parametrize("name", PAIRS)
def test_a_config_survives_json(name):
    config = read(name)
    assert (len(config.encoder.blocks), len(config.decoder.blocks)) == (2, 3)
    assert from_json(as_json(config)) == config
    assert hash(from_json(as_json(config))) == hash(config)


def test_the_page_names_every_family():
    page = (Path(__file__).parents[4] / "docs" / "encoder-decoders.md").read_text()
    assert PAIRS == ["bart", "mt5", "t5", "umt5", "whisper"]
    assert [name for name in PAIRS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_the_attention_to_the_encoder_is_that_of_a_layer(name):
    document = {"model_type": name, **SMALL, "encoder_attention_heads": 4, "attention_dropout": 0.2}
    layer = families.find_layer(document, 1)
    assert isinstance(layer.config, CrossAttentionConfig)
    assert families.find_encoder_decoder(document).decoder.blocks[1].cross_attention == layer.config


REFUSED = {
    "activation": (
        "bart",
        {"activation_function": "mish"},
        "activation_function ('mish') of bart must be one of silu,",
    ),
    "decoder": (
        "bart",
        {"is_encoder_decoder": False},
        "a bart whose config says that it is a decoder has no encoder; DecoderModel runs it",
    ),
    "mbart": ("bart", {"normalize_before": True}, "normalize_before (True) of bart is not supported, only False"),
    "norm": (
        "bart",
        {"add_final_layer_norm": True},
        "add_final_layer_norm (True) of bart is not supported, only False",
    ),
    "no norm": ("bart", {"normalize_embedding": False}, "normalize_embedding (False) of bart is not supported, only"),
    "sines": (
        "bart",
        {"static_position_embeddings": True},
        "static_position_embeddings (True) of bart is not supported, only False",
    ),
    "deep": ("whisper", {"encoder_layers": 10**9}, "encoder_layers (1000000000) of whisper must be at most 4096"),
    "heads": ("whisper", {"encoder_attention_heads": 5}, "d_in (24) must be a multiple of num_heads (5)"),
    "mels": ("whisper", {"num_mel_bins": 0}, "num_mel_bins (0) of whisper must be at least 1"),
    "deep stack": ("t5", {"num_decoder_layers": 10**9}, "num_decoder_layers (1000000000) of t5 must be at most 4096"),
    "gate": ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj ('gated-mish') of t5 must be one of silu,"),
    "two gates": (
        "umt5",
        {"feed_forward_proj": "gated-gelu-new"},
        "feed_forward_proj ('gated-gelu-new') of umt5 is not",
    ),
    "stack": ("mt5", {"is_decoder": True}, "is_decoder (True) of mt5 is not supported, only False or None"),
    "encoder": ("mt5", {"is_encoder_decoder": False}, "is_encoder_decoder (False) of mt5 is not supported, only True"),
    "decoder alone": (
        "llama",
        {},
        "model_type (llama) is no encoder and decoder of ours, which are bart, mt5, t5, umt5, whisper; "
        "DecoderModel runs it",
    ),
    "nobody": ("nobody", {}, "model_type (nobody) must be one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(case):
    name, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        read(name, **changes)


@pytest.mark.parametrize("name", PAIRS)
def test_layers_dropped_in_training_and_keys_of_generation_change_nothing(name):
    harmless = {"encoder_layerdrop": 0.1, "decoder_layerdrop": 0.2, "forced_eos_token_id": 2, "suppress_tokens": [1]}
    assert read(name, **harmless) == read(name)
    assert read(name, **{"dropout" if name in ("bart", "whisper") else "dropout_rate": 0.25}) != read(name)


def test_what_is_added_to_the_logits_is_there_where_the_file_holds_it():
    document = {"model_type": "bart", **SMALL, "encoder_attention_heads": 4}
    for names, wanted in ((["model.shared.weight"], False), (["final_logits_bias"], True), (["logits_bias"], True)):
        assert families.find_encoder_decoder(document, names).logits_bias == wanted


def test_a_pair_is_no_decoder():
    with pytest.raises(ValueError, match=r"^model_type \(bart\) is no decoder of ours"):
        families.find_decoder({"model_type": "bart", **SMALL})
    assert not issubclass(EncoderDecoderConfig, DecoderConfig)


def test_t5_scales_its_logits_by_what_the_config_says_of_the_head_and_umt5_always():
    for model_type, said, scaled in (
        ("t5", {}, True),
        ("t5", {"tie_word_embeddings": False}, False),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
        ("mt5", {}, False),
        ("umt5", {"tie_word_embeddings": False}, True),
    ):
        config = read(model_type, **said)
        assert config.logit_scale == (24**-0.5 if scaled else 1.0)
        assert config.tie == said.get("tie_word_embeddings", True)


def test_a_table_of_biases_is_the_first_layers_in_t5_and_each_layers_own_in_umt5():
    for model_type, tables in (("t5", 2), ("mt5", 2), ("umt5", 5)):
        names = [row.rule.torch for row in read(model_type).parameters]
        assert len([name for name in names if name.endswith("relative_bias")]) == tables
