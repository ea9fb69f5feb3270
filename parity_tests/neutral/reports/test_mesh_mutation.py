"""Distributed faults: the same in both frameworks, planted where they can show, counted and named honestly."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from attn_bridge.cli.app import run
from attn_bridge.specs import VARIANTS
from attn_parity.check.mesh.cases import MODELS
from fault_lab.mesh.configs import draw_mesh_config
from fault_lab.mesh.driver import mutate_mesh, plan_trials, run_cases
from fault_lab.mesh.faults import MESH_FAULTS, find_mesh_fault
from fault_lab.mesh.pairs import draw_right
from fault_lab.mesh.report import MeshMutationReport
from fault_lab.mesh.trials import MeshResult, MeshTrial
from fault_lab.visibility import Change

ROOT = Path(__file__).parents[3]
SIZES = {"tensor": 2, "context": 2}
CASE = "attention-reduction-missing:flax:105000"


def texts(package: str) -> set[str]:
    """Return the strings in the block of a framework."""
    files = (ROOT / "fault_lab" / "frameworks" / package / "mesh_mutants").glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_every_fault_stands_in_the_block_of_both_frameworks(package):
    known = texts(package)
    for fault in MESH_FAULTS:
        place, _, rest = fault.name.partition("-")
        assert fault.name in known or (place in ("attention", "mlp") and rest in known), fault.name


def test_there_are_enough_faults_with_unique_names():
    assert len({fault.name for fault in MESH_FAULTS}) == len(MESH_FAULTS) >= 25


def test_every_fault_is_planted_where_it_can_show():
    planned = plan_trials("flax", SIZES, 2, MESH_FAULTS, 7, plants=2)
    assert [str(one) for one in planned[:2]] == ["right:flax:7", "right:flax:8"]
    planted = planned[2:]
    assert [one.fault for one in planted] == [fault.name for fault in MESH_FAULTS for _ in range(2)]
    assert all(find_mesh_fault(one.fault).needs(draw_mesh_config(one.seed, SIZES)) for one in planted)


def test_faults_that_a_mesh_cannot_have_are_left_out():
    names = {fault.name for fault in MESH_FAULTS}
    planted = {
        axes: {one.fault for one in plan_trials("torch", dict.fromkeys(axes, 2), 0, MESH_FAULTS, 0, plants=1)}
        for axes in (("tensor",), ("context",), ("tensor", "context"))
    }
    tensor, context, both = planted.values()
    assert "mlp-reduction-missing" in tensor - context
    assert "ring-hop-dropped" in context - tensor
    assert tensor & context == {"weight-stale-on-one-device"}
    assert both - tensor - context == {name for name in names if name.endswith("-over-wrong-axis")}
    assert both == names


@pytest.mark.parametrize("seed", range(30))
def test_devices_share_every_drawn_block(seed):
    config = draw_mesh_config(seed, SIZES)
    assert np.array_equal(np.sort(config.layout(2).ravel()), np.arange(config.tokens))
    for name, shape in config.shapes().items():
        axis = config.cut_axis(name)
        assert axis is None or shape[axis] % config.tensor == 0
    assert set(config.shapes()) >= {"attention.q_proj.weight", "mlp.fc_out.bias"}


def test_right_pairs_are_modules_and_models():
    """No device can share a function, which has no weights."""
    names = {draw_right(seed, SIZES).case.name.partition(" ")[0] for seed in range(60)}
    assert names >= {"GroupedQueryAttention", "MultiHeadAttention"}
    assert len(names & {variant.name for variant in VARIANTS if not variant.is_function}) > 4
    assert names & MODELS.keys()


def result(fault, outcome, **facts):
    """Return what came of a trial."""
    change = Change(0.5, 0.5, 1e-16) if fault else None
    return MeshResult(MeshTrial(fault, "flax", 3), {}, "different", change=change, outcome=outcome, **facts)


def report(*results):
    """Return a report."""
    return MeshMutationReport(tuple(results), SIZES, 1, 1, 5000, {"jax": "0"}, 2.0)


RIGHT = MeshResult(MeshTrial("", "flax", 3), {}, "equal", outcome="right")
NAMED = result("ring-hop-dropped", "detected", shard="output only in shard context=1 of 2")
PLACED = result("ring-hop-doubled", "detected", place="first divergence (forward) in attention")


def test_a_place_alone_is_found_and_not_named():
    found = report(RIGHT, NAMED, PLACED)
    assert found.passed
    assert found.summary() == (
        "2 of 2 visible plants of 2 distributed faults detected, 1 named by shard or kind, "
        "0 false alarms on 1 right pairs, in 2 s"
    )
    assert [cells[2] for cells in found.rows()] == ["1/1, 1", "1/1, 0"]
    assert found.lines() == ["not named: ring-hop-doubled:flax:3: first divergence (forward) in attention"]


@pytest.mark.parametrize(
    "wrong",
    [
        result("ring-hop-dropped", "missed"),
        dataclasses.replace(RIGHT, verdict="different", outcome="false alarm"),
        result("ring-hop-dropped", "invisible"),
    ],
    ids=lambda one: one.outcome,
)
def test_misses_false_alarms_and_faults_never_seen_do_not_pass(wrong):
    assert not report(RIGHT, NAMED if wrong.outcome != "invisible" else PLACED, wrong).passed


def test_the_json_and_the_page_say_what_was_found(tmp_path):
    found = report(RIGHT, NAMED)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["passed"] is True
    assert [one["case"] for one in data["trials"]] == ["right:flax:3", "ring-hop-dropped:flax:3"]
    assert data["trials"][1]["shard"] == "output only in shard context=1 of 2"
    page = found.to_markdown(tmp_path / "page.md")
    assert "| ring-hop-dropped | ring ends one hop early | 1/1, 1 | output only in shard context=1 of 2 |" in page
    assert "<!-- made by: attn-bridge mutate --mesh tensor=2,context=2 --configs 1 --plants 1 -->" in page


USAGE_ERRORS = [
    (["--mesh", "tensor"], "error: --mesh takes axes such as tensor=2,context=2, each once, got tensor\n"),
    (["--mesh", "tensor=1"], "error: devices of the mesh (1) must be 2 to 16\n"),
    (["--mesh", "rows=2"], "error: axis of the mesh ('rows') must be one of tensor, context, fsdp\n"),
    (["--mesh", "tensor=2", "--faults", "1000"], f"error: faults (1000) must be at most {len(MESH_FAULTS)}\n"),
    (["--mesh", "tensor=2", "--framework", "numpy"], "error: framework ('numpy') must be one of torch, flax\n"),
    (["--mesh", "tensor=2", "--jobs", "3"], "error: --mesh goes with "),
    (["--framework", "torch"], "error: --framework (torch) goes with --mesh\n"),
    (["--mesh", "tensor=2", "--case", "nonsense"], "error: case (nonsense) must read FAULT:FRAMEWORK:SEED or "),
    (["--mesh", "tensor=2", "--case", "ring-gone:torch:5"], "error: fault (ring-gone) must be one of "),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS, ids=lambda value: " ".join(value)[:40])
def test_bad_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert run(["mutate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_numbers_and_names_are_checked():
    with pytest.raises(ValueError, match=r"configs \(-1\) must be at least 0"):
        mutate_mesh(SIZES, -1)
    with pytest.raises(ValueError, match="does not have what this fault needs"):
        run_cases({"tensor": 2}, ["ring-hop-dropped:flax:1"])
