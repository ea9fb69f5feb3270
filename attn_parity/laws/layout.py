"""Axes of a call: which axis of its arrays counts rows of a batch, and which counts positions of a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..samples import calls
from ..sides.arrays import is_float
from ..sides.function import Function
from ..sides.subject import Arguments, Array
from .side import NotTriedError, OneSide

TARGETS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", "target", "targets", "tgt_tokens")
"""Arguments that hold the sequence a decoder continues, where another argument holds the source."""

SOURCES = ("source", "src", "source_tokens", "encoder_inputs", "encoder_input_tokens", "inputs")
"""Arguments that hold the source of a decoder whose target is called `tokens`."""

SHARED = ("positions", "position_ids", "cache_position", "freqs_cis", "cos", "sin", "position_embeddings")
"""Arguments that all rows may share."""

PAIRWISE = ("attn_mask", "src_mask", "tgt_mask", "memory_mask", "mask", "bias", "attention_bias")
"""Arguments whose two axes are queries and keys where they have no more."""

SEQUENTIAL = (
    *("attention", "attn", "attend", "transformer", "recurrent", "rnn", "lstm", "gru", "mamba", "delta", "retention"),
    *("decoder", "encoder", "causal", "sequence", "query", "conv1d"),
)
"""Words of modules that take one sequence where their input has two axes."""

# A first row, a last and one between (`batches`); padded rows, and one that is not (`padding`).
ROWS = 3
"""Rows of the batch on which laws are tried."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a side's call.

    Attributes:
        main: position of the main input among the arrays of the call.
        batch: axis of the batch in the main input; None without one.
        time: axis of the sequence in the main input; None without one.
        is_certain: whether the axis of the batch follows from more than its position.
    """

    main: int
    batch: int | None
    time: int | None
    is_certain: bool


def layout_of(side: OneSide, batch_axis: int | None = None) -> Axes:
    """Read the axes of a call.

    Args:
        side: the side, with its call.
        batch_axis: the axis of the batch, from the caller; None reads it off.
    """
    call = side.call
    names = [name.partition("[")[0] for name in call.named(side.names)]
    content = [
        position
        for position, (name, mask) in enumerate(zip(names, calls.masks(call), strict=True))
        if not mask and not _is_mask_name(name)
    ]
    if not content:
        return Axes(0, None, None, False)
    targets = (*TARGETS, "tokens") if names[content[0]] in SOURCES else TARGETS
    main = next((position for position in content if names[position] in targets), content[0])
    leaf = call.leaves[main]
    # Whole numbers are ids, to which an embedding adds an axis.
    rank = leaf.ndim if is_float(leaf) else leaf.ndim + 1
    if batch_axis is not None:
        if not 0 <= batch_axis < leaf.ndim:
            raise ValueError(f"batch_axis ({batch_axis}) must be an axis of the first input, which has {leaf.ndim}")
        return Axes(main, batch_axis, _time(leaf, rank, batch_axis), True)
    if _is_keras(side) and rank >= 2 and leaf.ndim > 1:
        return Axes(main, 0, _time(leaf, rank, 0), True)
    if rank >= 3:
        # torch's attention and recurrent layers take the sequence first unless they have `batch_first`.
        firsts = [getattr(child, "batch_first", None) for child in side.parts.values()]
        batch = 1 if rank == 3 and leaf.ndim > 1 and False in firsts and True not in firsts else 0
        return Axes(main, batch, _time(leaf, rank, batch), False)
    is_sequence = any(word in side.words for word in SEQUENTIAL)
    if rank == 2 and is_sequence:
        return Axes(main, None, 0, False)
    return Axes(main, 0 if rank == 2 and leaf.ndim == 2 else None, None, normalises_batches(side))


def _is_keras(side: OneSide) -> bool:
    """Return whether a side is a model or layer of Keras: axis 0 of their inputs is always that of the batch."""
    layers = side.value.layers.values() if isinstance(side.value, Function) else ()
    return any(base.__module__.partition(".")[0] == "keras" for layer in layers for base in type(layer).__mro__)


def normalises_batches(side: OneSide) -> bool:
    """Return whether a side has a norm over the batch, whose rows are therefore a batch."""
    has_statistics = any(parameter.role == "statistic" for parameter in side.subject.parameters().values())
    return has_statistics or "batchnorm" in side.words.replace("_", "")


def _time(leaf: Array, rank: int, batch: int) -> int | None:
    return (1 - batch if batch < 2 else 0) if rank == 3 else None


def _is_mask_name(name: str) -> bool:
    return "mask" in name or name in SHARED or name in PAIRWISE


def row_axes(side: OneSide, call: Arguments, layout: Axes) -> list[int | None]:
    """Return, for each array of a call, its axis of the batch; None for one that all rows share.

    Raises:
        NotTriedError: the call has no axis of a batch.
    """
    if layout.batch is None:
        raise NotTriedError("the input is one sequence: give a batch of them")
    size = call.leaves[layout.main].shape[layout.batch]
    names = [name.partition("[")[0] for name in call.named(side.names)]
    results: list[int | None] = []
    for position, (name, leaf) in enumerate(zip(names, call.leaves, strict=True)):
        axis = layout.batch if position == layout.main or not _is_mask_name(name) else 0
        # A mask of two axes is (queries, keys), and positions of one axis are those of all rows.
        least = 3 if name in PAIRWISE else 2 if name in SHARED else 1
        is_row = leaf.ndim >= max(least, axis + 1) and leaf.shape[axis] == size
        results.append(axis if is_row and (is_float(leaf) or leaf.ndim > axis) else None)
    return results


def rows(call: Arguments, axes: Sequence[int | None], index: Sequence[int]) -> Arguments:
    """Return the call with some rows of the batch, in an order."""
    pairs = zip(call.leaves, axes, strict=True)
    return call.with_leaves([leaf if axis is None else np.take(leaf, list(index), axis) for leaf, axis in pairs])


def with_rows(first: Arguments, second: Arguments, axes: Sequence[int | None], index: Sequence[int]) -> Arguments:
    """Return the first call with some rows of the batch taken from the second."""
    results = []
    for leaf, other_leaf, axis in zip(first.leaves, second.leaves, axes, strict=True):
        if axis is None:
            results.append(leaf)
            continue
        new = leaf.copy()
        at = (slice(None),) * axis + (list(index),)
        new[at] = other_leaf[at]
        results.append(new)
    return first.with_leaves(results)


def orders(count: int) -> list[Array]:
    """Return orders of some elements that together commute with no other: a rotation, and one with two exchanged.

    A rotation alone would miss a side that rotates its keys or heads.
    """
    rotated = np.roll(np.arange(count), 1)
    exchanged = rotated.copy()
    exchanged[-2:] = rotated[-2:][::-1]
    return [rotated] if count < 3 else [rotated, exchanged]


def scaled_axes(first: Sequence[Array], second: Sequence[Array]) -> list[tuple[int, ...]]:
    """Return, for each output, the axes whose sizes differ between two runs."""
    return [
        tuple(axis for axis, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if sizes[0] != sizes[1])
        if one.ndim == two.ndim
        else ()
        for one, two in zip(first, second, strict=True)
    ]


def taken(outputs: Sequence[Array], axes: Sequence[tuple[int, ...]], index: Sequence[int]) -> list[Array]:
    """Return outputs with some positions of their axes; an output without such axes is left out."""
    results = []
    for output, own in zip(outputs, axes, strict=True):
        for axis in own:
            output = np.take(output, list(index), axis)
        if own:
            results.append(output)
    return results
