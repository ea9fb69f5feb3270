"""Prefixes of names that no layout knows, and how many names begin with each."""

from __future__ import annotations

from attn_bridge.models.unknown_names.beginnings import counted


def test_a_number_ends_a_prefix_unless_it_comes_first():
    names = ["model.layers.0.weight", "model.layers.1.weight", "0.layers.weight"]
    assert counted(names, deepest=3) == {"model.": 2, "model.layers.": 2, "0.": 1, "0.layers.": 1}
    assert counted(names, deepest=1) == {"model.": 2, "0.": 1}
