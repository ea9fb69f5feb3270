"""`attn-bridge mutate --mesh` finds and names distributed faults, and objects to no right sharded pair."""

from __future__ import annotations

import pytest

from attn_bridge.parity import mutate_mesh
from fault_lab.mesh.driver import run_cases

FAULTS = ("attention-reduction-missing", "mlp-bias-on-every-rank", "heads-of-ranks-in-wrong-order")
"""What devices hold copies of, what is added by each of them, and what they use of each other."""

IN_CONTEXT = ("padding-of-first-shard", "gradient-of-one-shard")


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize(("sizes", "faults"), [({"tensor": 2}, FAULTS), ({"context": 2}, IN_CONTEXT)])
def test_faults_are_found_and_named_and_right_pairs_pass(framework, sizes, faults):
    report = mutate_mesh(sizes, 2, faults, 5001, frameworks=[framework])
    assert report.passed, report.lines()
    assert {one.trial.fault for one in report.visible} == set(faults)
    assert report.unnamed == [], report.lines()
    assert all(one.change.changes_meaning for one in report.visible)
    assert len(report.right) == 2


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_equal_tokens_reveal_a_fault_in_which_tokens_meet(framework):
    (found,) = run_cases({"tensor": 2, "context": 2}, [f"ring-hop-doubled:{framework}:132000"]).results
    assert found.outcome == "detected"
    assert found.kind.startswith("the sides agree where all tokens are the same one: consistent with devices that let ")


NAMED = {
    "merge-weights-swapped": (135000, "by weights of a softmax that do not add up to 1"),
    "sinks-at-every-hop": (137008, "the sides agree once attention.sinks is log(2) larger in "),
    "heads-exchanged-back-in-wrong-order": (139002, "exchange their parts of attention.inner_norm.weight"),
    "input-gradient-not-reduced": (143000, ""),
    "norm-gradient-of-shard-alone": (145000, "consistent with a gradient that is not added up over the 2 devices"),
}
"""Fault -> seed of a configuration, and what its hint says; "" where copies that differ are named in its place."""


@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_faults_that_only_other_numbers_tell_are_named(framework):
    cases = [f"{fault}:{framework}:{seed}" for fault, (seed, _) in NAMED.items()]
    for found in run_cases({"tensor": 2, "context": 2}, cases).results:
        assert found.outcome == "detected"
        assert found.is_named, found
        assert NAMED[found.trial.fault][1] in found.kind, found.kind
