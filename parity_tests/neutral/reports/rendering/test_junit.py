"""A report as JUnit XML."""

import dataclasses

import pytest

from attn_parity.rendering import text
from parity_tests.support.judging.reports import (
    COMMAND,
    HOSTILE,
    different_report,
    equal_tensor,
    hostile_report,
    inconclusive_report,
)

from .renderings import EMPTY, parsed


def test_junit_has_a_case_per_tensor_and_counts_them():
    root = parsed(different_report())
    suite = root.find("testsuite")
    assert root.tag == "testsuites"
    assert suite.attrib == {
        "name": "GPTModel (torch) and GPTModel (Flax)",
        "tests": "54",
        "failures": "3",
        "errors": "1",
        "skipped": "0",
        "time": "4.720",
    }
    assert [case.get("name") for case in suite.iter("testcase")] == [one.name for one in different_report().tensors]
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert properties == different_report().environment
    assert suite.find("system-out").text == different_report().explain()


def test_junit_explains_failures():
    cases = {case.get("name"): case for case in parsed(different_report()).iter("testcase")}
    assert list(cases["output[1]"]) == []
    (failure,) = cases["output"]
    assert (failure.tag, failure.get("type")) == ("failure", "different")
    assert failure.get("message").startswith("412 of 8640 elements beyond 7.31e-13")
    assert "worst at (1, 7, 12) of sample 2: torch 0.731058578, Flax 0.727935218, float64 0.731058579" in failure.text
    assert f"again: {COMMAND}" in failure.text
    (error,) = cases["weight probe"]
    assert (error.tag, error.get("type"), error.get("message")) == ("error", "inconclusive", "Flax alone returned it")


@pytest.mark.parametrize(
    ("verdict", "tag"), [("different", "failure"), ("precision", "failure"), ("inconclusive", "error")]
)
def test_junit_fails_for_every_failed_report(verdict, tag):
    report = dataclasses.replace(inconclusive_report(), verdict=verdict, tensors=[equal_tensor("output")])
    suite = parsed(report).find("testsuite")
    (problem,) = suite.findall(f"testcase/{tag}")
    assert problem.get("message") == "the Flax side takes no argument attention_mask"
    assert int(suite.get("failures")) + int(suite.get("errors")) == 1
    assert suite.get("tests") == "2"


def test_junit_of_hostile_names_is_well_formed():
    case = parsed(hostile_report()).find("testsuite/testcase")
    assert case.get("name") == text.visible(HOSTILE)
    assert r"]]>" in case.get("name")
    assert parsed(EMPTY).find("testsuite").get("tests") == "0"
