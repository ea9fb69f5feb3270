"""The block without a fault is right, on both sides and by a third computation; with one it goes wrong as declared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attn_bridge import backends, torch_to_flax
from attn_bridge.reference import directional_derivative
from attn_parity.sides.subject import Arguments, load_adapter
from fault_lab.adapters import load_mutants
from fault_lab.planted import block_faults, mutants, pairs
from parity_tests.support.calls.blocks import find_config

from ..models.block_reference import reference

SIDES = ("torch", "flax")
BACKWARD_ONLY = ("keys-detached", "softmax-gradient-without-sum")


def config_with(**wanted):
    """Find a configuration that has some features, above the seeds of the default run."""
    return find_config(300_000, lambda config: all(getattr(config, k) == v for k, v in wanted.items()))


CONFIGS = {
    "decoder": config_with(
        causal=True, rope=True, qk_norm=True, num_kv_heads=2, num_heads=6, padding="left", hidden=12
    ),
    "encoder": config_with(causal=False, window=None, padding="right", norm="layer", hidden=9, outputs=2, rope=False),
    "capped": config_with(softcap=1.5, sinks=True, fused=True, padding="left", qkv_bias=True, norm="rms"),
    "window": config_with(window=3, sinks=True, rope=True, softcap=5.0, num_kv_heads=1, out_bias=True),
    "plain": config_with(gain=0.0, hidden=0, padding="none", input_mean=0.0),
}


def run(side, config, weights, inputs, cotangents, fault=""):
    module = load_mutants(side, "mutants").build("Block", {"config": config, "fault": fault})
    names = backends.load("torch").describe_weights(torch_block(config))
    shapes = {name: shape for name, (shape, _) in names.items()}
    rules = mutants.block_rules(shapes)
    held = torch_to_flax(weights, rules) if side == "flax" else weights
    result = load_adapter(side).subject_of(module).run(held, Arguments((), inputs), cotangents, dtype="float64")
    if cotangents is None:
        return result.outputs, {}
    gradients = result.parameter_gradients
    if side == "flax":
        gradients = {rule.torch: rule.convert(gradients[rule.flax], "flax") for rule in rules}
    return result.outputs, {"x": result.input_gradients[0], **gradients}


def torch_block(config):
    return load_mutants("torch", "mutants").build("Block", {"config": config})


def shapes_of(config):
    return {name: shape for name, (shape, _) in backends.load("torch").describe_weights(torch_block(config)).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_block_agrees_with_the_reference_forward_and_backward(name):
    config = CONFIGS[name]
    random = np.random.default_rng(config.seed)
    weights = mutants.draw_weights(shapes_of(config), config.seed, config.gain or 1.0)
    inputs = config.inputs()
    cotangents = [random.normal(size=inputs["x"].shape) for _ in range(config.outputs)]
    expected = [one for one in reference(config, weights, **inputs) if one is not None]
    directions = {key: random.normal(size=np.shape(array)) for key, array in {"x": inputs["x"], **weights}.items()}
    slopes = {
        key: directional_derivative(
            reference, config, weights, inputs["x"], inputs.get("attention_mask"), key, direction, cotangents
        )
        for key, direction in directions.items()
    }
    for side in SIDES:
        outputs, gradients = run(side, config, weights, inputs, cotangents)
        assert len(outputs) == len(expected)
        for got, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13 * np.abs(wanted).max())
        assert gradients.keys() == slopes.keys()
        largest = max(map(abs, slopes.values()))
        for key, slope in slopes.items():
            assert np.sum(gradients[key] * directions[key]) == pytest.approx(slope, abs=1e-12 * largest), (side, key)


def test_the_configurations_cover_what_the_block_can_do():
    drawn = [mutants.draw_config(seed) for seed in range(5000, 5300)]
    for field in dataclasses.fields(mutants.BlockConfig):
        if field.name not in ("seed", "dropout"):
            assert len({getattr(config, field.name) for config in drawn}) > 1, field.name
    assert any(1 < config.num_kv_heads < config.num_heads for config in drawn)
    assert sum(config.d_model != config.num_heads * config.head_dim for config in drawn) > 200
    assert any(config.empty_rows for config in drawn)
    assert {pairs.draw_pair(seed).name for seed in range(5000, 5300)} >= {
        "Block",
        "Linear",
        "LayerNorm",
        "LayerNorm (stock)",
        "MultiheadAttention",
        "TransformerEncoderLayer",
        "SelfAttention_v1",
        "MultiHeadAttention",
    }


def test_a_configuration_depends_on_its_seed_alone():
    assert mutants.draw_config(7) == mutants.draw_config(7) != mutants.draw_config(8)
    twice = [pairs.draw_pair(5001) for _ in range(2)]
    for one, two in zip(*(pair.inputs.items() for pair in twice), strict=True):
        assert one[0] == two[0]
        assert np.array_equal(one[1], two[1])


def test_a_configurations_empty_rows_follow_from_its_mask():
    config = config_with(causal=True, padding="left", window=None)
    assert config.empty_rows
    assert not dataclasses.replace(config, padding="right").empty_rows
    assert not dataclasses.replace(config, causal=False).empty_rows


@pytest.mark.parametrize("fault", block_faults.BLOCK_FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_planted_and_changes_what_it_says(fault):
    if fault.held:
        pytest.skip("it is in the weights, not in the code")
    config = find_config(
        300_000, lambda one: fault.applies(one) and (fault.hidden is block_faults.always or not fault.hidden(one))
    )
    random = np.random.default_rng(1)
    weights = mutants.draw_weights(shapes_of(config), 1, 1.0)
    inputs = config.inputs()
    cotangents = [random.normal(size=inputs["x"].shape) for _ in range(config.outputs)]
    right, right_gradients = run("torch", config, weights, inputs, cotangents)
    wrong, wrong_gradients = run("torch", config, weights, inputs, cotangents, fault.name)
    forward, backward = apart(right, wrong), apart(right_gradients.values(), wrong_gradients.values())
    if fault.verdict == "precision" or fault.hidden is block_faults.always:
        assert max(forward, backward) < 1e-8, "in float64 it is the same function"
    elif fault.name in BACKWARD_ONLY:
        assert forward < 1e-14
        assert backward > 1e-3
    else:
        assert max(forward, backward) > 1e-9
    if fault.verdict != "inconclusive":  # the other side draws another dropout mask
        backward = fault.name in BACKWARD_ONLY
        other, other_gradients = run("flax", config, weights, inputs, cotangents if backward else None, fault.name)
        assert apart(wrong, other) < 1e-8
        if backward:
            assert apart([wrong_gradients[name] for name in other_gradients], other_gradients.values()) < 1e-8


def apart(ones, others):
    """Return the largest difference of arrays, as a part of the largest value of all of them."""
    pairs = list(zip(ones, others, strict=True))
    return max(np.abs(one - two).max() for one, two in pairs) / max(np.abs(one).max() for one, _ in pairs)
