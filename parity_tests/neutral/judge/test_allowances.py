"""Differences that are allowed, and what has changed since a baseline: both work on finished reports."""

import dataclasses
import json

import pytest

from attn_parity.results.allowances import accept, checked, parse
from attn_parity.results.changes import Changes, changes, read
from attn_parity.results.findings import Divergence, ModuleNode
from attn_parity.results.report import Report
from parity_tests.support.judging.reports import (
    SUSPECT,
    different_report,
    equal_report,
    equal_tensor,
    inconclusive_report,
)


def node(path: str, verdict: str = "equal", *children: ModuleNode, **fields: object) -> ModuleNode:
    error = 1e-3 if verdict == "different" else 1e-16
    return ModuleNode(path, path, "X", "X", verdict, None, None, error, error, children=children, **fields)


def report_of(*guilty: str) -> Report:
    """Return a report of a model of three blocks with a norm each, of which the norms in some blocks differ."""
    blocks = []
    for index in range(3):
        path = f"blocks.{index}"
        verdict = "different" if path in guilty else "equal"
        norm = node(f"{path}.norm", verdict, first=path == guilty[0], message="eps")
        blocks.append(node(path, verdict, norm, node(f"{path}.fc")))
    names = ["output", "grad x", *(f"grad blocks.{i}.{one}.weight" for i in range(3) for one in ("norm", "fc"))]
    tensors = [equal_tensor(name, verdict="different", second_name=name) for name in names]
    tree = node("", "different", *blocks)
    return Report("different", tensors, Divergence(f"{guilty[0]}.norm", f"{guilty[0]}.norm", "forward", "eps"), tree)


def test_a_model_differing_only_in_an_allowed_submodule_is_equal():
    report = accept(report_of("blocks.1"), {"blocks.1.norm": "another eps on purpose"})
    assert (report.verdict, report.passed, report.failures, report.first_divergence) == ("equal", True, [], None)
    assert {one.allowed for one in report.tensors} == {"blocks.1.norm"}
    assert "in blocks.1.norm" in report.allowed[0].covers
    assert "output" in report.allowed[0].covers
    assert "code of blocks.1 around it was not judged apart" in report.notes[0]
    assert not any(one.first for one in report.tree.walk())
    assert report.summary().endswith("8 allowed to differ")


@pytest.mark.parametrize("path", ["blocks", "blocks.1"])
def test_an_allowed_path_covers_its_submodules(path):
    assert accept(report_of("blocks.1"), {path: "why"}).passed


@pytest.mark.parametrize("path", ["blocks.1.nor", "blocks.10", "norm", "blocks.2", "output"])
def test_an_allowed_path_does_not_cover_its_siblings(path):
    report = accept(report_of("blocks.1"), {path: "why"})
    assert report.verdict == "different"
    assert report.first_divergence.path == "blocks.1.norm"


def test_an_allowed_fault_does_not_hide_a_second_one():
    report = accept(report_of("blocks.0", "blocks.2"), {"blocks.0": "why"})
    assert report.verdict == "different"
    assert report.first_divergence.path == "blocks.2.norm"
    assert [one.path for one in report.tree.walk() if one.first] == ["blocks.2.norm"]
    allowed = {one.name for one in report.tensors if one.allowed}
    assert allowed == {"grad blocks.0.norm.weight", "grad blocks.0.fc.weight"}
    assert accept(report_of("blocks.0", "blocks.2"), {"blocks.0": "a", "blocks.2.norm": "b"}).passed


def test_outputs_gradients_and_weights_are_allowed_by_name():
    tensors = [equal_tensor(name, verdict="different") for name in ("output[1]", "grad x", "weight fc.weight")]
    report = Report("different", [*tensors, equal_tensor("output")])
    one = accept(report, {"output[1]": "a", "x": "b"})
    assert (one.verdict, [tensor.name for tensor in one.failures]) == ("different", ["weight fc.weight"])
    assert accept(report, {"output[1]": "a", "grad x": "b", "fc": "c"}).passed


def test_names_of_the_second_side_are_taken_as_well():
    report = different_report()
    changed = accept(report, {"head.kernel": "why"})
    assert [one.name for one in changed.tensors if one.allowed] == ["grad head.weight"]


def test_unused_allowances_are_reported():
    report = accept(equal_report(), {"blocks.1": "why", "gone": "it was"})
    assert report.passed
    assert [str(one) for one in report.allowed] == [
        "allowed: blocks.1: why (nothing there differs)",
        "allowed: gone: it was (nothing has that name)",
    ]


def test_inconclusive_results_can_not_be_allowed():
    assert accept(inconclusive_report(), {"output": "why"}).verdict == "inconclusive"
    report = dataclasses.replace(report_of("blocks.1"), verdict="inconclusive")
    assert accept(report, {"blocks.1": "why"}).verdict == "inconclusive"
    left = accept(different_report(), {SUSPECT: "a", "output": "b", "x": "c", "head": "d"})
    assert left.verdict == "inconclusive"  # the probe, which only one side returned


def test_nothing_allowed_changes_nothing():
    report = different_report()
    assert accept(report, {}) is report


def test_allowances_are_read_as_they_are_written():
    assert parse(["a.b=why = because", " c = d "]) == {"a.b": "why = because", "c": "d"}
    assert checked({"a": "b"}) == checked("a=b") == checked(["a=b"]) == {"a": "b"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"], "allow (a) must read PATH=REASON, such as blocks.3.norm=eps is 1e-6 on purpose"),
        (["=b"], "allow (=b) must read PATH=REASON, such as blocks.3.norm=eps is 1e-6 on purpose"),
        ({"a": " "}, "allow (a= ) must read PATH=REASON, such as blocks.3.norm=eps is 1e-6 on purpose"),
        (["a=b", "a=c"], "allow names a twice"),
        ({"a": 3}, "allow must map a path to the reason why it may differ"),
        ([3], "allow must map a path to the reason why it may differ"),
    ],
)
def test_an_invalid_allowance_is_refused_in_one_line(given, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        checked(given)
    assert str(caught.value) == message


# ---- what has changed


def test_a_report_that_is_as_before_has_not_changed(tmp_path):
    report = different_report()
    report.to_json(path := tmp_path / "a.json")
    for baseline in (report, path, str(path), report.to_json()):
        found = report.changes_since(baseline)
        assert found.is_empty
        assert str(found) == "since the baseline: nothing has changed"


def test_changes_name_failing_and_mended_tensors():
    before, now = different_report(), equal_report()
    now.tensors[5] = dataclasses.replace(now.tensors[5], second_used=0.93)
    now.tensors.pop()
    now.tensors.append(equal_tensor("grad new"))
    found = now.changes_since(before)
    assert found.verdict == ("different", "equal")
    assert found.mended == ("output", "grad x", "grad head.weight")
    assert (found.added, found.removed, found.failing) == (("grad new",), ("weight probe",), ())
    assert found.place == (SUSPECT, "")
    assert found.share == ("output", 3.1e9, 0.45)
    assert found.lines() == [
        "since the baseline: verdict different -> equal; 3 mended (output, grad x, grad head.weight); 1 new (grad "
        "new); 1 gone (weight probe)",
        f"  first divergence: {SUSPECT} -> none",
        "  largest change: output, 3.1e+09 x -> 45% of the allowed error",
    ]
    assert before.changes_since(now).failing == found.mended


def test_a_baseline_of_before_the_sides_were_renamed_is_read(tmp_path):
    data = different_report().to_json()
    for tensor in data["tensors"]:
        for name in ("first_used", "second_used", "second_name", "allowed", "sample"):
            del tensor[name]
    data["tensors"][3]["flax_used"] = 0.5
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert different_report().changes_since(tmp_path / "old.json").share == ("grad head.weight", 0.5, 1.8)


def test_a_tensor_in_two_precisions_is_two():
    low = equal_tensor("output", dtype="bfloat16")
    before, now = Report("equal", [equal_tensor("output"), low]), Report("equal", [equal_tensor("output"), low])
    now.tensors[1] = dataclasses.replace(low, verdict="different")
    assert now.changes_since(before).failing == ("output (bfloat16)",)


def test_changed_allowances_are_not_called_mended_or_failing():
    """A difference that is accepted is still there."""
    before, now = different_report(), accept(different_report(), {"output": "known", "head": "known"})
    found = now.changes_since(before)
    assert (found.mended, found.failing) == ((), ())
    assert found.now_allowed == ("output", "grad head.weight")
    assert not found.is_empty
    assert "; 2 now allowed (output, grad head.weight)" in found.lines()[0]
    back = before.changes_since(now)
    assert (back.mended, back.failing) == ((), ())
    assert back.no_longer_allowed == ("output", "grad head.weight")
    assert "; 2 no longer allowed (output, grad head.weight)" in back.lines()[0]
    gone = equal_report().changes_since(now)
    assert gone.mended == ("output", "grad x", "grad head.weight", "weight probe")
    assert now.changes_since(equal_report()).now_allowed == ("output", "grad head.weight")


def test_an_allowed_difference_does_not_fail():
    before, now = equal_report(), different_report()
    now.tensors[0] = dataclasses.replace(now.tensors[0], allowed="output")
    assert "output" not in now.changes_since(before).failing


def test_a_moved_divergence_is_reported():
    one, two = ({"verdict": "different", "tensors": [], "first_divergence": place} for place in (
        {"path": "a", "between": None}, {"path": "", "between": ["fc1", "fc2"]}
    ))  # fmt: skip
    assert changes(one, two) == Changes(("different", "different"), ("a", "between fc1 and fc2"))
    assert "first divergence: a -> between fc1 and fc2" in str(changes(one, two))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not JSON: "),
        ("[]", "is not a report of compare, written with --json"),
        ('{"verdict": "equal", "tensors": [{"name": "output"}]}', "is not a report of compare"),
        ('{"verdict": "equal"}', "is not a report of compare"),
        ("[" * 100_000, "is not JSON: "),
    ],
)
def test_a_baseline_that_is_none_is_one_line(text, message, tmp_path):
    path = tmp_path / "baseline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="baseline") as caught:
        read(path)
    assert str(caught.value).startswith(f"the baseline {path} {message}")
    assert "\n" not in str(caught.value)
