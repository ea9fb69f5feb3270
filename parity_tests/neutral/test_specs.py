"""The configs of the variants and their tables of parameters."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from attn_bridge import Rule, Rules, specs
from attn_bridge.specs.encoder_decoder_model import check_batch
from attn_parity.check.cases import cases_of

from ..support.calls.bad_calls import BAD_CALLS, MODULES
from ..support.calls.bad_configs import BAD_CONFIGS, UNCHANGED, VALID

CONFIGS: dict[str, specs.Config] = {
    "simple_self_attention": specs.SimpleSelfAttentionConfig(),
    "SelfAttention_v1": specs.SelfAttentionV1Config(3, 2),
    "SelfAttention_v2": specs.SelfAttentionV2Config(3, 2),
    "SelfAttention_v2 with biases": specs.SelfAttentionV2Config(3, 2, qkv_bias=True),
    "CausalAttention": specs.CausalAttentionConfig(3, 2, 6),
    "CausalAttention with biases": specs.CausalAttentionConfig(3, 2, 6, 0.1, True),
    "MultiHeadAttentionWrapper": specs.MultiHeadAttentionWrapperConfig(3, 2, 6, num_heads=2),
    "MultiHeadAttention": specs.MultiHeadAttentionConfig(3, 4, 6, 0.0, 2),
    "MultiHeadAttention with biases": specs.MultiHeadAttentionConfig(3, 4, 6, 0.0, 2, True),
    "LayerNorm": specs.LayerNormConfig(3),
    "GroupedQueryAttention": specs.GroupedQueryAttentionConfig(
        8, 2, 1, 3, d_out=5, qk_norm=specs.QKNorm("full"), gate=True, sinks=True
    ),
}


def projections(prefix: str, d_in: int, d_out: int, *, bias: bool) -> list[tuple[Any, ...]]:
    """Return rows of query, key and value: torch name, torch shape, Flax name, Flax shape."""
    rows = []
    for name in ("W_query", "W_key", "W_value"):
        rows.append((f"{prefix}{name}.weight", (d_out, d_in), f"{prefix}{name}.kernel", (d_in, d_out)))
        if bias:
            rows.append((f"{prefix}{name}.bias", (d_out,), f"{prefix}{name}.bias", (d_out,)))
    return rows


OUT_PROJ = [
    ("out_proj.weight", (4, 4), "out_proj.kernel", (4, 4)),
    ("out_proj.bias", (4,), "out_proj.bias", (4,)),
]
TABLES = {
    "simple_self_attention": [],
    "SelfAttention_v1": [(name, (3, 2), name, (3, 2)) for name in ("W_query", "W_key", "W_value")],
    "SelfAttention_v2": projections("", 3, 2, bias=False),
    "SelfAttention_v2 with biases": projections("", 3, 2, bias=True),
    "CausalAttention": projections("", 3, 2, bias=False),
    "CausalAttention with biases": projections("", 3, 2, bias=True),
    "MultiHeadAttentionWrapper": [row for head in (0, 1) for row in projections(f"heads.{head}.", 3, 2, bias=False)],
    "MultiHeadAttention": [*projections("", 3, 4, bias=False), *OUT_PROJ],
    "MultiHeadAttention with biases": [*projections("", 3, 4, bias=True), *OUT_PROJ],
    "LayerNorm": [("scale", (3,), "scale", (3,)), ("shift", (3,), "shift", (3,))],
    "GroupedQueryAttention": [
        ("W_query.weight", (6, 8), "W_query.kernel", (8, 6)),
        ("W_key.weight", (3, 8), "W_key.kernel", (8, 3)),
        ("W_value.weight", (3, 8), "W_value.kernel", (8, 3)),
        ("W_gate.weight", (6, 8), "W_gate.kernel", (8, 6)),
        ("out_proj.weight", (5, 6), "out_proj.kernel", (6, 5)),
        ("q_norm.scale", (6,), "q_norm.scale", (6,)),
        ("k_norm.scale", (3,), "k_norm.scale", (3,)),
        ("sinks", (2,), "sinks", (2,)),
    ],
}


@pytest.mark.parametrize("label", TABLES)
def test_the_table_lists_every_parameter_by_name_and_shape(label):
    rows = [(row.rule.torch, row.shape, row.rule.flax, row.flax_shape) for row in CONFIGS[label].parameters]
    assert rows == TABLES[label]


@pytest.mark.parametrize("label", TABLES)
def test_the_rules_are_those_of_the_table(label):
    assert CONFIGS[label].rules() == Rules(row.rule for row in CONFIGS[label].parameters)


def test_linear_layers_are_transposed_and_bare_matrices_are_not():
    assert CONFIGS["SelfAttention_v2"].parameters[0].rule == Rule("W_query.weight", "W_query.kernel", "o i -> i o")
    assert CONFIGS["SelfAttention_v1"].parameters[0].rule == Rule("W_query", "W_query", "i o -> i o")


def test_exercise_3_3_the_attention_of_the_smallest_gpt_2():
    """Exercise 3.3 of the book: 768 wide, 12 heads, 1024 tokens; 2,360,064 parameters."""
    config = specs.MultiHeadAttentionConfig(768, 768, 1024, dropout=0.0, num_heads=12)
    assert sum(math.prod(row.shape) for row in config.parameters) == 2_360_064
    assert config.head_dim == 64


def test_the_wrapper_gives_heads_a_causal_attention_config():
    config = specs.MultiHeadAttentionWrapperConfig(3, 2, 6, 0.25, 4, True)
    assert config.head == specs.CausalAttentionConfig(3, 2, 6, 0.25, True)


# ---- configs are values


@pytest.mark.parametrize("label", CONFIGS)
def test_a_config_is_a_frozen_value(label):
    config = CONFIGS[label]
    assert config == config.replace()
    assert hash(config) == hash(config.replace())
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError, match=field.name):
            setattr(config, field.name, 1)


FEED = specs.FeedForwardConfig(8, 12)
NORM = specs.RMSNormConfig(8)
ENCODER = specs.StackConfig(
    8, (specs.EncoderDecoderBlockConfig(specs.GroupedQueryAttentionConfig(8, 2), FEED, NORM),), 6
)
DECODER_BLOCK = specs.EncoderDecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), FEED, NORM, specs.CrossAttentionConfig(8, 2)
)


@pytest.mark.parametrize(
    "config",
    [
        specs.GPTModelConfig(11, 6, 8, 2, 1),
        specs.BertEncoderConfig(11, 8, 1, 2, 12, 6),
        specs.DecoderConfig(11, 8, (), NORM),
        specs.EncoderDecoderConfig(11, ENCODER, specs.StackConfig(8, (DECODER_BLOCK,), 6)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_trainer_reads_and_writes_the_config_of_a_model(config):
    before = config.replace()
    config.use_cache = False
    config.get_text_config().eos_token_id = 1
    assert config == before
    with pytest.raises(dataclasses.FrozenInstanceError, match="vocab_size"):
        config.vocab_size = 12
    assert json.loads(config.to_json_string()).keys() == {field.name for field in dataclasses.fields(config)}
    with pytest.raises(ValueError, match=r"^use_cache \(True\) must be False: give the call a cache of init_cache$"):
        config.use_cache = True


def test_configs_of_different_variants_are_different():
    assert len(set(CONFIGS.values())) == len(CONFIGS)
    assert specs.SelfAttentionV1Config(3, 2) != specs.SelfAttentionV2Config(3, 2)


def test_a_replaced_field_is_checked_again():
    config = specs.MultiHeadAttentionConfig(3, 4, 6, num_heads=2)
    assert config.replace(num_heads=4).head_dim == 1
    with pytest.raises(ValueError, match="d_out") as caught:
        config.replace(num_heads=3)
    assert str(caught.value) == "d_out (4) must be a multiple of num_heads (3)"


def test_sizes_and_rates_become_plain_numbers():
    config = specs.CausalAttentionConfig(np.int64(3), np.int32(2), np.uint8(6), dropout=0)
    assert config == specs.CausalAttentionConfig(3, 2, 6, 0.0)
    kinds = [type(value) for value in dataclasses.astuple(config)]
    assert kinds == [int, int, int, float, bool]


CONSTRUCTORS = [row for row in BAD_CALLS if row.call is None]


@pytest.mark.parametrize("row", CONSTRUCTORS, ids=lambda row: row.id)
def test_the_config_itself_refuses_bad_arguments(row):
    """So that a bad argument gives the same message on both sides."""
    with pytest.raises(row.error) as caught:
        specs.find_variant(row.target).config(**row.arguments)
    assert type(caught.value) is row.error
    assert str(caught.value) == row.message


def test_the_bad_calls_cover_every_field_of_every_config():
    for name in MODULES:
        fields = {field.name for field in dataclasses.fields(specs.find_variant(name).config)}
        told = {field for row in CONSTRUCTORS if row.target == name for field in fields if f"-{field}-" in row.id}
        assert told == fields, name


@pytest.mark.parametrize("target", VALID)
def test_a_config_refuses_what_breaks_a_rule(target):
    wrong = []
    for row in (row for row in BAD_CONFIGS if row.target == target):
        try:
            answer = f"accepted {dataclasses.replace(VALID[target], **row.changes)}"
        except (TypeError, ValueError) as error:
            answer = (type(error), str(error))
        if answer != (row.error, row.message):
            wrong.append((row.id, answer))
    assert not wrong


def test_heads_of_a_given_width_need_not_divide_the_input():
    sizes = {"d_in", "num_heads", "head_dim"}
    wide = [config for config in VALID.values() if sizes <= {field.name for field in dataclasses.fields(config)}]
    assert len(wide) == 8
    for config in wide:
        assert 7 % config.num_heads
        assert dataclasses.replace(config, d_in=7).head_dim == config.head_dim


def test_every_config_and_field_has_a_refusal():
    classes = {name for name in specs.__all__ if dataclasses.is_dataclass(getattr(specs, name))}
    assert classes - UNCHANGED == VALID.keys()
    unchecked = {
        f"{target}.{field.name}"
        for target, config in VALID.items()
        for field in dataclasses.fields(config)
        if not any(row.target == target and field.name in row.changes for row in BAD_CONFIGS)
    }
    assert unchecked == {"YaRNScaling.truncate"}


# ---- defaults and positions by hand


def test_sines_grow_from_a_wave_of_one_radian_to_a_ten_thousandth():
    table = specs.StackConfig(8, ENCODER.blocks, 4, position_offset=1, learned_positions=False).sines()
    rates, positions = 10000.0 ** (-np.arange(4) / 3), np.arange(-1, 4)[:, None]
    np.testing.assert_allclose(table, np.hstack([np.sin(positions * rates), np.cos(positions * rates)]), rtol=1e-12)


def test_each_sequence_of_tokens_has_a_source():
    check_batch((3, 5), (3, 7))
    with pytest.raises(ValueError, match=r"^batch of source \(3\) must be the batch of tokens \(2\)$"):
        check_batch((3, 5), (2, 5))


DEFAULTS = {
    "grouped": (
        specs.GroupedQueryAttentionConfig(12, 4, qkv_bias=True),
        {"num_kv_heads": 4, "head_dim": 3, "d_out": 12, "key_bias": True, "scale": 3**-0.5},
    ),
    "latent": (
        specs.MultiHeadLatentAttentionConfig(6, 2, 5, 3, 4, 2),
        {"d_out": 6, "scale": 7**-0.5},
    ),
    "latent of YaRN": (
        specs.MultiHeadLatentAttentionConfig(
            6, 2, 5, 3, 4, 2, position=specs.Rotary(scaling=specs.YaRNScaling(math.e, 16, mscale_all_dim=2.0))
        ),
        {"scale": 7**-0.5 * 1.2**2},
    ),
    "cross": (
        specs.CrossAttentionConfig(12, 4),
        {"d_context": 12, "num_kv_heads": 4, "head_dim": 3, "d_out": 12, "key_bias": False, "scale": 3**-0.5},
    ),
    "differential": (
        specs.DifferentialAttentionConfig(12, 4),
        {"num_kv_heads": 4, "head_dim": 3, "d_out": 12, "scale": 3**-0.5, "lambda_init": 0.8},
    ),
    "delta": (
        specs.GatedDeltaNetConfig(12, 4),
        {"num_value_heads": 4, "head_dim": 3, "value_head_dim": 3, "d_out": 12, "conv_size": 4},
    ),
    "convolution": (specs.GatedConvolutionConfig(12), {"width": 12, "d_out": 12, "conv_size": 3}),
    "mamba": (specs.MambaConfig(20), {"width": 40, "state_size": 16, "step_rank": 2, "d_out": 20, "conv_size": 4}),
    "mamba2": (
        specs.Mamba2Config(12, 4),
        {"head_dim": 6, "state_size": 128, "num_groups": 1, "norm_groups": 1, "d_out": 12, "conv_size": 4},
    ),
    "kimi": (
        specs.KimiDeltaAttentionConfig(12, 4, value_head_dim=5),
        {"head_dim": 3, "gate_rank": 5, "d_out": 12, "conv_size": 4},
    ),
    "lightning": (specs.LightningAttentionConfig(12, 4), {"head_dim": 3, "d_out": 12}),
    "linear": (specs.LinearAttentionConfig(12, 4), {"head_dim": 3, "value_head_dim": 3, "d_out": 12}),
}


def test_heads_decay_at_published_rates_by_default():
    rates = specs.LightningAttentionConfig(12, 4).decay_rates
    assert rates == pytest.approx((1 / 4, 1 / 16, 1 / 64, 1 / 256), rel=1e-14)


@pytest.mark.parametrize("label", DEFAULTS)
def test_defaults_follow_from_the_sizes(label):
    config, wanted = DEFAULTS[label]
    assert {name: getattr(config, name) for name in wanted} == pytest.approx(wanted, rel=1e-14)


# The frequencies of 8 channels with a base of 16 are 1, 1/2, 1/4 and 1/8.
LOW = 4 * math.log(8 / math.pi) / math.log(16)
SCALINGS = {
    "none": (None, [1, 1 / 2, 1 / 4, 1 / 8], 1),
    "linear": (specs.LinearScaling(4.0), [1 / 4, 1 / 8, 1 / 16, 1 / 32], 1),
    "NTK": (specs.NTKScaling(8.0), [1, 1 / 4, 1 / 16, 1 / 64], 1),
    "dynamic NTK": (specs.NTKScaling(8.0, 16), [1, 1 / 2, 1 / 4, 1 / 8], 1),
    # A channel turns 16 f / pi times in the context of 32; above 4 times it is kept, below once it is stretched.
    "Llama 3": (
        specs.Llama3Scaling(5.0, 1.0, 4.0, 32),
        [1, *(f / 5 + 4 / 5 * f * (16 * f / math.pi - 1) / 3 for f in (1 / 2, 1 / 4)), 1 / 40],
        1,
    ),
    "Llama 3 without a blend": (specs.Llama3Scaling(5.0, 2.0, 2.0, 32), [1, 1 / 2, 1 / 20, 1 / 40], 1),
    # Channels 1.35 and 3.35 turn four times and once in the context of 64: blended from 1 to 4.
    "YaRN": (specs.YaRNScaling(4.0, 64, 4.0, 1.0), [1, 1 / 2, 3 / 16, 1 / 16], 0.1 * math.log(4) + 1),
    "YaRN between channels": (
        specs.YaRNScaling(4.0, 64, 4.0, 1.0, truncate=False, attention_factor=1.25),
        [1, 1 / 2, *(f * (1 - 3 / 4 * (i - LOW) / 2) for i, f in ((2, 1 / 4), (3, 1 / 8)))],
        1.25,
    ),
    "YaRN without a blend": (
        specs.YaRNScaling(4.0, 64, 4.0, 4.0, truncate=False, mscale=2.0, mscale_all_dim=0.5),
        [1, 1 / 2, 1 / 16, 1 / 32],
        (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
    ),
    "YaRN that stretches nothing": (specs.YaRNScaling(1.0, 64, 4.0, 1.0), [1, 1 / 2, 1 / 4, 1 / 8], 1),
    "LongRoPE": (
        specs.LongRoPEScaling((1.0, 2.0, 4.0, 8.0), (1.0, 1.0, 1.0, 2.0), 16, 4.0),
        [1, 1 / 4, 1 / 16, 1 / 64],
        math.sqrt(3 / 2),
    ),
    "LongRoPE that grows nothing": (
        specs.LongRoPEScaling((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), 16, 0.5),
        [1, 1 / 2, 1 / 4, 1 / 8],
        1,
    ),
}


@pytest.mark.parametrize("label", SCALINGS)
def test_frequencies_of_rotary_positions_by_hand(label):
    scaling, frequencies, factor = SCALINGS[label]
    rotary = specs.Rotary(16.0, scaling=scaling)
    np.testing.assert_allclose(rotary.frequencies(8), frequencies, rtol=1e-13)
    assert rotary.table_factor == pytest.approx(factor, rel=1e-14)


def test_long_sequences_turn_by_factors_of_their_own():
    scaling = specs.LongRoPEScaling((1.0, 2.0, 4.0, 8.0), (1.0, 1.0, 1.0, 2.0), 16)
    np.testing.assert_allclose(scaling.long_frequencies(16.0, 8), [1, 1 / 2, 1 / 4, 1 / 16], rtol=1e-13)
    with pytest.raises(ValueError, match=r"^number of factors \(4\) must be half the channels that turn \(2\)$"):
        scaling.frequencies(16.0, 4)


ALIKE = [(16, 16, True), (17, 17, True), (1, 16, True), (16, 17, False), (17, 18, None)]


@pytest.mark.parametrize(("tokens", "other", "alike"), ALIKE)
def test_which_sequences_turn_alike(tokens, other, alike):
    longrope = specs.LongRoPEScaling((1.0,), (2.0,), 16)
    assert longrope.turns_alike(tokens, other) == (True if alike is None else alike)
    assert specs.NTKScaling(2.0, 16).turns_alike(tokens, other) == (False if alike is None else alike)
    assert specs.NTKScaling(2.0).turns_alike(tokens, other)
    assert specs.LinearScaling(2.0).turns_alike(tokens, other)


def test_ntk_slows_the_last_channels_most_whatever_the_width():
    assert [specs.NTKScaling(8.0).exponents(dim).tolist() for dim in (2, 4, 6)] == [[0], [0, 1], [0, 0.5, 1]]


def test_slopes_of_alibi_by_hand():
    assert specs.Alibi().slopes(2).tolist() == [2**-4, 2**-8]
    assert specs.Alibi().slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    assert specs.Alibi().slopes(7).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3, 2**-5]


# ---- the registry


def test_variants_are_found_by_name_and_alias():
    for variant in specs.VARIANTS:
        assert [specs.find_variant(name) for name in (variant.name, *variant.aliases)] == [variant] * (
            1 + len(variant.aliases)
        )
    assert specs.find_variant("SelfAttention").name == "SelfAttention_v2"


def test_an_unknown_variant_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="variant") as caught:
        specs.find_variant("MultiheadAttention")
    assert str(caught.value) == (
        "variant (MultiheadAttention) must be one of " + ", ".join(variant.name for variant in specs.VARIANTS)
    )


def test_names_files_and_configs_are_not_shared():
    names = [name for variant in specs.VARIANTS for name in (variant.name, *variant.aliases)]
    assert len(set(names)) == len(names)
    assert len({variant.file for variant in specs.VARIANTS}) == len(specs.VARIANTS)
    assert len({variant.config for variant in specs.VARIANTS}) == len(specs.VARIANTS)


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
def test_examples_have_unique_names_and_their_variants_configs(variant):
    assert len({example.name for example in variant.examples}) == len(variant.examples)
    assert {type(example.config) for example in variant.examples} <= {variant.config}


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
def test_a_brief_check_proves_the_meaning_of_every_example(variant):
    own, brief = cases_of(variant), cases_of(variant, is_brief=True)
    assert [case.name for case in brief] == [case.name for case in own]
    assert all("float64" in case.dtypes for case in brief)
    if variant.examples:
        assert brief[0].dtypes == ("float64", "float32", "bfloat16")
        assert {case.dtypes for case in brief[1:]} == {("float64",)}


@pytest.mark.parametrize(
    "variant", [one for one in specs.VARIANTS if not one.examples], ids=lambda variant: variant.name
)
def test_arguments_are_picked_from_named_sizes(variant):
    sizes = {"d_in": 6, "d_out": 4, "context_length": 5, "dropout": 0.1, "num_heads": 2, "qkv_bias": True, "other": 9}
    arguments = variant.config.arguments_from(sizes)
    assert "other" not in arguments
    config = variant.config(**arguments)
    assert {name: getattr(config, name) for name in arguments} == arguments
    if variant.name in ("LayerNorm", "RMSNorm"):
        assert arguments == {"emb_dim": 6}
    elif not variant.is_function:
        assert set(arguments) == {field.name for field in dataclasses.fields(config)}
