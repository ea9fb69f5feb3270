"""Changes of one operation that ports get wrong, in NumPy: other axes, orders, branches, functions and numbers.

In: the operands of one operation of a side. Out: the results of other operations in its place, with a description. A
side runs on with each, to see whether it then agrees with the other side.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from ..verdict.measures import without_far_entries
from .case import Array
from .layers import ACTIVATIONS

Numbers = Callable[[Array], Array]

BUDGET = 1 << 26
"""Work of all runs for one difference, in elements; it is counted, not timed, so that a busy machine tries as much."""

PER_OPERATION = 1000
"""Elements whose time an operation takes in addition."""

TRACED = 10
"""How many times that an operation takes to be traced and run, forward and backward."""

MOST_FITTING = 4
"""Most changes of a side that a hint offers: several may agree, of which the fault is any."""

MOST_OF_LINE = 2
"""Most of these that a line of code has."""

MOST_TIMES = 4
"""A changed run may take this many times as many steps as the one without a change, which a loop may need; it may also
never end."""

MOST_VALUES = 1 << 22
"""Most elements of the values that are kept of a run."""

MOST_PARTS = 4
"""Most parts whose orders are all tried; of more, two are exchanged."""

MOST_ORDERS = 24
"""Most orders of axes that are tried."""

FIT = 1e-9
"""Largest difference of two results that agree, relative to the largest value."""

ROUNDED_FIT = 1e-7
"""The same where a literal of float32 accuracy is left between both sides, ..."""

EXPLAINED = 1e-6
"""... if a change leaves at most this part of the difference."""

ENOUGH = 8
"""Fewest elements of which usual numbers need not be tried."""

USUAL = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 10.0)
"""Numbers that code often holds, for results of too few elements to solve for one."""

STEPS = 12
"""Most steps of Newton's method for a number in code."""

SHORTENED = (1.0, 0.5, 0.25)
"""Parts of a step that are tried in turn: behind a softmax the whole step may lead too far."""

SHRUNK = 0.75
"""Largest part of the difference that a step may leave."""

MOST_WHOLE = 1e6
"""Whole numbers up to this one are tried for a solved number, however many digits they have; 0 is among them."""

DIGITS = 3
"""Most digits of a number that code holds, unless it is a constant, a root or one over a whole number."""

CONSTANTS = (math.pi, 2 * math.pi, math.pi / 2, math.e, math.log(2), math.log(10), math.sqrt(2 / math.pi))
"""Numbers of many digits that code holds."""


ORDINALS = ("first", "second", "third", "fourth")


def stopped(name: str, index: int, count: int) -> str:
    """Describe an operation that passes no gradient to one of its operands."""
    which = "" if count == 1 else f"{ORDINALS[index] if index < len(ORDINALS) else f'{index + 1}th'} "
    return f"the gradient of the {which}operand of {name} stopped"


def in_run(at: int, count: int) -> str:
    """Describe which run of a line a change is in, if the line runs several times and the others stay as they are."""
    return f" in run {at + 1} of {count} alone" if count > 1 else ""


def transposed_operand(index: int, shapes: Sequence[Sequence[int]]) -> str:
    """Describe a product with a square operand transposed, by its size if the other operand has another one.

    The order of operands alone may be another one than that of the code: JAX exchanges those of einsum.
    """
    size = shapes[index][-1]
    is_alone = sum(tuple(shape[-2:]) == (size, size) for shape in shapes) == 1
    return f"the {f'{size} x {size}' if is_alone else ORDINALS[index]} operand of a product transposed"


def orders(parts: Sequence[int], count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the orders of some parts that are not their own, two exchanged parts first.

    Args:
        parts: the numbers of those of one size among all parts.
        count: the number of all parts.
    """
    own = tuple(range(len(parts)))
    for left, right in itertools.combinations(own, 2):
        order = list(own)
        order[left], order[right] = right, left
        yield f"parts {parts[left]} and {parts[right]} of {count} exchanged", tuple(order)
    if 2 < len(parts) <= MOST_PARTS:
        for order_of_all in itertools.permutations(own):
            if sum(map(int.__ne__, order_of_all, own)) > 2:
                which = (
                    f"its {count} parts" if len(parts) == count else f"parts {', '.join(map(str, parts))} of {count}"
                )
                yield f"{which} in the order {tuple(parts[at] for at in order_of_all)}", order_of_all


def axis_orders(axes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield other orders of the axes of an array that give the same shape."""
    made = [shape[axis] for axis in axes]
    for left, right in itertools.combinations(range(len(axes)), 2):
        order = list(axes)
        order[left], order[right] = order[right], order[left]
        if [shape[axis] for axis in order] == made and made[left] > 1:
            yield tuple(order)
    if len(axes) <= MOST_PARTS:
        for other in itertools.permutations(range(len(axes))):
            if sum(map(int.__ne__, other, axes)) > 2 and [shape[axis] for axis in other] == made:
                yield other


def softmaxes(logits: Array, axes: Sequence[int], *, is_log: bool) -> Iterator[tuple[str, Array]]:
    """Yield softmaxes over other axes."""
    for axis in range(logits.ndim):
        if (axis,) != tuple(axes):
            shifted = logits - logits.max(axis=axis, keepdims=True)
            total = np.exp(shifted).sum(axis=axis, keepdims=True)
            over = f"a softmax over axis {axis} of {logits.ndim} for axis {', '.join(map(str, axes))}"
            yield over, shifted - np.log(total) if is_log else np.exp(shifted) / total
    if not is_log:
        yield "sigmoid for the softmax", ACTIVATIONS["sigmoid"](logits)


def logsumexps(operand: Array, axes: Sequence[int]) -> Iterator[tuple[str, Array]]:
    """Yield the maximum for a logsumexp, and logsumexps over other axes."""
    yield "a maximum for the logsumexp", operand.max(axis=tuple(axes))
    for axis in range(operand.ndim):
        if (axis,) != tuple(axes):
            largest = operand.max(axis=axis, keepdims=True)
            total = np.log(np.exp(operand - largest).sum(axis=axis))
            over = f"a logsumexp over axis {axis} of {operand.ndim} for axis {', '.join(map(str, axes))}"
            yield over, total + largest.squeeze(axis)


def scaled_transforms(made: Array, count: int) -> Iterator[tuple[str, Array]]:
    """Yield a Fourier transform of some number of points with another normalisation."""
    for text, factor in (("times", 1.0), ("over", -1.0)):
        yield f"the Fourier transform {text} sqrt({count})", made * count ** (0.5 * factor)
        yield f"the Fourier transform {text} {count}", made * count**factor


def reductions(operand: Array, axes: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield other axes to reduce, as many first: more or fewer may fit where an axis has one element."""
    for count in sorted(range(1, operand.ndim + 1), key=lambda count: abs(count - len(axes))):
        for other in itertools.combinations(range(operand.ndim), count):
            if other != tuple(sorted(axes)):
                yield f"a reduction of axes {list(other)} for {sorted(map(int, axes))}", other


ROUNDINGS: dict[str, Numbers] = {"round": np.round, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}


def functions(name: str, operand: Array, plain: Array) -> Iterator[tuple[str, Array]]:
    """Yield the results of other functions of one array, and the array itself."""
    yield f"no {name}", operand
    if name in ("logistic", "sigmoid") and operand.ndim:
        shifted = np.exp(operand - operand.max(-1, keepdims=True))
        yield f"a softmax over the last axis for {name}", shifted / shifted.sum(-1, keepdims=True)
    others: dict[str, Numbers] = (
        ROUNDINGS
        if name in ROUNDINGS
        else {
            **ACTIVATIONS,
            "exp": np.exp,
            "sin": np.sin,
            "cos": np.cos,
            "square": np.square,
            "sqrt": np.sqrt,
            "softplus": lambda x: np.logaddexp(x, 0),
            "1 / sqrt": lambda x: 1 / np.sqrt(x),
        }
    )
    for other, function in others.items():
        value = function(operand)
        is_flat = value.size > 1 and np.ptp(operand) > 0 and np.ptp(value) == 0  # a saturated function fits by chance
        if other != name and value.shape == plain.shape and not is_flat and not np.array_equal(value, plain):
            yield f"{other} for {name}", value


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}

EXCHANGED = "the operands of the subtraction exchanged"
"""Change of positions, as of a table that is read at k - q for q - k."""

WORDS = {"add": "addition", "sub": "subtraction", "mul": "multiplication", "div": "division"}

_PREPOSITIONS = {"sub": ("from", "of"), "mul": ("by", "by"), "div": ("of", "by")}
"""Operation -> the word in front of its first operand and of its second one, where that is not "of" for both."""


SWAPPED = {
    "add": ("sub", "mul"),
    "sub": ("add",),
    "mul": ("add", "div"),
    "div": ("mul",),
    "max": ("min",),
    "min": ("max",),
}
"""Operation with two operands -> those that ports take for it."""


def binaries(
    kind: str, left: Array, right: Array, plain: Array, *, has_number: bool = False
) -> Iterator[tuple[str, Array]]:
    """Yield other results of an operation with two operands: one of them alone, exchanged, or another operation.

    Args:
        kind: of `BINARY`.
        left: the first operand.
        right: the second.
        plain: the result.
        has_number: whether an operand is a number in code, which may stand first there and second in a call.
    """
    if left.dtype.kind not in "iuf" or right.dtype.kind not in "iuf":
        return
    word = WORDS.get(kind, kind)
    before_first, before_second = _PREPOSITIONS.get(kind, ("of", "of"))
    for preposition, name, operand in ((before_second, "second", left), (before_first, "first", right)):
        if operand.shape == plain.shape:
            yield f"no {word} {preposition} its {'number' if has_number else f'{name} operand'}", operand
    if kind in ("sub", "div"):
        yield f"the operands of the {word} exchanged", BINARY[kind](right, left)
    for other in SWAPPED.get(kind, ()):
        if other == "mul" and not (left.any() and right.any()):
            continue  # a product with zeros drops the other operand, which later operations may do as well
        yield f"{WORDS.get(other, other)} for {word}", BINARY[other](left, right)
    if kind in ("add", "mul", "sub", "div") and right.dtype.kind == "f":
        yield f"the second operand of the {word} negated", BINARY[kind](left, -right)


COMPARISONS = {
    "gt": (np.greater, ("ge", "lt", "le")),
    "ge": (np.greater_equal, ("gt", "le", "lt")),
    "lt": (np.less, ("le", "gt", "ge")),
    "le": (np.less_equal, ("lt", "ge", "gt")),
}
"""Comparison -> its function, and those that ports take for it."""

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def comparisons(kind: str, left: Array, right: Array) -> Iterator[tuple[str, Array]]:
    """Yield the results of other comparisons."""
    for other in COMPARISONS[kind][1]:
        yield f"{SIGNS[other]} for {SIGNS[kind]}", COMPARISONS[other][0](left, right)
    if left.dtype.kind in "iu" and right.dtype.kind in "iu":
        for shift in (1, -1):
            yield (
                f"a bound {abs(shift)} {'higher' if shift > 0 else 'lower'}",
                COMPARISONS[kind][0](left, right + shift),
            )


def shifts(operand: Array, axis: int, shift: int) -> Iterator[tuple[str, Array]]:
    """Yield an array rolled by other numbers of positions."""
    size = operand.shape[axis]
    near = [-shift % size, 0, *range(1, min(size, 8))]
    for other in dict.fromkeys(near):
        if other != shift % size:
            signed = other if 2 * other <= size else other - size
            of = shift if 2 * shift <= size else shift - size
            yield f"a shift by {signed} for {of} along axis {axis}", np.roll(operand, other, axis)


@dataclasses.dataclass
class Budget:
    """Counts the work that is left."""

    left: float = BUDGET

    def spend(self, work: float) -> bool:
        """Take some work; return False if too little is left."""
        self.left -= work
        return self.left >= 0


class Hits:
    """The changes of a side that make both sides agree, each of as few of a line's operations as do."""

    def __init__(self) -> None:
        self._hits: list[tuple[str, str, frozenset[int], tuple[str, str]]] = []

    @property
    def are_enough(self) -> bool:
        """Whether there are as many as a hint offers."""
        return len(self._hits) >= MOST_FITTING

    def have(self, line: str, text: str, at: Collection[int]) -> bool:
        """Return whether these operations have a change, part of them suffices for this one, or the line has enough."""
        of_line = [(other, operations) for own, other, operations, _ in self._hits if own == line]
        if any(operations == frozenset(at) for _, operations in of_line):
            return True
        same = [operations for other, operations in of_line if other == text]
        return any(operations <= frozenset(at) for operations in same) or (not same and len(of_line) >= MOST_OF_LINE)

    def add(self, line: str, text: str, at: Collection[int], message: tuple[str, str]) -> None:
        """Add a change of operations with its description and line; the same change of more of them is dropped."""
        self._hits = [hit for hit in self._hits if hit[:2] != (line, text) or not frozenset(at) < hit[2]]
        self._hits.append((line, text, frozenset(at), message))

    def messages(self) -> list[tuple[str, str]]:
        """Return the description and the line of each change."""
        return [hit[-1] for hit in self._hits]


def are_alike(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Return whether two lists of results have the same shapes."""
    return len(first) == len(second) and all(one.shape == two.shape for one, two in zip(first, second, strict=True))


def apart(first: Sequence[Array], second: Sequence[Array]) -> Array | None:
    """Return the differences of two lists of results, relative to the largest of each; None if shapes differ.

    Whole numbers and truth values that are not the same are infinitely far apart.
    """
    if not are_alike(first, second):
        return None
    parts = [np.zeros(0)]
    for left, right in zip(first, second, strict=True):
        if left.dtype.kind == "f" and right.dtype.kind == "f":
            wanted, result, scale = without_far_entries(right, left)
            parts.append(np.ravel(result - wanted) / max(scale, 1e-300))
        elif left.dtype.kind in "fc":
            parts.append(np.ravel(left - right) / max(float(np.abs(right).max(initial=0.0)), 1e-300))
        else:
            parts.append(np.where(np.ravel(left == right), 0.0, np.inf))
    return np.concatenate(parts)


def limit_of(plain: Sequence[Array], wanted: Sequence[Array], *, has_literals: bool = True) -> float:
    """Return the largest difference of results that agree, for sides this far apart without a change.

    Literals of float32 accuracy, if a side has some, may be left between the sides, where a change explains all but a
    millionth.
    """
    if not has_literals:
        return FIT
    rest = apart(plain, wanted)
    finite = np.zeros(0) if rest is None else np.abs(rest[np.isfinite(rest)])
    return max(FIT, min(ROUNDED_FIT, EXPLAINED * float(finite.max(initial=0.0))))


def agree(first: Sequence[Array], second: Sequence[Array], limit: float = FIT) -> bool:
    """Return whether two lists of results are the same but for rounding in float64, or up to a limit."""
    rest = apart(first, second)
    return rest is not None and rest.size > 0 and bool((np.abs(rest) <= limit).all())


def solved(number: float, rest: Callable[[float], Array | None], limit: float = FIT) -> float | None:
    """Return the number in code for which a difference vanishes, by Newton's method; None if no step brings it nearer.

    Args:
        number: the number in the code.
        rest: number -> differences; None where the code fails.
        limit: largest difference of results that agree.
    """
    best = rest(number)
    if best is None or not best.size or not np.isfinite(best).all():
        return None
    at = number
    for _ in range(STEPS):
        step = 1e-6 * (abs(at) or 1.0)
        moved = rest(at + step)
        if moved is None:
            return None
        slope = (moved - best) / step
        square = float(np.real(np.vdot(slope, slope)))
        if not square or not math.isfinite(square):
            return None
        change = float(np.real(np.vdot(slope, best))) / square
        nearer = _nearer(at, change, float(np.abs(best).max()), rest)
        if nearer is None:
            return None
        at, best = nearer
        if np.abs(best).max() <= limit:
            return _polished(at, rest, limit)
    return None


def _nearer(
    number: float, change: float, largest: float, rest: Callable[[float], Array | None]
) -> tuple[float, Array] | None:
    """Return the number after as much of a step as makes the largest difference smaller, and its differences."""
    for part in SHORTENED:
        new = rest(number - part * change)
        if new is not None and np.isfinite(new).all() and np.abs(new).max() <= SHRUNK * largest:
            return number - part * change, new
    return None


def solutions(number: float, rest: Callable[[float], Array | None], limit: float = FIT) -> Iterator[float]:
    """Yield the numbers in code for which a difference may vanish: one that is solved for, or usual ones.

    Any number fits few results if it is solved for; it has few digits, and further samples have to confirm it. Behind a
    rounding no number can be solved for, and the next whole ones are tried. See `solved` for the arguments.
    """
    own = rest(number)
    if own is None or not own.size:
        return
    value = solved(number, rest, limit)
    if value is not None:
        yield value
        return
    near = (number - 1, number + 1) if number == round(number) and abs(number) > 1 else ()
    for value in near if own.size >= ENOUGH else (*USUAL, *near):
        difference = rest(value)
        if difference is not None and np.abs(difference).max() <= limit:
            yield value


def _polished(number: float, rest: Callable[[float], Array | None], limit: float) -> float | None:
    """Return a number of few digits next to a solved one that fits as well; None if none does.

    A number of many digits is a sign that something else is wrong.
    """
    whole = [float(round(number))] if abs(number) < MOST_WHOLE else []
    digits = (float(f"{number:.{digits}g}") for digits in range(1, DIGITS + 1))
    for value in (*whole, *digits, *_roots(number), *_near_constants(number)):
        rounded = rest(value)
        if rounded is not None and np.abs(rounded).max() <= limit:
            return value
    return None


def _near_constants(number: float) -> Iterator[float]:
    """Yield a constant next to a number, or one over a whole number."""
    inverse = round(1 / number) if number else 0
    for value in (*CONSTANTS, *((1 / inverse,) if inverse else ())):
        if abs(abs(number) - abs(value)) < 1e-6 * abs(value):
            yield math.copysign(value, number)


def _roots(number: float) -> Iterator[float]:
    """Yield the root of a whole number, or one over it, next to a number."""
    for square, power in ((number * number, 0.5), (1 / number / number if number else 0.0, -0.5)):
        if 1 < round(square) < 1 << 9 and abs(square - round(square)) < 1e-7 * square:
            yield math.copysign(round(square) ** power, number)
