"""The attention of a layer: our config, and the tables that map to its tensors and back."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .. import backends
from ..specs import Config
from ..weights import WeightsMismatchError
from .layout import Layout
from .rows.common import Table

Arrays = dict[str, np.ndarray]

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes that the modules compute in."""

_INDEX = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.([0-9]+)\.")

_ATTENTIONS = {"self_attn", "encoder_attn"}
"""Names of both attentions of a decoder's layer, whose tensors have the same names and shapes."""

_SIDES = {"encoder", "decoder"}
"""Names of both stacks of UMT5, whose layers have tensors of the same names and shapes."""


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer of a model, in ours.

    Attributes:
        variant: name of its class, in both packages.
        config: its config, which determines its tensors.
        layer: its index.
        tables: library -> rows that name its tensors, without prefix; the first is that of `transformers`.
        prefix: prefix of the names in `transformers`.
    """

    variant: str
    config: Config
    layer: int
    tables: Mapping[str, Table]
    prefix: str

    def to_ours(self, state: Mapping[str, np.ndarray]) -> Arrays:
        """Return the layer's arrays under our torch names.

        Args:
            state: the layer's attention arrays, of NumPy, torch or JAX, with any prefix or none, under the names of one
                of the tables; or those of the whole model, from which the layer's are taken.

        Raises:
            TypeError: a value is not a NumPy array, or has a dtype that no attention computes in.
            ValueError: the names are those of another layer.
            WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict of arrays, got {type(state).__name__}")
        state = {name: backends.as_numpy(array) for name, array in self._of_this_layer(state).items()}
        for name, array in state.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name} must be an array of NumPy, torch or JAX, got {type(array).__name__}")
        library, prefix, bare = self._recognise(state)
        self._check_index(prefix)
        encoded = self._layout(library).encode(self._shapes(), part=True)
        dropped = {row.theirs for row in self.tables[library] if row.reason}
        arrays = {bare[name]: array for name, array in state.items() if name in bare and bare[name] not in dropped}
        for name, array in arrays.items():
            if array.dtype.name not in DTYPES:
                raise TypeError(f"{name} must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {array.dtype.name}")
        unexpected = [
            name for name in state if name not in bare or not {bare[name]} & (encoded.shapes.keys() | dropped)
        ]
        missing = [prefix + name for name in encoded.shapes.keys() - arrays.keys()]
        misshapen = _misshapen(prefix, encoded.shapes, arrays)
        if missing or unexpected or misshapen:
            raise WeightsMismatchError(missing, unexpected, misshapen)
        return encoded.read(arrays)

    def to_theirs(
        self, arrays: Mapping[str, np.ndarray], *, library: str | None = None, prefix: str | None = None
    ) -> Arrays:
        """Return arrays under our torch names in the form of another library.

        Args:
            arrays: all of the layer's.
            library: a key of `tables`; None is `transformers`.
            prefix: prefix of the new names; None takes that of `transformers`, ``""`` none.

        Raises:
            ValueError: a library without a table.
            WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        """
        library = next(iter(self.tables)) if library is None else library
        if library not in self.tables:
            raise ValueError(f"library ({library}) must be one of {', '.join(self.tables)}")
        shapes = self._shapes()
        misshapen = _misshapen("", shapes, arrays)
        if arrays.keys() != shapes.keys() or misshapen:
            raise WeightsMismatchError(shapes.keys() - arrays.keys(), arrays.keys() - shapes.keys(), misshapen)
        front = self.prefix if prefix is None else prefix
        theirs = self._layout(library).encode(shapes, part=True).write(arrays)
        return {front + name: array for name, array in theirs.items()}

    def names(self, library: str | None = None) -> dict[str, tuple[int, ...]]:
        """Return the other library's name -> shape of every tensor of the layer, without prefix."""
        return self._layout(next(iter(self.tables)) if library is None else library).encode(self._shapes()).shapes

    def _of_this_layer(self, state: Mapping[str, object]) -> Mapping[str, Any]:
        """Return this layer's arrays out of a whole model's; any other state unchanged."""
        fronts = {name[: at + len(self.prefix)] for name in state if (at := _find(name, self.prefix)) is not None}
        if len(fronts) != 1:
            return state
        (front,) = fronts
        root, block = f"{front.partition('.')[0]}.", front.rstrip(".").rpartition(".")[0]
        if not any(name.startswith(root) and not name.startswith(block) for name in state):
            return state
        return {name: array for name, array in state.items() if name.startswith(front)}

    def _layout(self, library: str) -> Layout:
        return Layout(library, library, self.tables[library], ours=False)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {parameter.rule.torch: parameter.shape for parameter in self.config.parameters}

    def _recognise(self, names: Iterable[str]) -> tuple[str, str, dict[str, str]]:
        """Return the library of the names, the prefix of most of them, and name -> name without it."""
        names = list(names)
        best: tuple[str, str, dict[str, str]] = (next(iter(self.tables)), "", {})
        for library, table in self.tables.items():
            table_names = {row.theirs for row in table}
            below: dict[str, dict[str, str]] = collections.defaultdict(dict)
            for name in names:
                hit = _longest_known_ending(name, table_names)
                if hit is not None:
                    below[name.removesuffix(hit)][name] = hit
            for prefix, bare_names in below.items():
                if len(bare_names) > len(best[2]):
                    best = library, prefix, bare_names
        return best

    def _check_index(self, prefix: str) -> None:
        stem, own = (text.rstrip(".").rpartition(".")[2] for text in (prefix, self.prefix))
        if stem != own and {stem, own} == _ATTENTIONS:
            raise ValueError(f"state holds {stem} ({prefix.rstrip('.')}), not {own}")
        sides = [_SIDES & set(text.split(".")) for text in (prefix, self.prefix)]
        if all(sides) and sides[0] != sides[1]:
            raise ValueError(f"state holds the {min(sides[0])} ({prefix.rstrip('.')}), not the {min(sides[1])}")
        numbers = _INDEX.findall(prefix)
        if numbers and int(numbers[-1]) != self.layer:
            raise ValueError(f"state holds layer {numbers[-1]} ({prefix.rstrip('.')}), not layer {self.layer}")


def _misshapen(prefix: str, shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return the arrays whose shape is not the expected one, as lines of an error."""
    return [
        f"{prefix}{name}: expected {shape}, got {arrays[name].shape}"
        for name, shape in shapes.items()
        if name in arrays and arrays[name].shape != shape
    ]


def _find(name: str, prefix: str) -> int | None:
    """Return the position of a prefix in a name, at its beginning or after a dot; None if absent."""
    at = 0 if name.startswith(prefix) else name.find(f".{prefix}") + 1
    return at if name.startswith(prefix, at) else None


def _longest_known_ending(name: str, table_names: set[str]) -> str | None:
    parts = name.split(".")
    return next((ending for i in range(len(parts)) if (ending := ".".join(parts[i:])) in table_names), None)
