"""Rules from a TOML file; a mistake is named with its line."""

from __future__ import annotations

import pytest

from attn_bridge import Rule, Rules

from .checks import BIJECTION, raises

GOOD = """
# our own model
[[rule]]
torch = "h.{i}.q.weight"
flax = "h.{i}.q.kernel"
pattern = "(h d) e -> e h d"
h = 8

[[ rule ]]
torch = "norm.weight"
flax = "norm.scale"
"""


def test_rules_load_from_a_file(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(GOOD)
    expected = Rules(
        [Rule("h.{i}.q.weight", "h.{i}.q.kernel", "(h d) e -> e h d", h=8), Rule("norm.weight", "norm.scale")]
    )
    assert Rules.from_toml(path) == expected
    assert Rules.from_toml(str(path)) == expected


def test_an_empty_file_holds_no_rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text("")
    assert Rules.from_toml(path) == Rules([])


START = '[[rule]]\ntorch = "a"\nflax = "b"\n\n'
NEEDS = "a rule needs the keys torch and flax"
NOTHING_ELSE = "a rules file holds [[rule]] tables and nothing else, got"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{START}# [[rule]]\n[[rule]]\ntorch = "c"\n', f", line 6: {NEEDS}, got torch"),
        (f'{START}  [[ rule ]] # two\nflax = "c"\n', f", line 5: {NEEDS}, got flax"),
        (
            f'{START}[[rule]]\ntorch = "c"\nflax = "d"\npattern = "x y -> x"\n',
            f", line 5: Rule('c', 'd', 'x y -> x'): {BIJECTION}",
        ),
        (
            f'{START}[[rule]]\ntorch = "c"\nflax = "d"\nheads = 3\n',
            ", line 5: Rule('c', 'd', '... -> ...', heads=3): size given for 'heads', which is no axis of the pattern",
        ),
        (
            '[[rule]]\ntorch = "c"\nflax = "d"\npattern = "(h d) -> h d"\nh = 2.0\n',
            ", line 1: Rule('c', 'd', '(h d) -> h d', h=2.0): size of 'h' must be an integer, got float",
        ),
        ('[[rule]]\ntorch = 3\nflax = "d"\n', ", line 1: torch must be a string, got int"),
        (
            '[[rule]]\ntorch = "c.{i}"\nflax = "d"\n',
            ", line 1: Rule('c.{i}', 'd', '... -> ...'): both names must hold the same placeholders",
        ),
        (f"title = 'mine'\n{START}", f": {NOTHING_ELSE} title"),
        ("rule = 3\n", ": rule must be tables, each headed [[rule]]"),
        ("[rule]\ntorch = 'a'\n", ": rule must be tables, each headed [[rule]]"),
        ("rule = [{torch = 'a'}]\n", ": a rule needs the keys torch and flax, got torch"),
        (f'{START}[[rule]]\ntorch = "a"\nflax = "c"\n', ", line 5: two rules share the torch name a"),
        ("[[rule]\n", ": Expected ']]' at the end of an array declaration (at line 1, column 7)"),
        (f"{START}pattern = \n", ": Invalid value (at line 5, column 11)"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    raises(ValueError, f"{path}{message}", Rules.from_toml, path)


def test_two_rules_of_one_name_in_a_file_are_refused(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(START + START)
    with pytest.raises(ValueError, match="two rules share the torch name a") as caught:
        Rules.from_toml(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Rules.from_toml(tmp_path / "none.toml")
