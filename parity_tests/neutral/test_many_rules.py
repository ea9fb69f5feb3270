"""Rules by the thousands: work grows with their number and not with its square, and nothing is found that is not so."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from attn_bridge.models import rules_file
from attn_bridge.weights import Rule, Rules
from attn_bridge.weights.index import Index
from attn_bridge.weights.templates import fill, match

SPELLINGS = {
    "a name each": ("b{k}.weight", "l{k}.kernel"),
    "one ending": ("h.{k}.attn.weight", "h_{k}.attn.kernel"),
    "blocks": ("h.{i}.weight{k}", "h_{i}.kernel{k}"),
    "no dots": ("h{i}weight{k}", "h{i}kernel{k}"),
}
"""Names of a rule for the two sides; {k} is its number."""


def work(call, *arguments):
    """Return how many Python functions a call calls."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
    return count


def grows(call, few, many):
    """Return how many times the work is done for four times as much, once expressions are compiled."""
    call(*few), call(*many)
    return work(call, *many) / work(call, *few)


def rules_of(spelling, count, path):
    torch, flax = SPELLINGS[spelling]
    names = [(torch.replace("{k}", str(k)), flax.replace("{k}", str(k))) for k in range(count)]
    path.write_text("".join(f'[[rule]]\ntorch = "{torch}"\nflax = "{flax}"\n' for torch, flax in names))
    return path, [torch.replace("{i}", "7") for torch, _ in names]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_four_times_the_rules_is_four_times_the_work(spelling, tmp_path):
    few, many = (rules_of(spelling, count, tmp_path / f"{count}.toml") for count in (40, 160))
    assert grows(rules_file.read, few, many) < 5
    assert grows(Rules.from_toml, few[:1], many[:1]) < 5
    read = [(Rules.from_toml(path), names) for path, names in (few, many)]
    assert grows(lambda rules, names: rules.pair(names, "torch"), *read) < 5


@pytest.mark.parametrize("options", [{"flax": "all.{k}", "pattern": "a -> i a", "stack": "i"}, {"drop": "a buffer"}])
def test_four_times_the_joint_rules_is_four_times_the_work(options):
    def case(count):
        made = [
            Rule(
                f"h.{{i}}.part{k}" if "flax" in options else f"h.{k}.part",
                **{key: value.replace("{k}", str(k)) for key, value in options.items()},
            )
            for k in range(count)
        ]
        names = [f"h.{i}.part{k}" for k, i in itertools.product(range(count), range(2))]
        names = names if "flax" in options else [f"h.{k}.part" for k in range(count)]
        return Rules(made), {name: np.arange(3.0) for name in names}, "torch"

    assert grows(Rules.convert, case(20), case(80)) < 5


def test_a_wrong_rule_among_many_is_found_with_little_work_and_named(tmp_path):
    def refused(path):
        with pytest.raises(ValueError, match=r", line 4: two rules share the torch name h\.0\.attn\.weight$"):
            Rules.from_toml(path)

    def case(count):
        path, _ = rules_of("one ending", count, tmp_path / f"{count}.toml")
        first, _, rest = path.read_text().partition("[[rule]]\n")[2].partition("[[rule]]\n")
        path.write_text(f"[[rule]]\n{first}[[rule]]\n{first}[[rule]]\n{rest}")
        return (path,)

    assert grows(refused, case(40), case(160)) < 8


def test_an_index_finds_all_templates_that_a_name_falls_under():
    pieces = ["a", "{i}", "0", "7", ".", "{j}b", "b12", "{path}", "{rest}"]
    templates = sorted(
        one
        for one in map("".join, itertools.product(pieces, repeat=3))
        if all(one.count(placeholder) < 2 for placeholder in ("{i}", "{j}", "{path}", "{rest}"))
    )
    index = Index((one, one) for one in templates)
    values = {"i": "10", "j": "7", "path": "x.b1.", "rest": "0.7ab"}
    for name in {fill(one, values) for one in templates} | {"a\u0663.7b", "", "..a7"}:
        wanted = {one for one in templates if match(one, name, ("",)) is not None}
        assert wanted <= set(index.find(name))


def test_an_index_holds_a_name_against_few_templates():
    index = Index((f"{path}h.{{i}}.x{k}{end}", k) for k in range(50) for path, end in (("{path}", ""), ("", ".{rest}")))
    assert index.find("model.h.3.x17") == [17]
    assert index.find("h.3.x17.weight") == [17]


@pytest.mark.parametrize("names", [("a.{i}.b{j}", "a.3.b{j}"), ("a.1.b{i}", "a.{i}.b2"), ("a.3.b2", "a.{i}.b2")])
def test_rules_that_cover_one_name_are_refused_in_any_order(names):
    others = [f"a.{k}.b{k}" for k in range(10, 20)] + ["c.{i}.b{j}"]
    for order in (names, names[::-1]):
        rules = [Rule(one, one.replace("a", "x")) for one in (*others, *order)]
        with pytest.raises(ValueError, match=r"two rules cover the same torch names: "):
            Rules(rules)
