"""Statements on verdicts, made from reports without a framework."""

from __future__ import annotations

import json

import pytest

from attn_parity.attestation import statement
from parity_tests.support.judging.reports import different_report

SUBJECTS = {
    **{side: {"files": {}, "modules": {}, "weights": f"w {side}", "code": f"c {side}"} for side in ("first", "second")},
    "inputs": ["i", "j"],
    "rules": "r",
    "judge": {"version": "1"},
}
REPORT = different_report().to_json() | {"subjects": SUBJECTS, "command": "attn-bridge compare 'a b.py:A' c.py:B"}


def test_a_statement_names_every_subject_and_verdict(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    content = statement.of_report(path)
    digests = {each["name"]: each["digest"]["sha256"] for each in content["subject"]}
    assert len(digests.pop("report")) == 64
    assert digests == {
        **{f"{side} {part}": f"{part[0]} {side}" for side in ("first", "second") for part in ("code", "weights")},
        "inputs": "i",
        "inputs of the second side": "j",
        "rules": "r",
    }
    (comparison,) = content["predicate"]["comparisons"]
    assert (comparison["verdict"], comparison["words"]) == ("different", ["compare", "a b.py:A", "c.py:B"])
    verdicts = [each["verdict"] for each in REPORT["tensors"]]
    assert [*comparison["tensors"].values()] == verdicts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subjects": None}, "has no digests"),
        ({"subjects": {}}, "has no digests"),
        ({"command": ""}, "has no digests"),
        ({"verdict": "inconclusive", "message": "why"}, "has no verdict to attest: inconclusive: why$"),
        ({"subjects": SUBJECTS | {"second": {"code": "c"}}}, "the weights of the second side have no digest"),
        ({"tensors": [1]}, "is not a report of compare or review"),
    ],
)
def test_a_report_without_digests_or_verdict_is_not_attested(changes, message, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"judge": None, **REPORT} | changes))
    with pytest.raises(statement.AttestationError, match=message):
        statement.of_report(path)
