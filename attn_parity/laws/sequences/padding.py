"""Padding: hidden tokens change no real token, on the right and on the left.

Modules write masks in several ways. Each one that the module takes is tried; the law holds if one of them hides the
padding, and is broken if the module takes some and none does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ...sides.arrays import is_float
from ...sides.subject import Arguments, Array
from ..batches import Batch
from ..layout import Axes, scaled_axes
from ..side import REFUSALS, SAME, Gap, LawResult, NotTriedError, OneSide
from .order import CONTEXTS, sequence_leaves

REAL = ("attention_mask", "padding_mask", "input_mask")
"""Arguments that are true, or 1, for real tokens."""

HIDDEN = ("key_padding_mask", "src_key_padding_mask", "encoder_padding_mask")
"""Arguments that are true for padding, as torch's."""

EITHER = ("mask", "attn_mask", "src_mask", "attention_bias", "bias")
"""Arguments that modules read in several ways."""

LENGTHS = ("lengths", "seq_lengths", "seq_lens", "sequence_lengths", "input_lengths", "valid_length", "x_lengths")
"""Arguments that count the real tokens of each row."""

POSITIONS = ("positions", "position_ids")

SLOTS = "padding on the left counts"
"""Marks a side whose outputs depend on the amount of padding on the left, and not on its content."""

T = TypeVar("T")

HUGE = -1e9
"""Added to the scores of padding: its weight is 0 in every precision."""


@dataclasses.dataclass(frozen=True)
class _Way:
    """One way to show a module its padding.

    Attributes:
        name: the argument.
        label: how it is given, for the report.
        make: returns the argument for a bool array ``(B, T)``, true for real tokens.
        right_only: whether it can't describe padding on the left.
    """

    name: str
    label: str
    make: Callable[[Array], Array]
    right_only: bool = False


def padding_invariance(side: OneSide, layout: Axes) -> LawResult:
    """Pad a batch on the right, then on the left, and compare its real tokens with those of other padding and none."""
    ways = list(_ways(side))
    if not ways:
        raise NotTriedError("the module takes no mask of padding and no lengths")
    if layout.time is None or layout.batch is None:
        raise NotTriedError("the input is not a batch of sequences")
    if any(name in side.given for name in (*EITHER, *CONTEXTS, "causal_mask")) or len(side.call.leaves) > 4:
        raise NotTriedError("the call has a mask or a context of its own: give the tokens alone")
    padded = _Padded(side, layout)
    results: list[tuple[Gap, str, _Way]] = []
    refused = ""
    for way in ways:
        try:
            gap, change = padded.gap(way)
            if gap.size > side.limit and padded.is_pooled and change == padded.changed("right"):
                gap, change = min((gap, change), padded.gap(way, is_left=True), key=lambda result: result[0].size)
        except (*REFUSALS, NotTriedError) as error:
            refused = refused or str(error)
            continue
        results.append((gap, change, way))
        if gap.size <= side.limit:
            break
    if not results:
        raise NotTriedError(f"no mask that was tried is taken: {' '.join(refused.split())[:160]}")
    gap, change, way = min(results, key=lambda result: result[0].size)
    if gap.size > side.limit:
        tried = ", ".join(dict.fromkeys(one.label for _, _, one in results))
        return LawResult(gap, f"padding changes the outputs of real tokens (tried {tried})", change)
    if change in (SLOTS, padded.changed("left"), padded.without("left")):
        return LawResult(gap, f"padding on the left, by {way.label}")
    right = f"padding on the right, by {way.label}"
    if way.right_only or padded.is_pooled:
        return LawResult(gap, right)
    try:
        left, change = padded.gap(way, is_left=True)
    except (*REFUSALS, NotTriedError):
        return LawResult(gap, right)
    if left.size > side.limit:
        return LawResult(left, f"padding on the left changes the outputs of real tokens (by {way.label})", change)
    counts = "; on the left its slots count as positions" if change == SLOTS else " and left"
    worst = max(gap, left, key=lambda gap_of_side: gap_of_side.size)
    return LawResult(worst, f"padding on the right{counts}, by {way.label}")


def _ways(side: OneSide) -> Iterator[_Way]:
    whole = "input_ids" in side.arguments

    def square(real: Array) -> Array:
        return real[:, None, None] & np.ones((1, 1, real.shape[1], 1), bool)

    for name in side.arguments:
        real, hidden = name in REAL or name in EITHER, name in HIDDEN or name in EITHER
        if real:
            whole_numbers = _Way(name, f"{name} (B, T), 1 = real", lambda mask: mask.astype(np.int64))
            bools = _Way(name, f"{name} (B, T), True = real", lambda mask: mask)
            yield from (whole_numbers, bools) if whole else (bools, whole_numbers)
            yield _Way(name, f"{name} (B, 1, T, T), True = real", square)
        if hidden:
            yield _Way(name, f"{name} (B, T), True = padding", lambda mask: ~mask)
        if name in EITHER:
            yield _Way(name, f"{name} (B, 1, T, T), True = padding", lambda mask: ~square(mask))
        if real:
            yield _Way(name, f"{name} (B, T, T), True = real", lambda mask: square(mask)[:, 0])
            yield _Way(name, f"{name} (B, 1, T, T), added", lambda mask: np.where(square(mask), 0.0, HUGE))
        if name in LENGTHS:
            yield _Way(name, name, lambda mask: mask.sum(-1).astype(np.int64), right_only=True)


class _Padded:
    """A batch of which all rows but the first are padded.

    Attributes:
        is_pooled: whether no output has tokens. Code that pools the first token takes padding on the right alone, and
            the last token on the left.
    """

    def __init__(self, side: OneSide, layout: Axes):
        batch = Batch(side, layout)
        self.side, self.layout, self.batch = side, layout, batch
        self.is_pooled = False
        assert layout.time is not None, "checked by the caller"
        self.time = layout.time
        self.length = batch.call.leaves[layout.main].shape[self.time]
        if self.length < 4:
            raise NotTriedError("the sequence has fewer than four tokens")
        self.real = self.length - max(1, self.length // 3)
        self.places = sequence_leaves(side, layout)
        self.times = self._times()

    def _times(self) -> dict[int, int]:
        """Return position -> axis of the sequence, of each array of the call that holds one.

        Raises:
            NotTriedError: an array of the call has no element per token.
        """
        axes = {}
        names = self.batch.call.named(self.side.names)
        for position, (name, leaf) in enumerate(zip(names, self.batch.call.leaves, strict=True)):
            if name in LENGTHS:
                continue
            is_content = position in self.places
            if not is_content and leaf.shape != (self.batch.size, self.length):  # of masks, positions and types
                raise NotTriedError("the call has arrays other than its tokens")
            axes[position] = self.time if is_content else 1
        return axes

    def gap(self, way: _Way, *, is_left: bool = False) -> tuple[Gap, str]:
        """Return how far real tokens move with the padding's content, and from those without padding."""
        side, size = self.side, self.batch.size
        kept = range(self.length - self.real, self.length) if is_left else range(self.real)
        mask = np.ones((size, self.length), bool)
        mask[1:] = np.isin(np.arange(self.length), list(kept))
        keywords: dict[str, object] = {way.name: way.make(mask)}
        first = self._call(keywords)
        other = side.redrawn(first, 71)
        leaves = list(first.leaves)
        for position in self.places:
            leaves[position] = self._replaced(leaves[position], other.leaves[position], kept)
        outputs, changed_outputs = side.outputs(first), side.outputs(first.with_leaves(leaves))
        short = side.outputs(self._cut(kept, way))
        grown = scaled_axes(outputs, short)
        # Attention with further keys behind its tokens (a bias, a zero) has weights of another size: not judged.
        odd = [
            any(output.shape[axis] != self.length for axis in own) for output, own in zip(outputs, grown, strict=True)
        ]
        axes = self._judged(outputs, [() if is_odd else own for own, is_odd in zip(grown, odd, strict=True)], odd, way)
        where = "left" if is_left else "right"
        names = _of_judged(side.structure, axes)
        real = self._rows(self._kept(outputs, axes, kept), axes)
        moved = self._rows(self._kept(changed_outputs, axes, kept), axes)
        content = self._placed(side.gap(real, moved, names), names, axes, kept)
        if content.size > side.limit:
            return content, self.changed(where)
        is_known = [own is not None or is_odd for own, is_odd in zip(axes, odd, strict=True)]
        pooled = self._pooled(outputs, changed_outputs, is_known)
        if pooled.size > side.limit:
            return pooled, self.changed(where)
        alone = side.gap(self._rows(_of_judged(short, axes), axes), real, names)
        alone = self._placed(alone, names, axes, kept)
        if is_left and alone.size > side.limit:
            alone = self._with_positions(keywords, mask, kept, short, axes, names)
            if alone.size > side.limit:  # masks and positions may count the slots of padding
                return content, SLOTS
        return max(content, alone, key=lambda gap: gap.size), self.without(where)

    @staticmethod
    def changed(where: str) -> str:
        """Return the change of what padding holds, for the witness."""
        return f"with other numbers in the padding on the {where}"

    @staticmethod
    def without(where: str) -> str:
        """Return the change that adds padding."""
        return f"with padding on the {where}, and without it before"

    def _judged(
        self, outputs: list[Array], axes: list[tuple[int, ...]], odd: list[bool], way: _Way
    ) -> list[tuple[int, ...] | None]:
        """Return the axes of the tokens per output, None for one that is not judged; without any, the pooled ones.

        Raises:
            NotTriedError: no output is judged.
        """
        if any(axes):
            return [own or None for own in axes]
        # Pooling may count what a mask of another name hides; and code that takes ids may look for padding in them.
        is_padding = self._is_float and way.name in (*REAL, *HIDDEN, *LENGTHS)
        # A mask of other axes than the module's may broadcast the outputs.
        if is_padding and [output.shape for output in outputs] == [output.shape for output in self.batch.outputs]:
            judged = [bool(own) and not is_odd for own, is_odd in zip(self.batch.out, odd, strict=True)]
            if any(judged):
                self.is_pooled = True
                return [() if is_judged else None for is_judged in judged]
        raise NotTriedError("no output has an element per token")

    def _with_positions(
        self, keywords: dict[str, Any], mask: Array, kept: range, short: list[Array], axes: Any, names: list[str]
    ) -> Gap:
        """Return how far real tokens are from those without padding if they are given their own positions."""
        name = next((name for name in POSITIONS if name in self.side.arguments), None)
        if name is not None:
            keywords = {**keywords, name: np.maximum(np.cumsum(mask, -1) - 1, 0)}
        real = self._rows(self._kept(self.side.outputs(self._call(keywords)), axes, kept), axes)
        gap = self.side.gap(self._rows(_of_judged(short, axes), axes), real, names)
        return self._placed(gap, names, axes, kept)

    def _call(self, keywords: dict[str, object]) -> Arguments:
        return self.side.called_with(keywords, self.batch.call)

    def _cut(self, kept: range, way: _Way) -> Arguments:
        """Return the call of the real tokens alone; a call with a mask gets that of no padding."""
        leaves = list(self.batch.call.leaves)
        for position, axis in self.times.items():
            leaves[position] = np.take(leaves[position], list(kept), axis)
        call = self.batch.call.with_leaves(leaves)
        if way.name not in self.side.given:
            return call
        return self.side.called_with({way.name: way.make(np.ones((self.batch.size, len(kept)), bool))}, call)

    def _replaced(self, leaf: Array, other: Array, kept: range) -> Array:
        """Return an array with other content in its padding."""
        moved = np.moveaxis(leaf.copy(), (self.layout.batch or 0, self.time), (0, 1))
        rest = np.moveaxis(other, (self.layout.batch or 0, self.time), (0, 1))
        hidden = [position for position in range(self.length) if position not in kept]
        if not is_float(leaf) and np.array_equal(moved[1:, hidden], rest[1:, hidden]):
            rest = np.roll(moved, 1, 1)
        moved[1:, hidden] = rest[1:, hidden]
        return np.moveaxis(moved, (0, 1), (self.layout.batch or 0, self.time))

    def _kept(self, outputs: list[Array], axes: list[tuple[int, ...] | None], kept: range) -> list[Array]:
        """Return the real tokens of the outputs that are judged."""
        results = []
        for output, own in zip(outputs, axes, strict=True):
            for axis in own or ():
                output = np.take(output, list(kept), axis)
            if own is not None:
                results.append(output)
        return results

    def _rows(self, outputs: list[Array], axes: Sequence[object]) -> list[Array]:
        """Return the rows that are padded of the outputs that are judged."""
        results = []
        for output, own in zip(outputs, _of_judged(self._row_axes(axes), axes), strict=True):
            for axis in own:
                output = np.take(output, range(1, self.batch.size), axis)
            results.append(output)
        return results

    def _row_axes(self, axes: Sequence[object]) -> list[tuple[int, ...]]:
        return self.batch.out if len(self.batch.out) == len(axes) else [(0,)] * len(axes)

    def _placed(self, gap: Gap, names: list[str], axes: list[tuple[int, ...] | None], kept: range) -> Gap:
        """Return a gap among the real tokens of padded rows, with its index in the whole output."""
        rows = _of_judged(self._row_axes(axes), axes)
        gap = gap.placed(names, rows, range(1, self.batch.size))
        return gap.placed(names, [own or () for own in _of_judged(axes, axes)], kept)

    @property
    def _is_float(self) -> bool:
        """Whether the tokens are floats: such a side does not read the ids of padding."""
        return is_float(self.side.call.leaves[self.layout.main])

    def _pooled(self, outputs: list[Array], changed_outputs: list[Array], is_known: Sequence[bool]) -> Gap:
        """Return how far outputs without tokens move that are not judged otherwise."""
        if not self._is_float:
            return SAME
        names = [name for name, known in zip(self.side.structure, is_known, strict=True) if not known]
        first, second = (
            [out for out, known in zip(some, is_known, strict=True) if not known] for some in (outputs, changed_outputs)
        )
        return self.side.gap(first, second, names) if names else SAME


def _of_judged(values: Sequence[T], axes: Sequence[object]) -> list[T]:
    """Return what belongs to the outputs that are judged."""
    return [value for value, own in zip(values, axes, strict=True) if own is not None]
