"""A fault in a port of a modern variant is one fault: planted in torch and in Flax it makes the same wrong function."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import backends, torch_to_flax
from attn_bridge.parity import mutants
from attn_bridge.parity.faults import FAULTS, find_fault
from attn_bridge.parity.mutate import find_trial, run_trial
from attn_bridge.parity.port_faults import PORT_FAULTS
from attn_bridge.parity.subjects import Arguments

SEED = 500_000


def run(fault, pair, side, *, planted):
    name, arguments = fault.module(pair, planted=planted)
    module = backends.load(side, "mutants").build(name, arguments)
    torch_module = backends.load("torch", "mutants").build(name, arguments)
    shapes = {key: shape for key, (shape, _) in backends.load("torch").describe_weights(torch_module).items()}
    weights = mutants.draw_weights(shapes, pair.seed, 1.0)
    weights = torch_to_flax(weights, fault.rules(pair, shapes)) if side == "flax" else weights
    harness = backends.load_harness(side).Harness(module)
    return harness.run(weights, Arguments((), dict(pair.inputs)), None, dtype="float64").outputs[0]


@pytest.mark.parametrize("fault", PORT_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_makes_the_same_wrong_function_on_both_sides(fault):
    pairs = (fault.pair(seed) for seed in range(SEED, SEED + 200))
    pair = next(pair for pair in pairs if pair is not None)
    right = run(fault, pair, "torch", planted=False)
    wrong = run(fault, pair, "torch", planted=True)
    largest = np.abs(right).max()
    assert np.abs(wrong - right).max() > 1e-9 * largest
    assert np.abs(run(fault, pair, "flax", planted=True) - wrong).max() < 1e-11 * largest
    assert np.abs(run(fault, pair, "flax", planted=False) - right).max() < 1e-11 * largest


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_convolution_read_backwards_in_time_is_found(side):
    fault = find_fault("delta-taps-reversed")
    seed = next(seed for seed in range(SEED, SEED + 200) if fault.pair(seed) is not None)
    result = run_trial(find_trial(f"delta-taps-reversed:{side}:{seed}"))
    assert (result.verdict, result.outcome, result.change.effect) == ("different", "detected", "meaning")


def test_a_fault_is_not_planted_where_there_is_nothing_to_change():
    fault = find_fault("grouped-alibi-missing")
    pairs = {seed: fault.pair(seed) for seed in range(SEED, SEED + 40)}
    without = next(seed for seed, pair in pairs.items() if pair is None)
    with pytest.raises(ValueError, match=f"the configuration of seed {without} does not have what this fault needs"):
        find_trial(f"grouped-alibi-missing:flax:{without}")


def test_every_modern_variant_is_among_the_right_pairs_and_has_faults():
    modern = {variant.name for variant in mutants.VARIANTS if variant.examples}
    assert {fault.variant for fault in PORT_FAULTS} == modern
    assert modern <= {mutants.draw_pair(seed).name for seed in range(5000, 5300)}


def test_a_fault_that_does_not_exist_is_refused():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    with pytest.raises(ValueError, match=r"fault \(nonsense\) must be one of query-weight-not-transposed, "):
        find_fault("nonsense")
