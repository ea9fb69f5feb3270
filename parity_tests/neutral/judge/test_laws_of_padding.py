"""The law of padding without a framework: which calls it is tried on."""

from __future__ import annotations

import types

import pytest

from attn_parity.laws import padding
from attn_parity.laws.layout import Axes
from attn_parity.laws.side import NotTriedError


@pytest.mark.parametrize(("inputs", "reason"), [(4, "drawn"), (5, "a mask or a context of its own")])
def test_padding_is_tried_with_at_most_four_inputs(monkeypatch, inputs, reason):
    def drawn(side, layout):
        raise NotTriedError("drawn")

    monkeypatch.setattr(padding, "_Padded", drawn)
    call = types.SimpleNamespace(leaves=[None] * inputs)
    side = types.SimpleNamespace(arguments=["attention_mask"], given={}, call=call)
    with pytest.raises(NotTriedError, match=reason):
        padding.padding_invariance(side, Axes(0, 0, 1, True))
