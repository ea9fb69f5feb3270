"""`attn-bridge mutate --mesh` finds and names distributed faults, and objects to no right sharded pair."""

from __future__ import annotations

import pytest

from attn_bridge.parity import mutate_mesh

FAULTS = ("attention-reduction-missing", "mlp-bias-on-every-rank", "heads-of-ranks-in-wrong-order")
"""What devices hold copies of, what is added by each of them, and what they use of each other."""

IN_CONTEXT = ("padding-of-first-shard", "ring-hop-doubled", "gradient-of-one-shard")


@pytest.mark.parametrize("framework", ["torch", "flax"])
@pytest.mark.parametrize(("sizes", "faults"), [({"tensor": 2}, FAULTS), ({"context": 2}, IN_CONTEXT)])
def test_faults_are_found_and_named_and_right_pairs_pass(framework, sizes, faults):
    report = mutate_mesh(sizes, 2, faults, 5001, frameworks=[framework])
    assert report.passed, report.lines()
    assert {one.trial.fault for one in report.visible} == set(faults)
    assert report.unnamed == [], report.lines()
    assert all(one.change.changes_meaning for one in report.visible)
    assert len(report.right) == 2
