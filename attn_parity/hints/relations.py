"""Relations between two tensors: each function returns a sentence if its relation holds, "" if it does not.

A sentence names the relation and no cause: several causes have each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import FIT, Array, Case, divisors, ratio_of, written

FEW = 64
"""Rows that are compared first, so that a relation that does not apply costs little."""

ROWS = 512
"""Most rows that a ratio is estimated from; more would not change it."""

MOST_LISTED = 4
"""Most numbers of an axis that are listed one by one."""


def _constant_ratio(case: Case) -> str:
    """Recognise a multiple of the other side."""
    ratio = ratio_of(case.first, case.second)
    if ratio is None or float(np.ptp(case.first)) <= FIT * case.scale:  # any number is a multiple of another
        return ""
    if f"{ratio:.6g}" == "1":  # roundings, which a scale explains as well as anything
        return ""
    return f"{case.labels[1]} is {written(ratio)} times {case.labels[0]} everywhere"


def _zero_rows(case: Case) -> str:
    """Recognise rows that are zero on one side alone, such as the gradient of an embedding's row."""
    if case.first.ndim < 2:
        return ""
    rows = case.first.reshape(-1, case.first.shape[-1]), case.second.reshape(-1, case.second.shape[-1])
    off = np.flatnonzero((np.abs(rows[0] - rows[1]) > FIT * case.scale).any(axis=-1))
    if not 0 < len(off) < len(rows[0]):
        return ""
    for own, other, label in ((rows[0], rows[1], case.labels[0]), (rows[1], rows[0], case.labels[1])):
        if not np.abs(own[off]).any() and np.abs(other[off]).any(axis=-1).all():
            which = f"row {off[0]} of {len(own)} is" if len(off) == 1 else f"{len(off)} of {len(own)} rows are"
            return f"{which} zero in {label} alone, the others agree"
    return ""


def _constant_rows(case: Case) -> Array | None:
    """Return the difference by rows if it is the same in all; None for rows that are the same themselves."""
    if case.is_gradient or case.first.ndim < 2:
        return None
    rows = case.apart.reshape(-1, case.apart.shape[-1])
    if len(rows) < 2 or float(np.abs(rows - rows[:1]).max()) > FIT * case.scale:
        return None
    are_same = float(np.ptp(case.first.reshape(rows.shape), axis=0).max()) <= FIT * case.scale
    return None if are_same else rows


def _added_weight(case: Case) -> str:
    """Recognise a bias that one side adds twice, or not at all."""
    rows, (first, second) = _constant_rows(case), case.labels
    if rows is None:
        return ""
    for name, weight in case.weights.items():
        for factor in (1, -1):
            if weight.shape == rows[0].shape and case.fits(rows[0], factor * weight):
                more, less = (second, first) if factor > 0 else (first, second)
                return f"{more} is {less} plus {name} in every row"
    return ""


def _added_bias(case: Case) -> str:
    """Recognise a constant vector between the two."""
    return "" if _constant_rows(case) is None else "the difference is the same in every row"


def _one_plus_weight(case: Case) -> str:
    """Recognise a norm that multiplies by 1 + w where the other multiplies by w."""
    if case.is_gradient:
        return ""
    for name, weight in case.weights.items():
        if weight.ndim != 1 or case.first.shape[-1:] != weight.shape or not np.abs(weight).any():
            continue
        first, second = case.labels
        for multiplied, shifted, plain, more in (
            (case.first, case.second, first, second),
            (case.second, case.first, second, first),
        ):
            for other in (0.0, *(bias for bias in case.weights.values() if bias.shape == weight.shape)):
                if case.fits((multiplied - other) * (1 + weight), (shifted - other) * weight):
                    return f"{more} multiplies by 1 + {name} where {plain} multiplies by {name}"
    return ""


def _transposed(case: Case) -> str:
    """Recognise a product with a kernel that is transposed on one side."""
    if case.is_gradient:
        if (
            case.first.ndim >= 2
            and case.first.shape[-1] == case.first.shape[-2]
            and case.fits(case.first.swapaxes(-1, -2), case.second)
        ):
            return "one is the other transposed"
        return ""
    for name, weight in case.weights.items():
        if weight.ndim != 2 or weight.shape[0] != weight.shape[1]:
            continue
        for operand in case.inputs:
            if operand.shape[-1:] != weight.shape[:1] or operand.shape != case.first.shape:
                continue
            forward, backward = operand @ weight, operand @ weight.T
            for bias in (0.0, *(one for one in case.weights.values() if one.shape == weight.shape[:1])):
                ways = (case.fits(case.first, forward + bias), case.fits(case.second, backward + bias))
                other = (case.fits(case.first, backward + bias), case.fits(case.second, forward + bias))
                if all(ways) or all(other):
                    return f"one side multiplies by {name}, the other by its transpose"
    return ""


def _turned(case: Case) -> str:
    """Recognise outputs with two axes exchanged, as height and width are where a convolution's kernel is transposed."""
    if case.first.ndim != 4 or case.is_gradient:
        return ""
    for axes, what in (((0, 1, 3, 2), "the last two axes"), ((0, 2, 1, 3), "the middle two axes")):
        if case.first.transpose(axes).shape == case.first.shape and case.fits(case.first.transpose(axes), case.second):
            return f"one output is the other with {what} exchanged"
    return ""


def _reordered(case: Case) -> str:
    """Recognise the same numbers in another order: interleaved pairs, exchanged halves or chunks."""
    size = case.first.shape[-1] if case.first.ndim else 0
    if size < 2:
        return ""
    few = case.first.reshape(-1, size)[:FEW], case.second.reshape(-1, size)[:FEW]
    for width in divisors(size):
        for text, order in _orders(width):
            if case.fits(_moved(few[0], order), few[1]) and case.fits(_moved(case.first, order), case.second):
                inside = "" if width == size else f" in each {width} channels"
                return f"{case.labels[1]} has the same numbers in another order: {text}{inside}"
    alike = case.fits(np.sort(few[0], axis=-1), np.sort(few[1], axis=-1))
    if alike and case.first.ndim > 1 and case.fits(np.sort(case.first, axis=-1), np.sort(case.second, axis=-1)):
        return f"both have the same numbers in another order along the last axis: {_order(case)}"
    return ""


def _order(case: Case) -> str:
    """Return the order that all rows share: reversed, shifted, or else that of channels; or that they share none."""
    size = case.first.shape[-1]
    # A sum of the rows with random weights has the same number twice where two columns are equal in all rows alone.
    weights = np.random.default_rng(0).normal(size=case.first.size // size)
    first, second = (weights @ one.reshape(-1, size) for one in (case.first, case.second))
    near = np.flatnonzero(np.abs(first - second[0]) <= 1e-6 * np.abs(first).max())
    usual = {"reversed": np.arange(size)[::-1]} | {
        f"shifted by {-at % size}": np.roll(np.arange(size), -at) for at in near
    }
    for text, order in usual.items():
        if case.fits(first[order], second) and case.fits(case.first[..., order], case.second):
            return text
    order = np.empty(size, int)
    order[np.argsort(second)] = np.argsort(first)
    return (
        "permuted, all rows alike" if case.fits(case.first[..., order], case.second) else "each row in one of its own"
    )


def _moved(array: Array, order: Array) -> Array:
    """Return an array with each block of the last axis in another order."""
    blocks = array.reshape(*array.shape[:-1], -1, len(order))
    return np.asarray(blocks[..., order].reshape(array.shape))


def _orders(width: int) -> list[tuple[str, Array]]:
    """Return the reorderings of a block that ports get wrong."""
    orders = []
    places = np.arange(width)
    if width % 2 == 0 and width > 2:
        orders.append(("pairs interleaved instead of in halves", places.reshape(2, -1).T.reshape(-1)))
        orders.append(("pairs in halves instead of interleaved", places.reshape(-1, 2).T.reshape(-1)))
    for parts in (2, 3, 4):
        if width % parts == 0:
            chunks = places.reshape(parts, -1)
            for left in range(parts):
                for right in range(left + 1, parts):
                    order = chunks.copy()
                    order[[left, right]] = order[[right, left]]
                    orders.append((f"chunks {left} and {right} of {parts} exchanged", order.reshape(-1)))
    return orders


def _halves(case: Case) -> str:
    """Recognise rotary pairs that are halves on one side and interleaved on the other."""
    for width, first, second in _kept_pairs(case):
        if {first, second} == {(True, False), (False, True)}:
            words = ["halves" if halves else "interleaved pairs" for halves, _ in (first, second)]
            return f"{case.labels[0]} rotates {words[0]}, {case.labels[1]} {words[1]} ({width} channels per head)"
    return ""


def _rotated(case: Case) -> str:
    """Recognise rotary pairs of the same kind on both sides."""
    if any(first == second and sum(first) == 1 for _, first, second in _kept_pairs(case)):
        return "both rotate the same pairs, by other angles"
    return ""


def _kept_pairs(case: Case) -> Iterator[tuple[int, tuple[bool, bool], tuple[bool, bool]]]:
    """Yield widths, and of each side whether it keeps the lengths of pairs in halves, and of interleaved ones."""
    operand = next((one for one in case.inputs if one.shape == case.first.shape), None)
    size = case.first.shape[-1] if case.first.ndim else 0
    if operand is None or size < 4 or case.is_gradient:
        return
    rows = [array.reshape(-1, size)[-FEW:] for array in (operand, case.first, case.second)]
    for width in (one for one in divisors(size) if one % 2 == 0 and one >= 4):
        first, second = (
            (_keeps_pairs(rows[0], one, width, True), _keeps_pairs(rows[0], one, width, False)) for one in rows[1:]
        )
        yield width, first, second


def _keeps_pairs(operand: Array, made: Array, width: int, halves: bool) -> bool:
    def lengths(array: Array) -> Array:
        blocks = array.reshape(*array.shape[:-1], -1, width)
        pairs = (2, width // 2) if halves else (width // 2, 2)
        squares: Array = np.square(blocks.reshape(*blocks.shape[:-1], *pairs)).sum(axis=-2 if halves else -1)
        return squares

    before, after = lengths(operand), lengths(made)
    return bool(float(np.abs(before - after).max()) <= FIT * float(np.abs(before).max()))


def _multiples(case: Case) -> str:
    """Recognise rows, or channels behind a shift, that are each a multiple of the other side's, as behind norms."""
    if case.first.ndim < 2 or case.first.shape[-1] < 2 or case.is_gradient:
        return ""
    without_affine = _without_affine(case)
    for first, second, affine in ((case.first, case.second, ""), *([without_affine] if without_affine[2] else [])):
        if float(np.ptp(first)) <= FIT * case.scale:  # any number is a multiple of another
            continue
        rows = first.reshape(-1, first.shape[-1])[:ROWS], second.reshape(-1, second.shape[-1])[:ROWS]
        if all(float(np.ptp(row)) <= FIT * case.scale for row in rows[0]):  # as of a mean that is repeated
            continue
        factors = _factors(*rows)
        if factors is not None:
            return f"each row of {case.labels[1]} is a multiple of {case.labels[0]}'s{affine}, {_span(factors)} times"
        if len(rows[0]) < 4:
            continue
        factors = _factors(*(np.ascontiguousarray(part.T) for part in rows))
        what = f"each channel of {case.labels[1]} is a multiple of {case.labels[0]}'s"
        if factors is not None:
            return f"{what}{affine}, {_span(factors)} times"
        if _factors(*(np.ascontiguousarray((part - part.mean(axis=0)).T) for part in rows)) is not None:
            return f"{what}, shifted{affine}"
    return ""


def _factors(first: Array, second: Array) -> Array | None:
    """Return by how much each row has to be multiplied to be the other side's; None if there is no such number."""
    ratios = [ratio_of(*pair) for pair in zip(first, second, strict=True)]
    return np.array(ratios, dtype=np.float64) if ratios and None not in ratios else None


def _without_affine(case: Case) -> tuple[Array, Array, str]:
    """Return both outputs before the weight and bias of a norm, where they have some of that shape, and their names."""
    names = [name for name, one in case.weights.items() if one.shape == case.first.shape[-1:]]
    biases = [name for name in names if "bias" in name or "shift" in name][:1]
    scales = [name for name in names if "bias" not in name and "shift" not in name and case.weights[name].all()][:1]
    bias = case.weights[biases[0]] if biases else 0.0
    scale = case.weights[scales[0]] if scales else 1.0
    affine = f" without {' and '.join([*scales, *biases])}" if scales or biases else ""
    return np.asarray((case.first - bias) / scale), np.asarray((case.second - bias) / scale), affine


def _partly_scaled(case: Case) -> str:
    """Recognise a scale of some channels alone: those agree up to one number, and the others agree."""
    if case.is_gradient:
        return ""
    for axis, size in enumerate(case.first.shape):
        if not 2 < size <= ROWS:
            continue
        factors = _factors(*(np.moveaxis(array, axis, 0) for array in (case.first, case.second)))
        scaled = np.zeros(0, int) if factors is None else np.flatnonzero(np.abs(factors - 1) > FIT)
        if factors is None or not 0 < len(scaled) < size:
            continue
        if float(np.ptp(factors[scaled])) <= FIT * float(np.abs(factors).max()):
            first, second = case.labels
            which = f"{len(scaled)} of {size} along axis {axis}, from {scaled[0]} on,"
            times = f"{written(factors[scaled[0]])} times as large in {second} as in {first}"
            return f"{which} are {times}, the others agree"
    return ""


def _span(factors: Array) -> str:
    """Format the least and the largest of some ratios with as many digits as make them differ."""
    least, most = float(factors.min()), float(factors.max())
    if most - least <= FIT * float(np.abs(factors).max()):
        return written(most)
    texts = f"{least:.4g}", f"{most:.4g}"
    if texts[0] == texts[1]:
        texts = f"{least:.10g}", f"{most:.10g}"
    return " to ".join(texts)


def positions(case: Case) -> str:
    """Recognise entries along the last axis but one that differ alone, are moved or are turned round."""
    if case.first.ndim < 2 or case.is_gradient:
        return ""
    moved = _shifted(case) or _turned_round(case)
    axis = case.first.ndim - 2
    others = tuple(place for place in range(case.first.ndim) if place != axis)
    off = np.asarray((np.abs(case.apart) > FIT * case.scale).any(axis=others))
    # A row of zeros on both sides, as of a dead ReLU, agrees whatever the fault is.
    silent = np.asarray(((case.first == 0) & (case.second == 0)).all(axis=others))
    if moved or not axis or not off.any() or (off | silent).all():  # axis 0 is mostly that of samples
        return moved
    same = " by the same numbers for every entry of axis 0" if _is_same_in_every_entry(case) else ""
    differ = "differs" if off.sum() == 1 else "differ"
    return f"along axis {axis}, {_listed(np.flatnonzero(off), len(off))} {differ}{same}, the others agree"


def _listed(places: Array, size: int) -> str:
    """Return the numbers of some entries of an axis, in a range or one by one if few."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places) > 1:
        return f"entries {first} to {last} of {size}"
    if len(places) <= MOST_LISTED:
        return f"{'entry' if len(places) == 1 else 'entries'} {', '.join(map(str, places))} of {size}"
    return f"{len(places)} of {size} entries"


def _is_same_in_every_entry(case: Case) -> bool:
    """Return whether the difference does not depend on the sequence, as that of a table of positions."""
    apart = case.apart
    return len(apart) > 1 and bool(float(np.abs(apart - apart[:1]).max()) <= FIT * case.scale)


def _turned_round(case: Case) -> str:
    """Recognise entries in reverse order, in all channels or in those of one direction."""
    axis = case.first.ndim - 2
    if case.first.shape[axis] < 3:  # the reverse of two is an exchange, as of two channels
        return ""
    others = tuple(range(case.first.ndim - 1))
    close = FIT * case.scale
    agree = np.asarray((np.abs(case.apart) <= close).all(axis=others))
    turned = np.asarray((np.abs(case.second[..., ::-1, :] - case.first) <= close).all(axis=others))
    if agree.all() or not (agree | turned).all():
        return ""
    channels = np.flatnonzero(~agree)
    some = "" if not agree.any() else f" in {len(channels)} of {len(agree)} channels, from {channels[0]} on"
    return f"one side has axis {axis} in reverse order{some}"


def _shifted(case: Case) -> str:
    for axis in range(case.first.ndim - 1):
        size = case.first.shape[axis]
        for step in range(1, min(4, size - 1) if size > 2 else 0):
            first, second = np.moveaxis(case.first, axis, 0), np.moveaxis(case.second, axis, 0)
            if case.fits(first[:-step], second[step:]) or case.fits(first[step:], second[:-step]):
                return f"one side is the other moved by {step} along axis {axis}"
    return ""


def _edges(case: Case) -> str:
    """Recognise an image whose border alone differs, along its height and width.

    Along a single axis it may as well be the first or last channel.
    """
    if case.first.ndim != 4 or case.is_gradient:
        return ""
    off = np.abs(case.apart) > FIT * case.scale
    for axes in ((2, 3), (1, 2)):
        plane = np.asarray(off.any(axis=tuple(place for place in range(4) if place not in axes)))
        is_inside = min(plane.shape) < 3 or plane[1:-1, 1:-1].any()
        if not is_inside and plane[1:-1, [0, -1]].any() and plane[[0, -1], 1:-1].any():
            return f"only the border along axes {axes[0]} and {axes[1]} differs"
    return ""


EXACT: tuple[Callable[[Case], str], ...] = (_one_plus_weight, _added_weight, _reordered, _transposed, _halves)
"""Relations that name the step that differs, from the most specific to the least; the first that applies counts."""

VAGUE: tuple[Callable[[Case], str], ...] = (
    _zero_rows,
    _turned,
    _constant_ratio,
    _added_bias,
    _rotated,
    _partly_scaled,
    _multiples,
    _edges,
    positions,
)
"""Relations that many causes have; an operation whose change was tried is named before them."""
