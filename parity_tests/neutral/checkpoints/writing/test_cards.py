"""The section on parity in a model card: of reports of every kind, and of none."""

from __future__ import annotations

import pytest

from attn_bridge.checkpoints.hub import card

TENSORS = [
    {"name": "output", "verdict": "equal", "relative": 2e-16},
    {"name": "grad a|b", "verdict": "different", "relative": 0.0312},
]


def described(**report):
    return "\n".join(card.describe({"passed": False, **report}, ["parity.json", "parity.html"]))


def test_a_report_of_a_pair_becomes_its_verdict_place_and_command():
    text = described(
        verdict="precision",
        summary="precision: A (torch) and B (Flax), 2 tensors",
        first_divergence={"path": "blocks.3", "hint": "another eps"},
        tensors=TENSORS,
        notes=["mind <this>", 4],
        environment={"torch": "2.13.0", "jax": "0.10.2"},
        command="attn-bridge compare a.py:A 'b.py:B'",
    )
    assert (
        text
        == """## Parity

**precision**: A (torch) and B (Flax), 2 tensors

First difference: `blocks.3`. another eps

| tensor | verdict | relative difference in float64 |
| --- | --- | --- |
| `grad a\\|b` | different | 3.1e-02 |
| `output` | equal | 2.0e-16 |

- mind &lt;this&gt;

Judged with torch 2.13.0, jax 0.10.2.

Run it again: `attn-bridge compare a.py:A 'b.py:B'`

The whole report: [parity.json](parity.json), [parity.html](parity.html)."""
    )


@pytest.mark.parametrize(("passed", "verdict"), [(True, "equal"), (False, "different")])
def test_a_report_without_a_verdict_has_the_one_of_its_parts(passed, verdict):
    parts = [{"name": "norm", "verdict": "equal"}, {"name": "head", "verdict": verdict, "place": "out_head"}]
    text = described(passed=passed, parts=parts, oracle="transformers")
    equal = 2 if passed else 1
    front = (
        f"## Parity\n\n**{verdict}**: {equal} of 2 parts of the model equal; torch and Flax were judged against transf"
    )
    assert text.startswith(front)
    assert f"| `head` | {verdict} | `out_head` |" in text
    assert "Run it again" not in text


def test_verdicts_of_variants_are_counted_wrong_ones_first():
    cells = [{"variant": "GQA", "verdict": verdict} for verdict in ("equal", "different", "equal")]
    rows = described(cells=cells).splitlines()
    assert rows[6:8] == ["| `GQA` | different | 1 |", "| `GQA` | equal | 2 |"]


def test_long_tables_end_with_the_number_of_rows_left_out():
    text = described(tensors=[{"name": str(number), "verdict": "equal"} for number in range(15)])
    assert text.count("| equal |") == 12
    assert "and 3 more in the report" in text
