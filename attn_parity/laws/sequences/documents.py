"""Documents that share a row: the content of one changes no output of another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from ...sides.subject import Array
from ..layout import Axes
from ..side import REFUSALS, Gap, LawResult, NotTriedError, OneSide, failed
from .order import changed_from, token_axes

DOCUMENTS = (
    *("documents", "document_ids", "doc_ids", "segment_ids", "segments", "seq_idx", "sequence_ids", "seq_ids"),
    *("decoder_segment_ids", "inputs_segmentation", "decoder_input_segmentation"),
)
"""Arguments that number the document of each token."""

MOST = 3
"""Most documents of a row."""

COUNTS = {2: "two", 3: "three"}


def document_isolation(side: OneSide, layout: Axes) -> LawResult:
    """Pack documents into each row, change some positions, and compare the outputs of the documents around them."""
    names = [name for name in DOCUMENTS if name in side.arguments]
    if not names:
        raise NotTriedError("the module takes no numbers of documents")
    if layout.time is None:
        raise NotTriedError("the input is not a sequence")
    shape = side.call.leaves[layout.main].shape
    length, rows = shape[layout.time], 1 if layout.batch is None else shape[layout.batch]
    if length < 4:
        raise NotTriedError("the sequence has fewer than four tokens")
    numbers = _numbers(rows, length)
    refusal = NotTriedError("")
    for name in names:
        try:
            gap, change = _gap(side, layout, name, numbers)
        except REFUSALS as error:
            refusal = failed(error)
            continue
        if gap.size > side.limit:
            return LawResult(gap, f"a token sees other documents than its own (by {name})", change)
        return LawResult(gap, f"{COUNTS[int(numbers.max())]} documents per row, by {name}", change)
    raise refusal


def _numbers(rows: int, length: int) -> Array:
    """Return the numbers of documents ``(rows, length)``: from 1, three where each may have two tokens.

    Every other row has its borders one token earlier, so that the documents of another row are not its own.
    """
    count = 3 if length >= MOST * 2 else 2
    borders = [length * part // count for part in range(1, count)]
    at = np.arange(length) + np.arange(rows)[:, None] % 2
    return np.asarray(1 + np.sum([at >= border for border in borders], axis=0), np.int32)


def _changes(numbers: Array) -> Iterator[slice]:
    """Yield the positions of each document of the first two rows."""
    for start, stop in sorted({span for row in numbers[:2] for span in _spans(row)}):
        yield slice(start, stop)


def _spans(row: Array) -> Iterator[tuple[int, int]]:
    """Yield where each document of a row starts and stops."""
    for document in np.unique(row):
        at = np.flatnonzero(row == document)
        yield int(at[0]), int(at[-1]) + 1


def _gap(side: OneSide, layout: Axes, name: str, numbers: Array) -> tuple[Gap, str]:
    """Return the largest difference in a document after a change in other ones, and the change."""
    call = side.called_with({name: numbers if layout.batch is not None else numbers[0]})
    # The rows of the outputs are those of the call without documents, which shows the axes of its tokens.
    axes, axis = token_axes(side, layout), layout.time or 0
    base, (rows, length) = side.outputs(call), numbers.shape
    kept = [
        own == (axis,) and output.shape[axis] == length and (layout.batch is None or output.shape[layout.batch] == rows)
        for output, own in zip(base, axes, strict=True)
    ]
    if not any(kept):
        raise NotTriedError("no output has an element per token")
    names = list(itertools.compress(side.structure, kept))
    before = list(itertools.compress(base, kept))
    results = []
    for changed in _changes(numbers):
        moved = itertools.compress(side.outputs(changed_from(side, layout, changed.start, call, changed.stop)), kept)
        # A document that the change touches may move.
        touched = np.stack([np.isin(row, row[changed]) for row in numbers])
        after = [
            np.where(_along(touched, output.ndim, layout), output, new)
            for output, new in zip(before, moved, strict=True)
        ]
        where = f"with other numbers in positions {changed.start} to {changed.stop - 1}, another document"
        results.append((side.gap(before, after, names), where))
    return max(results, key=lambda pair: pair[0].size)


def _along(mask: Array, rank: int, layout: Axes) -> Array:
    """Return a mask ``(rows, tokens)`` in the axes of an output of some rank."""
    if layout.batch is None:
        mask = mask[0]
        return mask.reshape([-1 if axis == layout.time else 1 for axis in range(rank)])
    order = mask if layout.batch < (layout.time or 0) else mask.T
    sizes = iter(order.shape)
    return order.reshape([next(sizes) if axis in (layout.batch, layout.time) else 1 for axis in range(rank)])
