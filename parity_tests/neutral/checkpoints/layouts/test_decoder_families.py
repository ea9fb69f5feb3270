"""The configs of whole decoders, as families read them: what is refused, and where it is told which there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_bridge.checkpoints import configs
from attn_bridge.models import families, layouts
from attn_bridge.models.reading import multimodal
from attn_bridge.specs import DecoderConfig, ExpertGroups, MixtureOfExpertsConfig, RMSNormConfig, Router
from attn_bridge.specs.as_json import as_json, from_json
from parity_tests.support.models.drawn_decoders import own_keys

DECODERS = sorted(name for name, family in families.FAMILIES.items() if family.whole is DecoderConfig)
SMALL = {
    "vocab_size": 20,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "rotary_dim": 8,
    "is_decoder": True,
    "embedding_size": 64,
}


def small(name: str) -> dict[str, object]:
    return {"model_type": name, **SMALL, **own_keys(name)}


@pytest.mark.parametrize("name", DECODERS)
def test_a_config_survives_json(name):
    config = families.find_decoder(small(name))
    assert len(config.blocks) == 4
    assert from_json(as_json(config)) == config
    assert hash(from_json(as_json(config))) == hash(config)


ROUTERS = {
    "afmoe": ({}, Router("sigmoid", correction=True)),
    "deepseek_v2": ({}, Router("softmax", normalise=False)),
    "deepseek_v2 in groups": (
        {"topk_method": "group_limited_greedy"},
        Router("softmax", normalise=False, groups=ExpertGroups(2, 1, "max")),
    ),
    "deepseek_v3": ({}, Router("sigmoid", scale=2.5, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "deepseek_v32": ({}, Router("sigmoid", scale=2.5, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "glm_moe_dsa": ({}, Router("sigmoid", scale=2.5, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "aria_text": ({}, Router("softmax")),
    "axk1": ({}, Router("sigmoid", scale=2.5, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "dbrx": ({}, Router("softmax")),
    "dots1": ({}, Router("sigmoid", normalise=False, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "ernie4_5_moe": ({}, Router("softmax", correction=True)),
    "exaone_moe": ({}, Router("sigmoid", scale=2.5, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "flex_olmo": ({}, Router("softmax", normalise=False)),
    "flint": ({}, Router("sigmoid")),
    "glm4_moe": ({}, Router("sigmoid", correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "glm4_moe_lite": ({}, Router("sigmoid", scale=1.8, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "gemma4_text": ({}, Router("softmax", norm=RMSNormConfig(64), input_scale=0.125, expert_scales=True)),
    "gpt_oss": ({}, Router("softmax", bias=True)),
    "granitemoe": ({}, Router("softmax")),
    "granitemoehybrid": ({}, Router("softmax")),
    "granitemoeshared": ({}, Router("softmax")),
    "granitemoe_swa": ({}, Router("softmax")),
    "hunyuan_v1_moe": ({}, Router("softmax")),
    "hy_v3": ({}, Router("sigmoid", scale=2.826, correction=True)),
    "jamba": ({}, Router("softmax", normalise=False)),
    "kimi_linear": ({}, Router("sigmoid", scale=2.446, correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "kolibri1": ({}, Router("sigmoid", normalise=False, correction=True, corrects="logits")),
    "laguna": ({}, Router("sigmoid", correction=True)),
    "lfm2_moe": ({}, Router("sigmoid", correction=True, sum_eps=1e-6)),
    "cohere2_moe": ({}, Router("softmax", scale=0.5, corrects="logits")),
    "llama4_text": ({}, Router("sigmoid", normalise=False, corrects="logits")),
    "mellum": ({}, Router("softmax")),
    "mimo_v2_flash": ({}, Router("sigmoid", correction=True, groups=ExpertGroups(2, 1, "top2"))),
    "minimax": ({}, Router("softmax")),
    "minimax_m2": ({}, Router("sigmoid", correction=True)),
    "mixtral": ({}, Router("softmax")),
    "olmoe": ({}, Router("softmax", normalise=False)),
    "phimoe": ({}, Router("sparse_mixer", normalise=False)),
    "qwen2_moe": ({}, Router("softmax", normalise=False)),
    "qwen3_moe": ({}, Router("softmax", normalise=False)),
    "qwen3_5_moe_text": ({"norm_topk_prob": False}, Router("softmax")),
    "qwen3_next": ({}, Router("softmax")),
    "solar_open": ({}, Router("sigmoid", correction=True, groups=ExpertGroups(2, 1, "top2"))),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_the_family_does(name):
    changes, wanted = ROUTERS[name]
    assert families.find_decoder({**small(name.split()[0]), **changes}).blocks[-1].feed_forward.router == wanted


def test_every_family_of_experts_has_a_router_here():
    last = {name: families.find_decoder(small(name)).blocks[-1].feed_forward for name in DECODERS}
    experts = {name for name, feed_forward in last.items() if isinstance(feed_forward, MixtureOfExpertsConfig)}
    assert experts == {name.split()[0] for name in ROUTERS}


def test_the_page_names_every_family():
    docs = Path(__file__).parents[4] / "docs"
    pages = "".join((docs / page).read_text(encoding="utf-8") for page in ("models.md", "families.md"))
    assert [name for name in DECODERS if f"`{multimodal.written_type(name)}`" not in pages] == []


LINEAR = {"type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MIXED = ["full_attention", "sliding_attention"] * 2
ALIKE = {
    "type of nested scaling": ("olmo3", {"rope_scaling": LINEAR}, {}),
    "type of Gemma's scaling": ("gemma3_text", {"rope_scaling": LINEAR}, {}),
    "what nested scaling passes over": (
        "olmo3",
        {"rope_scaling": {**YARN, "truncate": False}, "original_max_position_embeddings": 4},
        {"rope_scaling": YARN},
    ),
    "biases of Qwen": ("qwen2", {"mlp_bias": True}, {}),
    "biases of DeepSeek V3": ("deepseek_v3", {"mlp_bias": True}, {}),
    "biases of DiffLlama": ("diffllama", {"mlp_bias": True}, {}),
    "activation": ("llama", {"hidden_act": "gelu_fast"}, {"hidden_act": "gelu_new"}),
    "kinds of layers": ("mistral", {"layer_types": MIXED}, {"layer_types": MIXED, "model_type": "ministral"}),
    "kinds of layers that are passed over": ("mixtral", {"layer_types": MIXED}, {}),
    "name of a kind": ("qwen2", {"layer_types": ["attention"] * 4}, {}),
    "slices, of which there is one": ("bloom", {"slow_but_exact": True}, {}),
    "scores in float32": ("gpt2", {"reorder_and_upcast_attn": True}, {}),
}
"""Case -> ``model_type``, keys, and others that mean the same in `transformers`."""


def test_the_head_of_a_multimodal_model_is_tied_as_the_whole_says():
    inner = {**small("gemma3_text"), "tie_word_embeddings": True}
    whole = {"model_type": "gemma3", "text_config": inner}
    assert families.find_decoder(whole).tie
    assert not families.find_decoder({**whole, "tie_word_embeddings": False}).tie


@pytest.mark.parametrize("key", ["n_head", "num_attention_heads"])
def test_settings_have_what_a_config_leaves_out(key):
    heads = layouts.find("hf-bloom").read_settings
    assert heads(configs.with_defaults({"model_type": "bloom"}))["num_heads"] == 8
    assert heads(configs.with_defaults({"model_type": "bloom", key: 6}))["num_heads"] == 6


@pytest.mark.parametrize("case", ALIKE)
def test_keys_mean_what_they_do_in_transformers(case):
    name, one, other = ALIKE[case]
    assert families.find_decoder({**small(name), **one}) == families.find_decoder({**small(name), **other})


HEADS_OF_FOUR = ("num_attention_heads", "num_key_value_heads", "head_dim")
REFUSED = {
    "activation": ("llama", {"hidden_act": "mish"}, "hidden_act ('mish') of llama must be one of"),
    "base that transformers does not read": (
        "dbrx",
        {"attn_config": {"rope_theta": 500000.0, "clip_qkv": 8.0}},
        "attn_config.rope_theta (500000.0) of dbrx must be rope_theta (10000.0)",
    ),
    "projections without a clip, at which transformers fails": (
        "dbrx",
        {"attn_config": {"rope_theta": 10000.0}},
        "attn_config.clip_qkv (null) of dbrx is not supported, only a value",
    ),
    "norm of weights": (
        "dbrx",
        {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
        "ffn_config.moe_normalize_expert_weights (2.0) of dbrx is not supported, only 1.0",
    ),
    "shared keys without per-layer embeddings": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 1},
        "num_kv_shared_layers (1) of gemma4_text must be 0 where hidden_size_per_layer_input is: transformers fails",
    ),
    "positions of all layers": (
        "cohere_compass_text",
        {"rope_parameters": {"rope_theta": 500.0}},
        "rope_parameters of cohere_compass_text must hold sliding_attention, got None",
    ),
    "deep": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers (1000000000) of llama must be at most 4096"),
    "residual": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm (True) of bloom is not supported, only False",
    ),
    "router": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method ('noaux_tc') of deepseek_v2 is not supported"),
    "slices": (
        "bloom",
        {"slow_but_exact": True, "pretraining_tp": 2},
        "slow_but_exact (True) of bloom is not supported, only None or False",
    ),
    "part of a head": (
        "llama",
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "partial_rotary_factor (0.5) of llama is not supported with rope_type linear, only 1.0",
    ),
    "odd part of a head": (
        "qwen3_next",
        {"partial_rotary_factor": 0.2},
        "partial_rotary_factor (0.2) of qwen3_next turns 3 of the 16 channels of a head, which must be an even number",
    ),
    "all but one channel of a head": (
        "solar_open",
        {"partial_rotary_factor": 0.75, "head_dim": 4},
        "partial_rotary_factor (0.75) of solar_open is not supported with rope_type default, only 1.0",
    ),
    "YaRN of a single channel": (
        "qwen3_next",
        {
            "partial_rotary_factor": 0.1,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
        },
        "partial_rotary_factor (0.1) of qwen3_next turns 1 of the 16 channels of a head, which must be an even number",
    ),
    **{
        f"a single channel of {name}": (
            name,
            {"partial_rotary_factor": 0.25, **dict.fromkeys(HEADS_OF_FOUR, 4), "hidden_size": 16},
            f"partial_rotary_factor (0.25) of {name} turns 1 of the 4 channels of a head, which must be an even number",
        )
        for name in ("gpt_neox_japanese", "persimmon", "phi", "stablelm")
    },
    "factor": ("granite", {"logits_scaling": 0.0}, "logits_scaling (0.0) of granite must be positive"),
    "cap": (
        "gemma3n_text",
        {"final_logit_softcapping": None},
        "final_logit_softcapping (null) of gemma3n_text is not supported, only a value",
    ),
    "encoder": (
        "bart",
        {"d_model": 64, "is_decoder": False},
        "model_type (bart) is no decoder of ours, which are afmoe, apertus,",
    ),
    "nobody": ("nobody", {}, "model_type (nobody) must be one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_by_name(case):
    name, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=r"^.*$") as caught:
        families.find_decoder({**small(name), **changes})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"class": "Path"}, "class ('Path') of a config must be one of "),
        ({"class": "Rotary", "spin": 2}, "Rotary has unknown fields: spin"),
        ({"class": "SlidingWindow"}, "SlidingWindow has missing fields: size"),
    ],
)
def test_a_document_that_is_no_config_is_refused(document, message):
    with pytest.raises(ValueError, match=r"^.*$") as caught:
        from_json(document)
    assert str(caught.value).startswith(message)


REFUSED_OF_HYBRIDS = {
    "biases of one projection": ("falcon_h1", {"projectors_bias": True}, "must be mamba_proj_bias (False)"),
    "a factor beside biases": (
        "falcon_h1",
        {"attention_bias": True, "attention_in_multiplier": 2.0},
        "attention_in_multiplier (2.0) of falcon_h1 is not supported, only 1.0",
    ),
    "four factors": ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "of falcon_h1 must be 5 numbers"),
    "another width": ("falcon_h1", {"mamba_d_head": 3}, "mamba_n_heads * mamba_d_head (24) must be mamba_d_ssm (32)"),
    "another activation": ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act ('gelu') of falcon_h1 is not supported"),
    "an activation of Mamba": ("mamba", {"hidden_act": "gelu"}, "hidden_act ('gelu') of mamba is not supported"),
    "an offset": ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset (2) must be less than attn_layer_period (2)"),
    "experts": (
        "nemotron_h",
        {"layers_block_type": ["mlp", "moe"]},
        "layer 1 of nemotron_h is of type moe, which must be full_attention or linear_attention or mlp",
    ),
    "an unknown letter": (
        "nemotron_h",
        {"layers_block_type": None, "hybrid_override_pattern": "M-x*"},
        "hybrid_override_pattern (M-x*) must consist of M * - E, not x",
    ),
    "a tied head": ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings (True) of nemotron_h is not"),
}


@pytest.mark.parametrize("case", REFUSED_OF_HYBRIDS)
def test_values_that_hybrid_models_do_not_compute_are_refused_by_name(case):
    name, keys, message = REFUSED_OF_HYBRIDS[case]
    with pytest.raises(ValueError, match=r"^.*$") as caught:
        families.find_decoder({**small(name), **keys})
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [False, None])
def test_a_config_whose_tokens_see_later_ones_is_refused_in_every_family(value):
    for name in families.known_model_types():
        keys = {"model_type": name, "is_decoder": True, "is_causal": value}
        message = rf"^is_causal \({value}\) of {name}(-decoder)? is not supported, only True$"
        for find in (families.find_decoder, families.find_encoder_decoder, lambda one: families.find_layer(one, 0)):
            with pytest.raises(ValueError, match=message):
                find(keys)
    assert families.find_decoder({**small("llama"), "is_causal": True}) == families.find_decoder(small("llama"))


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("llama", {"AutoModelForCausalLM": "modeling_capped.CappedLlamaForCausalLM"}),
        ("llama", {"AutoModelForCausalLM": "someone/base--modeling_capped.CappedLlamaForCausalLM"}),
        ("mistral", {"AutoModel": "modeling_encoder.MistralEncoderModel"}),
        ("llama", {"AutoModelForCausalLM": "modeling_mistral.MistralForCausalLM", "AutoModel": "modeling.LlamaModel"}),
    ],
)
def test_folder_with_code_for_another_class_is_refused(name, classes):
    code = next(iter(classes.values()))
    with pytest.raises(ValueError, match=rf"^auto_map of {name} names code of the folder's own \({code}\), which is "):
        families.find_decoder({**small(name), "auto_map": classes})


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("llama", {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}),
        ("mpt", {"AutoModelForCausalLM": "mosaicml/mpt-7b--modeling_mpt.MPTForCausalLM"}),
        ("ernie4_5", {"AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"}),
        ("phimoe", {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM", "AutoModel": "modeling_phimoe.Other"}),
        ("gpt2", {"AutoModelForCausalLM": "modeling_gpt2.GPT2LMHeadModel"}),
        ("llama", {"AutoConfig": "configuration.OtherConfig", "AutoModelForSequenceClassification": "modeling.Other"}),
        ("llama", "modeling.Other"),
    ],
)
def test_folder_with_the_code_that_transformers_took_over_is_read(name, classes):
    assert families.find_decoder({**small(name), "auto_map": classes}) == families.find_decoder(small(name))


def test_code_named_after_its_type_is_that_of_the_family():
    for name in DECODERS:
        classes = {"AutoModelForCausalLM": f"modeling.{name.replace('_', '').title()}ForCausalLM"}
        assert families.find_decoder({**small(name), "auto_map": classes}) == families.find_decoder(small(name))


def test_ties_of_a_folder_with_other_code_are_those_of_its_family():
    classes = {"AutoModelForCausalLM": "modeling.OtherForCausalLM"}
    assert families.ties_head({"model_type": "gemma", "auto_map": classes}) is True


def test_layers_of_nemotron_h_by_letters_are_those_by_names():
    keys = {**small("nemotron_h"), "layers_block_type": None}
    config = families.find_decoder({**keys, "hybrid_override_pattern": "M-*-"})
    assert config == families.find_decoder(small("nemotron_h"))
    with pytest.raises(ValueError, match=r"^layer 1 of nemotron_h is of type mlp, which has no attention$"):
        families.find_layer({**keys, "hybrid_override_pattern": "M-*-"}, 1)
