"""Propose a pairing from names, classes and shapes, and settle ambiguous parts by running both sides.

In this order: given rules; unstacked layers; equal names; split fused layers; the best bijection of the rest; runs of
the remaining candidates. Pairs that names settled are never overruled, but a number is only an order within a class and
a container: pairs that only numbers support remain open, too. The first candidate follows the order in which both sides
use their weights; it also remains if no pairing makes the outputs agree.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from ..sides.subject import Array, SideWeight
from .assignment import (
    LayerGroup,
    TensorSides,
    arranged,
    best,
    by_layers,
    equals,
    left_over,
    likely_orders,
    open_groups,
    template,
)
from .leftovers import UnpairedError
from .names import is_counted_alike, last_word, layer_of, read
from .parts import Split, splits
from .patterns import Lay, Way, WayOptions, kind_of, lay, options
from .settling import MAX_CANDIDATES, MAX_SHOWN, Choice, Distance, Link, Partial, joined, names_of, settle, together
from .tensors import Pairing, Tensor, uncovered, unstacked, whole

MAX_PERMUTED = 6
"""Most layers whose orders are all considered: 6! = 720, below the limit of four times `MAX_CANDIDATES`."""

# At 0.5 a similar name can take a bias to another layer than its matrix.
LAYER = 2.0
"""Added to the scores of tensors in a layer whose matrix is settled: twice the score of an equal role."""

Labels = tuple[str, str]
UseOrder = Mapping[str, int]
"""Name of a parameter -> when it first meets data."""


def propose(
    first: Mapping[str, SideWeight],
    second: Mapping[str, SideWeight],
    probe: Distance | None = None,
    settled_by_rules: Partial | None = None,
    labels: Labels = ("torch", "Flax"),
    orders: Callable[[], tuple[UseOrder, UseOrder]] | None = None,
    limit: int = MAX_CANDIDATES,
) -> Pairing:
    """Return the pairing that names, classes and shapes suggest.

    Args:
        first: parameters of the first side.
        second: parameters of the second side.
        probe: returns the distance of the outputs when both sides hold the same weights under a pairing, all of them
            different; it decides between pairings that names leave open.
        settled_by_rules: pairs that are settled already; the rest is paired as usual.
        labels: names of the sides in messages.
        orders: returns the order of first use of each parameter on both sides; empty where unknown.
        limit: most pairings to try.

    Raises:
        UnpairedError: (a WeightsMismatchError) no bijection exists; lists the leftover tensors.
        ValueError: several pairings remain and no evidence favours one; lists them.
    """
    settled_by_rules = settled_by_rules or Partial()

    left, right = _rest(first, settled_by_rules, "first"), _rest(second, settled_by_rules, "second")
    left, right = unstacked(left, right), unstacked(right, left)
    fixed, choices = _links(left, right, labels)
    choices = joined(choices)
    permuted = [choice for choice in choices if len({names_of(links) for links in choice}) > 1]
    weak = numbered_only(fixed, [link for choice in permuted for link in choice[0]], left, right)
    uses = orders() if orders is not None and (weak or permuted) else ({}, {})
    run = None
    if all(uses):
        # The order of execution first, then the pairings that names leave open.
        some = ((*weak, *(link for links in choice for link in links)) for choice in itertools.product(*permuted))
        open_ones = list(itertools.islice(some, 4 * MAX_CANDIDATES))
        run = next((links for links in open_ones if is_in_order(links, uses)), None) or as_run(open_ones[0], uses)
    if run is not None:
        reopened = {link.first.name for link in weak}
        fixed = [link for link in fixed if link.first.name not in reopened]
        is_permuted = {id(choice) for choice in permuted}
        choices = [choice for choice in choices if id(choice) not in is_permuted]
        choices.append([run, *(links for links in open_ones if names_of(links) != names_of(run))])
    pairing = settle(settled_by_rules, choices, fixed, probe, limit, is_ordered=run is not None)
    for tensors in ([match.first for match in pairing.matches], [match.second for match in pairing.matches]):
        assert not uncovered(tensors), f"some elements of {uncovered(tensors)} are not paired once"
    return in_order(pairing, first)


def in_order(pairing: Pairing, first: Mapping[str, SideWeight]) -> Pairing:
    """Return a pairing in the order of the first side's parameters."""
    rank = collections.defaultdict(lambda: len(first), {name: i for i, name in enumerate(first)})
    offsets = {id(one): one.first.cut.offset if one.first.cut else 0 for one in pairing.matches}
    matches = sorted(pairing.matches, key=lambda match: (rank[match.first.source], offsets[id(match)]))
    return dataclasses.replace(pairing, matches=tuple(matches))


def _rest(parameters: Mapping[str, SideWeight], settled: Partial, side: str) -> list[Tensor]:
    """Return the tensors of one side that are not settled."""
    done = {name for where, name, _ in settled.dropped if where == side}
    done |= {(match.first if side == "first" else match.second).source for match in settled.matches}
    framework = "torch" if side == "first" else "flax"
    return [whole(name, one, framework) for name, one in parameters.items() if name not in done]


def _links(first: list[Tensor], second: list[Tensor], labels: Labels) -> tuple[list[Link], list[Choice]]:
    """Return the pairs that are settled, and the choices that are open."""
    sides = TensorSides(first, second)
    pairs = equals(sides)
    fixed = [_link(sides, i, j, "name") for i, j in pairs]
    paired = {i for i, _ in pairs}, {j for _, j in pairs}
    ours = [one for i, one in enumerate(first) if i not in paired[0]]
    theirs = [one for j, one in enumerate(second) if j not in paired[1]]
    choices: list[Choice] = []
    for turned in (False, True) if ours and theirs else ():
        own, other = (theirs, ours) if turned else (ours, theirs)
        splits_of_side = splits(own, other, _lays_turned if turned else _lays)
        of_layers: dict[Hashable, list[Choice]] = collections.defaultdict(list)
        for orders in splits_of_side:
            choice = [links for order in orders for links in _shared_choice(order, other, turned=turned)]
            if len(choice) == 1:
                fixed += choice[0]
            else:
                layers = tuple(layer_of(own[split.whole]) or split.whole for split in orders[0])
                of_layers[layers, len(choice)].append(choice)
        choices += [together(some) for some in of_layers.values()]
        cut = [split for orders in splits_of_side for split in orders[0]]
        gone, used = {split.whole for split in cut}, {i for split in cut for i in split.parts}
        own = [one for i, one in enumerate(own) if i not in gone]
        other = [one for i, one in enumerate(other) if i not in used]
        ours, theirs = (other, own) if turned else (own, other)
    more, open_ones = _assigned(TensorSides(ours, theirs), fixed, labels)
    return fixed + more, choices + open_ones


def numbered_only(
    links: Sequence[Link], others: Sequence[Link], first: Sequence[Tensor], second: Sequence[Tensor]
) -> list[Link]:
    """Return the links that nothing but numbers in names supports: without them, others would do as well.

    Args:
        links: links that names settled.
        others: links that are open, which may exchange their tensors with those of `links`.
        first: the first side's tensors.
        second: the second side's tensors.
    """
    ours, theirs = ({one.name: name for one, name in zip(side, read(side), strict=True)} for side in (first, second))
    some = [
        link
        for link in links
        if link.first.name in ours
        and link.second.name in theirs
        and not is_counted_alike(ours[link.first.name], theirs[link.second.name])
    ]
    every = [*some, *others]
    sides = TensorSides([link.first for link in every], [link.second for link in every])
    groups = open_groups(sides.likeness(numbers=False), range(len(every)))
    weak = sorted(i for group in groups for i in group if i < len(some))
    return [dataclasses.replace(some[i], how="order") for i in weak]


def as_run(links: Sequence[Link], uses: tuple[UseOrder, UseOrder]) -> tuple[Link, ...] | None:
    """Return the same tensors paired by kind and words, and within these in the order in which both sides use them.

    None if shapes leave no bijection.
    """
    ours, theirs = (
        # Of tensors that one operation uses at once, the matrix comes before its bias.
        sorted(side, key=lambda tensor: (order.get(tensor.source, len(order)), -len(tensor.shape)))
        for side, order in zip(([one.first for one in links], [one.second for one in links]), uses, strict=True)
    )
    sides = TensorSides(ours, theirs)
    scores = sides.likeness(numbers=False)
    assignment = best(scores)
    if assignment is None:
        return None
    assignment = arranged(scores, assignment, open_groups(scores, assignment), in_order=True)
    # Again with the layers that matrices went to: a bias fits any layer of its width.
    scores = scores + LAYER * sides.within(
        {layer_of(ours[i]): layer_of(theirs[j]) for i, j in enumerate(assignment) if len(ours[i].shape) > 1}
    )
    assignment = best(scores)
    assert assignment is not None, "there was one before"
    assignment = arranged(scores, assignment, open_groups(scores, assignment), in_order=True)
    return tuple(_link(sides, i, j, "order") for i, j in enumerate(assignment))


def is_in_order(links: Sequence[Link], uses: tuple[UseOrder, UseOrder]) -> bool:
    """Return whether both sides use the tensors of these links in the same order, per shape."""
    times: dict[Hashable, list[tuple[int, int]]] = collections.defaultdict(list)
    for link in links:
        if link.first.source not in uses[0] or link.second.source not in uses[1]:
            return False
        kind = tuple(sorted(link.first.shape)), last_word(link.first)
        times[kind].append((uses[0][link.first.source], uses[1][link.second.source]))
    return all(sorted(some) == sorted(some, key=lambda order: order[::-1]) for some in times.values())


def _link(sides: TensorSides, i: int, j: int, how: str) -> Link:
    layers = sides.layers[0][i], sides.layers[1][j]
    return Link(sides.first[i], sides.second[j], sides.options(i, j), layers, how)


def _layers(first: Tensor, second: Tensor) -> Hashable:
    """Return a key that is equal for pairs of the same kinds of layer, which share an orientation."""
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


def _options(first: Tensor, second: Tensor) -> WayOptions:
    return options(kind_of(first, last_word(first)), kind_of(second, last_word(second)), equal_names=False)


def _shared_choice(splits_together: Sequence[Split], other_tensors: Sequence[Tensor], *, turned: bool) -> Choice:
    """Return the ways in which some fused tensors and their parts may go together."""
    each = [_split_choice(split, other_tensors, turned=turned) for split in splits_together]
    return [tuple(link for links in some for link in links) for some in itertools.product(*each)]


def _split_choice(split: Split, other_tensors: Sequence[Tensor], *, turned: bool) -> Choice:
    """Return the ways in which a fused tensor and its parts may go together; all parts lie alike."""
    choice = []
    for arrangement in split.arrangements:
        links = []
        pairs = [(part, other_tensors[j]) for j, part in arrangement.parts]
        lays_of_parts = [(_lays_turned if turned else _lays)(*pair, arrangement.axes) for pair in pairs]
        common = frozenset.intersection(*(frozenset(one.values()) for one in lays_of_parts))
        for pair, lays in zip(pairs, lays_of_parts, strict=True):
            first, second = pair[::-1] if turned else pair
            ways = tuple(way for way, how in lays.items() if how in common)
            options = WayOptions(ways, _options(first, second).is_open and len(ways) > 1)
            links.append(Link(first, second, options, _layers(first, second), "name"))
        choice.append(tuple(links))
    return choice


def _assigned(sides: TensorSides, settled: Sequence[Link], labels: Labels) -> tuple[list[Link], list[Choice]]:
    """Return the best bijection of the remaining tensors, as settled pairs and open choices."""
    scores = sides.likeness()
    assignment = best(scores)
    if assignment is None:
        raise _no_bijection(sides, scores, labels)
    groups = open_groups(scores, assignment)
    likely, layers = scores, _settled_layers(sides, settled, assignment, groups)
    # A bias goes where the matrix of its layer went, and a scale where the bias went.
    is_apart = any(
        layers.get(layer_of(sides.first[i]), layer_of(sides.second[j])) != layer_of(sides.second[j])
        for i, j in enumerate(assignment)
    )
    if groups or is_apart:
        # Again with the layers of settled matrices: a bias fits any layer of its width, and only its matrix tells
        # which. A bias that this settles may settle the matrix of another layer in turn.
        before: dict[str, str] = {}
        while layers.keys() != before.keys():
            before = layers
            scores = likely + LAYER * sides.within(before)
            assignment = best(scores)
            assert assignment is not None, "there was one before"
            groups = open_groups(scores, assignment)
            layers = {**_settled_layers(sides, settled, assignment, groups), **before}
        open_ones = {i for group in groups for i in group}
        settled_pairs = [(link.first, link.second) for link in settled]
        settled_pairs += [(sides.first[i], sides.second[j]) for i, j in enumerate(assignment) if i not in open_ones]
        suits = scores + sides.housed(settled_pairs)
        assignment = arranged(suits, assignment, groups)  # the usual order of what is open
    grouped = {i for group in groups for i in group}
    fixed = [_link(sides, i, j, "name") for i, j in enumerate(assignment) if i not in grouped]
    choices = [_orders(sides, scores, group) for group in by_layers(sides, groups, assignment)]
    return fixed, choices


def _settled_layers(
    sides: TensorSides, settled: Sequence[Link], assignment: Sequence[int], groups: Sequence[Sequence[int]]
) -> dict[str, str]:
    """Return layer of the first side -> layer of the second, by matrices that are settled, or else by biases."""
    open_ones = {i for group in groups for i in group}
    pairs = [(i, j) for i, j in enumerate(assignment) if i not in open_ones]
    layers = {layer_of(link.first): layer_of(link.second) for link in settled if len(link.first.shape) > 1}
    for i, j in pairs:
        if len(sides.first[i].shape) > 1:
            layers[layer_of(sides.first[i])] = layer_of(sides.second[j])
    for i, j in pairs:  # a norm's bias often fits one layer alone, and its scale any
        if sides.names[0][i].role == sides.names[1][j].role == "bias":
            layers.setdefault(layer_of(sides.first[i]), layer_of(sides.second[j]))
    layers.pop("", None)
    return layers


def _orders(sides: TensorSides, scores: Array, group: LayerGroup) -> Choice:
    """Return the ways in which the layers of a group may go together, the usual order first."""
    limit = 4 * MAX_CANDIDATES if len(group.first) <= MAX_PERMUTED else MAX_SHOWN
    links: dict[tuple[int, int], Link] = {}
    choice = []
    lists = [sides.names[0][next(iter(layer.values()))] for layer in group.first]
    places = [sides.names[1][next(iter(layer.values()))].natural for layer in group.second]
    for order in itertools.islice(likely_orders([template(name.layer) for name in lists], places), limit):
        theirs = [group.second[i] for i in order]
        pairs = [(mine[role], its[role]) for mine, its in zip(group.first, theirs, strict=True) for role in mine]
        if all(math.isfinite(scores[i, j]) for i, j in pairs):
            choice.append(
                tuple(links.get((i, j)) or links.setdefault((i, j), _link(sides, i, j, "order")) for i, j in pairs)
            )
    return choice


def _no_bijection(sides: TensorSides, scores: Array, labels: Labels) -> UnpairedError:
    """Return an error that lists the leftover tensors; two with the same name appear together, with both shapes."""
    left, right = left_over(scores)
    over = [sides.first[i] for i in left], [sides.second[j] for j in right]
    misshapen = []
    by_name = {sides.names[1][j].same: j for j in right}
    for i in list(left):
        j = by_name.pop(sides.names[0][i].same, None)
        if j is not None:
            first, second = sides.first[i], sides.second[j]
            misshapen.append(
                f"{first.name} is {first.shape} in {labels[0]} and {second.name} is {second.shape} in {labels[1]}"
            )
            left.remove(i)
            right.remove(j)
    return UnpairedError(
        missing=[_no_counterpart(sides.second[j], labels[1], labels[0]) for j in right],
        unexpected=[_no_counterpart(sides.first[i], *labels) for i in left],
        misshapen=misshapen,
        first=over[0],
        second=over[1],
    )


def _no_counterpart(tensor: Tensor, mine: str, other: str) -> str:
    return f"{tensor.name} {tensor.shape} ({mine}, no {other} parameter left for it)"
