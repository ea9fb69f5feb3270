"""Weights that devices share: written, loaded, saved and transferred as those of plain modules, each part where it is.

The scenarios run in workers, once for torch, four ranks over gloo, and once for JAX, one process with eight devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attn_bridge.parity import workers

from ..support import sharded_weights

RANKS = {"torch": 4, "jax": 1}
CASES = [("torch", one) for one in (*sharded_weights.BOTH, *sharded_weights.TORCH)]
CASES += [("jax", one) for one in sharded_weights.BOTH]

Outcome = list[dict[str, str]]
"""For each rank: scenario -> what went wrong."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Outcome]]:
    """Return what runs all scenarios of a framework, once."""
    found: dict[str, Outcome] = {}

    def run(framework: str) -> Outcome:
        if framework not in found:
            folder: Path = tmp_path_factory.mktemp(framework)
            count = RANKS[framework]
            tasks = [(framework, rank, str(folder)) for rank in range(count)]
            found[framework] = list(workers.run(sharded_weights.run, tasks, jobs=count))
        return found[framework]

    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", flags)
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield run


@pytest.mark.parametrize(("framework", "scenario"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_scenario(outcome: Callable[[str], Outcome], framework: str, scenario: Callable[..., None]):
    problems = {rank: one.get(scenario.__name__) for rank, one in enumerate(outcome(framework))}
    assert problems == dict.fromkeys(range(RANKS[framework]))
