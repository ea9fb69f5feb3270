"""The report of `compare`: its fields, its explanation, and its reproducibility."""

from __future__ import annotations

import json

import pytest
import torch

from attn_bridge.parity import ParityError, compare

from .sides import X, judge, linear, scale, verdicts


def test_the_report_of_an_equal_pair():
    report = compare(*linear(), X)
    assert report.verdict == "equal"
    assert report.passed
    assert report.raise_for_mismatch() is report
    assert [(one.name, one.flax_name, one.kind) for one in report.tensors] == [
        ("output", "output", "output"),
        ("grad input", "grad inputs", "input gradient"),
        ("grad weight", "grad kernel", "matrix gradient"),
        ("grad bias", "grad bias", "vector gradient"),
    ]
    assert [one.shape for one in report.tensors] == [(2, 5, 4), (2, 5, 8), (4, 8), (4,)]
    assert all(one.dtype == "float32" and one.message == "" for one in report.tensors)
    assert all(one.relative < 1e-14 and one.meaning_used < 0.01 for one in report.tensors)
    assert all(0 < one.torch_used < 1 and 0 < one.flax_used < 1 for one in report.tensors if one.name != "grad bias")
    assert (report.first_divergence, report.tree, report.failures) == (None, None, [])
    assert (report.unexercised, report.invariances, report.message) == ([], [], "")
    assert (report.torch_name, report.flax_name, report.seeds) == ("Linear", "Linear", 4)
    assert str(report).startswith("equal: Linear (torch) and Linear (Flax), 4 tensors, 17 runs (4 seeds), ")
    assert report.environment["torch"] == torch.__version__
    assert report.noise["float32, torch, run to run"] == report.noise["float32, flax, run to run"] == 0.0


def test_the_report_of_a_pair_that_differs(tmp_path):
    report = judge(scale, lambda m, x: x * m.w * (1 + 5e-5))
    assert report.verdict == "different"
    assert not report.passed
    first = report.first_divergence
    assert (first.path, first.flax_path, first.direction) == ("", "", "forward")
    assert "fed the same inputs, the outputs differ by 5e-05 of the largest value" in str(first)
    assert set(verdicts(report).values()) == {"different"}
    for one in report.failures:
        assert "float64 results differ by 5e-05 of the largest value, allowed 1e-12; worst at (" in one.message
        assert one.relative == pytest.approx(5e-5, rel=1e-3)
        assert one.worst.flax == pytest.approx(one.worst.torch * (1 + 5e-5), rel=1e-9)
        assert one.bad > 0.9 * one.count
    with pytest.raises(ParityError) as caught:
        report.raise_for_mismatch()
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report is report
    assert str(caught.value) == report.explain()
    assert str(first) in report.explain()
    data = report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(data, allow_nan=False))
    assert data["verdict"] == "different"
    assert data["first_divergence"]["direction"] == "forward"
    assert [one["name"] for one in data["tensors"]] == ["output", "grad inputs[0]", "grad w"]


def test_the_command_and_the_progress_are_passed_on():
    seen = []
    report = judge(scale, lambda m, x: x * m.w * 2, command="again!", progress=lambda *what: seen.append(what))
    assert "again: again!" in report.explain()
    assert {type(part) for what in seen for part in what} == {str, int}
    assert all(0 <= done <= total for _, done, total in seen)
    assert any("first divergence" in what for what, _, _ in seen)


def test_the_same_call_gives_the_same_report():
    first, second = (judge(scale, lambda m, x: x * m.w * 2).to_json() for _ in range(2))
    assert first["tensors"] == second["tensors"]
    assert judge(scale, lambda m, x: x * m.w * 2, first_seed=5).to_json()["tensors"] != first["tensors"]
