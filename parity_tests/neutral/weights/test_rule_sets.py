"""Sets of rules, which no two rules of one name may share."""

from __future__ import annotations

import pytest

from attn_bridge import Rule, Rules, torch_to_flax

from .checks import raises


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("a", "b"), Rule("a", "c")], "two rules share the torch name a"),
        ([Rule("a", "c"), Rule("b", "c")], "two rules share the flax name c"),
        ([Rule("a.{i}", "b.{i}"), Rule("a.{j}", "c.{j}")], "two rules cover the same torch names: a.{i} and a.{j}"),
        ([Rule("a.{i}", "c.{i}"), Rule("b.{j}", "c.{j}")], "two rules cover the same flax names: c.{i} and c.{j}"),
    ],
)
def test_two_rules_of_one_name_are_refused(rules, message):
    raises(ValueError, message, Rules, rules)


def test_a_set_holds_rules_only():
    raises(TypeError, "Rules takes Rule objects, got str", Rules, ["a"])
    raises(TypeError, "Rules takes Rule objects, got dict", torch_to_flax, {}, [{"torch": "a"}])


def test_a_set_is_iterable_sized_comparable_and_shows_itself():
    rules = Rules([Rule("a", "b"), Rule("c", "d", "o i -> i o")])
    assert list(rules) == [Rule("a", "b"), Rule("c", "d", "o i -> i o")]
    assert len(rules) == 2
    assert rules == Rules(rules)
    assert hash(rules) == hash(Rules(rules))
    assert rules != Rules([])
    assert repr(rules) == "Rules([Rule('a', 'b', '... -> ...'), Rule('c', 'd', 'o i -> i o')])"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("h.{i}", "k.{i}"), Rule("h.0", "z")], "two rules cover the same torch names: h.{i} and h.0"),
        ([Rule("h.{i}", "k.{i}"), Rule("b", "k.0")], "two rules cover the same flax names: k.{i} and k.0"),
        (
            [Rule("a.{i}.5", "b.{i}"), Rule("a.3.{i}", "c.{i}")],
            "two rules cover the same torch names: a.{i}.5 and a.3.{i}",
        ),
    ],
)
def test_overlapping_rules_are_refused(rules, message):
    raises(ValueError, message, Rules, rules)


def test_rules_that_differ_in_one_number_do_not_clash():
    assert len(Rules([Rule("a.{i}.5", "b.{i}"), Rule("a.{i}.6", "c.{i}"), Rule("a.x", "d")])) == 3
