"""A layout: a table of rows, settings that names alone don't determine, and the mapping in both directions."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...printable import printable
from ...weights import WeightsMismatchError
from ...weights.index import Index, kinds_of
from ...weights.placements import LayoutError, Placement, Shape, joined
from ...weights.rows import Row
from ...weights.templates import expanded, fill, placeholders
from .. import fitting
from ..parts import OmittedPart, apart
from ..reading.model_config import MAX_SIZE
from .blocks import are_alternatives, by_block, gaps, lacking, missing_names, mixed
from .mapped import Arrays, DecodedTensors, Encoded, gathered

FLAGS = ("tie", "fused", "value", "flat", "transposed", "scan", "interleaved", "joined", "resaved")
"""Settings that are 0 or 1; every other one is a size."""

VALUE = ".value"
"""Suffix of all names in a checkpoint of NNX's state, in which variables are nodes."""

HEAD = "out_head.weight"
"""Our name of the head of a model."""

Settings = Mapping[str, Any]


@functools.lru_cache(maxsize=1 << 16)
def _rows(index: Index[Row], name: str) -> tuple[Row, ...]:
    """Return the rows that may cover a name.

    Detection asks every layout about a hundred names; a process that converts several checkpoints asks about the same
    names again. 12 MB when it is full.
    """
    return tuple(index.find(name))


class Layout:
    """A library's names and shapes of tensors, in terms of our torch names.

    Args:
        name: name on the command line.
        title: its description.
        rows: its table.
        prefixes: values of ``{prefix}``, the usual one first; a checkpoint uses a single one.
        settings: setting -> the keys of a config.json that may contain it.
        defaults: setting -> its default value.
        whole: whether it describes a whole model, so that a row without a tensor is an error.
        ours: whether it maps to our names, some of which must occur together.
        marks: parts of names, of which a model of this layout has at least one; () for no such requirement.
        refused: outside names, with placeholders -> why a checkpoint that has one can't be converted.
        model_types: the ``model_type`` of a config.json that it is for; empty for any.
        nnx: whether its names are those of NNX's state, which may all end with ``.value``.
        parts: parts of checkpoints outside the model that it describes, which a conversion leaves out.
        unread: from a config.json to further parts, which the model of that config does not read.
        form: how its library stores a matrix, if another library stores it differently under the same name; else "".
        doubt: returns why a checkpoint of these names and shapes may be of another library, whose tensors mean other
            things; "" if it is surely of this layout. None: no other library has the same names.
    """

    def __init__(
        self,
        name: str,
        title: str,
        rows: Iterable[Row],
        *,
        prefixes: tuple[str, ...] = ("",),
        settings: Mapping[str, tuple[str, ...]] | None = None,
        defaults: Settings | None = None,
        whole: bool = False,
        ours: bool = True,
        marks: tuple[str, ...] = (),
        refused: Mapping[str, str] | None = None,
        model_types: tuple[str, ...] = (),
        nnx: bool = False,
        parts: tuple[OmittedPart, ...] = (),
        unread: Callable[[Mapping[str, object]], tuple[OmittedPart, ...]] | None = None,
        form: str = "",
        doubt: Callable[[Mapping[str, Shape | None]], str] | None = None,
    ):
        self.name, self.title, self.rows = name, title, tuple(rows)
        self.prefixes, self.settings, self.defaults = prefixes, dict(settings or {}), dict(defaults or {})
        self.whole, self.ours, self.marks, self.model_types, self.nnx = whole, ours, marks, model_types, nnx
        self.form, self.parts, self.unread, self.doubt = form, parts, unread, doubt
        if nnx:
            self.settings["value"] = ()
        self._refused = [(Row(template, reason=reason), reason) for template, reason in (refused or {}).items()]
        self._index_theirs(self.rows)
        self._ours = Index[Row]((name, row) for row in self.rows for name in (*row.ours, *row.tied))

    def _index_theirs(self, rows: Collection[Row]) -> None:
        self._covering = tuple(rows)
        self._theirs = {
            prefix: Index[Row]((row.theirs.replace("{prefix}", prefix), row) for row in rows)
            for prefix in self.prefixes
        }

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"

    @property
    def sizes(self) -> set[str]:
        """Settings that sizes in its rows are named after."""
        named = (
            size
            for row in self.rows
            for size in (*row.sizes.values(), *row.split, *row.shares)
            if isinstance(size, str)
        )
        return {size for size in named if size != "..."}

    @property
    def why_tied(self) -> str:
        """Advice for a tensor that is tied to another tensor and differs from it."""
        return "--set tie=0 writes both" if "tie" in self.settings else f"{self.name} has no other place for it"

    @property
    def head(self) -> str:
        """The outside name of the head that turns the last states into logits, without a prefix; "" if it has none."""
        names = (row.theirs.replace("{prefix}", "") for row in self.rows if row.ours == (HEAD,))
        return next((name for name in names if not placeholders(name)), "")

    # ---- names

    @functools.cached_property
    def _endings(self) -> tuple[str, ...]:
        """Ends of the names that its rows cover: the text after the last placeholder of each row."""
        return tuple({whole.rpartition("}")[2] for row in self._covering for whole in expanded(row.theirs)})

    def may_cover(self, names: Iterable[str]) -> bool:
        """Return False if some name ends as no row does, so that `match` leaves it out; no index is needed for that."""
        names = list(names)
        ending = self._ending(names)
        return all(name.removesuffix(ending).endswith(self._endings) for name in names)

    def match(self, names: Iterable[str]) -> tuple[str, dict[str, tuple[Row, dict[str, str]]]]:
        """Return the prefix that covers most names, and name -> row and placeholders of those it covers.

        A name of alternative rows falls under that of its block's other tensors; without any, under none.

        Raises:
            LayoutError: two rows cover a name that are not alternatives of a block.
        """
        names = list(names)
        ending = self._ending(names)
        bares = tuple(name.removesuffix(ending) for name in names)
        kinds = kinds_of(bares)
        samples = dict(zip(kinds, bares, strict=True))
        best: tuple[str, dict[str, tuple[Row, dict[str, str]]]] = (self.prefixes[0], {})
        for prefix in self.prefixes:
            is_usual = prefix == self.prefixes[0]
            if len(best[1]) == len(names) or (not is_usual and not any(name.startswith(prefix) for name in names)):
                continue  # the rows without a prefix are those of the usual one, too
            matches: dict[str, tuple[Row, dict[str, str]]] = {}
            several: dict[str, list[tuple[Row, dict[str, str]]]] = {}
            rows = {kind: some for kind, bare in samples.items() if (some := _rows(self._theirs[prefix], bare))}
            for name, bare, kind in zip(names, bares, kinds, strict=True) if rows else ():
                hits = [
                    (row, values)
                    for row in rows.get(kind, ())
                    if (values := row.match_theirs(bare, (prefix,))) is not None
                ]
                if len(hits) > 1 and not are_alternatives(row for row, _ in hits):
                    raise LayoutError(f"{name}: more than one row of {self.name} covers it")
                if len(hits) > 1:
                    several[name] = hits
                elif hits:
                    matches[name] = hits[0]
            if several:
                chosen = {**matches, **by_block(several, matches)}
                matches = {name: chosen[name] for name in names if name in chosen}
            if len(matches) > len(best[1]):
                best = prefix, matches
        return best

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the names that the layout maps to ours, in the given order, without those it drops."""
        _, matches = self.match(names)
        return [name for name, (row, _) in matches.items() if row.ours]

    def apart(self, names: Iterable[str], config: Mapping[str, object] | None = None) -> dict[str, OmittedPart]:
        """Return name -> the part of a checkpoint that it belongs to, for names of parts that are left out.

        Args:
            names: of the checkpoint's tensors.
            config: the model's config.json, for parts that it makes superfluous.
        """
        parts = self.parts if self.unread is None or not config else (*self.parts, *self.unread(config))
        return apart(parts, list(names), self.prefixes) if parts else {}

    def why_refused(self, names: Iterable[str]) -> str:
        """Return why a checkpoint with these names can't be converted, with the offending name; "" if it can."""
        names = list(names)
        ending = self._ending(names)
        for name in names:
            for row, reason in self._refused:
                if row.match_theirs(name.removesuffix(ending), self.prefixes) is not None:
                    return f"{name}: {reason}"
        return ""

    def is_complete(self, names: Iterable[str]) -> bool:
        """Return whether all tensors that a model needs are present."""
        return not self.missing(names)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names of the tensors that a whole model of this layout needs and `names` lacks."""
        names = list(names)
        prefix, matches = self.match(names)
        return self._missing(matches.values(), prefix, self._ending(names))

    def is_unmixed(self, names: Iterable[str]) -> bool:
        """Return whether each block has the tensors of one alternative, as all blocks of this layout do."""
        return not mixed(self.match(list(names))[1])

    def read_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings from a config.json.

        Raises:
            LayoutError: a value is not valid for its setting.
        """
        settings = {}
        inner = config.get("text_config")
        config = {**inner, **config} if isinstance(inner, Mapping) else config
        parts = ((outer, part) for outer, part in config.items() if isinstance(part, Mapping))
        config = {**config} | {f"{outer}.{key}": value for outer, part in parts for key, value in part.items()}
        for setting, keys in self.settings.items():
            key = next((key for key in keys if config.get(key) is not None), None)
            if key is None:
                continue
            value = config[key]
            least, most = (0, 1) if setting in FLAGS else (1, MAX_SIZE)
            is_right = isinstance(value, int) and (setting in FLAGS or not isinstance(value, bool))
            if not is_right or not least <= value <= most:
                wanted = "true or false" if setting in FLAGS else f"a whole number from 1 to {MAX_SIZE}"
                raise LayoutError(f"{key} ({printable(json.dumps(value), 40)}) of config.json must be {wanted}")
            settings[setting] = int(value)
        return settings

    # ---- both ways

    def decode(
        self, shapes: Mapping[str, Shape], settings: Settings | None = None, *, part: bool = False
    ) -> DecodedTensors:
        """Return the placement of each of our tensors in outside ones.

        Args:
            shapes: outside name -> shape.
            settings: values that names and shapes don't determine, such as ``num_heads``.
            part: whether some of a model's tensors may be absent.

        Raises:
            LayoutError: a shape that does not fit, or a setting that is missing.
            WeightsMismatchError: names that are missing, and names that no row covers.
        """
        all_settings = {**self.defaults, **(settings or {})}
        prefix, matches = self.match(shapes)
        ending = self._ending(shapes)
        unexpected = [name for name in shapes if name not in matches]
        refused = self.why_refused(unexpected)
        if refused:
            raise LayoutError(refused)
        placements: dict[str, Placement] = {}
        dropped: dict[str, str] = {}
        tied: dict[str, Placement] = {}
        row_settings: dict[str, int] = {}
        pieces: dict[str, dict[int, tuple[Row, dict[str, str], Placement]]] = collections.defaultdict(dict)
        for name, (row, values) in matches.items():
            if row.reason:
                dropped[name] = row.reason
                continue
            placed = row.decode(name, shapes[name], values, all_settings)
            if row.lengths:
                for ours, piece in placed.items():
                    pieces[ours][row.piece] = row, values, piece
                continue
            for ours in placed:
                if ours in placements:
                    raise LayoutError(f"{placements[ours].theirs} and {name} both hold {ours}")
            placements |= placed
            row_settings |= row.settings_of(shapes[name], all_settings)
            tied |= {fill(one, values): placed[fill(row.ours[0], values)] for one in row.tied}
        for ours, some in pieces.items():
            if ours in placements:
                raise LayoutError(f"{placements[ours].theirs} and {some[min(some)][2].theirs} both hold {ours}")
            placements[ours] = joined({number: piece for number, (_, _, piece) in some.items()})
        restore: dict[str, Any] = {**row_settings, **({"prefix": prefix} if len(self.prefixes) > 1 else {})}
        if ending:
            restore["value"] = 1
        if tied and "tie" in self.settings:
            restore["tie"] = int(not tied.keys() & placements.keys())
        restore |= {
            name: int(any(row.alternatives == (name,) for row, _ in matches.values()))
            for name in self.settings.keys() & {one for row in self.rows for one in row.alternatives}
        }
        placements |= {name: placed for name, placed in tied.items() if name not in placements}
        missing = [] if part else self._missing(matches.values(), prefix, ending) + self._lacking(placements)
        missing += [
            name
            for some in pieces.values()
            for name in self._further_pieces(*some[min(some)][:2], prefix, ending)
            if name not in matches and name not in missing
        ]
        if unexpected or missing:
            raise WeightsMismatchError(missing, unexpected)
        if conflict := mixed(matches):
            raise LayoutError(f"{' and '.join(conflict)} are in one block; the blocks of {self.name} have one of them")
        if self.ours:
            fitting.check(self, shapes, placements, {**all_settings, **restore})
        checks = {name: row.check for name, (row, _) in matches.items() if row.check is not None}
        copies = {name: row.copy_of for name, (row, _) in matches.items() if row.copy_of in shapes}
        return DecodedTensors(placements, dropped, restore, checks, copies)

    def encode(self, shapes: Mapping[str, Shape], settings: Settings | None = None, *, part: bool = False) -> Encoded:
        """Return the placement of each of our tensors in the outside tensors to write.

        Args:
            shapes: our name -> shape.
            settings: values that names and shapes don't determine; ``prefix`` among them.
            part: whether some of a model's tensors may be absent.

        Raises:
            LayoutError: a shape that does not fit, or a setting that is missing.
            WeightsMismatchError: names that are missing, and names that no row covers.
        """
        all_settings = {**self.defaults, **(settings or {})}
        prefix = all_settings.get("prefix", self.prefixes[0])
        ending = VALUE if self.nnx and all_settings.get("value") else ""
        grouped: dict[str, dict[tuple[int, int], str]] = collections.defaultdict(dict)
        rows: dict[str, tuple[Row, dict[str, str]]] = {}
        ties: list[tuple[str, str]] = []
        unexpected = []
        for name in shapes:
            hits = [(row, *hit) for row in self._ours.find(name) if (hit := row.match_ours(name)) is not None]
            tying = [(row, values) for row, number, values in hits if number >= len(row.ours)]
            plain = [(row, number, values) for row, number, values in hits if number < len(row.ours)]
            kept = [fill(row.ours[0], values) for row, values in tying]
            if kept and kept[0] in shapes and (all_settings.get("tie", 1) or not plain):
                if tuple(shapes[name]) != tuple(shapes[kept[0]]):
                    raise LayoutError(
                        f"{name} {tuple(shapes[name])} can't be tied to {kept[0]} {tuple(shapes[kept[0]])}; "
                        + self.why_tied
                    )
                ties.append((kept[0], name))
                continue
            if len(plain) > 1:
                plain = self._one_branch(plain, shapes, {**all_settings, prefix: 1})
            if len(plain) > 1 and len({row.piece for row, _, _ in plain if row.lengths}) < len(plain):
                raise LayoutError(f"{name}: more than one row of {self.name} covers it")
            if not plain:
                unexpected.append(name)
                continue
            for row, number, values in plain:
                position = int(values[row.counter]) if row.stack else 0
                theirs = fill(row.theirs, {**values, "prefix": prefix}) + ending
                if (number, position) in grouped[theirs] or rows.get(theirs, (row,))[0] is not row:
                    raise LayoutError(f"{next(iter(grouped[theirs].values()))} and {name} would both be {theirs}")
                grouped[theirs][number, position] = name
                rows[theirs] = row, {key: value for key, value in values.items() if key != row.counter}
        missing = [] if part else self._missing(rows.values(), prefix, ending)
        for theirs, names in grouped.items():
            row, values = rows[theirs]
            depth = 1 + max(position for _, position in names)
            for number, template in enumerate(row.ours):
                for position in gaps({at for one, at in names if one == number}, depth):
                    missing.append(fill(template, {**values, row.counter: str(position)} if row.stack else values))
        if not part:
            missing += self._lacking(shapes)
        if unexpected or missing:
            raise WeightsMismatchError(set(missing), unexpected)
        result: dict[str, Shape] = {}
        parts = {}
        for theirs, names in grouped.items():
            row, values = rows[theirs]
            of_parts = {key: tuple(shapes[name]) for key, name in names.items()}
            if row.lengths:
                start, stop = row.rows_of(shapes, values, all_settings)
                of_parts = {key: (stop - start, *shape[1:]) for key, shape in of_parts.items()}
            result[theirs], parts[theirs] = row.encode(theirs, of_parts, names, all_settings)
            if row.lengths:
                parts[theirs] = {
                    name: dataclasses.replace(placed, start=start) for name, placed in parts[theirs].items()
                }
        return Encoded(result, parts, ties)

    def to_canonical(self, arrays: Mapping[str, np.ndarray], **settings: object) -> Arrays:
        """Convert arrays under outside names to arrays under our torch names; a part of a model is accepted.

        Names that the layout drops, or does not cover, must be removed with `select` first.
        """
        decoded = self.decode({name: array.shape for name, array in arrays.items()}, settings, part=True)
        if decoded.dropped:
            raise WeightsMismatchError(unexpected=decoded.dropped)
        return {name: gathered(arrays, one) for name, one in decoded.placements.items()}

    def from_canonical(self, arrays: Mapping[str, np.ndarray], **settings: object) -> Arrays:
        """Convert arrays under our torch names to arrays under outside ones; a part of a model is accepted."""
        return self.encode({name: array.shape for name, array in arrays.items()}, settings, part=True).write(arrays)

    def _one_branch(
        self, hits: list[tuple[Row, int, dict[str, str]]], shapes: Mapping[str, Shape], settings: Settings
    ) -> list[tuple[Row, int, dict[str, str]]]:
        """Return, of rows in alternative branches, the requested one, or the largest that is complete.

        Ties go to the first row; parts that are counted must have equal shapes. The pieces of one tensor are in one
        branch.
        """
        branches: dict[str, list[tuple[Row, int, dict[str, str]]]] = collections.defaultdict(list)
        for hit in hits:
            branches[hit[0].branch].append(hit)
        is_twice = any(len(some) > 1 and not all(row.lengths for row, _, _ in some) for some in branches.values())
        if is_twice or len({row.choice for row, _, _ in hits}) > 1:
            return hits
        chosen = [hit for hit in hits if any(settings.get(one) for one in hit[0].alternatives)]
        if chosen:
            return chosen
        sizes = []
        for row, _, values in hits:
            branch = [one for one in self.rows if one.branch == row.branch and not one.optional]
            wanted = [
                [fill(name, values) for name in one.ours if placeholders(name) <= values.keys()] for one in branch
            ]
            is_there = all(name in shapes for names in wanted for name in names) and all(
                len({shapes[name] for name in names}) <= 1
                for one, names in zip(branch, wanted, strict=True)
                if one.part
            )
            sizes.append(sum(map(len, wanted)) if is_there else 0)
        return branches[hits[sizes.index(max(sizes))][0].branch]

    def _further_pieces(self, row: Row, values: Mapping[str, str], prefix: str, ending: str) -> Iterable[str]:
        """Yield the names of all pieces of a tensor, of one of which this is the row."""
        for other in self.rows:
            if (other.lengths, other.ours, other.branch) == (row.lengths, row.ours, row.branch):
                yield fill(other.theirs, {**values, "prefix": prefix}) + ending

    def is_decorated(self, names: Iterable[str]) -> bool:
        """Return whether all names end with NNX's ``.value``, which a module's own names lack."""
        return bool(self._ending(names))

    def _ending(self, names: Iterable[str]) -> str:
        """Return ``.value`` if all names end with it in a layout of NNX's state; else ""."""
        names = list(names) if self.nnx else []
        return VALUE if names and all(name.endswith(VALUE) for name in names) else ""

    def _missing(self, matches: Iterable[tuple[Row, Mapping[str, str]]], prefix: str, ending: str = "") -> list[str]:
        """Return the missing names of a whole model."""
        return missing_names(self.rows, self.marks, matches, prefix, ending) if self.whole else []

    def _lacking(self, names: Iterable[str]) -> list[str]:
        return lacking(names) if self.ours else []
