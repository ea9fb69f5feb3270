"""Documents that share a row: the content of one changes no output of another."""

from __future__ import annotations

import itertools

import numpy as np

from ..sides.subject import Array
from .layout import Axes
from .order import changed_from, token_axes
from .side import REFUSALS, Gap, LawResult, NotTriedError, OneSide, failed

DOCUMENTS = (
    *("documents", "document_ids", "doc_ids", "segment_ids", "segments", "seq_idx", "sequence_ids", "seq_ids"),
    *("decoder_segment_ids", "inputs_segmentation", "decoder_input_segmentation"),
)
"""Arguments that number the document of each token."""


def document_isolation(side: OneSide, layout: Axes) -> LawResult:
    """Pack two documents into each row, change one of them, and compare the outputs of the other."""
    names = [name for name in DOCUMENTS if name in side.arguments]
    if not names:
        raise NotTriedError("the module takes no numbers of documents")
    if layout.time is None:
        raise NotTriedError("the input is not a sequence")
    shape = side.call.leaves[layout.main].shape
    length, rows = shape[layout.time], 1 if layout.batch is None else shape[layout.batch]
    if length < 4:
        raise NotTriedError("the sequence has fewer than four tokens")
    cut = length // 2
    numbers = np.broadcast_to(np.where(np.arange(length) < cut, 1, 2), (rows, length)).astype(np.int32)
    refusal = NotTriedError("")
    for name in names:
        try:
            gap, change = _gap(side, layout, name, numbers, cut)
        except REFUSALS as error:
            refusal = failed(error)
            continue
        if gap.size > side.limit:
            return LawResult(gap, f"a token sees other documents than its own (by {name})", change)
        return LawResult(gap, f"two documents per row, by {name}", change)
    raise refusal


def _gap(side: OneSide, layout: Axes, name: str, numbers: Array, cut: int) -> tuple[Gap, str]:
    """Return the largest difference in a document after a change in the other one, and the change."""
    call = side.called_with({name: numbers if layout.batch is not None else numbers[0]})
    # The rows of the outputs are those of the call without documents, which shows the axes of its tokens.
    axes, axis = token_axes(side, layout), layout.time or 0
    base, length = side.outputs(call), numbers.shape[1]
    kept = [own == (axis,) and output.shape[axis] == length for output, own in zip(base, axes, strict=True)]
    if not any(kept):
        raise NotTriedError("no output has an element per token")
    shown = list(itertools.compress(side.structure, kept))
    results = []
    for changed, own in ((slice(cut, length), range(cut)), (slice(0, cut), range(cut, length))):
        moved = side.outputs(changed_from(side, layout, changed.start, call, changed.stop))
        before, after = (
            [np.take(output, own, axis) for output in itertools.compress(outputs, kept)] for outputs in (base, moved)
        )
        where = f"with other numbers in positions {changed.start} to {changed.stop - 1}, another document"
        results.append((side.gap(before, after, shown), where))
    return max(results, key=lambda pair: pair[0].size)
