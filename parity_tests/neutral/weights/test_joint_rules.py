"""Rules between one tensor and several, and rules that drop a tensor."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import Rule, Rules, WeightsMismatchError, flax_to_torch, torch_to_flax

from .checks import ONE, raises

JOINT = {
    "counted": (
        Rule(["h.{i}.q", "h.{i}.k"], "k.{i}.qk", "(h c) d -> d (h part c)", part="part", h=2),
        {f"h.{i}.{name}": (6, 4) for i in range(3) for name in "qk"},
        {f"k.{i}.qk": (4, 12) for i in range(3)},
    ),
    "along": (
        Rule(["a", "b"], "ab", "o d -> d o", along="o", split=[3, 5]),
        {"a": (3, 4), "b": (5, 4)},
        {"ab": (4, 8)},
    ),
    "equal shares": (
        Rule(["a", "b"], "ab", "o d -> d o", along="o"),
        {"a": (4, 3), "b": (4, 3)},
        {"ab": (3, 8)},
    ),
    "stacked": (
        Rule("h.{i}.w", "w", "o d -> d l o", stack="l"),
        {f"h.{i}.w": (2, 3) for i in range(11)},
        {"w": (3, 11, 2)},
    ),
    "parts on the Flax side": (
        Rule("c_attn", ["q", "k", "v"], "(part o) d -> d o", part="part"),
        {"c_attn": (12, 3)},
        {"q": (3, 4), "k": (3, 4), "v": (3, 4)},
    ),
    "stacked on the torch side": (
        Rule("experts", "moe.{i}.w", "e o d -> d o", stack="e"),
        {"experts": (5, 2, 3)},
        {f"moe.{i}.w": (3, 2) for i in range(5)},
    ),
}


@pytest.mark.parametrize("name", JOINT)
def test_joint_rules_round_trip_every_bit(name):
    rule, shapes, flax_shapes = JOINT[name]
    random = np.random.default_rng(0)
    arrays = {key: random.integers(0, 2**32, size=shape, dtype=np.uint32).view("f4") for key, shape in shapes.items()}
    arrays["plain"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    rules = Rules([rule, Rule("plain", "plain", "o i -> i o")])
    there = torch_to_flax(arrays, rules)
    assert {key: one.shape for key, one in there.items()} == {**flax_shapes, "plain": (3, 2)}
    back = flax_to_torch(there, rules)
    assert back.keys() == arrays.keys()
    assert all(back[key].tobytes() == array.tobytes() for key, array in arrays.items())
    assert Rules([rule.turned().turned()]) == Rules([rule])
    again = torch_to_flax(flax_to_torch(there, rules), rules)
    assert all(again[key].tobytes() == there[key].tobytes() for key in there)


def test_joint_rules_put_every_element_where_the_pattern_says():
    arrays = {
        f"h.{i}.{name}": np.arange(24).reshape(6, 4) + 100 * i + 1000 * part
        for i in range(3)
        for part, name in enumerate("qk")
    }
    there = torch_to_flax(arrays, [JOINT["counted"][0]])
    for i, h, part, c, d in np.ndindex(3, 2, 2, 3, 4):
        assert there[f"k.{i}.qk"][d, (h * 2 + part) * 3 + c] == arrays[f"h.{i}.{'qk'[part]}"][h * 3 + c, d]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: Rule(["a", "b"], ["c", "d"], "o -> o", along="o"), "one of torch and flax must be a single name"),
        (
            lambda: Rule(["a", "b"], "c", "o -> o", along="o", split=[1, "x"]),
            "split must hold whole numbers or '...', got 'x'",
        ),
        (lambda: Rule(["a", "b"], "c", "o -> o", along="p"), "'p' is no axis of the pattern"),
        (lambda: Rule("a", "b", "o -> l o", stack="l"), "names on both sides must hold the same placeholders"),
        (lambda: Rule("a", first="b", second="c"), "torch and flax, or first and second, not some of both"),
    ],
)
def test_an_invalid_joint_rule_is_refused_at_construction(rule, message):
    with pytest.raises(ValueError, match=message):
        rule()


def test_tensors_missing_from_a_joint_rule_are_named():
    rule, shapes, _ = JOINT["counted"]
    arrays = {key: np.ones(shape) for key, shape in shapes.items()}
    del arrays["h.1.k"]
    raises(WeightsMismatchError, "weights do not match: missing: h.1.k", torch_to_flax, arrays, [rule])
    raises(WeightsMismatchError, "weights do not match: missing: k.{i}.qk", flax_to_torch, {}, [rule])
    with pytest.raises(WeightsMismatchError, match=r"misshapen: k\.0\.qk \(4, 5\)"):
        flax_to_torch({"k.0.qk": np.ones((4, 5))}, [rule])


def test_an_axis_may_have_the_name_of_a_key():
    assert Rule("a", "b", "(part o) -> part o", part=2).sizes == {"part": 2}


def test_a_rule_that_drops_leaves_its_tensor_out():
    rules = [Rule("a", "b"), Rule("mask", drop="computed")]
    assert torch_to_flax({"a": ONE, "mask": ONE}, rules).keys() == {"b"}
    assert flax_to_torch({"b": ONE}, rules).keys() == {"a"}
