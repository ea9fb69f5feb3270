"""Each side of a pair of `mutate` runs attention by a kernel that its seed draws, and says which."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_bridge import backends, torch_to_flax
from attn_parity.settings.precision import strict
from attn_parity.sides.subject import Arguments, load_adapter
from fault_lab.adapters import load_mutants
from fault_lab.driver import find_trial, run_trial
from fault_lab.planted import mutants, pairs
from fault_lab.planted.block_faults import BLOCK_FAULTS
from fault_lab.planted.kernels import OWN_FORMULA, Order, draw_order
from parity_tests.support.calls.blocks import find_config

SEED = 410_000
SIDES = ("torch", "flax")

KERNELS = {side: load_mutants(side, "kernels").KERNELS for side in SIDES}


def block(side, config, order=None):
    return load_mutants(side, "mutants").build("Block", {"config": config}, order)


def only(side, name):
    """Return an order that asks one kernel, and the plain reference where it does not support a call."""
    return Order({name: KERNELS[side].get(name), "reference": KERNELS[side]["reference"]})


def run(side, config, order=None, dtype="float64"):
    """Run a block on numbers of its seed: its outputs and gradients."""
    shapes = {
        name: shape for name, (shape, _) in backends.load("torch").describe_weights(block("torch", config)).items()
    }
    weights = mutants.draw_weights(shapes, config.seed, 1.0)
    if side == "flax":
        weights = torch_to_flax(weights, mutants.block_rules(shapes))
    inputs = config.inputs()
    random = np.random.default_rng(config.seed)
    cotangents = [random.normal(size=inputs["x"].shape).astype(dtype) for _ in range(config.outputs)]
    subject = load_adapter(side).subject_of(block(side, config, order))
    found = subject.run(weights, Arguments((), inputs), cotangents, dtype=dtype)
    return [*found.outputs, found.input_gradients[0], *found.parameter_gradients.values()]


@functools.cache
def formula(side, config, dtype="float64"):
    """Run a block by its own formula."""
    return run(side, config, dtype=dtype)


PADDED = find_config(SEED, lambda one: one.causal and one.padding == "left" and one.empty_rows and one.groups > 1)
CAPPED = find_config(SEED, lambda one: one.softcap is not None and one.sinks and one.gain)
PLAIN = {
    "torch": ("sdpa", "sdpa_math", "sdpa_flash", "by_rows", "eager", "reference"),
    "flax": ("few_queries", "blocked", "jax.nn", "nnx", "reference"),
}
"""Those that serve every call without soft-cap and sinks, on processors, in float64 as well."""


@pytest.mark.parametrize(("side", "name"), [(side, name) for side in SIDES for name in PLAIN[side]])
def test_every_kernel_computes_the_blocks_attention(side, name):
    config = dataclasses.replace(PADDED, softcap=None, sinks=False)
    order = only(side, name)
    assert_same(formula(side, config), run(side, config, order))
    assert order.served == [name]


@pytest.mark.parametrize(
    ("side", "name"),
    [
        *(("torch", one) for one in ("by_rows", "cpu_flash")),
        *(("flax", one) for one in ("few_queries", "blocked", "cpu_flash")),
    ],
)
def test_soft_cap_and_sinks_are_those_of_the_block(side, name):
    if backends.load(side, "implementations").unavailable()[name] is not None:
        pytest.skip("it does not run on this machine")
    dtype, limit = ("float32", 2e-4) if name == "cpu_flash" else ("float64", 1e-12)
    order = only(side, name)
    assert_same(formula(side, CAPPED, dtype), run(side, CAPPED, order, dtype), limit)
    assert order.served == [name]


@pytest.mark.parametrize(
    ("side", "name"), [("torch", "eager"), ("torch", "cpu_flash"), ("flax", "jax.nn"), ("flax", "cpu_flash")]
)
def test_an_unsupported_call_goes_to_the_next_kernel(side, name):
    """None has soft-cap and sinks, or float64."""
    order = only(side, name)
    assert_same(formula(side, CAPPED), run(side, CAPPED, order))
    assert order.served == ["reference"]


def assert_same(wanted, got, limit=1e-12):
    for one, two in zip(wanted, got, strict=True):
        assert np.abs(one - two).max() <= limit * max(np.abs(one).max(), 1e-3)


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "is_fused"), [("sdpa", False), ("sdpa_math", False), ("sdpa_flash", True)])
def test_torchs_fused_kernels_run_under_strict(name, is_fused):
    config = dataclasses.replace(PADDED, softcap=None, sinks=False)
    inputs = {key: torch.from_numpy(array) for key, array in config.inputs().items()}
    with strict(), Operations() as seen:
        block("torch", config, only("torch", name)).eval()(**inputs)[0].sum().backward()
    assert ("_scaled_dot_product_flash_attention_for_cpu_backward" in seen.names) == is_fused


def test_the_kernel_order_follows_from_seed_and_side():
    names = ["one", "two", "three", "four"]
    orders = {seed: draw_order(seed, "torch", names) for seed in range(200)}
    assert orders[7] == draw_order(7, "torch", names)
    assert {order[0] for order in orders.values()} == set(names)
    assert any(draw_order(seed, "flax", names) != orders[seed] for seed in orders)
    for seed, order in orders.items():
        assert [name for name in draw_order(seed, "torch", [*names, "five"]) if name != "five"] == order


def test_each_kernel_of_this_machine_is_drawn():
    for side in SIDES:
        kernels = load_mutants(side, "kernels")
        firsts = {kernels.draw(seed, "Block").first for seed in range(SEED, SEED + 300)}
        assert firsts == {*KERNELS[side], OWN_FORMULA}
        assert OWN_FORMULA not in {kernels.draw(seed, "GroupedQueryAttention").first for seed in range(300)}


def attending(wanted):
    """Return the first seed whose right pair attends and whose first kernels are as wanted."""
    names = {side: load_mutants(side, "kernels") for side in SIDES}
    return mutants.find_seed(
        SEED,
        lambda seed: (
            (pair := pairs.draw_pair(seed)).name == "CausalAttention"
            and all(names[side].draw(seed, pair.name).first == first for side, first in wanted.items())
        ),
    )


def test_a_right_pairs_kernels_follow_from_its_seed():
    seed = attending({"torch": "eager", "flax": "nnx"})
    result = run_trial(find_trial(f"right:{seed}"))
    assert result.outcome == "right", result.explanation
    assert result.described["kernels"] == {"torch": ["eager"], "flax": ["nnx"]}
    assert json.loads(json.dumps(result.to_json()))["config"]["kernels"] == {"torch": ["eager"], "flax": ["nnx"]}


def test_a_drawn_kernel_that_is_wrong_is_a_false_alarm(monkeypatch):
    seed = attending({"torch": "eager"})
    right = KERNELS["torch"]["eager"].attend
    monkeypatch.setattr(KERNELS["torch"]["eager"], "attend", lambda call: right(call) * 1.0001)
    assert run_trial(find_trial(f"right:{seed}")).outcome == "false alarm"


def test_a_fault_in_attention_keeps_the_faulty_code():
    config = find_config(SEED, lambda one: one.gain > 0)
    result = run_trial(find_trial(f"scale-off-by-1e-4:flax:{config.seed}"))
    assert result.outcome == "detected"
    assert result.described["kernels"]["flax"] == [OWN_FORMULA]
    assert result.described["kernels"]["torch"]


def test_attention_faults_are_those_the_formula_reads():
    for side in SIDES:
        block = load_mutants(side, "mutants").Block
        source = "".join(inspect.getsource(getattr(block, name)) for name in ("score", "weigh", "mix"))
        assert {one.name for one in BLOCK_FAULTS if f'"{one.name}"' in source} == {
            one.name for one in BLOCK_FAULTS if one.in_attention
        }


def test_the_choice_of_kernels_is_restored():
    for side in SIDES:
        choose = backends.load(side, "implementations").choose
        run(side, find_config(SEED, lambda one: one.gain > 0), only(side, "reference"))
        assert backends.load(side, "implementations").choose is choose
