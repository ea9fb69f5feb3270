"""Families as data: their files, the configs that they read, refuse and write; without a framework or transformers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import tomllib
from importlib import resources

import pytest

from attn_bridge.models import families, layouts, tables
from attn_bridge.models.derived import known
from attn_bridge.models.derived.description import KeySource, dumps, loads
from attn_bridge.models.derived.layout import layout_of
from attn_bridge.models.derived.reading import DerivedFamily
from attn_bridge.models.pairs import reading as pairs
from attn_bridge.models.reading import multimodal
from attn_bridge.models.reading.model_config import nested

NAMES = [one.model_type for one in known.DESCRIPTIONS]
BY_NAME = {one.model_type: one for one in known.DESCRIPTIONS}
TINY = {
    "vocab_size": 31,
    "hidden_size": 64,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "experts.num_experts": 4,
    "experts.top_k": 2,
    "experts.hidden_dim": 12,
    "experts.shared": 1,
    "sparse.first": 1,
    "sparse.step": 1,
    "groups.number": 2,
    "groups.chosen": 1,
}
"""Field -> its value in small models; two experts are a group."""
LATENT = {f"attention.{name}": width for name, width in (
    ("latent_dim", 6), ("nope_dim", 4), ("rope_dim", 8), ("value_dim", 10), ("query_dim", 7)
)}  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"
OWN = {
    "gemma3n_text": {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 2},
    "gemma4_text": {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 2},
    "cohere_compass_text": {"rope_parameters": {FULL: {"rope_theta": 500.0}, SLIDING: None}},
    "dbrx": {
        "attn_config.rope_theta": 500.0,
        "attn_config.kv_n_heads": 2,
        "attn_config.clip_qkv": 8.0,
        "rope_theta": 500.0,
    },
    "mamba2": {"num_heads": 16, "head_dim": 8},
    "mimo_v2_flash": {"head_dim": 24},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
}
"""Family -> keys of its small model whose defaults do not fit the other sizes."""


def tiny(name, **changes):
    """Return the config.json of a small model of a family."""
    description = BY_NAME[name]
    fields = description.fields
    more = {} if "attention.head_dim" not in fields else {"head_dim": 16}
    more |= {
        fields[field].key: value
        for field, value in {**EXPERTS, **LATENT}.items()
        if field in fields and fields[field].key
    }
    more |= {"num_key_value_heads": 4} if "attention.latent_dim" in fields else {}
    more |= {"rotary_dim": 8} if "position.dim" in fields else {}
    more |= {key: values[0] for key, values in description.fixed.items() if description.defaults.get(key) not in values}
    more |= {"is_decoder": True, "is_encoder_decoder": False} if name in multimodal.DECODERS else {}
    more |= {key: {**TINY, **more}.get(other, TINY["hidden_size"]) for key, other in description.same.items()}
    more |= {key: TINY[usual] for usual, key in description.keys.items() if usual in TINY}
    more |= {"attention_types": [[["global", "local"], 2], [["global"], 1]]} if name == "gpt_neo" else {}
    return nested({"model_type": name, **TINY, **more, **OWN.get(name, {}), **changes})


@pytest.mark.parametrize("name", NAMES)
def test_file_of_a_family_is_written_as_it_is_read(name):
    assert loads(dumps(BY_NAME[name]), "it.toml") == BY_NAME[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_reads_what_it_writes(name):
    config = families.find_decoder(tiny(name))
    assert (len(config.blocks), config.emb_dim, config.vocab_size) == (5, 64, 31)
    written = json.loads(json.dumps(DerivedFamily(BY_NAME[name], layouts.find(BY_NAME[name].layout)).write(config)))
    assert families.find_decoder({"model_type": name, **written}) == config


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_a_family_are_found_by_names_and_type(name):
    layout, config = layouts.find(BY_NAME[name].layout), families.find_decoder(tiny(name))
    settings = layout.read_settings({**BY_NAME[name].defaults, **tiny(name)})
    shapes = layout.encode({row.rule.torch: row.shape for row in config.parameters}, settings).shapes
    assert layouts.detect(shapes, multimodal.decoder_type(name)) is layout
    found = layout.decode(shapes, settings).placements
    assert {row.rule.torch: row.shape for row in config.parameters} == {
        ours: found[ours].shape for ours in found if ours != "out_head.weight" or not config.tie
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "num_hidden_layers" in BY_NAME[name].keys])
def test_sizes_of_an_encoder_are_not_those_of_its_decoder(name):
    config = families.find_decoder(tiny(name))
    of_encoder = {"num_hidden_layers": 3, "encoder_layers": 3, "num_attention_heads": 2, "encoder_attention_heads": 2}
    assert families.find_decoder(tiny(name, **of_encoder)) == config
    short = {key: value for key, value in tiny(name).items() if key not in BY_NAME[name].keys.values()}
    defaults = BY_NAME[name].defaults
    short |= {"hidden_size": 4 * defaults["decoder_attention_heads"], **of_encoder}
    assert len(families.find_decoder(short).blocks) == defaults["decoder_layers"]


def test_reading_families_imports_no_transformers():
    assert "transformers" not in sys.modules


def test_value_that_was_not_proven_is_refused():
    with pytest.raises(ValueError, match=r"^use_qk_norm \(True\) of cohere is not supported, only False$"):
        families.find_decoder(tiny("cohere", use_qk_norm=True))


def test_a_key_that_the_class_does_not_read_changes_nothing():
    of_roformer = {"model_type": "roformer", **TINY, "embedding_size": TINY["hidden_size"], "is_decoder": True}
    plain, with_base = (families.find_decoder(of_roformer | keys) for keys in ({}, {"rope_theta": 5.0}))
    assert plain == with_base
    assert not [key for key in families.write_config(plain, layouts.find("hf-roformer")) if "rope" in key]


@pytest.mark.parametrize("name", ["cohere2", "gemma3_text"])
def test_interval_between_layers_without_a_window_is_that_of_the_config(name):
    blocks = families.find_decoder(tiny(name, sliding_window_pattern=2)).blocks
    assert [block.attention.mask.reach is None for block in blocks] == [False, True, False, True, False]


def test_a_number_with_an_integer_default_is_written_as_an_integer():
    config = families.find_decoder(tiny("vaultgemma", query_pre_attn_scalar=7))
    written = families.write_config(config, layouts.find("hf-vaultgemma"))["query_pre_attn_scalar"]
    assert (written, type(written)) == (7, int)
    halves = families.find_decoder(tiny("vaultgemma", query_pre_attn_scalar=7.5))
    with pytest.raises(ValueError, match=r"vaultgemma has another blocks\[0\]\.attention\.scale"):
        families.write_config(halves, layouts.find("hf-vaultgemma"))


@pytest.mark.parametrize(
    ("keys", "scaled"), [({}, True), ({"rope_parameters": None}, True), ({"rope_parameters": {}}, False)]
)
def test_positions_are_scaled_by_default_where_a_config_has_none(keys, scaled):
    first = families.find_decoder(tiny("gpt_oss") | keys).blocks[0].attention
    assert (first.position.scaling is not None) == scaled


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_scale_without_a_number_is_refused(name):
    with pytest.raises(TypeError, match=f"^query_pre_attn_scalar of {name} must be a number, got null$"):
        families.find_decoder(tiny(name, query_pre_attn_scalar=None))


def test_padding_of_sines_is_no_position():
    for token in (None, 0, 1):
        assert families.find_decoder(tiny("xglm", pad_token_id=token)).sinusoids == "tensor2tensor"
    with pytest.raises(ValueError, match=r"^pad_token_id \(2\) of xglm is not supported, only None or 0 or 1$"):
        families.find_decoder(tiny("xglm", pad_token_id=2))


def test_value_that_must_be_there_is_refused_as_null():
    with pytest.raises(ValueError, match=r"^sliding_window \(null\) of exaone4 is not supported, only a value$"):
        families.find_decoder(tiny("exaone4", sliding_window=None, layer_types=["full_attention"] * 5))


def test_key_of_the_pattern_counts_without_kinds_of_layers_alone():
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    assert families.find_decoder(tiny("exaone4", sliding_window_pattern="LLLG", layer_types=kinds))
    with pytest.raises(ValueError, match=r"sliding_window_pattern \('LLLG'\) of exaone4 is not supported, only 4$"):
        families.find_decoder(tiny("exaone4", sliding_window_pattern="LLLG"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_type = ", "it.toml: Invalid value"),
        ('model_type = "x"\nkind = 3', "unexpected keyword argument 'kind'"),
        ('model_type = "x"\n[fields.norm]\neps = { key = "e", value = 1.0 }', "either a key or a value"),
        ('rows = [{ theirs = "a.weight", ours = ["b"], along = "x" }]', "'x' is no axis"),
    ],
)
def test_bad_file_of_a_family_is_refused_with_its_name(text, message):
    with pytest.raises(ValueError, match=r"^it\.toml: ") as error:
        loads(text, "it.toml")
    assert message in str(error.value)


def test_families_of_the_users_folder_are_read(tmp_path, monkeypatch):
    cohere = BY_NAME["cohere"]
    mine = dataclasses.replace(cohere, model_type="mine", layout="hf-mine")
    (tmp_path / "mine.toml").write_text(dumps(mine))
    other = dataclasses.replace(cohere, fields={**cohere.fields, "norm.eps": KeySource(value=0.5)})
    (tmp_path / "a.toml").write_text(dumps(other))
    monkeypatch.setenv(known.FOLDER, str(tmp_path))
    read = {one.model_type: one for one in known.load()}
    assert read["mine"] == mine
    assert read["cohere"] == other
    assert layout_of(mine).name == "hf-mine"


def test_no_null_is_written_for_experts_that_a_model_lacks():
    config = families.find_decoder(tiny("deepseek_v2", first_k_dense_replace=5, num_experts_per_tok=None))
    written = families.write_config(config, layouts.find("hf-deepseek-v2"))
    assert written["model_type"] == "deepseek_v2"
    assert "routed_scaling_factor" not in written


def test_queries_without_a_latent_are_written_as_null():
    config = families.find_decoder(tiny("deepseek_v2", q_lora_rank=None))
    written = families.write_config(config, layouts.find("hf-deepseek-v2"))
    assert (written["model_type"], written["q_lora_rank"]) == ("deepseek_v2", None)


def test_functions_that_files_name_exist():
    paths = {
        path
        for file in resources.files(tables).iterdir()
        if file.name.endswith(".toml")
        for path in tomllib.loads(file.read_text(encoding="utf-8")).get("code", {}).values()
    }
    assert paths
    for module, _, name in (path.rpartition(".") for path in paths):
        assert callable(getattr(importlib.import_module(f"attn_bridge.models.{module}"), name))


def test_no_pair_has_the_name_of_a_decoder():
    names = {name for one in pairs.FAMILIES for name in one.model_types}
    assert names
    assert not names & {multimodal.decoder_type(name) for name in NAMES}


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([[["global", "local"], 2]], "must be those of num_layers (5)"),
        ([[["global"], 6]], "must be those of num_layers (5)"),
        ([[["global"], 10**12]], "must be those of num_layers (5)"),
        ([[["global", "near"], 1]], "must be lists of global and local, each with a number"),
        ([[["local"], True]], "must be lists of global and local, each with a number"),
        ("global", "must be lists of global and local, each with a number"),
        (None, "must be lists of global and local, each with a number"),
    ],
)
def test_runs_of_other_kinds_or_numbers_of_layers_are_refused(runs, why):
    with pytest.raises(ValueError, match=f"^attention_types of gpt_neo {re.escape(why)}$"):
        families.find_decoder(tiny("gpt_neo", attention_types=runs))


def test_names_of_layers_take_precedence_over_runs_of_them():
    named = families.find_decoder(tiny("gpt_neo", attention_layers=["local", "local", "global", "local", "global"]))
    assert [block.attention.mask.reach is None for block in named.blocks] == [False, False, True, False, True]
    for wrong, why in ((["local"], "those of num_layers (5)"), (["near"] * 5, "names, global or local")):
        with pytest.raises(ValueError, match=f"^attention_layers of gpt_neo must be {re.escape(why)}$"):
            families.find_decoder(tiny("gpt_neo", attention_layers=wrong))
