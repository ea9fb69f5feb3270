"""Read a pairing from rules, for all parameters or for some of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from attn_bridge.weights import Rule, Rules, WeightsMismatchError, joint
from attn_bridge.weights.user_rules import AnyRules, read_rules

from ..sides.subject import SideWeight
from .proposal import Labels, UseOrder, in_order, propose
from .settling import MAX_CANDIDATES, Distance, Partial
from .tensors import Cut, Match, Pairing, Tensor, uncovered, whole

Parameters = Mapping[str, SideWeight]


def from_rules(rules: AnyRules, first: Parameters, second: Parameters) -> Pairing:
    """Return the pairing that rules define; they must cover every parameter.

    Raises:
        WeightsMismatchError: lists every parameter that the rules leave out, that does not exist, or whose shape
            differs.
        ValueError: two rules claim one parameter.
    """
    pairing, problems = _read(rules, first, second, ("torch", "Flax"))
    used = {match.second.source for match in pairing.matches} | {name for _, name in problems.misnamed}
    used_names = {match.first.source for match in pairing.matches} | problems.named
    dropped = {(side, name) for side, name, _ in pairing.dropped}
    problems.missing += [name for name in second if name not in used and ("second", name) not in dropped]
    problems.unexpected += [name for name in first if name not in used_names and ("first", name) not in dropped]
    problems.refuse()
    return in_order(Pairing(pairing.matches, pairing.dropped), first)


def partial(rules: AnyRules, first: Parameters, second: Parameters, labels: Labels = ("torch", "Flax")) -> Partial:
    """Return the pairs that rules define, for the parameters that they cover.

    Raises:
        WeightsMismatchError: lists names that do not exist, and shapes that do not fit.
        ValueError: two rules claim one parameter.
    """
    pairing, problems = _read(rules, first, second, labels)
    problems.refuse()
    return pairing


def pair_parameters(
    first: Parameters,
    second: Parameters,
    probe: Distance | None = None,
    rules: AnyRules | None = None,
    labels: Labels = ("torch", "Flax"),
    orders: Callable[[], tuple[UseOrder, UseOrder]] | None = None,
    limit: int = MAX_CANDIDATES,
) -> Pairing:
    """Return the pairing that rules define, completed by `propose` for parameters without rules."""
    settled = None if rules is None else partial(rules, first, second, labels=labels)
    return propose(first, second, probe, settled, labels, orders, limit)


@dataclasses.dataclass
class _Problems:
    """The errors in the rules of two sides, collected to be raised together."""

    labels: Labels
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[str] = dataclasses.field(default_factory=list)
    misnamed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    named: set[str] = dataclasses.field(default_factory=set)

    def refuse(self) -> None:
        """Raise the collected errors, if any."""
        if self.missing or self.unexpected or self.misshapen:
            raise WeightsMismatchError(self.missing, self.unexpected, self.misshapen)


def _read(rules: AnyRules, first: Parameters, second: Parameters, labels: Labels) -> tuple[Partial, _Problems]:
    parsed = read_rules(rules)
    # A rule names torch and flax, whichever side they are on; rules by side, first and second, stay as they are.
    if [_framework(first, "torch"), _framework(second, "flax")] == ["flax", "torch"]:
        parsed = Rules(rule if rule.by_side else rule.turned() for rule in parsed)
    problems = _Problems(labels)
    matches = _plain_matches(Rules(rule for rule in parsed if not rule.is_joint), first, second, problems)
    dropped: list[tuple[str, str, str]] = []
    of_first, of_second = joint.covered(parsed, first, "torch"), joint.covered(parsed, second, "flax")
    for (rule, covered), (_, others) in zip(of_first, of_second, strict=True):
        firsts, seconds = {name: first[name] for name in covered}, {name: second[name] for name in others}
        if not rule.drop:
            matches += _joint_matches(rule, firsts, seconds, problems)
            continue
        for side, names, parameters in (("first", rule.torch_names, firsts), ("second", rule.flax_names, seconds)):
            hits = [name for name in parameters if any(joint.matches(one, name) for one in names)]
            dropped += [(side, name, rule.drop) for name in hits]
            problems.missing += [f"{rule.where}{name}" for name in names if not hits]
    _refuse_doubles(matches)
    return Partial(tuple(matches), tuple(dropped)), problems


def _framework(parameters: Parameters, default: str) -> str:
    own = {getattr(one, "framework", "") for one in parameters.values()} - {""}
    return own.pop() if len(own) == 1 else default


def _plain_matches(rules: Rules, first: Parameters, second: Parameters, problems: _Problems) -> list[Match]:
    """Return the matches of rules from one tensor to one."""
    places = {rule: rule.where for rule in rules}
    pairs, missing, _ = rules.pair(first, "torch")
    problems.missing += missing
    problems.named |= pairs.keys()
    matches = []
    for name, (rule, other) in pairs.items():
        if other not in second:
            problems.unexpected.append(other)
            problems.misnamed.append((name, other))
            continue
        try:
            shape = rule.convert_shape(first[name].shape, "torch")
        except ValueError as error:
            problems.misshapen.append(f"{places[rule]}{name}: {error}")
            problems.misnamed.append((name, other))
            continue
        if shape != second[other].shape:
            problems.misshapen.append(f"{places[rule]}{other}: expected {second[other].shape}, the rules give {shape}")
        # The rule of this pair alone: without placeholders, so that reports and conversions need not match names again.
        concrete = Rule(name, other, rule.pattern, **rule.sizes)
        matches.append(Match(whole(name, first[name], "torch"), whole(other, second[other], "flax"), concrete, "rule"))
    return matches


def _joint_matches(rule: Rule, first: Parameters, second: Parameters, problems: _Problems) -> list[Match]:
    """Return the matches of a rule between one tensor and several: a part of the one for each of them."""
    single_is_first = joint.parts_side(rule) == "flax"
    singles, others = (first, second) if single_is_first else (second, first)
    label = problems.labels[1 if single_is_first else 0]
    row = joint.row_of(rule)
    wholes, wrong = joint.placed(rule, row, {name: one.shape for name, one in singles.items()})
    problems.misshapen += wrong
    groups, _ = joint.grouped(row, others)
    problems.missing += [f"{rule.where}{name}" for name in groups if name not in wholes]
    if not wholes and not groups:
        problems.missing.append(f"{rule.where}{row.theirs}")
    matches = []
    for name, parts in wholes.items():
        for other, piece_lay in parts.items():
            if other not in others:
                problems.missing.append(f"{rule.where}{other}")
                continue
            if others[other].shape != piece_lay.shape:
                problems.misshapen.append(
                    f"{rule.where}{other}: {others[other].shape} in {label}, the rules give {piece_lay.shape}"
                )
                continue
            atoms = [atom for axis in piece_lay.axes for atom in axis]
            piece = dataclasses.replace(
                whole(name, singles[name], "torch" if single_is_first else "flax"),
                name=f"{name}[{_label(other, parts)}]",
                shape=tuple(size for size, _ in atoms),
                cut=Cut(piece_lay.offset, tuple(stride for _, stride in atoms)),
            )
            it = whole(other, others[other], "flax" if single_is_first else "torch")
            axes = [[f"a{i}" for i in range(*span)] for span in _spans([len(axis) for axis in piece_lay.axes])]
            matches.append(_match(it, piece, axes, rule.pattern, single_is_first=single_is_first))
    lost = uncovered([match.first if single_is_first else match.second for match in matches])
    # A gap is only worth a message of its own where no other error explains it.
    if not wrong and not problems.missing and not problems.misshapen:
        problems.misshapen += [f"{rule.where}{name}: the parts are not all of it" for name in lost]
    return matches


def _spans(lengths: Iterable[int]) -> list[tuple[int, int]]:
    spans, end = [], 0
    for length in lengths:
        spans.append((end, end + length))
        end += length
    return spans


def _match(part: Tensor, piece: Tensor, axes: list[list[str]], text: str, *, single_is_first: bool) -> Match:
    """Return the match of a part and its piece of the single tensor, whose axes are those of the part taken apart."""
    sizes = dict(zip([axis for group in axes for axis in group], piece.shape, strict=True))
    axis_sizes = {axis: sizes[axis] for group in axes if len(group) > 1 for axis in group}
    apart = " ".join(axis for group in axes for axis in group) or "..."
    together = " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in axes) or "..."
    if single_is_first:
        return Match(piece, part, Rule("torch", "flax", f"{apart} -> {together}", **axis_sizes), "rule", text)
    return Match(part, piece, Rule("torch", "flax", f"{together} -> {apart}", **axis_sizes), "rule", text)


def _label(name: str, names: Iterable[str]) -> str:
    """Return the label of a part: the words of its name that the names of the other parts do not share."""
    split = [one.split(".") for one in names]
    words = name.split(".")
    if any(len(one) != len(words) for one in split):
        return name
    own = [word for i, word in enumerate(words) if len({one[i] for one in split}) > 1]
    return ".".join(own) or name


def _refuse_doubles(matches: Iterable[Match]) -> None:
    """Refuse a parameter that two rules claim."""
    for which in (0, 1):
        tensors = [(match.first, match.second)[which] for match in matches]
        counts: dict[str, int] = {}
        for tensor in tensors:
            counts[tensor.source] = counts.get(tensor.source, 0) + math.prod(tensor.shape)
        for tensor in tensors:
            if counts[tensor.source] > math.prod(tensor.parameter.shape):
                raise ValueError(f"{tensor.source} must be covered by exactly one rule")
