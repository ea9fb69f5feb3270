"""Rules pair parameters, all or some; those that do not fit are refused."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from attn_bridge import Rule, Rules, WeightsMismatchError
from attn_bridge.weights.user_rules import read_rules
from attn_parity.pairing import from_rules, partial, propose

from .parameters import BARE, draw, parameters


@pytest.fixture
def sides():
    ours = parameters(
        {
            **{f"layers.{i}.{name}.weight": ((4, 4), "Linear") for i in range(3) for name in ("q", "k", "up")},
            "odd.weight": ((4, 6), "Linear"),
            "embed.weight": ((9, 4), "Embedding"),
            "mask": ((5, 5), "Own"),
        },
        "torch",
    )
    theirs = parameters(
        {
            "blocks.both.kernel": ((3, 4, 2, 4), "Own"),
            **{f"mlp_{i}.kernel": ((4, 4), "Dense") for i in range(3)},
            "strange.kernel": ((3, 2, 4), "Own"),
            "embed.embedding": ((9, 4), "Embed"),
        },
        "flax",
    )
    return ours, theirs


TABLES = [
    {
        "torch": ["layers.{i}.q.weight", "layers.{i}.k.weight"],
        "flax": "blocks.both.kernel",
        "pattern": "o d -> l d part o",
        "part": "part",
        "stack": "l",
    },
    {"torch": "odd.weight", "flax": "strange.kernel", "pattern": "o (a b) -> a b o", "a": 3},
    {"torch": "layers.{i}.up.weight", "flax": "mlp_{i}.kernel", "pattern": "o i -> i o"},
    {"torch": "mask", "drop": "computed"},
]


@pytest.mark.parametrize("given", ["tables", "rules", "file", "set"])
def test_partial_rules_leave_other_parameters_to_names(sides, tmp_path, given):
    rules = TABLES
    if given == "rules":
        rules = [Rule(**table) for table in TABLES]
    elif given == "set":
        rules = Rules(Rule(**table) for table in TABLES)
    elif given == "file":
        rules = tmp_path / "rules.toml"
        rules.write_text(
            "\n".join(
                "[[rule]]\n" + "\n".join(f"{key} = {value!r}" for key, value in table.items()) for table in TABLES
            )
        )
    ours, theirs = sides
    found = propose(ours, theirs, None, partial(rules, ours, theirs))
    assert {row.torch: row.how for row in found.rows()} == {
        **{name: "rule" for name in ours if name not in ("embed.weight", "mask")},
        "embed.weight": "name",
    }
    assert found.dropped == (("first", "mask", "computed"),)
    arrays = draw(ours)
    flax = found.to_second(arrays)
    assert {name: one.shape for name, one in flax.items()} == {name: one.shape for name, one in theirs.items()}
    for i, part in itertools.product(range(3), range(2)):
        name = f"layers.{i}.{'qk'[part]}.weight"
        bits = arrays[name].view(np.uint32)
        assert np.array_equal(flax["blocks.both.kernel"].view(np.uint32)[i, :, part], bits.T)
        aligned = found.aligned(flax, "second")[name]
        assert np.array_equal(np.ascontiguousarray(aligned).view(np.uint32), bits)
    back = found.to_first(flax)
    assert back.keys() == arrays.keys() - {"mask"}
    assert all(np.array_equal(back[name].view(np.uint32), arrays[name].view(np.uint32)) for name in back)


def test_rule_keys_name_frameworks_or_sides(sides):
    ours, theirs = sides
    turned = propose(theirs, ours, None, partial(TABLES, theirs, ours))
    straight = propose(ours, theirs, None, partial(TABLES, ours, theirs))
    arrays = {name: one for name, one in draw(ours).items() if name != "mask"}
    one, two = straight.to_second(arrays), turned.to_first(arrays)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name].view(np.uint32), two[name].view(np.uint32)) for name in one)
    rule = {"first": "W", "second": "V", "pattern": "a b -> b a"}
    for frameworks in itertools.product(("torch", "flax"), repeat=2):
        shapes = {"W": ((2, 3), "")}, {"V": ((3, 2), "")}
        sides = [parameters(one, framework) for one, framework in zip(shapes, frameworks, strict=True)]
        assert partial([rule], *sides).matches[0].rule.pattern == "a b -> b a"
    other = {"torch": "W", "flax": "V", "pattern": "a b -> b a"}
    sides = parameters({"W": ((2, 3), "")}, "flax"), parameters({"V": ((3, 2), "")}, "flax")
    assert partial([other], *sides).matches[0].first.name == "W"


def test_parts_may_be_on_either_side():
    fused = parameters({"c_attn.weight": ((4, 12), "Conv1D")}, "torch")
    apart = parameters({f"{name}.kernel": ((4, 4), "Dense") for name in ("a", "b", "c")}, "flax")
    rule = Rule("c_attn.weight", ["b.kernel", "a.kernel", "c.kernel"], "i o -> i o", along="o")
    arrays = draw(fused)
    found = from_rules([rule], fused, apart).to_second(arrays)
    bits = arrays["c_attn.weight"].view(np.uint32)
    for i, name in enumerate("bac"):
        assert np.array_equal(found[f"{name}.kernel"].view(np.uint32), bits[:, 4 * i : 4 * i + 4])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"torch": "q"}, "rule 1: a rule needs the keys torch and flax, got torch"),
        ({"first": "q", "flax": "k"}, "rule 1: a rule needs the keys first and second, got first, flax"),
        (
            {"torch": ["a", "b"], "flax": "c"},
            "rule 1: Rule(['a', 'b'], 'c', '... -> ...'): c: several parts need either the axis that counts them or "
            "one they lie along",
        ),
        (
            {"torch": "a", "flax": "b", "drop": "no"},
            "rule 1: a rule that drops has one name, torch or flax, and the reason",
        ),
        ({"torch": "a", "flax": ["b", 3]}, "rule 1: flax must be a string or a list of strings, got a list with int"),
    ],
)
def test_an_invalid_rule_is_named_by_its_number(table, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_rules([table])


def test_rules_that_do_not_fit_are_named_with_their_line(tmp_path, sides):
    path = tmp_path / "rules.toml"
    path.write_text(
        '# mine\n[[rule]]\ntorch = ["layers.{i}.q.weight", "layers.{i}.k.weight"]\nflax = "blocks.both.kernel"\n'
        'pattern = "o d -> l d (part o)"\npart = "part"\nstack = "l"\n'
    )
    with pytest.raises(WeightsMismatchError) as caught:
        partial(path, *sides)
    assert f"{path}, line 2: blocks.both.kernel (3, 4, 2, 4) has 4 axes, expected 3" in str(caught.value)
    with pytest.raises(WeightsMismatchError, match=r"missing: rule 1: nowhere"):
        partial([{"torch": ["nowhere", "none"], "flax": "nowhere", "along": "o", "pattern": "o -> o"}], *sides)


def test_rules_decide_the_pairing():
    ours, theirs = BARE
    pairing = from_rules([Rule("W", "W", "a b -> b a")], ours, theirs)
    array = draw(ours)["W"]
    assert np.array_equal(pairing.to_second({"W": array})["W"].view(np.uint32), array.T.view(np.uint32))
    assert [row.how for row in pairing.rows()] == ["rule"]


def test_all_faults_of_the_rules_are_listed():
    ours = parameters({"a.weight": ((4, 4), "Linear"), "b.weight": ((5, 4), "Linear"), "c.weight": ((2, 2), "Linear")})
    theirs = parameters(
        {"a.kernel": ((4, 4), "Linear"), "b.kernel": ((4, 6), "Linear"), "e.kernel": ((2, 2), "Linear")}
    )
    rules = [Rule("a.weight", "a.kernel", "o i -> i o"), Rule("b.weight", "b.kernel", "o i -> i o"), Rule("x", "y")]
    with pytest.raises(WeightsMismatchError) as caught:
        from_rules(rules, ours, theirs)
    assert caught.value.missing == ["e.kernel", "x"]
    assert caught.value.unexpected == ["c.weight"]
    assert caught.value.misshapen == ["b.kernel: expected (4, 6), the rules give (4, 5)"]
