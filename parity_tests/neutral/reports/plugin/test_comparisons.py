"""A comparison in a test: verdict, explanation, allowed differences, baselines, JUnit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from xml.etree import ElementTree

import pytest

from attn_parity import factories
from attn_parity.plugin import comparing

from .pytest_runs import FAILING, ids


def test_an_equal_pair_returns_the_report(run):
    done = run("def test_same(parity):\n    assert parity('a', 'a', [1]).verdict == 'equal'", "-v", "-rA")
    assert done.status == 0
    assert ids(done) == ["test_same"]
    assert "\nparity: 1 comparison, 1 equal\n" in done.out
    assert "Captured parity" not in done.out
    (asked,) = done.asked
    assert asked == {
        "inputs": [1],
        "rules": None,
        "transfer": True,
        "seeds": 4,
        "first_seed": 0,
        "modes": ["eager"],
        "dtypes": None,
        "device": None,
        "localise": True,
        "command": "pytest test_it.py::test_same",
        "progress": None,
    }


def test_the_summary_line_says_what_differs_and_where(run):
    source = """
def test_it(parity):
    parity("a", "eps", [1], allow={})

def test_place(parity):
    parity("a", "different", [1])
"""
    for options in ((), ("--tb=no",), ("--tb=native",)):
        lines = [line for line in run(source, "-rf", *options, COLUMNS="200").out.splitlines() if line[:6] == "FAILED"]
        if "--tb=native" not in options:
            assert lines == [
                "FAILED test_it.py::test_it - different: output and 1 more, first in ln2",
                "FAILED test_it.py::test_place - different: T (torch) and F (Flax), first in blocks.0",
            ]
        assert len(lines) == 2


def test_a_mismatch_fails_with_the_explanation(run):
    done = run(FAILING.replace("  # line 4", ""), "--parity-seeds=7", "--parity-first-seed=3", "--parity-device=cpu")
    assert done.status == 1
    assert "plugin.py" not in done.out
    home = "attn_parity.results.report.ParityError"
    assert f'\n>       parity("a", "different", [1])\nE       {home}: different: ' in done.out
    assert "\nE       first divergence (forward) in blocks.0 (Flax: layers.0): 100%, a:b,c\n" in done.out
    again = "pytest 'test_it.py::test_other[cpu]' --parity-seeds 7 --parity-first-seed 3 --parity-device cpu"
    assert f"\nE         again: {again}\n" in done.out
    assert "\n---- Captured parity call ----\nnote: mind the gap\ntorch 2\n" in re.sub("-{5,}", "----", done.out)
    assert "\nparity: 3 comparisons, 1 different, 1 precision, 1 equal\n" in done.out
    assert "::error" not in done.out


def test_used_allowances_are_listed_after_the_tests(run, tmp_path):
    """Of a test that passes there is no other report."""
    source = """
EPS = {"ln2": "eps of flax"}

def test_one(parity):
    parity("a", "eps", [1], allow=EPS)
    parity("a", "eps", [1], allow=EPS | {"drop": "off"})
    parity("a", "a", [1], allow=EPS)

def test_two(parity):
    parity("a", "eps", [1], allow={"output": "rounded", "nosuch": "x"})
"""
    done = run(source, "-q", "--junit-xml=junit.xml")
    summary = done.out[done.out.index("\nparity: ") :].splitlines()[1:6]
    assert summary == [
        "parity: 4 comparisons, 1 different, 3 equal (2 with differences that are allowed)",
        "  allowed: ln2: eps of flax (test_it.py::test_one)",
        "  allowed: drop: off (nothing has that name)",
        "  allowed: output: rounded (test_it.py::test_two)",
        "  allowed: nosuch: x (nothing has that name)",
    ]
    note = "no other submodule than ln2 differs, which may; code of T around it was not judged apart"
    assert f"\n  note: {note}\n" in done.out
    assert "  note: mind the gap" not in done.out
    found = (tmp_path / "junit.xml").read_text()
    assert found.count('<property name="parity_allowed" value="ln2: eps of flax"') == 2


def test_the_rerun_command_is_relative_to_the_working_directory(run, tmp_path):
    (tmp_path / "inside").mkdir()
    done = run(FAILING, "..", folder="inside")
    assert "\nE         again: pytest ../test_it.py::test_other\n" in done.out


def test_an_error_of_compare_fails_the_test(run):
    done = run("def test_it(parity):\n    parity('a', 'broken', [1])")
    assert done.status == 1
    assert "ValueError: inputs is not an array" in done.out
    assert "parity:" not in done.out


def test_tracebacks_leave_out_the_frames_of_the_judge():
    with pytest.raises(ValueError, match="must read") as caught:
        factories.load("nothing")
    assert "factories.py" in str(caught.getrepr(style="short"))
    comparing.hide_own_frames(caught.value)
    shown = str(caught.getrepr(style="short"))
    assert "test_comparisons.py" in shown
    assert "factories.py" not in shown


def test_junit_has_verdict_and_first_divergence(run, tmp_path):
    run(FAILING, "--junit-xml=junit.xml")
    cases = ElementTree.parse(tmp_path / "junit.xml").iter("testcase")
    found = {
        case.get("name"): [(entry.get("name"), entry.get("value")) for entry in case.iter("property")] for case in cases
    }
    divergence = (
        "parity_first_divergence",
        "first divergence (forward) in blocks.0 (Flax: layers.0): 100%, a:b,c",
    )
    assert found["test_other"] == [("parity_verdict", "equal"), ("parity_verdict", "different"), divergence]
    assert found["test_lossy"] == [("parity_verdict", "precision"), divergence]


def test_a_failing_subtest_counts_once(run):
    source = """
def test_parts(parity, subtests):
    for flax in ("a", "different", "a"):
        with subtests.test(flax):
            parity("a", flax, [1])
"""
    if importlib.util.find_spec("_pytest.subtests") is None:
        pytest.skip("this pytest has no subtests")
    done = run(source, GITHUB_ACTIONS="true")
    assert done.status == 1
    assert "\nparity: 3 comparisons, 1 different, 2 equal\n" in done.out
    assert done.out.count("::error ") == 1


def test_changes_since_a_baseline_are_shown(run, tmp_path):
    source = FAILING
    assert run(source, "--parity-json=before").status == 1
    for path in (tmp_path / "before").iterdir():
        path.write_text('{"verdict": "precision", "tensors": []}')
    done = run(source, "--parity-baseline=before")
    assert "since the baseline: verdict precision -> different" in done.out
    (tmp_path / "other").mkdir()
    assert "since the baseline: it was equal, or not run" in run(source, "--parity-baseline=other").out
