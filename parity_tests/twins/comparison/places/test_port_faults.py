"""A fault in a port of a modern variant is one fault: planted in torch and in Flax it makes the same wrong function."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attn_bridge import backends, torch_to_flax
from attn_bridge.specs import VARIANTS, find_variant
from attn_parity.sides.subject import Arguments, load_adapter
from fault_lab.adapters import load_mutants
from fault_lab.driver import find_trial, run_trial
from fault_lab.planted import mutants, pairs
from fault_lab.planted.faults import FAULTS, find_fault
from fault_lab.planted.port_faults import PORT_FAULTS

SEED = 500_000


def run(fault, pair, side, *, planted):
    name, arguments = fault.module(pair, planted=planted)
    module = load_mutants(side, "mutants").build(name, arguments)
    torch_module = load_mutants("torch", "mutants").build(name, arguments)
    shapes = {key: shape for key, (shape, _) in backends.load("torch").describe_weights(torch_module).items()}
    weights = mutants.draw_weights(shapes, pair.seed, 1.0)
    weights = torch_to_flax(weights, fault.rules(pair, shapes)) if side == "flax" else weights
    runner = load_adapter(side).subject_of(module)
    return runner.run(weights, Arguments((), dict(pair.inputs)), None, dtype="float64").outputs[0]


@pytest.mark.parametrize("fault", PORT_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_makes_the_same_wrong_function_on_both_sides(fault):
    drawn = (pair for seed in range(SEED, SEED + 200) if (pair := fault.pair(seed)) is not None)
    for pair in itertools.islice(drawn, 3):  # one may hide it: numbers that no clip reaches
        right = run(fault, pair, "torch", planted=False)
        wrong = run(fault, pair, "torch", planted=True)
        largest = np.abs(right).max()
        if is_visible := bool(np.abs(wrong - right).max() > 1e-9 * largest):
            break
    assert is_visible
    assert np.abs(run(fault, pair, "flax", planted=True) - wrong).max() < 1e-11 * largest
    assert np.abs(run(fault, pair, "flax", planted=False) - right).max() < 1e-11 * largest


def example(variant, name):
    (found,) = (one for one in find_variant(variant).examples if one.name == name)
    return found.config


def output(variant, config, weights, x):
    """Run our own module on given weights."""
    module = backends.load("torch").build(find_variant(variant), {"config": config}, "float64")
    return load_adapter("torch").subject_of(module).run(weights, Arguments((), {"x": x}), None).outputs[0]


def planted(name, config, weights, x):
    """Run a port that goes wrong on the same weights."""
    fault = find_fault(name)
    arguments = {"variant": fault.variant, "config": config, "reads": fault.wrong(config)}
    module = load_mutants("torch", "mutants").build("Port", arguments)
    weights = {f"port.{name}": array for name, array in weights.items()}
    runner = load_adapter("torch").subject_of(module)
    return runner.run(weights, Arguments((), {"x": x}), None, dtype="float64").outputs[0]


def drawn(config):
    random = np.random.default_rng(3)
    weights = {row.rule.torch: random.normal(size=row.shape) for row in config.parameters}
    return weights, random.normal(size=(2, 7, config.d_in))


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma", "qwen3-next"])
def test_the_tiled_heads_fault_tiles_keys_and_values(name):
    config = example("GroupedQueryAttention", name)
    weights, x = drawn(config)
    tiled = dict(weights)
    for key in ("W_key.weight", "W_key.bias", "W_value.weight", "W_value.bias"):
        if key in weights:
            repeats = (config.num_heads // config.num_kv_heads, *[1] * (weights[key].ndim - 1))
            tiled[key] = np.tile(weights[key], repeats)
    expected = output("GroupedQueryAttention", config.replace(num_kv_heads=config.num_heads), tiled, x)
    found = planted("grouped-heads-tiled", config, weights, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_the_rope_first_fault_swaps_the_query_rows():
    config = example("MultiHeadLatentAttention", "deepseek-v3")
    weights, x = drawn(config)
    heads = weights["W_query.weight"].reshape(config.num_heads, -1, config.query_dim)
    rope, nope = np.split(heads, [config.rope_dim], axis=1)
    turned = weights | {"W_query.weight": np.concatenate([nope, rope], 1).reshape(weights["W_query.weight"].shape)}
    expected = output("MultiHeadLatentAttention", config, turned, x)
    assert np.abs(planted("latent-rope-first", config, weights, x) - expected).max() < 1e-12 * np.abs(expected).max()


def test_the_value_first_fault_permutes_the_convolutions_channels():
    config = example("GatedDeltaNet", "qwen3-next")
    weights, x = drawn(config)
    value, rest = np.split(weights["conv1d.weight"], [config.value_width])
    expected = output("GatedDeltaNet", config, weights | {"conv1d.weight": np.concatenate([rest, value])}, x)
    found = planted("delta-channels-value-first", config, weights, x)
    assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_convolution_read_backwards_in_time_is_found(side):
    fault = find_fault("delta-taps-reversed")
    seed = next(seed for seed in range(SEED, SEED + 200) if fault.pair(seed) is not None)
    result = run_trial(find_trial(f"delta-taps-reversed:{side}:{seed}"))
    assert (result.verdict, result.outcome, result.change.effect) == ("different", "detected", "meaning")


def test_a_fault_without_anything_to_change_is_not_planted():
    fault = find_fault("grouped-alibi-missing")
    planted = {seed: fault.pair(seed) for seed in range(SEED, SEED + 40)}
    without = next(seed for seed, pair in planted.items() if pair is None)
    with pytest.raises(ValueError, match=f"the configuration of seed {without} does not have what this fault needs"):
        find_trial(f"grouped-alibi-missing:flax:{without}")


def test_every_modern_variant_has_right_pairs_and_faults():
    modern = {variant.name for variant in VARIANTS if variant.examples}
    assert {fault.variant for fault in PORT_FAULTS} == modern
    assert modern <= {pairs.draw_pair(seed).name for seed in range(5000, 5300)}


def test_a_fault_that_does_not_exist_is_refused():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    with pytest.raises(ValueError, match=r"fault \(nonsense\) must be one of query-weight-not-transposed, "):
        find_fault("nonsense")
