"""Rows of a batch: the content of other rows changes nothing, joining a batch only rounds, and order is free."""

from __future__ import annotations

import itertools

import numpy as np

from ..sides.subject import Arguments, Array
from .layout import ROWS, Axes, normalises_batches, row_axes, rows, scaled_axes, taken, with_rows
from .side import REFUSALS, Gap, LawResult, NotTriedError, OneSide, failed


class Batch:
    """A call of at least two rows of one side, and the rows of its outputs.

    Attributes:
        call: the call.
        axes: axis of the batch per array of the call.
        size: number of rows.
        outputs: the outputs of the call.
        out: axes of the batch per output.
        takes_one: whether the side takes a row alone.
        names: names of the outputs that have rows.
        own_axes: their axes of the batch.
    """

    def __init__(self, side: OneSide, layout: Axes):
        self.side, self.layout = side, layout
        axes = row_axes(side, side.call, layout)
        size = side.call.leaves[layout.main].shape[layout.batch or 0]
        self.axes, self.call = axes, side.call
        self.takes_one = True
        try:
            if size < 2:
                single = side.call
                self.call = joined([single, *(side.redrawn(single, 20 + row) for row in range(1, ROWS))], axes)
                size = ROWS
            self.size = size
            self.outputs = side.outputs(self.call)
            fewer = self._fewer()
        except REFUSALS as error:
            raise failed(error) from error
        if len(fewer) != len(self.outputs):
            raise NotTriedError("the number of outputs depends on the size of the batch")
        self.out = scaled_axes(self.outputs, fewer)
        self.names = [name for name, own in zip(side.structure, self.out, strict=True) if own]
        self.own_axes = [own for own in self.out if own]
        if not self.names:
            raise NotTriedError("no output has a row for each row of the batch")

    def _fewer(self) -> list[Array]:
        """Return the outputs of fewer rows: of one, or of all but one where the side refuses one."""
        try:
            return self.side.outputs(rows(self.call, self.axes, [0]))
        except REFUSALS:
            if self.size < 3:
                raise
        self.takes_one = False
        return self.side.outputs(rows(self.call, self.axes, range(self.size - 1)))

    def row(self, outputs: list[Array], index: int) -> list[Array]:
        """Return one row of the outputs that have rows."""
        return taken(outputs, self.out, [index])

    def gap(self, first: list[Array], second: list[Array], row: int) -> Gap:
        """Return the largest difference between two runs of a row, at its index in the whole batch."""
        return self.side.gap(first, second, self.names).placed(self.names, self.own_axes, [row])


def joined(parts: list[Arguments], axes: list[int | None]) -> Arguments:
    """Return calls joined along the axes of the batch."""
    leaves = zip(*(part.leaves for part in parts), strict=True)
    return parts[0].with_leaves(
        [some[0] if axis is None else np.concatenate(some, axis) for some, axis in zip(leaves, axes, strict=True)]
    )


def batch_invariance(side: OneSide, layout: Axes) -> LawResult:
    """Compare a row with itself among other rows of other content, and alone."""
    batch = Batch(side, layout)
    gaps = _content(side, batch)
    gap, change = max(gaps, key=lambda pair: pair[0].size)
    if not (gap.size > side.limit):
        return LawResult(gap, f"other rows' content, and none of them (batch of {batch.size})")
    _check_axis(side, layout, gap)
    return LawResult(gap, "a row depends on other rows of its batch", change)


def _content(side: OneSide, batch: Batch) -> list[tuple[Gap, str]]:
    other = side.redrawn(batch.call, 31)
    results = []
    for row in sorted({0, batch.size - 1}):
        rest = [one for one in range(batch.size) if one != row]
        changed = side.outputs(with_rows(batch.call, other, batch.axes, rest))
        own = batch.row(batch.outputs, row)
        change = f"with other numbers in row{'s' * (len(rest) > 1)} {_list(rest)}"
        results.append((batch.gap(own, batch.row(changed, row), row), change))
        if not batch.takes_one:
            continue
        alone = taken(side.outputs(rows(batch.call, batch.axes, [row])), batch.out, [0])
        results.append((batch.gap(own, alone, row), f"for row {row} alone"))
    return results


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (" ..." if len(numbers) > 4 else "")


def _check_axis(side: OneSide, layout: Axes, gap: Gap) -> None:
    """Raise unless it is certain that the axis is the batch's: an input may have its sequence first.

    Raises:
        NotTriedError: the rows may be positions of a sequence.
    """
    if layout.is_certain or "batch" in side.asserted:
        return
    leaf = side.call.leaves[layout.main]
    if leaf.ndim == 2 and layout.time is None:
        raise NotTriedError(
            f"rows depend on each other ({gap.size:.1g}): they may be tokens of one sequence (batch_axis=0 asserts "
            "that they are a batch)"
        )
    if layout.time is None:
        return
    other = Axes(layout.main, layout.time, layout.batch, True)
    try:
        is_other = max(pair[0].size for pair in _content(side, Batch(side, other))) <= side.limit
    except NotTriedError:
        is_other = not normalises_batches(side) and _keeps_rows(side, other)
    if is_other:
        raise NotTriedError(
            f"axis {layout.batch} mixes and axis {layout.time} does not: the input may have its sequence first "
            f"(batch_axis={layout.batch} asserts that axis {layout.batch} is the batch)"
        )


def _keeps_rows(side: OneSide, layout: Axes) -> bool:
    """Return whether other content in all but one row changes nothing, of a side that takes this size of batch only."""
    axes = row_axes(side, side.call, layout)
    size = side.call.leaves[layout.main].shape[layout.batch or 0]
    changed = side.outputs(with_rows(side.call, side.redrawn(side.call, 31), axes, range(1, size)))
    axis = layout.batch or 0
    kept = [output.shape[axis : axis + 1] == (size,) for output in side.base]
    first, second = (
        [np.take(output, [0], axis) for output in itertools.compress(outputs, kept)] for outputs in (side.base, changed)
    )
    return any(kept) and side.gap(first, second, list(itertools.compress(side.structure, kept))).size <= side.limit


def row_permutation(side: OneSide, layout: Axes) -> LawResult:
    """Compare the outputs of rows in another order with the outputs in that order."""
    batch = Batch(side, layout)
    order = np.roll(np.arange(batch.size), 1).tolist()
    outputs = side.outputs(rows(batch.call, batch.axes, order))
    expected, got = taken(batch.outputs, batch.out, order), taken(outputs, batch.out, range(batch.size))
    gap = side.gap(expected, got, batch.names)
    if gap.size > side.limit:
        _check_axis(side, layout, gap)
    return LawResult(gap, f"rows in another order (batch of {batch.size})", f"with the rows in the order {order}")
