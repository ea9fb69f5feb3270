"""The verdict on a part of a model: the worst of its pairs', and of decoding."""

from __future__ import annotations

import pytest

from attn_parity.check.model.report import Decoding, PairVerdict, PartVerdict


def pair(verdict, place="", first="torch"):
    direction, hint = ("forward", f"hint at {place}") if place else ("", "")
    return PairVerdict(first, "flax", verdict, place, direction, hint, (), 3, (), 0.5)


@pytest.mark.parametrize(
    ("pairs", "decoding", "verdict", "place"),
    [
        ([pair("equal"), pair("equal")], None, "equal", ""),
        ([pair("equal"), pair("precision", "a.b")], None, "precision", "a.b"),
        ([pair("different"), pair("precision", "a.b"), pair("different", "a.c")], None, "different", "a.c"),
        ([pair("different", "a.b", "transformers"), pair("different", "a.c")], None, "different", "a.c"),
        ([pair("different", "a.c"), pair("different", "a.b", "transformers")], None, "different", "a.c"),
        ([pair("equal")], "equal", "equal", ""),
        ([pair("equal")], "precision", "precision", "block (decoding)"),
        ([pair("precision", "a.b")], "precision", "precision", "a.b"),
        ([pair("precision", "a.b")], "different", "different", "block (decoding)"),
        ([pair("different", "a.b")], "precision", "different", "a.b"),
    ],
)
def test_the_worst_verdict_is_that_of_the_part(pairs, decoding, verdict, place):
    with_cache = decoding and Decoding(decoding, {"torch": 0.1}, "apart by 0.1")
    part = PartVerdict.of("block", pairs, with_cache, 1.5)
    assert (part.verdict, part.place, part.pairs, part.decoding) == (verdict, place, tuple(pairs), with_cache)
    direction, hint = ("forward", "apart by 0.1" if "decoding" in place else f"hint at {place}") if place else ("", "")
    assert (part.name, part.direction, part.hint, part.seconds) == ("block", direction, hint, 1.5)
