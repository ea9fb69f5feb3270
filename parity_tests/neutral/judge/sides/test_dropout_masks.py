"""The masks that both sides drop by: which numbers they are, and which calls share them."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from attn_bridge import rng
from attn_parity.sides.dropout_masks import Draw, MaskPlan, Masks, asking


@pytest.mark.parametrize("step", [0, 3])
def test_masks_of_one_shape_are_numbered(step):
    masks = Masks(7, step)
    drawn = [masks.draw((2, 5), 0.7) for _ in range(3)]
    key = rng.fold_in(rng.fold_in(rng.key(7), step), zlib.crc32(b"(2, 5)"))
    for number, mask in enumerate(drawn):
        np.testing.assert_array_equal(mask, rng.bernoulli(rng.fold_in(key, number), 0.7, (2, 5)))


def test_repeated_call_draws_the_same_masks():
    masks = Masks(0)
    first = [masks.draw((40,), 0.5), masks.draw((40,), 0.5)]
    assert len(masks.draws) == 2
    masks.restart()
    assert masks.draws == []
    np.testing.assert_array_equal([masks.draw((40,), 0.5), masks.draw((40,), 0.5)], first)
    assert (first[0] != first[1]).any()


def test_mask_of_turned_axes_is_turned():
    plain = Masks(1).draw((3, 4, 6), 0.5)
    np.testing.assert_array_equal(Masks(1).draw((6, 1, 3, 4), 0.5), plain.transpose(2, 0, 1)[:, None])
    np.testing.assert_array_equal(Masks(1).draw((4, 1, 6, 3), 0.5), plain.transpose(1, 2, 0)[:, None])


def test_masks_keep_as_many_as_asked_for():
    assert Masks(0).draw((100, 100), 0.9).mean() == pytest.approx(0.9, abs=0.01)
    assert Masks(0).draw((9,), 1.0).all()


def test_plan_gives_operands_in_the_order_of_draws():
    plan = MaskPlan()
    plan.start(None)
    assert plan.draw((2, 3), 0.5, "drop", "dims").tolist() == [[True] * 3] * 2
    plan.start(["first", "second"])
    assert [plan.draw((2,), 0.5, "a"), plan.draw((3,), 0.75, "b")] == ["first", "second"]
    assert plan.draws == [Draw((2,), 0.5, "a"), Draw((3,), 0.75, "b")]
    assert [draw.rate for draw in plan.draws] == [0.5, 0.25]
    assert [draw.size for draw in plan.draws] == [2, 3]


def test_innermost_object_on_the_stack_asks():
    class Caller:
        def call(self, inner):
            return inner()

    outer, inner = Caller(), Caller()
    owners = {id(outer): "outer", id(inner): "inner"}
    assert outer.call(lambda: inner.call(lambda: asking(owners))) == "inner"
    assert outer.call(lambda: Caller().call(lambda: asking(owners))) == "outer"
    assert Caller().call(lambda: asking(owners)) is None
