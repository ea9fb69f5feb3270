"""A layout whose table depends on the model: on its number of layers, its shapes, or its form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ...weights.placements import LayoutError, Shape
from ...weights.rows import Row
from .mapped import DecodedTensors, Encoded
from .table import FLAGS, Layout, Settings

Form = Settings
"""Setting -> value, for the settings that select a layout's table."""


class Reading(Protocol):
    """Determines the form of a model, outside or ours, from names, shapes and settings."""

    def __call__(self, shapes: Mapping[str, Shape], settings: Settings) -> Form:
        """Return the form."""


class ChosenLayout(Layout):
    """A layout with a table for every form of a model; other arguments are those of `Layout`.

    Args:
        name: name on the command line.
        title: its description.
        table: form -> the rows of such models.
        forms: forms whose names, taken together, are all that such models may have; the rows of the first are `rows`.
        of_theirs: returns the form of a model of the library.
        of_ours: returns the form for a model of ours.
        kept: which parts of the form are settings that lead back to the same outside tensors.
    """

    def __init__(
        self,
        name: str,
        title: str,
        table: Callable[[Form], Iterable[Row]],
        *,
        forms: Sequence[Form],
        of_theirs: Reading,
        of_ours: Reading,
        kept: tuple[str, ...] = (),
        **rest: Any,
    ):
        super().__init__(name, title, table(forms[0]), **rest)
        self._table, self._of_theirs, self._of_ours, self._kept, self._rest = table, of_theirs, of_ours, kept, rest
        rows = {row.theirs: row for row in self.rows}
        for form in forms[1:]:
            rows = {**{row.theirs: row for row in table(form)}, **rows}
        self._index_theirs(rows.values())

    def decode(
        self, shapes: Mapping[str, Shape], settings: Settings | None = None, *, part: bool = False
    ) -> DecodedTensors:
        """Return the placement of each of our tensors in outside ones; see `Layout.decode`."""
        _, matches = self.match(shapes)
        refused = self.why_refused(name for name in shapes if name not in matches)
        if refused:
            raise LayoutError(refused)
        all_settings = {**self.defaults, **(settings or {})}
        form = self._of_theirs(shapes, all_settings)
        decoded = self._of(form).decode(shapes, {**all_settings, **form}, part=part)
        kept = {key: form[key] for key in self._kept if form[key] or key in FLAGS}
        return dataclasses.replace(decoded, restore={**decoded.restore, **kept})

    def encode(self, shapes: Mapping[str, Shape], settings: Settings | None = None, *, part: bool = False) -> Encoded:
        """Return the placement of each of our tensors in the outside tensors to write; see `Layout.encode`."""
        all_settings = {**self.defaults, **(settings or {})}
        form = self._of_ours(shapes, all_settings)
        return self._of(form).encode(shapes, {**all_settings, **form}, part=part)

    def _of(self, form: Form) -> Layout:
        return Layout(self.name, self.title, self._table(form), **self._rest)
