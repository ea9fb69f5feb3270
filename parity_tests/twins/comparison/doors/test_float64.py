"""A pair whose torch side holds float64 is judged in float64 by dumps and by trainings, as by `compare`."""

from __future__ import annotations

import pytest

from .sides import FlaxTable, TorchTable, dumped, trained

FAULT = 1.0 + 1e-9


@pytest.mark.parametrize("gain", [1.0, FAULT], ids=["right", "wrong"])
def test_dumps_of_float64_show_a_fault_of_a_billionth(gain, tmp_path):
    report = dumped(TorchTable().double(), FlaxTable(gain=gain), tmp_path)
    assert report.verdict == ("equal" if gain == 1.0 else "different")
    assert {one.dtype for one in report.tensors} == {"float64"}


@pytest.mark.parametrize("gain", [1.0, FAULT], ids=["right", "wrong"])
def test_trainings_in_float64_show_a_fault_of_a_billionth(gain):
    report = trained(TorchTable().double(), FlaxTable(gain=gain), steps=2)
    assert (report.verdict, report.dtype) == ("equal" if gain == 1.0 else "different", "float64")
