"""Which verdicts pass, and that `raise_for_mismatch` raises on all others."""

from __future__ import annotations

import pytest

from attn_parity.results.findings import SEVERITY
from attn_parity.results.report import ParityError, Report

from ...support.judging.other_pages import training_report


@pytest.mark.parametrize("verdict", SEVERITY)
@pytest.mark.parametrize("kind", ["comparison", "training"])
def test_only_an_equal_report_passes(kind, verdict):
    report = Report(verdict, []) if kind == "comparison" else training_report(verdict=verdict)
    assert report.passed == (verdict == "equal")
    if report.passed:
        assert report.raise_for_mismatch() is report
    else:
        with pytest.raises(ParityError) as caught:
            report.raise_for_mismatch()
        assert caught.value.report is report
        assert str(caught.value) == report.explain()
