"""Rules in all forms that users may supply, and their combination with built-in ones.

In: rules, tables, pairs of a comparison's report, or a TOML file. Out: `Rules`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..printable import printable
from . import joint
from .index import Index
from .rule import Rule, Side, rule_from
from .rules import Rules
from .templates import PLACEHOLDER

Shapes = Mapping[str, tuple[int, ...]]


@runtime_checkable
class Paired(Protocol):
    """A pair of a comparison's report: a tensor's names on its two sides, and the pattern between them."""

    @property
    def first(self) -> str:
        """Name on the first side."""

    @property
    def second(self) -> str:
        """Name on the second side."""

    @property
    def pattern(self) -> str:
        """Pattern from the first side's axes to the second's."""


AnyRules: TypeAlias = str | Path | Rules | Iterable[Rule | Mapping[str, Any]]
"""Rules from a user: a TOML file, a set, or rules and tables one by one."""

RulesOrPairs: TypeAlias = str | Path | Rules | Iterable[Rule | Mapping[str, Any] | Paired]
"""Rules, or pairs of a comparison's report."""


def read_rules(rules: AnyRules) -> Rules:
    """Return rules as a set.

    Raises:
        TypeError: an element is neither a `Rule` nor a table.
        ValueError: a table is not a rule; the message names its line, or its number.
        OSError: the file cannot be read.
    """
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, (str, Path)):
        return Rules.from_toml(rules)
    if isinstance(rules, Rule):
        return Rules([rules])
    if isinstance(rules, Mapping):
        raise TypeError("rules must be a TOML file's path, Rules, or a list of rules; got one table")
    if not isinstance(rules, Iterable):
        raise TypeError(f"rules must be Rules or a list of Rule, got {type(rules).__name__}")
    numbered = enumerate(rules, 1)
    return Rules(rule_from(rule, f"rule {number}") if isinstance(rule, Mapping) else rule for number, rule in numbered)


def rules_between(rules: RulesOrPairs, torch: Shapes, flax: Shapes) -> Rules:
    """Return rules as a set whose sides are torch and Flax, including pairs of a report.

    Args:
        rules: the rules; those with `first` and `second`, and pairs, have either framework first.
        torch: name -> shape of every tensor of the torch module.
        flax: those of the Flax module.

    Raises:
        TypeError: an element is neither a `Rule`, a table nor a pair.
        ValueError: a table is not a rule, or a pair of parts of tensors.
        OSError: the file cannot be read.
    """
    listed: Any = rules
    if isinstance(rules, Iterable) and not isinstance(rules, (str, Path, Rules, Rule, Mapping)):
        shapes = {**torch, **flax}
        listed = [_rule_of(rule, shapes, (torch, flax)) for rule in rules]
    return Rules(_oriented(rule, torch, flax) for rule in read_rules(listed))


def added(rules: Rules, built_in: Iterable[Rule]) -> Rules:
    """Return rules together with the built-in rules whose tensors they do not name."""
    own = list(rules)
    index: dict[Side, Index[Rule]] = {
        "torch": Index(((name, rule) for rule in own for name in rule.torch_names), integers=None),
        "flax": Index(((name, rule) for rule in own for name in rule.flax_names), integers=None),
    }

    def names(side: Side, name: str) -> bool:
        return any(_covers(rule, side, name) for rule in index[side].find(name))

    free = [
        rule
        for rule in built_in
        if not any(names("torch", name) for name in rule.torch_names)
        and not any(names("flax", name) for name in rule.flax_names)
    ]
    return Rules([*own, *free])


def _covers(rule: Rule, side: Side, name: str) -> bool:
    if not rule.is_joint:
        return rule.values(name, side) is not None
    return any(joint.matches(template, name) for template in (rule.torch_names if side == "torch" else rule.flax_names))


def _rule_of(rule: object, shapes: Shapes, sides: tuple[Shapes, Shapes]) -> object:
    """Return a pair, or a pair's table of a JSON report, as a rule; any other value unchanged."""
    if isinstance(rule, Mapping) and isinstance(rule.get("how"), str):
        names = (rule.get("first", rule.get("torch")), rule.get("second", rule.get("flax")), rule.get("pattern"))
    elif isinstance(rule, Paired) and not isinstance(rule, Rule):
        names = (rule.first, rule.second, rule.pattern)
    else:
        return rule
    first, second, pattern = map(str, names)
    for name in (first, second):
        if name not in shapes and name.endswith("]") and name.partition("[")[0] in shapes:
            whole = printable(name.partition("[")[0])
            raise ValueError(f"{printable(name)} is a part of a tensor; give a Rule for all of {whole}")
    if "," in pattern:
        raise ValueError(f"{printable(first)}: {printable(pattern)}: no rule reads an axis backwards")
    at = 0 if first in sides[0] and second in sides[1] else 1
    sizes: Mapping[str, Any] = _sizes(pattern, sides[at].get(first), sides[1 - at].get(second))
    return Rule(first=first, second=second, pattern=pattern, **sizes)


def _sizes(pattern: str, *shapes: tuple[int, ...] | None) -> dict[str, int]:
    """Return the sizes of axes that a pattern groups, read from the side where they are separate."""
    grouped = {axis for group in re.findall(r"\(([^()]*)\)", pattern) for axis in group.split()}
    sizes: dict[str, int] = {}
    for text, shape in zip(pattern.split("->"), shapes, strict=True):
        axes = re.findall(r"\([^()]*\)|\S+", text)
        if shape is not None and len(axes) == len(shape):
            sizes |= {axis: size for axis, size in zip(axes, shape, strict=True) if axis in grouped}
    return sizes


def _oriented(rule: Rule, torch: Shapes, flax: Shapes) -> Rule:
    """Return a rule of a first and a second side with torch's names first."""
    if not rule.by_side or not (_names_all(rule.flax_names, torch) and _names_all(rule.torch_names, flax)):
        return rule
    is_first = _names_all(rule.torch_names, torch) and _names_all(rule.flax_names, flax)
    return rule if is_first and _fits(rule, torch, flax) else rule.turned()


def _names_all(templates: Collection[str], names: Collection[str]) -> bool:
    """Whether every template names a tensor."""
    return all(
        one in names or (PLACEHOLDER.search(one) is not None and any(joint.matches(one, name) for name in names))
        for one in templates
    )


def _fits(rule: Rule, torch: Shapes, flax: Shapes) -> bool:
    """Return whether a rule between two tensors converts torch's shape to Flax's; True if a shape is unknown."""
    if rule.is_joint or rule.torch not in torch or rule.flax not in flax:
        return True
    try:
        return rule.convert_shape(torch[rule.torch], "torch") == tuple(flax[rule.flax])
    except ValueError:
        return False
