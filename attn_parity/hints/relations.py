"""Relations between two tensors: each function returns a sentence if its relation holds, "" if it does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from .case import FIT, Array, Case, divisors, ratio_of, scale_named
from .reshaping import averaged

FEW = 64
"""Rows that are compared first, so that a relation that does not apply costs little."""

ROWS = 512
"""Most rows that a ratio is estimated from; more would not change it."""

HALF = 0.5
"""Least part of a border that another padding changes."""

PER_ROW = 0.1
"""How far the logarithm of a ratio is from 0 that eps alone rarely explains."""


def _gelu_pattern(case: Case) -> str:
    """Recognise GELU's two kinds by the size of the difference, where the input of the activation is not known."""
    if case.is_gradient or any(given.shape == case.first.shape for given in case.inputs):
        return ""
    largest = float(np.abs(case.apart).max())
    lowest = float(min(case.first.min(), case.second.min()))
    far = float(np.abs(case.apart[np.abs(case.first) > 5]).max(initial=0.0))
    if not (1e-5 < largest < 5e-4 and -0.1701 < lowest < 0 and far <= 1e-6):
        return ""
    return "differences of at most 5e-4, none far from 0, and no value below -0.17: consistent with GELU's two kinds"


def _constant_ratio(case: Case) -> str:
    """Recognise a scale by another number: one side is a multiple of the other."""
    ratio = ratio_of(case.first, case.second)
    if ratio is None or float(np.ptp(case.first)) <= FIT * case.scale:  # any number is a multiple of another
        return ""
    if f"{ratio:.6g}" == "1":  # roundings, which a scale explains as well as anything
        return ""
    first, second = case.labels
    return f"{second} is {ratio:.6g} times {first} everywhere{scale_named(ratio, case)}"


def _padding_row(case: Case) -> str:
    """Recognise padding_idx: a row of an embedding that is zero, or gets no gradient, on one side."""
    if case.first.ndim < 2 or not case.may_hold("embedding"):
        return ""
    rows = case.first.reshape(-1, case.first.shape[-1]), case.second.reshape(-1, case.second.shape[-1])
    off = np.flatnonzero((np.abs(rows[0] - rows[1]) > FIT * case.scale).any(axis=-1))
    if not 0 < len(off) < len(rows[0]):
        return ""
    for rows_of_one, label in zip(rows, case.labels, strict=True):
        others = rows[1] if rows_of_one is rows[0] else rows[0]
        if not np.abs(rows_of_one[off]).any() and np.abs(others[off]).any():
            if case.is_gradient and len(off) == 1 and len(case.first.shape) == 2:
                return f"row {off[0]} gets no gradient in {label}: consistent with padding_idx={off[0]} there alone"
            if not case.is_gradient:
                return f"{len(off)} of {len(rows[0])} rows are zero in {label} alone: consistent with padding_idx there"
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
                return f"{more} is {less} plus {name} in every row: consistent with {name} added twice, or left out"
    return ""


def _added_bias(case: Case) -> str:
    """Recognise a constant vector between the two."""
    return (
        "" if _constant_rows(case) is None else "the difference is the same in every row: consistent with another bias"
    )


def _one_plus_weight(case: Case) -> str:
    """Recognise a norm that multiplies by 1 + w where the other multiplies by w."""
    if case.is_gradient:
        return ""
    for name, weight in case.weights.items():
        if weight.ndim != 1 or case.first.shape[-1:] != weight.shape:
            continue
        first, second = case.labels
        for multiplied, shifted, plain, more in (
            (case.first, case.second, first, second),
            (case.second, case.first, second, first),
        ):
            text = f"{more} multiplies by 1 + {name} where {plain} multiplies by {name}"
            if not np.abs(weight).any() and not np.abs(multiplied).any() and _is_normed(shifted):
                return f"{plain} is zero, as {name} is: consistent with 1 + {name} in {more}"
            for other in (0.0, *(bias for bias in case.weights.values() if bias.shape == weight.shape)):
                if case.fits((multiplied - other) * (1 + weight), (shifted - other) * weight):
                    return text
    return ""


def _is_normed(array: Array) -> bool:
    """Return whether every row has a mean square of 1, like the output of a norm with unit weights."""
    return bool((np.abs(np.square(array).mean(axis=-1) - 1) < 0.05).all())


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
    cause = (
        ": consistent with height and width exchanged" if any(one.ndim == 4 for one in case.weights.values()) else ""
    )
    for axes, what in (((0, 1, 3, 2), "the last two axes"), ((0, 2, 1, 3), "the middle two axes")):
        if case.first.transpose(axes).shape == case.first.shape and case.fits(case.first.transpose(axes), case.second):
            return f"one output is the other with {what} exchanged{cause}"
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
                turned = " (as rotary positions take them)" if "pairs" in text and case.may_hold("attention") else ""
                return f"{case.labels[1]} has the same numbers in another order: {text}{inside}{turned}"
    alike = case.fits(np.sort(few[0], axis=-1), np.sort(few[1], axis=-1))
    if alike and case.first.ndim > 1 and case.fits(np.sort(case.first, axis=-1), np.sort(case.second, axis=-1)):
        return f"both have the same numbers in another order along the last axis: {_order(case, few)}"
    return ""


def _order(case: Case, few: tuple[Array, Array]) -> str:
    """Return the order that all rows share: reversed, shifted, or else that of channels; or that they share none."""
    ranks = np.argsort(np.argsort(few[1][0]))
    order = np.argsort(few[0][0])[ranks]
    if not case.fits(case.first[..., order], case.second):
        return "each row in one of its own"
    size = len(order)
    if np.array_equal(order, np.arange(size)[::-1]):
        return "reversed"
    shifts = [shift for shift in range(1, size) if np.array_equal(order, np.roll(np.arange(size), shift))]
    return f"shifted by {shifts[0]}" if shifts else "consistent with permuted channels"


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
        return "both rotate the same pairs, by other angles: consistent with another base, positions or direction"
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


def _normalised(case: Case) -> str:
    """Recognise norms with another eps or variance: rows that are each a multiple of the other side's."""
    if case.first.ndim < 2 or case.first.shape[-1] < 2 or case.is_gradient:
        return ""
    first_numbers, second_numbers = _without_affine(case)
    if float(np.ptp(first_numbers)) <= FIT * case.scale:  # any number is a multiple of another
        return ""
    rows = (
        first_numbers.reshape(-1, first_numbers.shape[-1])[:ROWS],
        second_numbers.reshape(-1, second_numbers.shape[-1])[:ROWS],
    )
    flat = [float(np.ptp(first)) <= FIT * case.scale for first in rows[0]]
    if all(flat):  # numbers that are the same along a row, such as a mean that is repeated
        return ""
    ratios = [ratio_of(first, second) for first, second in zip(*rows, strict=True)]
    factors = np.array([ratio for ratio in ratios if ratio is not None])
    if len(factors) < len(ratios) or not len(factors):
        return _by_channel(case, *rows, first_numbers.size // first_numbers.shape[-1])
    middle = float(np.median(factors))
    before = f"each row of {case.labels[1]} is {middle:.6g} times that of {case.labels[0]}"
    recognised = variance(middle, rows[0].shape[-1]) if case.may_hold("norm") else ""
    if recognised and float(np.ptp(factors)) <= 0.05 * abs(middle - 1):
        return f"{before}{recognised}"
    if float(np.ptp(factors)) <= FIT * float(np.abs(factors).max()):
        return f"{before} but for weight and bias{scale_named(middle, case)}"
    measured = (
        f"each row of {case.labels[1]} is a multiple of {case.labels[0]}'s, {_span(factors.min(), factors.max())} times"
    )
    if not case.may_hold("norm") or factors.min() <= 0 or any(flat):  # a norm turns no sign
        return measured
    rows_apart = float(np.abs(np.log(np.abs(factors))).max()) > PER_ROW if factors.all() else True
    return f"{measured}: consistent with another eps or another variance in a norm" + (
        ", or with another weight per row, as a router's" if rows_apart else ""
    )


def _partly_scaled(case: Case) -> str:
    """Recognise a scale of some channels alone: those agree up to one number, and the others agree."""
    if case.is_gradient:
        return ""
    for axis, size in enumerate(case.first.shape):
        pairs = zip(*(np.moveaxis(array, axis, 0)[:ROWS] for array in (case.first, case.second)), strict=True)
        ratios = [ratio_of(first, second) for first, second in pairs] if 1 < size <= ROWS else [None]
        if None in ratios:
            continue
        factors = np.array(ratios, dtype=np.float64)
        scaled = np.flatnonzero(np.abs(factors - 1) > FIT)
        if 0 < len(scaled) < size > 2 and float(np.ptp(factors[scaled])) <= FIT * float(np.abs(factors).max()):
            first, second = case.labels
            which = f"{len(scaled)} of {size} along axis {axis}, from {scaled[0]} on,"
            return f"{which} are {factors[scaled[0]]:.6g} times as large in {second} as in {first}, the others agree"
    return ""


def _span(least: float, most: float) -> str:
    """Format two ratios with as many digits as make them differ."""
    texts = f"{least:.4g}", f"{most:.4g}"
    if texts[0] == texts[1]:
        texts = f"{least:.10g}", f"{most:.10g}"
    return " to ".join(texts)


def _by_channel(case: Case, first_numbers: Array, second_numbers: Array, count: int) -> str:
    """Recognise other statistics: channels that are each a multiple of the other side's, after a shift."""
    if len(first_numbers) < 4:
        return ""
    centred = first_numbers - first_numbers.mean(axis=0), second_numbers - second_numbers.mean(axis=0)
    ratios = [ratio_of(first, second) for first, second in zip(centred[0].T, centred[1].T, strict=True)]
    if not ratios or None in ratios:
        return ""
    factors = np.array(ratios, dtype=np.float64)
    middle = float(np.median(factors))
    is_norm = case.may_hold("norm")
    recognised = variance(middle, count) if is_norm and float(np.ptp(factors)) <= 0.05 * abs(middle - 1) else ""
    what = recognised or is_norm * ": consistent with other statistics, another eps or another scale per channel"
    times = f"{middle:.6g} times" if recognised else "a multiple of"
    return f"each channel of {case.labels[1]} is {times} {case.labels[0]}'s, shifted{what}"


def _without_affine(case: Case) -> tuple[Array, Array]:
    """Return both outputs before the norm's weight and bias, where they have some of that shape."""
    vectors = {name: one for name, one in case.weights.items() if one.shape == case.first.shape[-1:]}
    bias = next((one for name, one in vectors.items() if "bias" in name or "shift" in name), 0.0)
    scale = next((one for name, one in vectors.items() if "bias" not in name and "shift" not in name), 1.0)
    if np.ndim(scale) and not np.abs(scale).min() > 0:
        return case.first - bias, case.second - bias
    return np.asarray((case.first - bias) / scale), np.asarray((case.second - bias) / scale)


def variance(ratio: float, count: int, close: float = 0.05) -> str:
    """Recognise n/(n-1), or its root, as the ratio of two variances; eps moves it a little, by a part of `close`."""
    if count < 2:
        return ""
    whole = count / (count - 1)
    for value, text in ((whole, "n/(n-1)"), (math.sqrt(whole), "sqrt(n/(n-1))")):
        for quotient, side in ((ratio, ""), (1 / ratio if ratio else 0.0, "1/")):
            if abs(quotient - value) <= close * (value - 1):
                written = f"{side}({text})" if side else text
                return f" = {written} with n = {count}: consistent with the unbiased variance on one side alone"
    return ""


def positions(case: Case) -> str:
    """Recognise masks, padding and shifts: rows up to a position agree, or only the first ones differ.

    The rows of a bag of embeddings are not positions.
    """
    if case.first.ndim < 2 or case.is_gradient:
        return ""
    moved = _shifted(case) or _turned_round(case)
    if moved or _is_batch(case) or _is_image(case) or "bag" in case.words:
        return moved
    axis = case.first.ndim - 2
    others = tuple(place for place in range(case.first.ndim) if place != axis)
    off = np.asarray((np.abs(case.apart) > FIT * case.scale).any(axis=others))
    # A row of zeros on both sides, as of a dead ReLU, agrees whatever the fault is.
    silent = np.asarray(((case.first == 0) & (case.second == 0)).all(axis=others))
    places = np.flatnonzero(off)
    if not len(places) or (off | silent).all():
        return ""
    first, last, size = int(places[0]), int(places[-1]), len(off)
    is_run = len(places) == last - first + 1
    edges = {0, size - 1}
    if is_run and first == 0:
        text, cause = f"positions 0 to {last} of {size} differ, later ones agree", "a mask or padding at the start"
    elif is_run and (first, last) == (1, size - 1):
        text = f"position 0 of {size} agrees, later ones differ"
        cause = "other scores, positions or masks where the first attends to itself alone, or a recurrence's step"
    elif is_run and last == size - 1:
        text = f"positions 0 to {first - 1} of {size} agree, later ones differ"
        cause = "a mask, window or padding, or a recurrence's step"
    elif set(places.tolist()) == edges or (len(places) <= size // 2 and edges <= set(places.tolist())):
        text, cause = f"only positions at both edges differ ({len(places)} of {size})", "another padding"
    else:
        text = f"{len(places)} of {size} positions differ, from {first} on"
        # Where a mask leaves some rows one key, these agree whatever the scores are.
        cause = "other scores, a mask, packed positions, or what goes by distance"
    if _is_same_in_every_sequence(case):
        cause = "other positions that are added, or another part that no input reaches"
        return f"{text}, by the same numbers in every sequence: consistent with {cause}"
    return f"{text}: consistent with {cause}" if case.may_hold("attention") else text


def _is_same_in_every_sequence(case: Case) -> bool:
    """Return whether the difference does not depend on the sequence, as that of a table of positions; masks' do."""
    apart = case.apart
    return len(apart) > 1 and bool(float(np.abs(apart - apart[:1]).max()) <= FIT * case.scale)


def _is_image(case: Case) -> bool:
    """Return whether the axes are those of an image or of the signal of convolutions: no position attends there.

    The axis that would be that of positions may be that of the channels of a signal.
    """
    is_convolution = any(one.ndim > 2 for one in case.weights.values())
    return case.first.ndim > 3 or (is_convolution and not case.may_hold("attention"))


def _is_batch(case: Case) -> bool:
    """Return whether the rows are sequences: inputs have as many, and have positions themselves, such as ids."""
    least = [2 if np.issubdtype(one.dtype, np.integer) else 3 for one in case.inputs]
    sequences = (one for one, axes in zip(case.inputs, least, strict=True) if one.ndim >= axes)
    return case.first.ndim == 2 and any(one.shape[0] == case.first.shape[0] for one in sequences)


def _turned_round(case: Case) -> str:
    """Recognise positions in reverse order, in all channels or in those of one direction."""
    if case.first.shape[-2] < 3:  # the reverse of two is an exchange, as of two channels
        return ""
    others = tuple(range(case.first.ndim - 1))
    close = FIT * case.scale
    agree = np.asarray((np.abs(case.apart) <= close).all(axis=others))
    turned = np.asarray((np.abs(case.second[..., ::-1, :] - case.first) <= close).all(axis=others))
    if agree.all() or not (agree | turned).all():
        return ""
    channels = np.flatnonzero(~agree)
    some = "" if not agree.any() else f" in {len(channels)} of {len(agree)} channels, from {channels[0]} on"
    return f"the positions are in reverse order on one side{some}: consistent with a direction that is not turned back"


def _shifted(case: Case) -> str:
    for axis in range(case.first.ndim - 1):
        size = case.first.shape[axis]
        for step in range(1, min(4, size - 1) if size > 2 else 0):
            first, second = np.moveaxis(case.first, axis, 0), np.moveaxis(case.second, axis, 0)
            if case.fits(first[:-step], second[step:]) or case.fits(first[step:], second[:-step]):
                return (
                    f"one side is the other moved by {step} along axis {axis}: consistent with another padding or shift"
                )
    return ""


def _edges(case: Case) -> str:
    """Recognise another padding of a convolution: only the border of an image differs, along its height and width.

    Along a single axis it may as well be the first or last channel.
    """
    if case.first.ndim != 4 or case.is_gradient:
        return ""
    off = np.abs(case.apart) > FIT * case.scale
    for axes in ((2, 3), (1, 2)):
        others = tuple(place for place in range(4) if place not in axes)
        plane = np.asarray(off.any(axis=others))
        if min(plane.shape) < 3 or plane[1:-1, 1:-1].any():
            continue
        borders = [np.take(off, place, axis) for axis in axes for place in (0, -1)]
        # What is beyond the border reaches all that is next to it.
        reached = all(border.mean() >= HALF for border in borders if border.any())
        if plane[1:-1, [0, -1]].any() and plane[[0, -1], 1:-1].any() and reached:
            return "only the border of the image differs: consistent with another padding, or with another mean over it"
    return ""


EXACT: tuple[Callable[[Case], str], ...] = (
    _one_plus_weight,
    _added_weight,
    _reordered,
    _transposed,
    _halves,
    _padding_row,
)
"""Relations that name the step that differs, from the most specific to the least; the first that applies counts."""

VAGUE: tuple[Callable[[Case], str], ...] = (
    averaged,
    _gelu_pattern,
    _turned,
    _constant_ratio,
    _added_bias,
    _rotated,
    _partly_scaled,
    _normalised,
    _edges,
    positions,
)
"""Relations that many causes have; an operation whose change was tried is named before them."""
