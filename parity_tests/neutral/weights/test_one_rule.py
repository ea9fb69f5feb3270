"""One rule: its pattern, sizes and names."""

from __future__ import annotations

import pytest

from attn_bridge import Rule, Rules

from .checks import BIJECTION, raises

ARROW = "pattern must read 'torch axes -> flax axes'"


@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        ("a b -> a", {}, f"Rule('t', 'f', 'a b -> a'): {BIJECTION}"),
        ("a -> a b", {}, f"Rule('t', 'f', 'a -> a b'): {BIJECTION}"),
        ("a a -> a", {}, f"Rule('t', 'f', 'a a -> a'): {BIJECTION}"),
        ("a b -> a c", {}, f"Rule('t', 'f', 'a b -> a c'): {BIJECTION}"),
        ("a 2 -> a", {}, f"Rule('t', 'f', 'a 2 -> a'): {BIJECTION}"),
        ("... a -> a", {}, f"Rule('t', 'f', '... a -> a'): {BIJECTION}"),
        ("a -> ... a", {}, f"Rule('t', 'f', 'a -> ... a'): {BIJECTION}"),
        ("... ... -> ...", {}, f"Rule('t', 'f', '... ... -> ...'): {BIJECTION}"),
        ("(a b -> b a", {}, f"Rule('t', 'f', '(a b -> b a'): {BIJECTION}"),
        ("a$ b -> b a", {}, f"Rule('t', 'f', 'a$ b -> b a'): {BIJECTION}"),
        ("a b", {}, f"Rule('t', 'f', 'a b'): {ARROW}"),
        ("a -> a -> a", {}, f"Rule('t', 'f', 'a -> a -> a'): {ARROW}"),
        ("", {}, f"Rule('t', 'f', ''): {ARROW}"),
        ("(h d) -> h d", {}, "Rule('t', 'f', '(h d) -> h d'): (h d) needs the size of h or d as a keyword"),
        ("h d -> (h d)", {}, "Rule('t', 'f', 'h d -> (h d)'): (h d) needs the size of h or d as a keyword"),
        (
            "(h d e) -> h d e",
            {"h": 2},
            "Rule('t', 'f', '(h d e) -> h d e', h=2): (h d e) needs the size of d or e as a keyword",
        ),
        (
            "(h d) -> h d",
            {"h": 2, "z": 3},
            "Rule('t', 'f', '(h d) -> h d', h=2, z=3): size given for 'z', which is no axis of the pattern",
        ),
        ("(h d) -> h d", {"h": 0}, "Rule('t', 'f', '(h d) -> h d', h=0): size of 'h' (0) must be at least 1"),
        ("(h d) -> h d", {"h": -2}, "Rule('t', 'f', '(h d) -> h d', h=-2): size of 'h' (-2) must be at least 1"),
    ],
)
def test_a_rule_that_is_not_a_bijection_is_refused(pattern, sizes, message):
    raises(ValueError, message, Rule, "t", "f", pattern, **sizes)


@pytest.mark.parametrize("size", [2.0, True, "2", None], ids=repr)
def test_sizes_are_integers(size):
    kind = type(size).__name__
    message = f"Rule('t', 'f', '(h d) -> h d', h={size!r}): size of 'h' must be an integer, got {kind}"
    raises(TypeError, message, Rule, "t", "f", "(h d) -> h d", h=size)


@pytest.mark.parametrize("label", ["torch", "flax", "pattern"])
def test_names_and_pattern_are_strings(label):
    arguments = {"torch": "t", "flax": "f", "pattern": "a -> a", label: 3}
    raises(TypeError, f"{label} must be a string, got int", Rule, **arguments)


def test_a_pattern_has_a_bounded_number_of_axes():
    axes = " ".join("abcdefghijklm")
    raises(
        ValueError, f"Rule('t', 'f', '{axes} -> {axes}'): 13 axes, more than 12", Rule, "t", "f", f"{axes} -> {axes}"
    )


@pytest.mark.parametrize(
    ("torch", "flax", "message"),
    [
        ("a.{i}", "b", "Rule('a.{i}', 'b', '... -> ...'): both names must hold the same placeholders"),
        ("a.{i}", "b.{j}", "Rule('a.{i}', 'b.{j}', '... -> ...'): both names must hold the same placeholders"),
        ("a.{i}.{i}", "b.{i}.{i}", "'a.{i}.{i}': placeholders are distinct lower-case names such as {i}"),
        ("a.{I}", "b.{I}", "'a.{I}': placeholders are distinct lower-case names such as {i}"),
        ("a.{}", "b.{}", "'a.{}': placeholders are distinct lower-case names such as {i}"),
    ],
)
def test_both_names_hold_the_same_placeholders(torch, flax, message):
    raises(ValueError, message, Rule, torch, flax)


def test_a_rule_shows_and_compares_itself():
    rule = Rule("t", "f", "(h d) -> h d", h=2)
    assert repr(rule) == "Rule('t', 'f', '(h d) -> h d', h=2)"
    assert rule == Rule("t", "f", "(h d) -> h d", h=2)
    assert hash(rule) == hash(Rule("t", "f", "(h d) -> h d", h=2))
    assert rule != Rule("t", "f", "(h d) -> h d", h=3)
    assert rule != ("t", "f")


def test_a_rule_moves_below_prefixes():
    rule = Rule("q.weight", "q.kernel", "(h d) e -> e h d", h=2)
    assert rule.prefixed("a.b", "") == Rule("a.b.q.weight", "q.kernel", "(h d) e -> e h d", h=2)
    assert Rules([rule]).prefixed("", "c") == Rules([Rule("q.weight", "c.q.kernel", "(h d) e -> e h d", h=2)])
    assert rule.prefixed("x.{j}", "y.{j}") == Rule("x.{j}.q.weight", "y.{j}.q.kernel", "(h d) e -> e h d", h=2)
    assert rule.prefixed("a", "b").sizes is not rule.sizes
    for prefixes in (("x.{j}", ""), ("a{", "a{")):
        with pytest.raises(ValueError, match=r"placeholder|brace"):
            rule.prefixed(*prefixes)


@pytest.mark.parametrize("name", ["a{i}0", "a0{i}", "a{i}{j}0", "a.{i", "a.i}", "{{i}}"])
def test_ambiguous_placeholders_are_refused(name):
    with pytest.raises(ValueError, match="placeholder"):
        Rule(name, name)
