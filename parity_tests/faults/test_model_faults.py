"""Faults of whole models, planted in families that have all pieces between them: each is different, and at its block.

The measure is `transformers`' own model; the parts without a fault are equal.
`python -m parity_tests.support.judging.fault_table` does the same for every family, in half an hour, and writes
docs/model-faults.md.
"""

from __future__ import annotations

import pytest

from attn_bridge.parity import check_model

from ..support.judging import model_faults

FAMILIES = ["gemma2", "gpt-oss", "deepseek-v3", "olmo"]

RIGHT = [*FAMILIES, "diffllama", "phi3-long"]
"""Beside them, one that `transformers` computes less precisely, and one whose cached keys were turned otherwise."""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_fault_is_different_at_its_place(family, tmp_path):
    folder = model_faults.right(family, tmp_path)
    seen = []
    for number, planted in enumerate(model_faults.planted(folder)):
        wrong = model_faults.write(planted, tmp_path / f"wrong-{number}")
        report = check_model(folder, wrong, oracle="transformers", seeds=1, tokens=10)
        for part in report.parts:
            name, place = planted.faults.get(part.name, ("", ""))
            prefix = "" if part.name == "ends" else part.name
            verdict = "different" if name else "equal"
            assert part.verdict == verdict, (name, part)
            assert part.place.startswith(f"{prefix}.{place}".strip(".") if name else ""), (name, part)
        seen += [name for name, _ in planted.faults.values()]
    assert len(seen) >= 8
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", RIGHT)
def test_a_right_model_is_equal(family, dtype, tmp_path):
    report = check_model(model_faults.right(family, tmp_path, dtype))
    assert report.oracle == "transformers"
    assert report.dtype == dtype
    assert [(part.name, part.verdict) for part in report.parts if part.verdict != "equal"] == []
