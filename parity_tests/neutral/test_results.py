"""What public functions return: values, which nothing changes once they are made."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

MODULES = (
    "attn_bridge.checkpoints.hub.publishing",
    "attn_bridge.checkpoints.readers",
    "attn_bridge.checkpoints.options",
    "attn_bridge.checkpoints.planning.plans",
    "attn_bridge.checkpoints.verification",
    "attn_bridge.checkpoints.workers.jobs",
    "attn_bridge.checkpoints.workers.sharing",
    "attn_parity.check.report",
    "attn_parity.check.model.report",
    "attn_parity.results.findings",
    "attn_parity.results.report",
    "attn_parity.training.report",
    "fault_lab.mesh.report",
    "fault_lab.report",
)


@pytest.mark.parametrize("name", MODULES)
def test_fields_of_results_can_not_be_set(name):
    kinds = [one for one in vars(importlib.import_module(name)).values() if dataclasses.is_dataclass(one)]
    assert any(kind.__module__ == name for kind in kinds)
    for kind in kinds:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(object.__new__(kind), dataclasses.fields(kind)[0].name, None)
