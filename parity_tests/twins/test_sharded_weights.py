"""Weights that devices share in torch: written, loaded and saved as those of plain modules, each part where it is.

The scenarios run in workers, four ranks over gloo, each of which has Flax modules on four devices of its own as well.
"""

from __future__ import annotations

import pytest

from ..support.sharded import sharded_weights
from ..support.sharded.sharded_weights import Outcome


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return what came of all scenarios, for each rank."""
    return sharded_weights.outcome("torch", tmp_path_factory)


@pytest.mark.parametrize("scenario", [*sharded_weights.BOTH, *sharded_weights.TORCH], ids=lambda one: one.__name__)
def test_scenario(outcome: Outcome, scenario: sharded_weights.Scenario):
    problems = [rank.get(scenario.__name__) for rank in outcome]
    assert problems == [None] * sharded_weights.RANKS["torch"]
