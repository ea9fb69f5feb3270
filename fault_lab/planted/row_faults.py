"""Faults of rotary positions in rows: pairs of channels that turn by another row, or at another rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from attn_bridge.specs import GroupedQueryAttentionConfig, Rotary
from attn_bridge.specs.position import AxesLayout


@dataclasses.dataclass(frozen=True)
class OtherOrder(Rotary):
    """Rows of positions taken for (height, width, time), as an image counts them."""

    def rows(self, dim: int) -> list[int]:
        """Return the next row for each pair, for the last row the first."""
        assert self.axes is not None, "planted where there are rows"
        return [(row + 1) % len(self.axes) for row in super().rows(dim)]


@dataclasses.dataclass(frozen=True)
class CountedInChannels(Rotary):
    """Pairs of channels per row taken for twice as many, so that the last rows get fewer or none."""

    def rows(self, dim: int) -> list[int]:
        """Return the row of each pair."""
        assert self.axes is not None, "planted where there are rows"
        return [row for row, pairs in enumerate(self.axes) for _ in range(2 * pairs)][: dim // 2]


def _of_rows(changes: Callable[[Rotary], Rotary]) -> Callable[[GroupedQueryAttentionConfig], Mapping[str, Rotary]]:
    """Return the change of a config whose position has rows; none where it has no rows or can't have the change."""

    def changed(config: GroupedQueryAttentionConfig) -> Mapping[str, Rotary]:
        rope = config.position
        if not isinstance(rope, Rotary) or rope.axes is None:
            return {}
        try:
            position = changes(rope)
        except ValueError:
            return {}
        return {} if position == rope else {"position": position}

    return changed


def _as(kind: type[Rotary], rope: Rotary) -> Rotary:
    return kind(**{field.name: getattr(rope, field.name) for field in dataclasses.fields(rope)})


def _reversed(rope: Rotary) -> Rotary:
    assert rope.axes is not None, "asked for where there are rows"
    return dataclasses.replace(rope, axes=rope.axes[::-1])


def _other_layout(layouts: Mapping[str, AxesLayout]) -> Callable[[Rotary], Rotary]:
    return lambda rope: dataclasses.replace(rope, layout=layouts.get(rope.layout, rope.layout))


sections_reversed = _of_rows(_reversed)
rows_in_other_order = _of_rows(lambda rope: _as(OtherOrder, rope))
turns_for_sections = _of_rows(_other_layout({"sections": "interleaved", "interleaved": "sections"}))
sections_in_channels = _of_rows(lambda rope: rope if rope.layout == "interleaved" else _as(CountedInChannels, rope))
frequencies_restarted = _of_rows(_other_layout({"sections": "axial", "axial": "sections", "strided": "axial"}))
