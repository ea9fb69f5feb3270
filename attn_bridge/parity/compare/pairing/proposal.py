"""A pairing proposed from names, classes and shapes, and settled by running where they leave it open.

In this order: rules that were given; stacks taken apart; names that are equal; fused layers taken apart; the best
bijection of the rest; what is open is tried out, the usual way first. Names that settled a pair are never overruled.
Where nothing that was tried makes the outputs agree, layers go together in the order in which both sides run them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from ....weights import WeightsMismatchError
from ..sides.subject import Array, Parameter
from .assignment import Group, Sides, arranged, best, by_layers, equals, left_over, open_groups, template
from .names import last_word, layer_of
from .parts import Split, splits, unstacked
from .patterns import Lay, Options, Way, kind_of, lay, options
from .tensors import Match, Pairing, Tensor, uncovered, whole

MAX_CANDIDATES = 256
"""Most pairings that are tried out before the choice is left to the user."""

MAX_PERMUTED = 6
"""Most layers of which every order is thought of."""

MAX_SHOWN = 16
"""Pairings that are tried out where there are more than that."""

LAYER = 2.0
"""By how much a settled matrix speaks for the other tensors of its layer."""

AGREE = 1e-9
"""How far apart outputs may be that agree."""

NEAR = 1e-3
"""How far apart they may be if no pairing makes them agree: what float32 tables, or a small fault, keep apart."""

FURTHER = 100.0
"""How many times as far apart other pairings must be then."""

ALIKE = 10.0
"""How many times as far apart a pairing may be that is as good as the nearest."""

Probe = Callable[[Pairing], float]
Labels = tuple[str, str]
Order = Mapping[str, int]
"""Path of a submodule -> when it was called first."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """What rules say about some of the parameters.

    Attributes:
        matches: the pairs.
        dropped: (side, parameter, reason) of those that stay out.
    """

    matches: tuple[Match, ...] = ()
    dropped: tuple[tuple[str, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Link:
    """Two tensors that are one, what their names say of their axes, and what settled that they are one."""

    first: Tensor
    second: Tensor
    options: Options
    layers: Hashable
    how: str


Choice = list[tuple[Link, ...]]
"""Alternatives of which one holds, the usual one first."""


def propose(
    first: Mapping[str, Parameter],
    second: Mapping[str, Parameter],
    probe: Probe | None = None,
    given: Partial | None = None,
    labels: Labels = ("torch", "Flax"),
    orders: Callable[[], tuple[Order, Order]] | None = None,
) -> Pairing:
    """Return the pairing that names, classes and shapes suggest.

    Args:
        first: parameters of the first side.
        second: parameters of the second side.
        probe: returns how far apart the outputs are when both sides hold the same, all different weights by a pairing;
            it decides between pairings that names leave open.
        given: what is settled already; the rest is paired as usual.
        labels: what to call the sides in messages.
        orders: returns when each submodule of the two sides is called.

    Raises:
        WeightsMismatchError: there is no bijection; lists what is left over.
        ValueError: several pairings are left open, and nothing speaks for one; lists them.
    """
    given = given or Partial()

    def proposed(ours: Mapping[str, Parameter], theirs: Mapping[str, Parameter], *, in_order: bool) -> Pairing:
        left, right = _rest(ours, given, "first"), _rest(theirs, given, "second")
        left, right = unstacked(left, right), unstacked(right, left)
        fixed, choices = _links(left, right, labels, in_order=in_order)
        return _settle(given, _joined(choices), fixed, probe)

    def proposed_as_run() -> Pairing | None:
        first_order, second_order = orders() if orders is not None else ({}, {})
        if not first_order or not second_order:
            return None
        with contextlib.suppress(ValueError):
            return proposed(_as_run(first, first_order), _as_run(second, second_order), in_order=True)
        return None

    try:
        found = proposed(first, second, in_order=False)
    except TooManyError:
        again = proposed_as_run()
        if again is None:
            raise
        found = again
    if found.doubt and any(match.how == "order" for match in found.matches):
        found = proposed_as_run() or found
    for tensors in ([match.first for match in found.matches], [match.second for match in found.matches]):
        assert not uncovered(tensors), f"some elements of {uncovered(tensors)} are not paired once"
    return in_order(found, first)


class TooManyError(ValueError):
    """More pairings are open than can be tried out, and none of those tried makes the outputs agree."""


def _as_run(parameters: Mapping[str, Parameter], order: Order) -> dict[str, Parameter]:
    """Return parameters by when the submodules that own them are called."""
    places = {name: order.get(one.path, len(order)) for name, one in parameters.items()}
    return {name: parameters[name] for name in sorted(parameters, key=places.__getitem__)}


def in_order(pairing: Pairing, first: Mapping[str, Parameter]) -> Pairing:
    """Return a pairing in the order of the first side's parameters."""
    place = {name: i for i, name in enumerate(first)}
    offsets = {id(one): one.first.cut.offset if one.first.cut else 0 for one in pairing.matches}
    matches = sorted(pairing.matches, key=lambda one: (place[one.first.source], offsets[id(one)]))
    return dataclasses.replace(pairing, matches=tuple(matches))


def _rest(parameters: Mapping[str, Parameter], given: Partial, side: str) -> list[Tensor]:
    """Return the tensors of one side that are not settled."""
    done = {name for where, name, _ in given.dropped if where == side}
    done |= {(match.first if side == "first" else match.second).source for match in given.matches}
    framework = "torch" if side == "first" else "flax"
    return [whole(name, one, framework) for name, one in parameters.items() if name not in done]


# ---- who is who


def _links(
    first: list[Tensor], second: list[Tensor], labels: Labels, *, in_order: bool
) -> tuple[list[Link], list[Choice]]:
    """Return the pairs that are settled, and the choices that are open."""
    sides = Sides(first, second)
    pairs = equals(sides)
    fixed = [_link(sides, i, j, "names") for i, j in pairs]
    taken = {i for i, _ in pairs}, {j for _, j in pairs}
    ours = [one for i, one in enumerate(first) if i not in taken[0]]
    theirs = [one for j, one in enumerate(second) if j not in taken[1]]
    choices: list[Choice] = []
    for turned in (False, True):
        here, there = (theirs, ours) if turned else (ours, theirs)
        found = splits(here, there, _lays_turned if turned else _lays)
        of_layers: dict[Hashable, list[Choice]] = collections.defaultdict(list)
        for orders in found:
            choice = [links for order in orders for links in _shared_choice(order, there, turned=turned)]
            if len(choice) == 1:
                fixed += choice[0]
            else:
                layers = tuple(layer_of(here[split.whole]) or split.whole for split in orders[0])
                of_layers[layers, len(choice)].append(choice)
        choices += [_together(some) for some in of_layers.values()]
        cut = [split for orders in found for split in orders[0]]
        gone, used = {split.whole for split in cut}, {i for split in cut for i in split.parts}
        here = [one for i, one in enumerate(here) if i not in gone]
        there = [one for i, one in enumerate(there) if i not in used]
        ours, theirs = (there, here) if turned else (here, there)
    more, open_ones = _assigned(Sides(ours, theirs), fixed, labels, in_order=in_order)
    return fixed + more, choices + open_ones


def _link(sides: Sides, i: int, j: int, how: str) -> Link:
    layers = sides.layers[0][i], sides.layers[1][j]
    return Link(sides.first[i], sides.second[j], sides.options(i, j), layers, how)


def _layers(first: Tensor, second: Tensor) -> Hashable:
    """Return what pairs of one kind of layer have in common, which lie one way round."""
    lasts = last_word(first), last_word(second)
    return tuple(
        (kind_of(one, last).layer, last or template(one.spelled.rpartition(".")[2]))
        for one, last in zip((first, second), lasts, strict=True)
    )


def _lays(first: Tensor, second: Tensor, cut: frozenset[int]) -> dict[Way, Lay]:
    """Return the ways in which a part of the first side may be a tensor of the second, and how it lies there."""
    return {way: lay(way, first.shape, is_left=True, cut=cut) for way in _options(first, second).ways}


def _lays_turned(second: Tensor, first: Tensor, cut: frozenset[int]) -> dict[Way, Lay]:
    """Return the ways in which a part of the second side may be a tensor of the first, and how it lies there."""
    return {way: lay(way, second.shape, is_left=False, cut=cut) for way in _options(first, second).ways}


def _options(first: Tensor, second: Tensor) -> Options:
    return options(kind_of(first, last_word(first)), kind_of(second, last_word(second)), equal_names=False)


def _shared_choice(splits_together: Sequence[Split], there: Sequence[Tensor], *, turned: bool) -> Choice:
    """Return the ways in which some fused tensors and their parts may go together."""
    each = [_split_choice(split, there, turned=turned) for split in splits_together]
    return [tuple(link for links in some for link in links) for some in itertools.product(*each)]


def _split_choice(split: Split, there: Sequence[Tensor], *, turned: bool) -> Choice:
    """Return the ways in which a fused tensor and its parts may go together; all parts lie alike."""
    choice = []
    for arrangement in split.arrangements:
        links = []
        pairs = [(part, there[j]) for j, part in arrangement.parts]
        found = [(_lays_turned if turned else _lays)(*pair, arrangement.axes) for pair in pairs]
        common = frozenset.intersection(*(frozenset(one.values()) for one in found))
        for pair, lays in zip(pairs, found, strict=True):
            first, second = pair[::-1] if turned else pair
            ways = tuple(way for way, how in lays.items() if how in common)
            options = Options(ways, _options(first, second).is_open and len(ways) > 1)
            links.append(Link(first, second, options, _layers(first, second), "names"))
        choice.append(tuple(links))
    return choice


def _together(choices: Sequence[Choice]) -> Choice:
    """Return the choices of a layer's weight and bias as one: both are cut in the same way."""
    return [tuple(link for links in same for link in links) for same in zip(*choices, strict=True)]


def _assigned(
    sides: Sides, settled: Sequence[Link], labels: Labels, *, in_order: bool
) -> tuple[list[Link], list[Choice]]:
    """Return the best bijection of what is left, as settled pairs and open choices."""
    scores = sides.likeness()
    assignment = best(scores)
    if assignment is None:
        raise _no_bijection(sides, scores, labels)
    groups = open_groups(scores, assignment)
    if groups:  # a bias goes where the matrix of its layer went
        open_ones = {i for group in groups for i in group}
        layers = {layer_of(link.first): layer_of(link.second) for link in settled if len(link.first.shape) > 1}
        for i, j in enumerate(assignment):
            if i not in open_ones and len(sides.first[i].shape) > 1:
                layers[layer_of(sides.first[i])] = layer_of(sides.second[j])
        layers.pop("", None)
        scores = scores + LAYER * sides.within(layers)
        assignment = best(scores)
        assert assignment is not None, "there was one before"
        groups = open_groups(scores, assignment)
        open_ones = {i for group in groups for i in group}
        known = [(link.first, link.second) for link in settled]
        known += [(sides.first[i], sides.second[j]) for i, j in enumerate(assignment) if i not in open_ones]
        suits = scores + sides.housed(known)
        assignment = arranged(suits, assignment, groups, in_order=in_order)  # the usual order of what is open
    grouped = {i for group in groups for i in group}
    fixed = [
        _link(sides, i, j, "names" if scores[i, j] > 1.0 else "shapes")
        for i, j in enumerate(assignment)
        if i not in grouped
    ]
    choices = [_orders(sides, scores, group) for group in by_layers(sides, groups, assignment)]
    return fixed, choices


def _orders(sides: Sides, scores: Array, group: Group) -> Choice:
    """Return the ways in which the layers of a group may go together, the usual order first."""
    limit = 4 * MAX_CANDIDATES if len(group.first) <= MAX_PERMUTED else MAX_SHOWN
    known: dict[tuple[int, int], Link] = {}
    choice = []
    for order in itertools.islice(itertools.permutations(group.second), limit):
        pairs = [(mine[role], its[role]) for mine, its in zip(group.first, order, strict=True) for role in mine]
        if all(math.isfinite(scores[i, j]) for i, j in pairs):
            choice.append(
                tuple(known.get((i, j)) or known.setdefault((i, j), _link(sides, i, j, "order")) for i, j in pairs)
            )
    return choice


def _spelled(first: Tensor, second: Tensor) -> str:
    return f"{first.spelled} = {second.spelled}"


def _no_bijection(sides: Sides, scores: Array, labels: Labels) -> WeightsMismatchError:
    """Name what is left when whatever can be paired is; two of one name are named together, with both shapes."""
    left, right = left_over(scores)
    misshapen = []
    by_name = {sides.names[1][j].same: j for j in right}
    for i in list(left):
        j = by_name.pop(sides.names[0][i].same, None)
        if j is not None:
            one, two = sides.first[i], sides.second[j]
            misshapen.append(f"{one.name} is {one.shape} in {labels[0]} and {two.name} is {two.shape} in {labels[1]}")
            left.remove(i)
            right.remove(j)
    return WeightsMismatchError(
        missing=[_no_counterpart(sides.second[j], labels[1], labels[0]) for j in right],
        unexpected=[_no_counterpart(sides.first[i], *labels) for i in left],
        misshapen=misshapen,
    )


def _no_counterpart(tensor: Tensor, mine: str, other: str) -> str:
    return f"{tensor.name} {tensor.shape} ({mine}, no {other} parameter left for it)"


# ---- what is open


def _joined(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices, with those that repeat in numbered blocks made one: they are decided once for all."""
    alike: dict[Hashable, list[Choice]] = collections.defaultdict(list)
    for choice in choices:
        key = tuple(tuple(template(_spelled(link.first, link.second)) for link in links) for links in choice)
        alike[key].append(choice)
    return [_together(found) for found in alike.values()]


def _settle(given: Partial, choices: Sequence[Choice], fixed: Sequence[Link], probe: Probe | None) -> Pairing:
    """Return the first candidate under which the outputs agree, or nearly do while all others are far from it.

    Where there is none, the two sides differ whatever the pairing; then the usual one goes on, to find out where.
    """
    usual = _usual_ways([*fixed, *(link for choice in choices for links in choice for link in links)])
    is_permuted = any(len({_names_of(links) for links in choice}) > 1 for choice in choices)
    some = list(itertools.islice(_candidates(given, choices, fixed, usual), MAX_CANDIDATES + 1))
    first = some[0]
    if len(some) == 1:
        return _said(first, "names")
    names = _open_names(choices, fixed, usual)
    if probe is None and not is_permuted:
        return _said(first, "convention")
    if probe is None:
        raise ValueError(f"the pairing of parameters is ambiguous, give rules; candidates: {_listed(some, names)}")
    is_whole = len(some) <= MAX_CANDIDATES and not any(len(choice) == MAX_SHOWN for choice in choices)
    tried = some if is_whole else some[:MAX_SHOWN]
    distances: list[float] = []
    agreed: set[Hashable] = set()
    for candidate in tried:  # once one agrees, only others of which something else is which matter
        distances.append(math.inf if {_who(candidate)} == agreed else probe(candidate))
        if distances[-1] < AGREE:
            agreed.add(_who(candidate))
    nearest = min((one for one in distances if not math.isnan(one)), default=math.inf)
    limit = AGREE if nearest < AGREE else FURTHER * nearest if nearest < NEAR else 0.0
    found = [candidate for candidate, distance in zip(tried, distances, strict=True) if distance < limit]
    is_alone = sum(distance < ALIKE * nearest for distance in distances) == 1
    if nearest >= AGREE and is_alone and len({_who(candidate) for candidate in found}) > 1:
        found = []  # none stands out; the usual one goes on, to find out where they differ
    if len(found) > 1 and len({_who(candidate) for candidate in found}) > 1:
        what = f"{len(found)} make the outputs agree"
        raise ValueError(
            f"the pairing of parameters is ambiguous and {what}, give rules; candidates: {_listed(some, names)}"
        )
    if found:
        return found[0]
    if not is_whole and is_permuted:
        raise TooManyError(f"the pairing of parameters is ambiguous, give rules; candidates: {_listed(some, names)}")
    doubt = (
        "no pairing makes the outputs agree; the first is gone on with, and if another one is right, they may begin to "
        f"differ elsewhere: rules of your own settle it (rules=, --rules); tried: {_listed(some, names)}"
    )
    return dataclasses.replace(_said(first, "order" if is_permuted else "convention"), doubt=doubt)


def _names_of(links: Sequence[Link]) -> tuple[tuple[str, str], ...]:
    return tuple((link.first.name, link.second.name) for link in links)


def _who(candidate: Pairing) -> tuple[tuple[str, str], ...]:
    return tuple((match.first.name, match.second.name) for match in candidate.matches)


def _said(pairing: Pairing, how: str) -> Pairing:
    """Return a pairing whose open pairs were settled in another way than by running."""
    matches = tuple(dataclasses.replace(match, how=how) if match.how == "probe" else match for match in pairing.matches)
    return dataclasses.replace(pairing, matches=matches)


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
    shown = [way for way in ways if dataclasses.replace(way, sizes=()) == like]
    if len(ways) > 1 and shown:
        return (shown[0],)
    return ways if link.options.is_open else ways[:1]


def _candidates(
    given: Partial, choices: Sequence[Choice], fixed: Sequence[Link], usual: Mapping[Hashable, Way]
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
                found = [match(link, i) for link, i in zip(chosen, wanted, strict=True)]
                yield Pairing((*given.matches, *found), given.dropped)


def _open_names(choices: Sequence[Choice], fixed: Sequence[Link], usual: Mapping[Hashable, Way]) -> set[str]:
    names = {link.first.name for choice in choices if len(choice) > 1 for links in choice for link in links}
    return names | {link.first.name for link in fixed if len(_open_ways(link, usual)) > 1}


def _listed(candidates: Sequence[Pairing], names: set[str]) -> str:
    """Describe the first candidates by what they do not have in common."""
    texts = []
    for candidate in candidates:
        rows = [match for match in candidate.matches if match.first.name in names][:4]
        texts.append(", ".join(f"{match.first.name} = {match.second.name} ({match.pattern})" for match in rows))
    shown = list(dict.fromkeys(texts[:4]))
    more = len(candidates) - 4
    return "; ".join(shown) + (f"; and {more if more + 4 <= MAX_CANDIDATES else 'many'} more" if more > 0 else "")
