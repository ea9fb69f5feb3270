"""Placeholders that touch each other stand for a digit each, on both sides of a rule."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import Rule, Rules, flax_to_torch, torch_to_flax
from attn_parity.pairing import partial

from ..judge.pairing.parameters import parameters

RULE = Rule("stages{i}{j}.weight", "stages.{i}.blocks.{j}.kernel", "o i -> i o")


def arrays(*names):
    return {name: np.arange(6.0).reshape(2, 3) + at for at, name in enumerate(names)}


def test_two_numbers_in_a_row_are_told_apart():
    given = arrays("stages00.weight", "stages01.weight", "stages10.weight")
    made = torch_to_flax(given, [RULE])
    assert list(made) == [f"stages.{i}.blocks.{j}.kernel" for i, j in ("00", "01", "10")]
    back = flax_to_torch(made, [RULE])
    assert all(np.array_equal(back[name], array) for name, array in given.items())


@pytest.mark.parametrize("name", ["stages112.weight", "stages1.weight"])
def test_other_counts_of_digits_are_not_covered(name):
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        torch_to_flax(arrays("stages11.weight", name), [RULE])


def test_numbers_of_two_digits_are_not_covered_on_the_way_back():
    with pytest.raises(ValueError, match=r"unexpected: stages\.1\.blocks\.12\.kernel"):
        flax_to_torch(arrays("stages.1.blocks.1.kernel", "stages.1.blocks.12.kernel"), [RULE])


@pytest.mark.parametrize("other", ["stages{i}.weight", "stages{i}{k}.weight", "stages11.weight"])
def test_rules_that_cover_the_same_names_clash(other):
    target = "x" + "".join(f".{{{word}}}" for word in "ik" if f"{{{word}}}" in other)
    with pytest.raises(ValueError, match="cover the same torch names"):
        Rules([RULE, Rule(other, target)])


def test_pairs_of_a_comparison_take_several_numbers():
    ours = parameters({f"stages{at}.weight": ((4, 3), "Linear") for at in ("11", "12", "21")})
    theirs = parameters({f"stages.{i}.{j}.kernel": ((3, 4), "Linear") for i, j in ("11", "12", "21")})
    rules = [{"first": "stages{i}{j}.weight", "second": "stages.{i}.{j}.kernel", "pattern": "o i -> i o"}]
    found = partial(rules, ours, theirs)
    assert [(match.first.name, match.second.name) for match in found.matches] == [
        ("stages11.weight", "stages.1.1.kernel"),
        ("stages12.weight", "stages.1.2.kernel"),
        ("stages21.weight", "stages.2.1.kernel"),
    ]


def test_a_rule_drops_names_with_several_numbers():
    ours = parameters({f"gain{at}.weight": ((4, 3), "Linear") for at in ("11", "12")})
    found = partial([{"first": "gain{i}{j}.weight", "drop": "none"}], ours, {})
    assert [name for _, name, _ in found.dropped] == ["gain11.weight", "gain12.weight"]
