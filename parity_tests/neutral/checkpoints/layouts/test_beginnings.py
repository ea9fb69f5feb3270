"""Prefixes of names, which advice about other layouts counts."""

from __future__ import annotations

from attn_bridge.models.unknown_names.beginnings import below


def test_a_number_ends_a_prefix_unless_it_comes_first():
    names = ["model.layers.0.weight", "model.layers.1.weight", "0.layers.weight"]
    assert below(names) == {
        "model.": {"layers.0.weight", "layers.1.weight"},
        "model.layers.": {"0.weight", "1.weight"},
        "0.": {"layers.weight"},
        "0.layers.": {"weight"},
    }


def test_a_prefix_has_no_more_than_six_parts():
    assert list(below(["a.b.c.d.e.f.g.h.weight"]))[-1] == "a.b.c.d.e.f."
