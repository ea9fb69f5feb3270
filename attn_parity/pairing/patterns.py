"""The possible axis patterns between two tensors: from the layers that own them, else from their shapes.

A framework's own layer determines its axes (``o i`` for torch's Linear, ``i o`` for Flax's), so that two such layers
leave no choice, whatever the sizes. Elsewhere every rearrangement that fits is a candidate, the usual one first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from attn_bridge.weights import Rule

from .tensors import Match, Tensor

# 3! = 6: three axes of one size in any order.
MAX = 6
"""Most axis patterns to keep for one pair."""

_TORCH_LINEAR = {"Linear", "NonDynamicallyQuantizableLinear", "LazyLinear"}
_TORCH_STACKED = {"LSTM", "GRU", "RNN", "RNNBase", "LSTMCell", "GRUCell", "RNNCell", "MultiheadAttention"}
_FLAX_LINEAR = {"Linear", "LinearGeneral", "Dense", "DenseGeneral", "LoRALinear"}
_CONVOLUTION = re.compile(r"(Lazy)?Conv([123]d)?")
_TRANSPOSED = re.compile(r"(Lazy)?ConvTranspose([123]d)?")
_SPACE = "xyzuvw"

Shape = tuple[int, ...]
Sizes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way from the first side's axes to the second side's.

    Attributes:
        pattern: in einops' words.
        sizes: of the axes that it needs.
        flips: axes of the second side that are read backwards.
    """

    pattern: str
    sizes: Sizes = ()
    flips: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The pattern as people read it."""
        axes = self.pattern.partition("->")[2].split()
        return f"{self.pattern}, {' '.join(axes[i] for i in self.flips)} backwards" if self.flips else self.pattern

    def match(self, first: Tensor, second: Tensor, how: str) -> Match:
        """Return the match of two tensors that lie this way."""
        text = self.text if self.flips else ""
        return Match(first, second.flipped(self.flips) if self.flips else second, _rule(self), how, text)


@dataclasses.dataclass(frozen=True)
class Lay:
    """The layout of a part within a fused tensor; all parts of a tensor share it.

    Attributes:
        order: axes of the part, in the order of the other tensor's axes; -1 for axes that the cut made.
        sizes: the sizes into which the remaining axes of the part are divided there.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]


def lay(way: Way, part: Shape, *, is_left: bool, cut: frozenset[int]) -> Lay:
    """Return how a part lies by a way, of which it is the left or the right side; `cut` are the axes of the cut."""
    if way.pattern.startswith("..."):
        sides = [[[f"a{i}"] for i in range(len(part))]] * 2
    else:
        sides = [_groups(side) for side in way.pattern.split("->")]
    mine, its = sides if is_left else sides[::-1]
    sizes = dict(way.sizes)
    sizes |= {group[0]: part[i] for i, group in enumerate(mine) if len(group) == 1}
    kept = [i for i in range(len(part)) if i not in cut]
    owner = {word: -1 if i in cut else kept.index(i) for i, group in enumerate(mine) for word in group}
    words = [word for group in its for word in group if word in owner]
    order = [owner[word] for word in words]
    return Lay(
        tuple(axis for i, axis in enumerate(order) if order[i - 1 : i] != [axis]),
        tuple(sizes.get(word, 0) for word in words if owner[word] >= 0),
    )


def _groups(side: str) -> list[list[str]]:
    """Return the words of each axis of one side of a pattern; none for an axis of one element."""
    groups = re.findall(r"\([^)]*\)|\S+", side)
    return [[word for word in group.strip("()").split() if word != "1"] for group in groups]


@dataclasses.dataclass(frozen=True)
class TensorKind:
    """The properties that determine a tensor's axes: its shape, and its layer and framework."""

    shape: Shape
    framework: str
    owner: str
    last: str

    @property
    def layer(self) -> tuple[str, str, str, int]:
        """Key that is equal for tensors of one kind of layer."""
        return self.framework, self.owner, self.last, len(self.shape)


@dataclasses.dataclass(frozen=True)
class WayOptions:
    """The ways from one tensor to another.

    Attributes:
        ways: all that fit, the usual one first.
        is_open: whether another than the first may well be meant.
    """

    ways: tuple[Way, ...] = ()
    is_open: bool = False


def kind_of(tensor: Tensor, last: str) -> TensorKind:
    """Return a tensor's kind; `last` is the last word of its name."""
    return TensorKind(tensor.shape, tensor.framework, tensor.parameter.owner, last)


@functools.lru_cache(maxsize=65536)
def options(first: TensorKind, second: TensorKind, equal_names: bool) -> WayOptions:
    """Return the ways that may lead from one kind of tensor to another.

    Args:
        first: the first side's.
        second: the second side's.
        equal_names: whether both have one name, so that two bare arrays of one shape lie alike.
    """
    if math.prod(first.shape) != math.prod(second.shape):
        return WayOptions()
    letters = letters_of(first), letters_of(second)
    if letters[0] and letters[1]:
        spoken = _said(first, second, *letters)
        if spoken is not None:
            return WayOptions(spoken, len(spoken) > 1)
    convolution = _unknown_convolution(first, second, *letters)
    if convolution:
        return WayOptions(convolution, len(convolution) > 1)
    ways = list(dict.fromkeys(_free(first.shape, second.shape)))
    identity = Way("... -> ...")
    same_class = first.framework == second.framework and first.layer == second.layer and bool(first.owner)
    plain = any("Norm" in kind.owner or "Embed" in kind.owner for kind in (first, second))
    # Vectors, norms and tables have no axes to exchange, and one class lies alike on both sides, square or not.
    if identity in ways and (plain or same_class or len(first.shape) < 2):
        return WayOptions((identity,))
    transposed = _is_transposed(first, second)
    ways.sort(key=lambda way: _rank(way, first.shape, transposed))
    bare = equal_names and first.last == second.last and not (letters[0] or letters[1])
    return WayOptions(tuple(ways[:MAX]), len(ways) > 1 and not (bare and ways[0] == identity))


def _is_transposed(first: TensorKind, second: TensorKind) -> bool:
    """Return whether a square matrix usually lies the other way round on the other side."""
    guesses = _guess(first), _guess(second)
    if guesses[0] and guesses[1]:
        return guesses[0] != guesses[1]
    return any(guesses) and first.framework != second.framework


def _guess(kind: TensorKind) -> str:
    """Return the usual axes of a matrix of that kind, or ""."""
    letters = letters_of(kind)
    if letters and len(letters) == 2:
        return "".join(letters) if set(letters) == {"i", "o"} else ""
    if kind.last == "kernel":
        return "io"
    return "oi" if kind.last == "weight" else ""


def letters_of(kind: TensorKind) -> tuple[str, ...]:
    """Return the axis names of a framework's own layer; empty if unknown, ``("*",)`` for grouped axes."""
    rank, owner, last = len(kind.shape), kind.owner, kind.last
    is_matrix = last in ("weight", "kernel")
    if kind.framework == "torch":
        if rank == 2 and is_matrix and owner in _TORCH_LINEAR | _TORCH_STACKED:
            return ("o", "i")
        # The linear layer of GPT-2 in transformers, whose matrix is as TensorFlow had it.
        if rank == 2 and owner == "Conv1D" and last == "weight":
            return ("i", "o")
        if rank > 2 and last == "weight" and _CONVOLUTION.fullmatch(owner):
            return ("o", "i", *_SPACE[: rank - 2])
        if rank > 2 and last == "weight" and _TRANSPOSED.fullmatch(owner):
            return ("i", "o", *_SPACE[: rank - 2])
        return ("n", "d") if rank == 2 and last == "weight" and owner.startswith("Embedding") else ()
    if last == "kernel" and owner in _FLAX_LINEAR | {"DenseParams"}:
        return ("i", "o") if rank == 2 else ("*",)
    if rank > 2 and last == "kernel" and (_CONVOLUTION.fullmatch(owner) or _TRANSPOSED.fullmatch(owner)):
        return (*_SPACE[: rank - 2], "i", "o")
    return ("n", "d") if rank == 2 and last == "embedding" and owner == "Embed" else ()


def _said(
    first: TensorKind, second: TensorKind, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> tuple[Way, ...] | None:
    """Return the patterns that two known layers allow; None if they do not determine each other."""
    if ours == ("*",) or theirs == ("*",):
        return _general(first, second, ours, theirs)
    turned = [bool(_TRANSPOSED.fullmatch(kind.owner)) for kind in (first, second)]
    if set(ours) == set(theirs):
        if turned[0] != turned[1]:
            return None
        if turned[0] and first.framework != second.framework:
            return tuple(_transposed_convolution(first, second, ours, theirs))
        if ours == theirs:
            return (Way("... -> ..."),) if first.shape == second.shape else ()
        sizes = dict(zip(ours, first.shape, strict=True))
        if tuple(sizes[axis] for axis in theirs) != second.shape:
            return ()
        return (_matrix_way(ours, theirs) if len(ours) == 2 else Way(f"{' '.join(ours)} -> {' '.join(theirs)}"),)
    if {"i", "o"} <= set(ours) & set(theirs) and not any(turned):
        return _pointwise(first.shape, second.shape, ours, theirs)
    return None


def _matrix_way(ours: Sequence[str], theirs: Sequence[str]) -> Way:
    """Return a transposition if the axes of two matrices are named in different orders, else no change."""
    return Way("a1 a0 -> a0 a1") if tuple(ours) != tuple(theirs) else Way("... -> ...")


def _pointwise(mine: Shape, its: Shape, ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[Way, ...]:
    """Return the ways between a linear layer and a convolution: of one point, or of patches that the layer flattens."""
    sizes, others = dict(zip(ours, mine, strict=True)), dict(zip(theirs, its, strict=True))
    space = [axis for axis in (*ours, *theirs) if axis in _SPACE]
    if sizes["o"] != others["o"]:
        return ()
    if sizes["i"] == others["i"]:
        if any((sizes | others)[axis] != 1 for axis in space):
            return ()
        texts = [" ".join(axis if axis in "io" else "1" for axis in axes) for axes in (ours, theirs)]
        return (Way(" -> ".join(texts)),)
    kernel = sizes if len(ours) > len(theirs) else others
    inner = tuple((axis, kernel[axis]) for axis in ("i", *space))
    if math.prod(size for _, size in inner) != (others if kernel is sizes else sizes)["i"]:
        return ()
    ways = []
    for order in ((*space, "i"), ("i", *space)):
        group = f"({' '.join(order)})"
        texts = [
            " ".join(group if axis == "i" and len(axes) == 2 else axis for axis in axes) for axes in (ours, theirs)
        ]
        ways.append(Way(" -> ".join(texts), inner))
    return tuple(ways)


def _transposed_convolution(
    first_kind: TensorKind, second_kind: TensorKind, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> Iterator[Way]:
    """Yield the patterns between the transposed convolutions of torch and Flax.

    By default Flax does not flip the kernel, unlike the transpose of a convolution. With `transpose_kernel` it does,
    and inputs and outputs are swapped.
    """
    space = len(ours) - 2
    for last, flipped in (("i o", True), ("o i", False)):
        flax = (*_SPACE[:space], *last.split())
        first, second = (ours, flax) if first_kind.framework == "torch" else (flax, theirs)
        sizes = dict(zip(first, first_kind.shape, strict=True))
        if tuple(sizes[axis] for axis in second) == second_kind.shape:
            flips = tuple(i for i, axis in enumerate(second) if axis in _SPACE and sizes[axis] > 1)
            yield Way(f"{' '.join(first)} -> {' '.join(second)}", (), flips if flipped else ())


def _unknown_convolution(
    first: TensorKind, second: TensorKind, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> tuple[Way, ...]:
    """Return the layouts that libraries have for a kernel of which one side's layer is known, the usual one first.

    None of them exchanges axes of space: where a port does, that is a fault and not a layout. Shapes alone would allow
    it wherever a kernel is square.
    """
    letters, other, is_first = (ours, second, True) if ours else (theirs, first, False)
    space = tuple(axis for axis in letters if axis in _SPACE)
    if bool(ours) == bool(theirs) or not space or len(other.shape) != len(letters):
        return ()
    sizes = dict(zip(letters, (first if is_first else second).shape, strict=True))
    # Flax and TensorFlow; torch; MLX; transposed convolutions of Keras; those of torch.
    layouts = [(*space, "i", "o"), ("o", "i", *space), ("o", *space, "i"), (*space, "o", "i"), ("i", "o", *space)]
    if other.last == "weight":  # a port that keeps torch's names, as Equinox does
        layouts.insert(0, layouts.pop(1))
    fitting = [" ".join(axes) for axes in layouts if tuple(sizes[axis] for axis in axes) == other.shape]
    left = " ".join(letters)
    groups, factor = other.shape[-2:]
    is_depthwise = sizes["i"] == 1 and min(groups, factor) > 1 and sizes["o"] == groups * factor
    if is_depthwise and other.shape[:-2] == tuple(sizes[axis] for axis in space):  # as Keras keeps it
        sides = (left.replace("o", "(g m)").replace("i", "1"), " ".join((*space, "g", "m")))
        return (Way(" -> ".join(sides if is_first else sides[::-1]), (("g", groups), ("m", factor))),)
    ways = []
    for right in fitting:
        pattern = f"{left} -> {right}" if is_first else f"{right} -> {left}"
        ways.append(Way("... -> ..." if left == right else pattern))
    return tuple(ways)


def _general(
    first: TensorKind, second: TensorKind, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> tuple[Way, ...] | None:
    """Return the way between linear layers of which one has several axes, for inputs and then for outputs."""
    if ours == theirs:
        return (Way("... -> ..."),) if first.shape == second.shape else None
    letters = theirs if ours == ("*",) else ours
    if set(letters) != {"i", "o"}:
        return None
    turned = letters == ("o", "i")
    return tuple(_grouped(first.shape, second.shape, turned=turned, contiguous=True))[:1]


# ---- by shapes alone


def _free(mine: Shape, its: Shape) -> Iterator[Way]:
    """Yield every way that the shapes allow: axes in another order, or some of them taken together."""
    if mine == its:
        yield Way("... -> ...")
    bare = [[i for i, size in enumerate(shape) if size != 1] for shape in (mine, its)]
    if not bare[0] or not bare[1] or len(bare[0]) == len(bare[1]):
        yield from _permuted(mine, its, *bare)
    # Bounds the search: each finer axis may go to each coarser one, 4**6 = 4,096 ways.
    elif 0 < min(len(bare[0]), len(bare[1])) <= 4 and max(len(bare[0]), len(bare[1])) <= 6:
        yield from _grouped(mine, its)


def _permuted(mine: Shape, its: Shape, ours: list[int], theirs: list[int]) -> Iterator[Way]:
    """Yield the orders of axes that fit; axes of size 1 come and go."""
    # 5! = 120 orders are tried; of more axes, the same order and the reversed one.
    if len(ours) > 5:
        orders: Iterator[tuple[int, ...]] = iter([tuple(ours), tuple(reversed(ours))])
    else:
        orders = itertools.permutations(ours)
    for order in orders:
        if [mine[i] for i in order] != [its[j] for j in theirs]:
            continue
        named = {i: f"a{theirs[k]}" for k, i in enumerate(order)}
        left = " ".join(named.get(i, "1") for i in range(len(mine)))
        right = " ".join(f"a{j}" if j in theirs else "1" for j in range(len(its)))  # "" is a scalar; "()" an axis of 1
        if mine != its or list(order) != theirs:
            yield Way(f"{left} -> {right}")


def _grouped(mine: Shape, its: Shape, *, turned: bool | None = None, contiguous: bool = False) -> Iterator[Way]:
    """Yield the ways in which each axis of the coarser side is a group of the finer side's, in their order.

    Args:
        mine: the first side's shape.
        its: the second side's.
        turned: whether a matrix must lie the other way round; None allows both.
        contiguous: whether a group must stand together.
    """
    counts = [sum(size != 1 for size in shape) for shape in (mine, its)]
    coarse, fine = (mine, its) if (counts[0], len(mine)) <= (counts[1], len(its)) else (its, mine)
    names = [f"a{i}" for i in range(len(fine))]
    for owners in itertools.product(range(len(coarse)), repeat=len(fine)):
        groups = [[i for i, owner in enumerate(owners) if owner == k] for k in range(len(coarse))]
        if any(math.prod(fine[i] for i in group) != coarse[k] for k, group in enumerate(groups)):
            continue
        together = all(group == list(range(group[0], group[-1] + 1)) for group in groups if group)
        if contiguous and (not together or not all(groups)):
            continue
        if any(size == 1 and owners[i] != owners[min(i + 1, len(fine) - 1)] for i, size in enumerate(fine)):
            continue  # it goes with the next one: where it stands makes no difference
        if turned is not None and (owners[0] == len(coarse) - 1) != turned:
            continue
        text = " ".join(_group([names[i] for i in group]) for group in groups)
        sizes = tuple((names[i], fine[i]) for group in groups if len(group) > 1 for i in group)
        sides = (text, " ".join(names)) if coarse is mine else (" ".join(names), text)
        yield Way(" -> ".join(sides), sizes)


def _group(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"


def _rank(way: Way, mine: Shape, transposed: bool) -> tuple[int, ...]:
    """Return a key that puts the usual way first."""
    left, right = ([*re.findall(r"a\d+|\.\.\.", side)] for side in way.pattern.split("->"))
    if left == right:
        return (0 if not transposed else 1, 0)
    ends = [left[-1:] == right[:1], left[:1] == right[-1:]]
    swapped = left[:-2] == right[:-2] and left[-2:] == right[-2:][::-1]
    cycled = any(left == right[k:] + right[:k] for k in range(1, len(right)))  # groups in their order
    if len(mine) <= 2 and (cycled or swapped):
        return (1 if not transposed else 0, not cycled)
    convolution = len(left) > 2 and [*left[2:], left[1], left[0]] == right
    return (2, not swapped, not cycled, not convolution, not all(ends))


@functools.cache
def _rule(way: Way) -> Rule:
    """Return the rule of a pattern; the match, not the rule, names the parts."""
    return Rule("torch", "flax", way.pattern, **dict(way.sizes))
