"""`attn-bridge mutate` counts what the judge finds, and turns red for what it misses or objects to for nothing."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from attn_bridge.cli.app import run
from attn_bridge.parity import mutate as run_mutate
from attn_parity.compare import driver as compare_driver
from attn_parity.results.report import Picture, Report, TensorVerdict
from fault_lab import driver
from fault_lab.adapters import load_mutants
from fault_lab.driver import Trial, find_trial, plan_faults, run_trial, run_trials
from fault_lab.planted import mutants, pairs
from fault_lab.planted.block_faults import always, never
from fault_lab.planted.faults import FAULTS, find_fault
from fault_lab.planted.usual_rules import USUAL_RULES
from parity_tests.support.calls.blocks import find_config

SEED = 400_000
"""Where the tests' own numbers begin."""


def case(fault, side, *, hidden=False):
    """Return the name of a case in which a fault shows, or is hidden."""
    wanted = find_fault(fault)
    config = find_config(SEED, lambda one: wanted.applies(one) and wanted.hidden(one) == hidden)
    return f"{fault}:{side}:{config.seed}"


@pytest.fixture
def judge(monkeypatch):
    """Put a judge that always says the same in place of the right one."""

    def replace(verdict):
        def compare(torch_module, flax_module, inputs, **options):
            reason = "" if verdict == "equal" else "no reason"
            tensor = TensorVerdict("output", "output", "output", (1,), "float32", verdict, reason)
            return Report(verdict, [tensor], pictures=[Picture("output", np.ones(1), np.ones(1))])

        monkeypatch.setattr(compare_driver, "compare", compare)

    return replace


@pytest.fixture(scope="module")
def report():
    """One small run with the right judge."""
    return run_mutate(configs=1, faults=1, seed=SEED)


def test_a_small_run_finds_the_faults_and_objects_to_nothing(report):
    assert report.passed, report.lines()
    named = [(one.trial.fault, one.trial.side) for one in report.planted]
    assert named == [("query-weight-not-transposed", side) for side in ("torch", "flax")]
    assert [one.trial.seed for one in report.right] == [SEED]
    assert {one.outcome for one in report.planted} == {"detected"}
    assert {one.outcome for one in report.right} == {"right"}
    assert all(one.change.changes_meaning for one in report.planted)
    assert all(set(one.rules) == {rule.name for rule in USUAL_RULES} for one in report.results)
    assert report.summary().startswith("2 of 2 visible plants of 1 faults detected, 0 false alarms on 1 right pairs, ")


def test_the_json_has_its_schema(report):
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["schema"] == 1
    assert data["passed"] is True
    assert (data["configs"], data["faults"], data["plants"], data["seed"]) == (1, 1, 1, SEED)
    assert (data["survivors"], data["false_alarms"], data["unseen"]) == ([], [], [])
    assert data["environment"]["torch"]
    assert set(data["rules"]) == {rule.name for rule in USUAL_RULES}
    for trial in data["trials"]:
        assert set(trial) == {
            *("case", "fault", "side", "seed", "module", "config", "outcome", "verdict", "message", "change", "rules"),
            *("command", "seconds"),
        }
        assert set(trial["rules"]["1e-5"]) == {"outputs", "outputs and gradients"}
        assert (trial["change"] is None) == (trial["fault"] == "")
    planted = data["trials"][0]
    assert planted["config"]["num_heads"] == mutants.draw_config(planted["seed"]).num_heads
    assert planted["change"]["effect"] == "meaning"
    assert planted["command"] == f"attn-bridge mutate --case {planted['case']}"


def test_the_markdown_has_every_fault_and_its_command(report, tmp_path):
    text = report.to_markdown(tmp_path / "mutants.md")
    assert (tmp_path / "mutants.md").read_text() == text
    assert f"<!-- made by: attn-bridge mutate --configs 1 --plants 1 --faults 1 --seed {SEED} --jobs 1 -->" in text
    assert "| `query-weight-not-transposed` | query matrix read with its axes the other way round | 2/2 | " in text
    assert "0 of 1 right pairs were objected to; with 95 % confidence the rate is below 95.00%" in text
    assert "| all |  | 2/2 |" in text
    assert "not as it should be" not in text


def test_every_fault_is_planted_on_both_sides_where_it_applies():
    trials = list(plan_faults(FAULTS, SEED, 2))
    assert len(set(trials)) == len(trials)
    for fault in FAULTS:
        mine = [trial for trial in trials if trial.fault == fault.name]
        assert {trial.side for trial in mine} == {"torch", "flax"}
        planted = [fault.pair(trial.seed) for trial in mine]
        assert None not in planted
        shown, hidden = (sum(fault.is_hidden(pair) == wanted for pair in planted) for wanted in (False, True))
        assert shown == (0 if fault.hidden is always else 4)
        assert hidden == (0 if fault.hidden is never else 2)
        assert find_trial(str(mine[0])) == mine[0]


def test_a_true_invariance_is_not_counted_as_a_miss():
    result = run_trial(find_trial(case("rope-positions-shifted", "flax", hidden=True)))
    assert (result.verdict, result.outcome, result.change.effect) == ("equal", "invariance", "none")
    assert not result.visible
    assert 0 < max(result.change.forward, result.change.backward) < result.change.limit


def test_a_dropped_key_bias_is_detected_despite_softmax():
    result = run_trial(find_trial(case("key-bias-dropped", "torch", hidden=True)))
    assert (result.verdict, result.outcome, result.change.effect) == ("different", "detected", "none")
    assert "does not use it" in result.message


def test_a_loss_of_precision_is_measured_and_found():
    result = run_trial(find_trial(case("softmax-in-bfloat16", "torch")))
    assert (result.verdict, result.outcome, result.change.effect) == ("precision", "detected", "precision")
    assert result.change.loss > 10


def test_dropout_in_eval_is_inconclusive_and_judged_by_usual_rules():
    result = run_trial(find_trial(case("dropout-in-eval", "torch")))
    assert (result.verdict, result.outcome) == ("inconclusive", "detected")
    assert result.rules["1e-5"] == (True, True)


def test_weights_through_a_float16_checkpoint_are_found():
    result = run_trial(find_trial(case("checkpoint-in-float16", "flax")))
    assert (result.verdict, result.outcome) == ("different", "detected")
    assert result.message.startswith("weight ")


def test_a_survivor_is_listed_and_is_status_1(judge, capsys):
    judge("equal")
    assert run(["mutate", "--configs", "1", "--faults", "1", "--jobs", "1", "--seed", str(SEED)]) == 1
    printed = capsys.readouterr().out
    assert "query-weight-not-transposed" in printed
    assert "0/2" in printed
    assert "missed: query-weight-not-transposed in torch, seed 5" in printed
    assert "again: attn-bridge mutate --case query-weight-not-transposed:torch:5" in printed
    assert "0 of 2 visible plants of 1 faults detected, 0 false alarms on 1 right pairs, in " in printed


def test_a_false_alarm_is_listed_and_is_status_1(judge, capsys, tmp_path):
    judge("different")
    options = ["--configs", "2", "--faults", "1", "--jobs", "1", "--seed", str(SEED), "--markdown"]
    assert run(["mutate", *options, str(tmp_path / "m.md"), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert data["false_alarms"] == [f"right:{SEED}", f"right:{SEED + 1}"]
    assert data["survivors"] == []
    assert "## What is not as it should be" in (tmp_path / "m.md").read_text()


def test_an_objection_to_a_true_invariance_is_a_false_alarm(judge):
    judge("different")
    result = run_trial(find_trial(case("rope-positions-shifted", "torch", hidden=True)))
    assert result.outcome == "false alarm"


def test_a_crash_of_the_judge_detects_nothing(monkeypatch):
    module = compare_driver
    planted, right = find_trial(case("scale-missing", "torch")), find_trial(f"right:{SEED}")
    for error, verdict, outcomes in (
        (ValueError("will not"), "refused", ("detected", "false alarm")),
        (RuntimeError("broken"), "crashed", ("missed", "false alarm")),
    ):

        def compare(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(module, "compare", compare)
        results = [run_trial(planted), run_trial(right)]
        assert [result.verdict for result in results] == [verdict, verdict]
        assert tuple(result.outcome for result in results) == outcomes
        assert results[0].rules is None


def test_a_case_runs_again_from_its_name(capsys):
    assert run(["mutate", "--case", f"right:{SEED}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("equal: ")
    assert f"right: {pairs.draw_pair(SEED).name}, seed {SEED}: equal\n" in printed


def test_processes_give_the_results_of_one():
    small = [seed for seed in range(SEED, SEED + 200) if pairs.draw_pair(seed).name == "Linear"][:2]
    trials = [Trial("", None, seed) for seed in small]
    one, two = (sorted(run_trials(trials, jobs), key=lambda result: result.trial.seed) for jobs in (1, 2))
    assert [dataclasses.replace(result, seconds=0, explanation="") for result in one] == [
        dataclasses.replace(result, seconds=0, explanation="") for result in two
    ]
    assert [result.outcome for result in one] == ["right", "right"]


def test_a_fault_that_never_showed_does_not_count_as_found(report):
    hidden = [dataclasses.replace(one, outcome="invariance") for one in report.planted]
    changed = dataclasses.replace(report, results=(*hidden, *report.right))
    assert changed.unseen == ("query-weight-not-transposed",)
    assert not changed.passed
    assert "never seen: query-weight-not-transposed" in changed.summary()


def test_a_process_forgets_what_was_compiled_for_the_trials_before(judge, monkeypatch):
    forgotten = []
    monkeypatch.setattr(load_mutants("flax", "mutants"), "forget_programs", lambda: forgotten.append(1))
    judge("equal")
    monkeypatch.setattr(driver, "PROGRAMS_OF", 2)
    list(run_trials([find_trial(f"right:{SEED + number}") for number in range(5)], jobs=1))
    assert len(forgotten) in (2, 3)  # the count goes on from what ran before


def test_faults_are_chosen_by_the_beginning_of_their_names():
    report = run_mutate(configs=0, only="linear-query", seed=SEED)
    assert {result.trial.fault for result in report.results} == {"linear-query-and-key-swapped"}
    assert report.passed
    assert " --only linear-query " in report.command
    assert report.to_markdown().startswith("## Later faults")
    with pytest.raises(ValueError, match=r"^only \(x\) must be the beginning of a fault's name$"):
        run_mutate(only="x")
