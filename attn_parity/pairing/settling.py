"""Settle the pairings that names, classes and shapes leave open, by running both sides under each candidate.

Layers that store gates in another order than torch are split into gates here, which are paired one by one.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from attn_bridge.printable import listed

from .assignment import template
from .leftovers import rules_of
from .names import layer_of
from .patterns import Way, WayOptions
from .tensors import Match, Pairing, Tensor

# Five layers have 5! = 120 orders, which are tried; six have 720.
MAX_CANDIDATES = 256
"""Most pairings to try before the choice is left to the user."""

MAX_SHOWN = 16
"""Number of pairings to try if more than the limit remain."""

MAX_LISTED, MAX_PAIRS = 4, 2
"""Number of pairings, or of layers, that a message lists, and pairs of each pairing."""

AS_IT_IS = "... -> ..."
"""Pattern of a tensor that keeps its axes."""

AGREE = 1e-9
"""Relative distance below which outputs agree: several times the rounding of float64 in a deep model."""

# The difference up to which the verdict, too, asks whether float32 tables explain it (`verdict.measures.TABLE_LIMIT`).
NEAR = 1e-3
"""Relative distance up to which the nearest pairing may be right although none agrees: the effect of float32 tables, or
of a small fault."""

# In the tests float32 tables leave the right pairing 1e-8 to 3e-5 apart and wrong ones 0.3. Where the nearest is 1e-5
# apart and the next 8e-4, a small fault may be the cause as well, and nothing is settled.
FURTHER = 100.0
"""Other pairings must then be this many times as far apart."""

ALIKE = 10.0
"""A pairing this many times as far apart as the nearest is as good as it."""

TORCH, KERAS = "rzn", "zrn"
"""The gates of a GRU in the order in which torch and Keras keep them."""

_KERAS_GRU = re.compile(r"(^|[./])gru_cell(_\d+)?[./](kernel|recurrent_kernel|bias)$")
"""Paths of the variables of Keras's GRU: its cell is a layer of that name."""

_KERNELS = re.compile(r"(^|[./])(kernel|recurrent_kernel|bias)$")
"""Names that trees of weights have from Keras, or from code like it, which may as well keep torch's order."""

Distance = Callable[[Pairing], float]


@dataclasses.dataclass(frozen=True)
class Partial:
    """The pairs that rules define for some of the parameters.

    Attributes:
        matches: the pairs.
        dropped: (side, parameter, reason) of those that are excluded.
    """

    matches: tuple[Match, ...] = ()
    dropped: tuple[tuple[str, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Link:
    """Two matched tensors, the axis patterns that their layers allow, and the reason for the match."""

    first: Tensor
    second: Tensor
    options: WayOptions
    layers: Hashable
    how: str


Choice = list[tuple[Link, ...]]
"""Alternatives of which one holds, the usual one first."""


def together(choices: Sequence[Choice]) -> Choice:
    """Return the choices of a layer's weight and bias as one: both are cut in the same way."""
    return [tuple(link for links in same for link in links) for same in zip(*choices, strict=True)]


def joined(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices, with those that repeat in numbered blocks made one: they are decided once for all."""
    alike: dict[Hashable, list[Choice]] = collections.defaultdict(list)
    for choice in choices:
        key = tuple(
            tuple(template(f"{link.first.spelled} = {link.second.spelled}") for link in links) for links in choice
        )
        alike[key].append(choice)
    return [together(found) for found in alike.values()]


def settle(
    by_rules: Partial,
    choices: Sequence[Choice],
    fixed: Sequence[Link],
    probe: Distance | None,
    limit: int = MAX_CANDIDATES,
    *,
    is_ordered: bool = False,
) -> Pairing:
    """Return the first candidate whose outputs agree, or nearly agree while those of all others are far apart.

    If no candidate does, the two sides differ under every pairing; the first candidate is returned, so that the
    difference can be localised.

    Args:
        by_rules: pairs that rules settled.
        choices: the open choices.
        fixed: pairs that names settled.
        probe: returns the distance of the outputs.
        limit: most candidates to try.
        is_ordered: whether the first candidate follows the order of execution, so that it needs no other support.

    Raises:
        ValueError: several candidates fit equally well, and no evidence favours one.
    """
    usual = _usual_ways([*fixed, *(link for choice in choices for links in choice for link in links)])
    is_permuted = any(len({names_of(links) for links in choice}) > 1 for choice in choices)
    some = list(itertools.islice(_candidates(by_rules, choices, fixed, usual), limit + 1))
    first = some[0]
    if len(some) == 1:
        return first
    names = _open_names(choices, fixed, usual)
    by_name = {link.first.name: link.how for link in [*fixed, *(link for choice in choices for link in choice[0])]}
    if probe is None and (is_ordered or not is_permuted):
        return _untried(first, by_name)
    if probe is None:
        raise _ambiguous("", some, names)
    is_whole = len(some) <= limit and not any(len(choice) == MAX_SHOWN for choice in choices)
    tried = some if is_whole else some[: min(limit, MAX_SHOWN)]
    distances = _distances(tried, probe, first if is_ordered else None)
    tried = tried[: len(distances)]
    nearest = min((one for one in distances if not math.isnan(one)), default=math.inf)
    # Absolute where a pairing agrees; relative to the nearest where float32 tables keep all from agreeing; else 0.0,
    # which no distance is below.
    bound = AGREE if nearest < AGREE else FURTHER * nearest if nearest < NEAR else 0.0
    agreeing = [candidate for candidate, distance in zip(tried, distances, strict=True) if distance < bound]
    is_alone = sum(distance < ALIKE * nearest for distance in distances) == 1
    if nearest >= AGREE and is_alone and len({_who(candidate) for candidate in agreeing}) > 1:
        agreeing = []  # none stands out; the usual one goes on, to find out where they differ
    if len(agreeing) > 1 and len({_who(candidate) for candidate in agreeing}) > 1:
        what = f"{len(agreeing)} make the outputs agree"
        if not is_ordered:
            raise _ambiguous(f" and {what}", some, names)
        return _doubtful(first, by_name, what, tried, names, is_ordered=is_ordered, rest="rules settle it")
    if agreeing:
        return agreeing[0]
    if not is_whole and is_permuted and not is_ordered:
        raise _ambiguous("", some, names)
    why, rest = (
        "no pairing makes the outputs agree",
        "if another is right, they may begin to differ elsewhere, and rules",
    )
    return _doubtful(first, by_name, why, some, names, is_ordered=is_ordered, rest=f"{rest} settle it")


def _distances(tried: Sequence[Pairing], probe: Distance, ordered: Pairing | None) -> list[float]:
    """Return how far apart the outputs are under each candidate, as far as they are tried.

    Once one agrees, only others of which something else is which matter; none does where it is the order of execution.
    """
    distances: list[float] = []
    agreed: set[Hashable] = set()
    for candidate in tried:
        distances.append(math.inf if {_who(candidate)} == agreed else probe(candidate))
        if distances[-1] < AGREE:
            agreed.add(_who(candidate))
            if ordered is not None and _who(candidate) == _who(ordered):
                break
    return distances


def names_of(links: Sequence[Link]) -> frozenset[tuple[str, str]]:
    """Return which tensor is which in an alternative."""
    return frozenset((link.first.name, link.second.name) for link in links)


def _who(candidate: Pairing) -> frozenset[tuple[str, str]]:
    return frozenset((match.first.name, match.second.name) for match in candidate.matches)


def _untried(pairing: Pairing, by_name: Mapping[str, str]) -> Pairing:
    """Return a pairing whose open pairs were settled in another way than by running."""
    matches = tuple(
        dataclasses.replace(match, how=by_name.get(match.first.name, "order")) if match.how == "probe" else match
        for match in pairing.matches
    )
    return dataclasses.replace(pairing, matches=matches)


def _doubtful(
    pairing: Pairing,
    by_name: Mapping[str, str],
    why: str,
    tried: Sequence[Pairing],
    names: set[str],
    *,
    is_ordered: bool,
    rest: str,
) -> Pairing:
    """Return a pairing with a note that names its open pairs: by layers, or tensors if the way alone is open."""
    pairs, differ = {match.first.name: match for match in pairing.matches}, _differing(tried, names)
    texts = [_written_pair(pairs[name], is_way_open) for name, is_way_open in differ.items()]
    order = " by the order of execution" * (is_ordered and not all(differ.values()))
    judged = f"judged is the first{order}{': ' * bool(texts)}{listed(list(dict.fromkeys(texts)), MAX_LISTED)}"
    return dataclasses.replace(_untried(pairing, by_name), doubt=f"{why}; {judged}; {rest} (rules=, --rules)")


def _written_pair(match: Match, is_way_open: bool) -> str:
    """Return an open pair by its layers, or by its tensors and the way between them if that alone is open."""
    if not is_way_open:
        tensors = match.first, match.second
        return " = ".join((not tensor.alias and layer_of(tensor)) or tensor.name for tensor in tensors)
    return f"{match.first.name} = {match.second.name}{_written_way(match)}"


def _written_way(match: Match) -> str:
    return f" ({'as it is' if match.pattern == AS_IT_IS else match.pattern})"


def _differing(candidates: Sequence[Pairing], names: set[str]) -> dict[str, bool]:
    """Return the first names of the pairs in which candidates differ -> whether by ways alone.

    Ways are left out where it is open, too, which tensor is which.
    """
    partners: dict[str, set[str]] = collections.defaultdict(set)
    patterns: dict[str, set[str]] = collections.defaultdict(set)
    for candidate in candidates:
        for match in candidate.matches:
            if match.first.name in names:
                partners[match.first.name].add(match.second.name)
                patterns[match.first.name].add(match.pattern)
    exchanged = [name for name in partners if len(partners[name]) > 1]
    return dict.fromkeys(exchanged, False) or {name: True for name in partners if len(patterns[name]) > 1}


def _usual_ways(links: Sequence[Link]) -> dict[Hashable, Way]:
    """Return kind of layer -> the way in which all of its pairs lie that can lie in one way only."""
    seen: dict[Hashable, set[Way]] = collections.defaultdict(set)
    for link in links:
        if len(link.options.ways) == 1:
            seen[link.layers].add(dataclasses.replace(link.options.ways[0], sizes=()))
    return {key: next(iter(some)) for key, some in seen.items() if len(some) == 1}


def _open_ways(link: Link, usual: Mapping[Hashable, Way]) -> tuple[Way, ...]:
    """Return the ways that are open for a pair: one, where its own kind of layer shows it elsewhere."""
    ways = link.options.ways
    like = usual.get(link.layers)
    alike = [way for way in ways if dataclasses.replace(way, sizes=()) == like]
    if len(ways) > 1 and alike:
        return (alike[0],)
    return ways if link.options.is_open else ways[:1]


def _candidates(
    by_rules: Partial, choices: Sequence[Choice], fixed: Sequence[Link], usual: Mapping[Hashable, Way]
) -> Iterator[Pairing]:
    """Yield every pairing that is left open, the usual ones first; one kind of layer lies one way round."""
    links = {id(link): link for link in [*fixed, *(link for choice in choices for some in choice for link in some)]}
    ways = {key: _open_ways(link, usual) for key, link in links.items()}
    permuted = {id(link) for choice in choices if len(choice) > 1 for some in choice for link in some}
    made: dict[tuple[int, int], Match] = {}

    def match(link: Link, number: int) -> Match:
        if (id(link), number) not in made:
            is_open = len(ways[id(link)]) > 1 or id(link) in permuted
            way = ways[id(link)][number]
            made[id(link), number] = way.match(link.first, link.second, "probe" if is_open else link.how)
        return made[id(link), number]

    for alternatives in itertools.product(*choices):
        chosen = [*fixed, *(link for some in alternatives for link in some)]
        counts: dict[Hashable, int] = {}
        for link in chosen:
            if len(ways[id(link)]) > 1:
                counts[link.layers] = max(counts.get(link.layers, 0), len(ways[id(link)]))
        for numbers in itertools.product(*(range(count) for count in counts.values())):
            number = dict(zip(counts, numbers, strict=True))
            wanted = [number[link.layers] if len(ways[id(link)]) > 1 else 0 for link in chosen]
            if all(i < len(ways[id(link)]) for link, i in zip(chosen, wanted, strict=True)):
                matches = [match(link, i) for link, i in zip(chosen, wanted, strict=True)]
                for gates in ([*by_gates(matches)], [*by_gates(matches, by_kernels=True)])[: 1 + may_be_keras(matches)]:
                    yield Pairing((*by_rules.matches, *gates), by_rules.dropped)


def _open_names(choices: Sequence[Choice], fixed: Sequence[Link], usual: Mapping[Hashable, Way]) -> set[str]:
    names = {link.first.name for choice in choices if len(choice) > 1 for links in choice for link in links}
    return names | {link.first.name for link in fixed if len(_open_ways(link, usual)) > 1}


def _ambiguous(what: str, candidates: Sequence[Pairing], names: set[str]) -> ValueError:
    """Return the refusal of a choice that names and runs leave open, with the rules for the first candidate."""
    rules = rules_of(candidates[0].matches, names)
    return ValueError(
        f"the pairing of parameters is ambiguous{what}, give rules; candidates: {_listed(candidates, names)}"
        f"{'; rules for the first (rules=, --rules): ' if rules else ''}{rules}"
    )


def _listed(candidates: Sequence[Pairing], names: set[str]) -> str:
    """Describe the first candidates by the pairs in which they differ from each other."""
    differ = _differing(candidates, names)
    rows = [[match for match in candidate.matches if match.first.name in differ] for candidate in candidates]

    def written(match: Match) -> str:
        return f"{match.first.name} = {match.second.name}{_written_way(match) * differ[match.first.name]}"

    texts = list(filter(None, dict.fromkeys(", ".join(map(written, row[:MAX_PAIRS])) for row in rows)))
    more = len(candidates) - MAX_LISTED
    return "; ".join(texts[:MAX_LISTED]) + (
        f"; and {more if more + MAX_LISTED <= MAX_CANDIDATES else 'many'} more" if more > 0 and texts else ""
    )


def may_be_keras(matches: Iterable[Match]) -> bool:
    """Return whether a torch GRU is paired with kernels possibly in Keras's gate order, though no path names Keras."""
    pairs = [(match.first, match.second) for match in matches]
    sides = [*pairs, *(pair[::-1] for pair in pairs)]
    return any(_order(one) == TORCH and two.source.endswith("recurrent_kernel") for one, two in sides)


def by_gates(matches: Iterable[Match], *, by_kernels: bool = False) -> Iterator[Match]:
    """Yield matches, those between a GRU of torch and one of Keras gate by gate.

    Args:
        matches: the matches.
        by_kernels: take every layer with Keras's names of weights for one of Keras.
    """
    for match in matches:
        orders = _order(match.first, by_kernels=by_kernels), _order(match.second, by_kernels=by_kernels)
        is_plain = not match.rule.sizes and not match.text
        if is_plain and all(orders) and orders[0] != orders[1]:
            torch = match.first if orders[0] == TORCH else match.second
            # torch names matrices by what they multiply, weight_ih and weight_hh.
            source = "h" if "_hh" in torch.source else "i"  # the state or the input
            for gate in TORCH:
                first, second = (
                    _gate(tensor, order, gate, f"{source}{gate}")
                    for tensor, order in zip((match.first, match.second), orders, strict=True)
                )
                yield Match(first, second, match.rule, match.how)
        else:
            yield match


def _order(tensor: Tensor, *, by_kernels: bool = False) -> str:
    """Return the order of the gates in a tensor; "" if it is not of a GRU whose order is known."""
    if tensor.framework == "torch" and tensor.parameter.owner in ("GRU", "GRUCell"):
        return TORCH
    return KERAS if (_KERNELS if by_kernels else _KERAS_GRU).search(tensor.source) else ""


def _gate(tensor: Tensor, order: str, gate: str, label: str) -> Tensor:
    axis = 0 if order == TORCH else len(tensor.shape) - 1  # torch's matrices are (outputs, inputs), Keras's kernels not
    width, position = tensor.shape[axis] // len(order), order.index(gate)
    return tensor.slice(axis, position * width, (position + 1) * width, f"{tensor.name}[{label}]")
