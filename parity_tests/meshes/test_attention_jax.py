"""Attention over simulated devices in JAX: all operands and masks, and what a ring needs of memory."""

from __future__ import annotations

import pytest

from ..support.calls import cover
from .processes.sharded_attention import MESHES, METHODS, calls, deviations, memory

CASES = {
    "few scores": (tuple(calls()), False),
    "in blocks, balanced": (("causal", "rows that see nothing", "window"), True),
}


@pytest.mark.parametrize("case", CASES)
@cover.some("whole", [False, True], always=[False])
def test_a_call_that_devices_share_is_the_plain_one(case, whole):
    names, as_many = CASES[case]
    found = deviations(names, as_many=as_many, whole=whole)
    assert len(found) == len(MESHES) * (len(METHODS) if whole else 1) * len(names)
    assert {name: one for name, one in found.items() if not one <= 1e-12} == {}


def test_a_ring_of_eight_devices_needs_a_sixth_the_memory():
    found = memory(65_536, 8)
    assert min(found.values()) >= 6.0, found
