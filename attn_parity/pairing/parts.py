"""Fused layers: tensors that are one on one side and several on the other.

They are split into named parts, so that later steps pair tensor with tensor.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ..sides.subject import Array
from .assignment import template
from .names import Name, last_word, likeness, part_sets, part_word, read
from .patterns import Lay, Way, kind_of, letters_of
from .tensors import Tensor

Lays = Callable[[Tensor, Tensor, frozenset[int]], Mapping[Way, Lay]]
"""The ways in which a part (with the axes that the cut made) may be a tensor of the other side, and how it lies."""

MAX_PARTS = 4
"""Most parts of a fused tensor with unknown names: the largest known sets, an LSTM's gates, have four."""

MAX_TIED = 4
"""Most fused tensors whose parts are permuted: 4! = 24 orders."""

BundleScores = Mapping[tuple[int, int], float]
"""(position of a fused tensor, of a bundle) -> how much names speak for it to hold them."""

MAX_SIBLINGS = 8
"""Most siblings of which any subset may be the parts of one tensor: up to 154 subsets of two to `MAX_PARTS`; of more
siblings, only neighbours in the order of declaration."""

_BY_HEAD = ("query_key_value", "wqkv")
"""Layers that keep query, key and value head by head (GPT-NeoX, BLOOM, Falcon, InternLM2), as others don't."""


@dataclasses.dataclass(frozen=True)
class PartBundle:
    """Tensors of one side that may be the parts of a fused tensor of the other.

    Attributes:
        parts: positions of the tensors, in the order in which a fused tensor stores them.
        labels: the name of each part.
        word: the word for a layer that fuses them; "" if the names do not suggest one.
        scattered: whether other tensors are between them in the order of declaration.
        which: words that separate them from sibling layers with the same part words.
    """

    parts: tuple[int, ...]
    labels: tuple[str, ...]
    word: str
    scattered: bool = False
    which: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A way to cut a fused tensor.

    Attributes:
        parts: (position of the other side's tensor, the slice that corresponds to it) of each part.
        axes: axes of the parts that the cut made.
    """

    parts: tuple[tuple[int, Tensor], ...]
    axes: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Split:
    """A tensor of one side and those of the other that are its parts.

    Attributes:
        whole: position of the fused tensor.
        parts: positions of the other side's.
        arrangements: the ways to cut it, the usual one first.
    """

    whole: int
    parts: tuple[int, ...]
    arrangements: tuple[Arrangement, ...]


def splits(tensors: Sequence[Tensor], others: Sequence[Tensor], lays: Lays) -> list[list[tuple[Split, ...]]]:
    """Return the tensors of one side that the other side has in parts.

    Those whose names speak as much for each other's parts come together, in every order that is possible; any other
    one alone, in one.

    Args:
        tensors: the side with fused tensors.
        others: the side with their parts.
        lays: how a part that was cut out may lie in one of the others.
    """
    names, other_names = read(tensors), read(others)
    sizes = collections.Counter(math.prod(one.shape) for one in others)
    fused = [
        i
        for i, (tensor, name) in enumerate(zip(tensors, names, strict=True))
        # A tensor that the other side has in the same size is no fused one, unless its name says so.
        if tensor.shape and (name.fused or not sizes[math.prod(tensor.shape)])
    ]
    totals = {math.prod(tensors[i].shape) for i in fused}
    bundles = list(_bundles(others, other_names, totals)) if fused else []
    by_size = collections.defaultdict(list)
    for k, bundle in enumerate(bundles):
        by_size[sum(math.prod(others[j].shape) for j in bundle.parts)].append(k)
    spoken = _speaks([names[i] for i in fused], bundles, other_names)
    possible = [
        (float(spoken[row, k]), i, k)
        for row, i in enumerate(fused)
        for k in by_size[math.prod(tensors[i].shape)]
        if not sizes[math.prod(tensors[i].shape)] or bundles[k].word == names[i].fused
    ]
    candidates: list[tuple[float, int, int, Split]] = []
    paired: set[int] = set()
    used: set[int] = set()

    def split(i: int, k: int) -> Split:
        arrangements = _arrangements(tensors[i], names[i], others, bundles[k], lays)
        return Split(i, bundles[k].parts, tuple(arrangements))

    for score, i, k in sorted(
        possible, key=lambda possible_split: (-possible_split[0], possible_split[1], possible_split[2])
    ):
        parts = bundles[k].parts
        if i in paired or used & set(parts):
            continue
        possible_split = split(i, k)
        if possible_split.arrangements:
            paired.add(i)
            used |= set(parts)
            candidates.append((score, i, k, possible_split))
    scores = {(i, k): score for score, i, k in possible}
    groups: list[list[tuple[float, int, int, Split]]] = []
    for new in candidates:
        for group in groups:
            if len(group) < MAX_TIED and all(_is_tied(new, one, scores) for one in group):
                group.append(new)
                break
        else:
            groups.append([new])
    return [_orders(group, split) for group in groups]


def _is_tied(left: tuple[float, int, int, Split], right: tuple[float, int, int, Split], scores: BundleScores) -> bool:
    """Return whether names speak as much for each of two fused tensors to hold the other's parts as its own."""
    (_, i, k, _), (_, j, m, _) = left, right
    finite = [scores.get(pair, math.inf) for pair in ((i, k), (j, m), (i, m), (j, k))]
    # Scores are sums of a few terms: equal ones differ by the rounding of another order alone.
    return max(finite) - min(finite) < 1e-9 if math.isfinite(max(finite)) else False


def _orders(
    group: Sequence[tuple[float, int, int, Split]], split: Callable[[int, int], Split]
) -> list[tuple[Split, ...]]:
    """Return the ways in which some fused tensors may share their parts, the usual one first."""
    usual = tuple(one for *_, one in group)
    turned = [
        tuple(split(i, k) for (_, i, _, _), (_, _, k, _) in zip(group, order, strict=True))
        for order in itertools.islice(itertools.permutations(group), 1, None)
    ]
    return [usual, *(some for some in turned if all(one.arrangements for one in some))]


def _bundles(tensors: Sequence[Tensor], names: Sequence[Name], totals: Collection[int]) -> Iterator[PartBundle]:
    """Yield the groups of siblings that may be fused on the other side.

    Args:
        tensors: the side with the parts.
        names: their names.
        totals: numbers of elements of the fused tensors.
    """
    siblings: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for i, name in enumerate(names):
        siblings[name.parent, name.role, name.last].append(i)
    for group in siblings.values():
        words_of = [part_word(names[i]) for i in group]
        bundled: set[frozenset[int]] = set()
        for which in [None, *dict.fromkeys(which for _, which in words_of)]:  # all of them, or those of one set
            words: dict[str, list[int]] = collections.defaultdict(list)
            for i, (word, its) in zip(group, words_of, strict=True):
                if which in (None, its):
                    words[word].append(i)
            for key, labels in part_sets().items():
                if not all(len(words[label]) == 1 for label in labels):
                    continue
                parts = tuple(words[label][0] for label in labels)
                if frozenset(parts) not in bundled:
                    bundled.add(frozenset(parts))
                    yield PartBundle(parts, labels, key.split()[0], which=which or ())
        ordered = sorted(group, key=lambda i: names[i].natural)
        rank = {i: k for k, i in enumerate(ordered)}
        for length in range(2, min(len(ordered), MAX_PARTS) + 1):
            if len(ordered) <= MAX_SIBLINGS:
                candidates: Iterator[tuple[int, ...]] = itertools.combinations(ordered, length)
            else:
                candidates = (tuple(ordered[k : k + length]) for k in range(len(ordered) - length + 1))
            for parts in candidates:
                if frozenset(parts) not in bundled and sum(math.prod(tensors[i].shape) for i in parts) in totals:
                    labels = tuple(names[i].spelled or str(i) for i in parts)
                    yield PartBundle(parts, labels, "", rank[parts[-1]] - rank[parts[0]] >= length)


def _speaks(fused: Sequence[Name], bundles: Sequence[PartBundle], others: Sequence[Name]) -> Array:
    """Return how much names speak for each fused tensor to hold each bundle."""
    owners = [others[bundle.parts[0]].owner for bundle in bundles]
    owners = [
        dataclasses.replace(owner, words=(*owner.words, *bundle.which)) if bundle.which else owner
        for owner, bundle in zip(owners, bundles, strict=True)
    ]
    score = likeness([name.owner for name in fused], owners)
    usual = {word: len(part_sets()[word]) for word in {name.fused for name in fused} if word}
    for k, bundle in enumerate(bundles):
        # The last two terms break ties: fewer parts, and none with other tensors between them.
        score[:, k] += 0.5 * bool(bundle.word) - 0.01 * len(bundle.parts) - 0.1 * bundle.scattered
        for row, name in enumerate(fused):
            # The name of the fused layer outweighs the words of the module around it, 1.0 and 0.5 in `likeness`.
            score[row, k] += 2.0 * bool(name.fused and name.fused == bundle.word)
            score[row, k] += 0.25 * bool(len(bundle.parts) == usual.get(name.fused))
    return score


def _arrangements(
    tensor: Tensor, name: Name, others: Sequence[Tensor], bundle: PartBundle, lays: Lays
) -> Iterator[Arrangement]:
    """Yield the ways to cut a tensor into a bundle, the usual one first; all its parts lie alike."""
    # Names that differ in a number alone say the order, as those of a list do.
    is_settled = bool(bundle.word) or len({template(others[i].spelled) for i in bundle.parts}) == 1
    orders = [range(len(bundle.parts))] if is_settled else list(itertools.permutations(range(len(bundle.parts))))
    by_head = name.own in _BY_HEAD
    for order in orders:
        parts = [bundle.parts[i] for i in order]
        labels = [bundle.labels[i] for i in order]
        for cut, axes in _cuts(tensor, [others[i] for i in parts], labels, by_head=by_head):
            ways = [lays(one, others[i], axes) for i, one in zip(parts, cut, strict=True)]
            if frozenset.intersection(*(frozenset(one.values()) for one in ways)):
                yield Arrangement(tuple(zip(parts, cut, strict=True)), axes)
                if len(axes) < 2:  # whoever cuts it otherwise than head by head does it in the usual way
                    break


def _cuts(
    tensor: Tensor, parts: Sequence[Tensor], labels: Sequence[str], *, by_head: bool
) -> Iterator[tuple[list[Tensor], frozenset[int]]]:
    """Yield the parts of each possible cut, and the axes of the parts that come from the axis that was cut.

    Cuts are head by head along the axis, by index where the axis counts the parts, or in contiguous blocks. No axis of
    a layer whose axes are known counts parts, a kernel's two pixels among them.
    """
    count, sizes = len(parts), [math.prod(part.shape) for part in parts]
    names = [f"{tensor.name}[{label}]" for label in labels]
    for axis in _outputs(tensor)[:1] if by_head else ():
        lengths = _lengths(tensor.shape[axis], sizes)
        for heads in _heads(tensor, parts, lengths):
            apart = tensor.unfolded(axis, (heads, tensor.shape[axis] // heads))
            starts = list(itertools.accumulate((length // heads for length in lengths), initial=0))
            pieces = [apart.slice(axis + 1, starts[i], starts[i + 1], names[i]) for i in range(count)]
            yield pieces, frozenset((axis, axis + 1))
    is_known = letters_of(kind_of(tensor, last_word(tensor))) not in ((), ("*",))
    for axis in range(len(tensor.shape)) if not is_known else ():
        if tensor.shape[axis] == count and len(set(sizes)) == 1 and _leaves_matrices(tensor, parts):
            yield [tensor.at(axis, i, names[i]) for i in range(count)], frozenset()
    for axis in _outputs(tensor):
        lengths = _lengths(tensor.shape[axis], sizes)
        if lengths:
            starts = list(itertools.accumulate(lengths, initial=0))
            pieces = [tensor.slice(axis, starts[i], starts[i + 1], names[i]) for i in range(count)]
            yield pieces, frozenset((axis,))


def _lengths(length: int, sizes: Sequence[int]) -> list[int]:
    """Return how much of an axis belongs to each of the parts, if it can be cut between them."""
    total = sum(sizes)
    if not total:
        return []
    # Parts share the axis as they share the elements; a share that is no whole number is no cut.
    lengths = [length * size // total for size in sizes]
    return lengths if all(lengths) and not any(length * size % total for size in sizes) else []


def _leaves_matrices(tensor: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether a tensor has an axis that counts its parts, on top of the axes that the parts have."""
    return len(tensor.shape) > min(2, max(len(part.shape) for part in parts))


def _heads(tensor: Tensor, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[int]:
    """Return the numbers of heads by which an axis may go, those of its parts' shapes if they show them."""
    if not lengths:
        return []
    # A head holds rows of each part: their number divides all lengths. One head is the contiguous cut.
    possible = [n for n in range(2, math.gcd(*lengths) + 1) if all(length % n == 0 for length in lengths)]
    shape = parts[-1].shape  # keys and values may have fewer heads than queries
    is_apart = len(shape) == 3 or (len(shape) == 2 and len(tensor.shape) == 1)
    return [n for n in possible if n == shape[-2]] if is_apart else possible


def _outputs(tensor: Tensor) -> list[int]:
    """Return the axes along which parts may lie, the usual one first: outputs."""
    axes = list(range(len(tensor.shape)))
    is_last = tensor.framework == "flax" or tensor.parameter.owner == "Conv1D"
    return [*reversed(axes)] if is_last else axes
