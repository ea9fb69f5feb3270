"""The whole report in a terminal, on request: the tree of modules and the table of tensors."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from attn_parity.rendering import branch, outline
from attn_parity.results.findings import ModuleNode
from parity_tests.support.judging.reports import different_report

from .renderings import EMPTY, printed


def test_details_are_shown_on_request():
    flat = " ".join(printed(different_report(), 110, full=True).split())
    for line in (
        "first divergence (forward) in blocks.3.norm1 (Flax: layers.3.norm1): eps is 1e-05",
        "hint: both eps differ by a factor of 10",
        "grad head.weight: precision: flax used 180% of its allowance in float32",
        "noise, each side against itself, relative: torch, run twice 0; Flax, eager and jit 2.2e-16",
        "unexercised (no comparison reached them): blocks.{i}.attn.rel_bias (12); pos_ids.table",
        "invariant (the outputs do not depend on them): blocks.{i}.attn.W_key.bias (12)",
        "python 3.11.7, machine x86_64, 2 cores, torch 2.13.0+cpu",
        "peak memory 1.3 GB",
        "pairing of parameters: 48 by names, 1 by probe",
    ):
        assert line in flat


def test_the_whole_tree_marks_one_module_and_folds_equal_neighbours():
    out = io.StringIO()
    Console(file=out, width=110).print(branch.tree(different_report()))
    lines = out.getvalue().splitlines()
    marked = [place for place, line in enumerate(lines) if "<- first divergence here" in line]
    assert len(marked) == 1
    assert re.search(r"norm1 .* different +fwd 3.1e-03 +bwd 5.2e-03 +x3e\+04$", lines[marked[0] - 1])
    tree = "\n".join(lines)
    assert re.search(r"blocks\.0 \.\.\. blocks\.2 .* 3 equal +fwd 3.2e-15 +bwd 5.1e-15", tree)
    assert re.search(r"blocks\.4 \.\.\. blocks\.11 .* 8 equal", tree)
    assert re.search(r"pos_ids .*torch only$", tree, re.M)
    assert re.search(r"probe .*Flax only$", tree, re.M)
    assert re.search(r"drop .*not judged$", tree, re.M)
    assert "blocks.7" not in tree


def test_everything_is_shown_on_request():
    shown = printed(different_report(), 120, full=True)
    assert all(f"── blocks.{index} " in shown for index in range(12))
    assert shown.count("grad blocks.") == 49
    assert "layers.11.attn.out_proj.kernel" in shown
    assert "{i}.attn.W_query" not in shown


def test_a_small_tree_is_shown_whole():
    leaves = tuple(ModuleNode(f"a.{i}", f"a.{i}", "Linear", "Linear", "equal") for i in range(5))
    assert [len(run) for run in outline.runs(leaves, collapse=True)] == [5]
    report = dataclasses.replace(EMPTY, tree=ModuleNode("a", "a", "Stack", "Stack", "equal", children=leaves))
    assert re.findall(r"── (\d)  Linear", printed(report, full=True)) == list("01234")


@pytest.mark.parametrize(
    "odd",
    [
        ModuleNode("b", "b", "Linear", "Linear", "different"),
        ModuleNode("b", "b", "Linear", "Linear", "equal", first=True),
        ModuleNode("b", None, "Linear", "Linear", "equal"),
        ModuleNode("b", "b", "Linear", "Linear", "equal", children=(ModuleNode("b.c", "b.c", verdict="precision"),)),
        ModuleNode("b", "b", "Linear", "Linear"),
        ModuleNode("b", "b", "Linear", "Einsum", "equal"),
    ],
    ids=["different", "first", "no counterpart", "differs inside", "not judged", "another class"],
)
def test_only_equal_modules_of_one_class_are_folded(odd):
    same = ModuleNode("a", "a", "Linear", "Linear", "equal")
    assert [len(run) for run in outline.runs([same, same, same, odd, same, same], collapse=True)] == [3, 1, 1, 1]


def test_the_whole_table_has_failures_first():
    shown = printed(different_report(), full=True)
    rows = shown.split("─\n")[1].splitlines()
    names = [match[0] for row in rows if (match := re.match(r"(output|grad|weight)\S*( \S+)?", row))]
    first = ["output", "grad x", "grad head.weight", "weight probe", "output[1]"]
    assert [name.split("  ")[0] for name in names if not name.startswith("weights")][:5] == first
    assert re.match(r"output +different +3\.1e-03 +3\.1e\+09x +0\.21 \| 5210$", rows[0].rstrip())
    flat = " ".join(" ".join(rows).split())
    assert "at (1, 7, 12): torch 0.731058578, Flax 0.727935218, on random weights, seed 1" in flat
