"""Usage of `attn-bridge mutate`, the usual rules and the statistics of its report, without any framework."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path

import numpy as np
import pytest

import attn_bridge
from attn_bridge.cli.app import run
from attn_parity.results.findings import Picture
from fault_lab import driver
from fault_lab.planted.block_faults import always
from fault_lab.planted.faults import FAULTS, find_fault
from fault_lab.planted.usual_rules import rejections
from fault_lab.report import MutationReport
from fault_lab.trials import upper_bound
from fault_lab.visibility import Change
from parity_tests.support.calls.blocks import find_config

USAGE_ERRORS = [
    (["--configs", "0"], "error: configs (0) must be at least 1\n"),
    (["--configs", "-3"], "error: configs (-3) must be at least 1\n"),
    (["--configs", "many"], "error: Invalid value for '--configs': "),
    (["--faults", "0"], "error: faults (0) must be at least 1\n"),
    (["--faults", "1000"], f"error: faults (1000) must be at most {len(FAULTS)}\n"),
    (["--plants", "0"], "error: plants (0) must be at least 1\n"),
    (["--seed", "-1"], "error: seed (-1) must be at least 0\n"),
    (["--jobs", "0"], "error: jobs (0) must be at least 1\n"),
    (
        ["--json", "/no/such/folder/x.json"],
        "error: --json /no/such/folder/x.json cannot be written: there is no folder /no/such/folder\n",
    ),
    (
        ["--markdown", "/no/such/folder/x.md"],
        "error: --markdown /no/such/folder/x.md cannot be written: there is no folder /no/such/folder\n",
    ),
    (["--case", "nonsense"], "error: case (nonsense) must read right:SEED or FAULT:SIDE:SEED, with a side of "),
    (["--case", "right:x"], "error: case (right:x) must read right:SEED or FAULT:SIDE:SEED, "),
    (["--case", "scale-missing:left:5"], "error: case (scale-missing:left:5) must read "),
    (["--case", "scale-gone:torch:5"], "error: fault (scale-gone) must be one of query-weight-not-transposed, "),
    (["extra"], "error: Got unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS, ids=lambda value: " ".join(value)[:30])
def test_bad_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert run(["mutate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(("window", "is_longer_seen"), [(None, False), (2, True), (99, False)])
def test_a_longer_window_is_planted_where_it_shows_more(window, is_longer_seen):
    config = find_config(0, lambda config: config.tokens > 4)
    assert find_fault("window-one-longer").applies(dataclasses.replace(config, window=window)) is is_longer_seen


def test_a_case_that_a_fault_does_not_fit_is_refused(capsys):
    seed = find_config(0, lambda config: config.softcap is None).seed
    assert run(["mutate", "--case", f"softcap-missing:flax:{seed}"]) == 2
    assert "does not have what this fault needs" in capsys.readouterr().err


def test_help_gives_an_example(capsys):
    assert run(["mutate", "--help"]) == 0
    assert "Example: attn-bridge mutate" in capsys.readouterr().out


def picture(name, torch, flax, oracle=None):
    torch, flax = np.array(torch, np.float32), np.array(flax, np.float32)
    return Picture(name, torch, flax, torch.astype(np.float64) if oracle is None else np.array(oracle))


def test_each_usual_rule_rejects_what_it_says():
    def rejected(torch, flax, oracle=None):
        found = rejections([picture("output", torch, flax, oracle)])
        return [name for name, (outputs, _) in found.items() if outputs]

    assert rejected([1.0, -1.0], [1.0, -1.0]) == []
    assert rejected([1.0, -1.0], [1.0001, -1.0001]) == ["1e-5", "2x f64"]
    assert rejected([1.0, -1.0], [1.003, -1.003]) == ["1e-5", "1e-3", "2x f64"]
    assert rejected([1.0, -1.0], [1.1, -1.1]) == ["1e-5", "1e-3", "1e-2", "2x f64"]
    assert rejected([1.0, -1.0], [-1.0, 1.0]) == ["1e-5", "1e-3", "1e-2", "2x f64"], "a mean sees no permutation"
    assert rejected([1.0, 1.0], [1.0003, 1.0003]) == ["1e-5", "mean", "2x f64"]
    assert rejected([1.0, 1.0], [1.0003, 1.0003], [1.0002, 1.0002]) == ["1e-5", "mean"], "torch is as far off"
    assert rejected([1.0], [np.nan]) == ["1e-5", "1e-3", "1e-2", "mean", "2x f64"]


def test_usual_rules_judge_outputs_with_and_without_gradients():
    found = rejections([picture("output", [1.0], [1.0]), picture("grad x", [1.0], [2.0])])
    assert found["1e-3"] == (False, True)


def test_a_changes_effect_follows_from_its_measures():
    assert Change(0.0, 0.0, 0.0, loss=1.0).effect == "none"
    assert Change(0.0, 5e-15, 0.0, loss=1.0).effect == "none"
    assert Change(0.0, 1e-13, 0.0).effect == "meaning"
    assert Change(0.0, 1e-13, 1e-15, loss=1.0).effect == "none", "rounding moves it as far"
    assert Change(0.0, 0.0, 0.0, loss=5.0).effect == "precision"
    assert Change(float("nan"), 0.0, 0.0).effect == "meaning"


def test_the_upper_bound_is_that_of_clopper_and_pearson():
    assert upper_bound(0, 500) == pytest.approx(1 - 0.05 ** (1 / 500), rel=1e-9)
    assert upper_bound(3, 100) == pytest.approx(0.0757, abs=1e-4)
    assert upper_bound(1, 1) == 1.0


def test_the_docs_page_lists_every_fault_and_its_command():
    page = (Path(attn_bridge.__file__).parents[1] / "docs" / "mutants.md").read_text(encoding="utf-8")
    assert "<!-- made by: attn-bridge mutate --configs " in page
    assert [fault.name for fault in FAULTS if f"| `{fault.name}` | {fault.about} | " not in page] == []
    assert "not as it should be" not in page
    gallery = (Path(attn_bridge.__file__).parents[1] / "docs" / "gallery-results.md").read_text(encoding="utf-8")
    assert "<!-- gallery made by: attn-bridge mutate --configs 0 " in gallery, (
        "docs/generate.py makes it by its own command"
    )
    assert gallery.count("| yes |") > 200
    assert "| NO |" not in gallery


DOCS = Path(attn_bridge.__file__).parents[1] / "docs"
NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@pytest.mark.parametrize("name", ["../README.md", "index.md"])
def test_opening_pages_repeat_the_count_of_the_table(name):
    [counts] = re.findall(r"`: ([0-9]+ of [0-9]+) visible plants", (DOCS / "mutants.md").read_text(encoding="utf-8"))
    opening = (DOCS / name).read_text(encoding="utf-8")
    assert re.findall(r"([0-9]+ of [0-9]+) planted faults", opening) == [counts]


def test_the_page_of_an_alpha_repeats_the_figures_of_the_pages_it_links():
    alpha = (DOCS / "alpha.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \| \[.+\]\(([a-z-]+\.md).*\) \|$", alpha, re.MULTILINE)
    assert len(rows) >= 5
    for question, answer, page in rows:
        figures = set(NUMBERS.findall((DOCS / page).read_text(encoding="utf-8")))
        assert {*NUMBERS.findall(question), *NUMBERS.findall(answer)} <= figures, question


def test_at_least_twenty_faults_have_names_and_descriptions():
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.about for fault in FAULTS)
    assert {fault.verdict for fault in FAULTS} == {"different", "precision", "inconclusive"}


@pytest.mark.parametrize(
    ("fault", "verdict", "effect", "outcome"),
    [
        (None, "equal", "none", "right"),
        (None, "precision", "none", "false alarm"),
        ("scale-missing", "crashed", "meaning", "missed"),
        ("scale-missing", "equal", "meaning", "missed"),
        ("scale-missing", "precision", "meaning", "detected"),
        ("scale-missing", "equal", "none", "invariance"),
        ("scale-missing", "different", "none", "false alarm"),
        ("PRECISION", "equal", "none", "below rounding"),
        ("DROPS", "different", "none", "detected"),
        ("DROPS", "equal", "none", "invariance"),
    ],
)
def test_the_outcome_of_a_trial_is_that_of_its_verdict(fault, verdict, effect, outcome):
    chosen = {
        None: None,
        "PRECISION": next(one for one in FAULTS if one.verdict == "precision" and not one.held),
        "DROPS": next(one for one in FAULTS if one.drops_parameter),
    }.get(fault) or (fault and find_fault(fault))
    change = Change(0.0 if effect == "none" else 1.0, 0.0, 0.0)
    assert driver._outcome(chosen, verdict, change) == outcome


def test_faults_that_never_showed_are_listed_unless_they_never_can():
    hidden = next(one.name for one in FAULTS if one.hidden is always)
    outcomes = [(hidden, "invariance"), ("scale-missing", "invariance"), ("softcap-missing", "invariance")]
    outcomes += [("softcap-missing", "detected")]
    results = tuple(
        types.SimpleNamespace(trial=types.SimpleNamespace(fault=fault), outcome=outcome) for fault, outcome in outcomes
    )
    report = MutationReport(results, configs=1, faults=3, seed=0, plants=2, jobs=1, environment={}, seconds=0.0)
    assert report.unseen == ("scale-missing",)
    assert not report.passed
