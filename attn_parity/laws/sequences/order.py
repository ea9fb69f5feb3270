"""The order of a sequence: causality, and keys in another order where the module has no positions."""

from __future__ import annotations

import itertools

import numpy as np

from ...sides.arrays import is_float
from ...sides.subject import Arguments, Array
from ..layout import Axes, orders, scaled_axes
from ..side import REFUSALS, SAME, Gap, LawResult, NotTriedError, OneSide
from .claims import claims_causality, claims_no_positions

TRIPLES = (("query", "key", "value"), ("q", "k", "v"), ("inputs_q", "inputs_k", "inputs_v"))
"""Names of arguments that hold one sequence three times in self-attention."""

CONTEXTS = ("context", "memory", "encoder_hidden_states", "key_value_states", "inputs_kv")
"""Names of arguments that hold the tokens that another sequence attends to."""

MOST_POSITIONS = 4
"""Positions from which on inputs are changed."""


def sequence_leaves(side: OneSide, layout: Axes) -> list[int]:
    """Return the positions of the arrays that hold the main input's sequence: query, key and value, or it alone."""
    names, leaves = side.call.named(side.names), side.call.leaves
    main = leaves[layout.main]
    group = next((group for group in TRIPLES if names[layout.main] in group), ())
    return [
        position
        for position, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        if position == layout.main or (name in group and leaf.shape[:-1] == main.shape[:-1])
    ]


def changed_from(
    side: OneSide, layout: Axes, start: int, call: Arguments | None = None, stop: int | None = None
) -> Arguments:
    """Return the call with other content from a position of its sequence on, or up to another one."""
    call = side.call if call is None else call
    other = side.redrawn(call, 41)
    places = sequence_leaves(side, layout)
    leaves = list(call.leaves)
    at = (slice(None),) * (layout.time or 0) + (slice(start, stop),)
    for position in places:
        new = leaves[position].copy()
        new[at] = other.leaves[position][at]
        if not is_float(new) and np.array_equal(new, leaves[position]):
            new[at] = np.roll(leaves[position], 1, layout.time)[at]
        leaves[position] = new
    return call.with_leaves(leaves)


def shortened(side: OneSide, layout: Axes) -> Arguments:
    """Return the call without the last token of its sequence."""
    leaves, axis = list(side.call.leaves), layout.time or 0
    length = leaves[layout.main].shape[axis]
    for position in sequence_leaves(side, layout):
        leaves[position] = np.take(leaves[position], range(length - 1), axis)
    return side.call.with_leaves(leaves)


def token_axes(side: OneSide, layout: Axes) -> list[tuple[int, ...]]:
    """Return, for each output, its axes that grow with the sequence.

    The size of an axis alone does not show it: there may be as many heads as tokens. A side that refuses a shorter
    sequence is read by its sizes.
    """
    length = side.call.leaves[layout.main].shape[layout.time or 0]
    try:
        fewer = side.outputs(shortened(side, layout)) if length > 1 else []
    except REFUSALS:
        fewer = []
    if len(fewer) == len(side.base) and all(one.ndim == two.ndim for one, two in zip(side.base, fewer, strict=True)):
        return scaled_axes(side.base, fewer)
    return [tuple(axis for axis, size in enumerate(output.shape) if size == length) for output in side.base]


def before(outputs: list[Array], axes: list[tuple[int, ...]], axis: int, stop: int) -> list[Array]:
    """Return the first positions of the outputs that have the sequence on this axis."""
    return [np.take(output, range(stop), axis) for output, own in zip(outputs, axes, strict=True) if axis in own]


def future(side: OneSide, layout: Axes) -> tuple[Gap, int, int]:
    """Return how much outputs depend on later positions, from which one, and how many were tried.

    Raises:
        NotTriedError: the call has no sequence of at least two tokens, or no output has it.
    """
    if layout.time is None:
        raise NotTriedError("the input has no axis of a sequence")
    leaf = side.call.leaves[layout.main]
    length = leaf.shape[layout.time]
    if length < 2:
        raise NotTriedError("the sequence has one token: give more")
    axis, axes = layout.time, token_axes(side, layout)
    axes = [
        own if output.shape[axis : axis + 1] == (length,) else () for output, own in zip(side.base, axes, strict=True)
    ]
    names = [name for name, own in zip(side.structure, axes, strict=True) if axis in own]
    if not names:
        raise NotTriedError("no output has an element per token")
    starts = sorted({1, length // 2, length - 2, length - 1} - {0})[-MOST_POSITIONS:]
    worst, at = SAME, starts[0]
    for start in starts:
        outputs = side.outputs(changed_from(side, layout, start))
        gap = side.gap(before(side.base, axes, axis, start), before(outputs, axes, axis, start), names)
        if gap.size > worst.size:
            worst, at = gap, start
    return worst, at, len(starts)


def is_causal(side: OneSide, layout: Axes) -> bool:
    """Return whether no output of a call depends on later positions."""
    if side.is_causal is None:
        side.is_causal = future(side, layout)[0].size <= side.limit
    return side.is_causal


def causality(side: OneSide, layout: Axes) -> LawResult:
    """Change tokens from a position on, and compare the outputs before it."""
    gap, start, tried = future(side, layout)
    claim = claims_causality(side)
    side.is_causal = gap.size <= side.limit
    if gap.size <= side.limit:
        return LawResult(gap, f"outputs before a token do not depend on it ({tried} positions)")
    if not claim:
        raise NotTriedError(
            'the module does not claim to be causal, and outputs see later positions (only=["causality"] asserts it)'
        )
    return LawResult(
        gap,
        f"an output depends on later positions ({claim})",
        f"with other numbers from position {start} of the sequence on",
    )


def key_permutation(side: OneSide, layout: Axes) -> LawResult:
    """Permute the tokens that queries attend to: a context's, or those of self-attention with its outputs."""
    names = side.call.named(side.names)
    contexts = [position for position, name in enumerate(names) if name in CONTEXTS]
    leaves = list(side.call.leaves)
    if contexts:
        leaf = leaves[contexts[0]]
        axis = layout.time if layout.time is not None and leaf.ndim > layout.time else leaf.ndim - 2
        if any("mask" in name for name in names):
            raise NotTriedError("the call has a mask, which names keys by position")
        results = []
        for order in orders(leaf.shape[axis]):
            for position in contexts:
                if side.call.leaves[position].shape == leaf.shape:
                    leaves[position] = np.take(side.call.leaves[position], order, axis)
            results.append((side.gap(side.base, side.outputs(side.call.with_leaves(leaves))), order))
        gap, order = max(results, key=lambda pair: pair[0].size)
        how = f"{names[contexts[0]]} in another order"
        return _decided(side, gap, how, f"with {names[contexts[0]]} in the order {order.tolist()}")
    if layout.time is None:
        raise NotTriedError("the input has no axis of a sequence")
    if any("mask" in name for name in names) or True in (side.given.get("is_causal"), side.given.get("causal")):
        raise NotTriedError("the call has a mask, which names keys by position")
    axis, length = layout.time, leaves[layout.main].shape[layout.time]
    axes = token_axes(side, layout)
    rank = leaves[layout.main].ndim + (not is_float(leaves[layout.main]))
    kept = [
        # Weights have axes of queries and of keys.
        output.ndim == rank and own == (axis,) and output.shape[axis] == length
        for output, own in zip(side.base, axes, strict=True)
    ]
    if not any(kept):
        raise NotTriedError("no output has an element per token")
    names = list(itertools.compress(side.structure, kept))
    results = []
    for order in orders(length):
        for position in sequence_leaves(side, layout):
            leaves[position] = np.take(side.call.leaves[position], order, axis)
        outputs = itertools.compress(side.outputs(side.call.with_leaves(leaves)), kept)
        expected = [np.take(output, order, axis) for output in itertools.compress(side.base, kept)]
        results.append((side.gap(expected, list(outputs), names), order))
    gap, order = max(results, key=lambda pair: pair[0].size)
    return _decided(side, gap, "tokens in another order", f"with the tokens in the order {order.tolist()}")


def _decided(side: OneSide, gap: Gap, how: str, change: str) -> LawResult:
    claim = claims_no_positions(side)
    if gap.size <= side.limit:
        return LawResult(gap, how)
    if not claim:
        raise NotTriedError(
            "outputs depend on the order of the tokens, and the module does not claim that they do not "
            '(only=["keys"] asserts it)'
        )
    return LawResult(gap, f"the order of the tokens changes the result ({claim})", change)
