"""Laws without a framework: the axes of a call, which calls padding is tried on, and what a report counts."""

from __future__ import annotations

import types

import numpy as np
import pytest

from attn_parity.laws.layout import Axes, layout_of
from attn_parity.laws.report import LawsReport, LawVerdict
from attn_parity.laws.sequences import padding
from attn_parity.laws.side import NotTriedError
from attn_parity.sides.function import Function
from attn_parity.sides.subject import Arguments


@pytest.mark.parametrize(("inputs", "reason"), [(4, "drawn"), (5, "a mask or a context of its own")])
def test_padding_is_tried_with_at_most_four_inputs(monkeypatch, inputs, reason):
    def drawn(side, layout):
        raise NotTriedError("drawn")

    monkeypatch.setattr(padding, "_Padded", drawn)
    call = types.SimpleNamespace(leaves=[None] * inputs)
    side = types.SimpleNamespace(arguments=["attention_mask"], given={}, call=call)
    with pytest.raises(NotTriedError, match=reason):
        padding.padding_invariance(side, Axes(0, 0, 1, True))


def test_summary_counts_the_statuses_that_there_are():
    laws = [LawVerdict(str(number), status, "") for number, status in enumerate(["holds", "not tried", "holds"])]
    report = LawsReport(laws, "Net", "torch module", seconds=2.0)
    assert report.summary() == "Net (torch module): 2 holds, 1 not tried, in float64, 2.0 s"
    assert report.passed
    assert not LawsReport(laws[1:2]).passed
    assert not LawsReport([*laws, LawVerdict("a", "broken", "")]).passed


@pytest.mark.parametrize(("home", "is_certain"), [("keras.src.layers.core.dense", True), ("mine", False)])
@pytest.mark.parametrize(("shape", "time"), [((3, 4), None), ((3, 5, 4), 1)])
def test_axis_0_of_keras_is_the_batch(shape, time, home, is_certain):
    side_of = Function(len, {}, "flax", {"dense": type("Dense", (), {"__module__": home})()})
    call = Arguments((np.zeros(shape, "float32"),))
    subject = types.SimpleNamespace(parameters=dict)
    side = types.SimpleNamespace(value=side_of, call=call, names=["x"], words="model", parts={}, subject=subject)
    assert layout_of(side) == Axes(0, 0, time, is_certain)
