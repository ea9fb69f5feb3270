"""A base with an adapter merged into it: sums in float32 as bytes are read, rounded once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...printable import printable
from ...weights.placements import rounded
from ..containers import open_reader
from ..containers.base import Array, Reader, TensorInfo, numpy_dtype
from ..containers.files import bad, boxes, check_range, listed
from ..containers.remote import is_there
from ..containers.sources import inside, read_file, snapshot_of
from ..manifest import new_digest
from ..readers import Filtered, Renamed, Wrapped
from .config import CONFIG, EMBEDDINGS, HEADS, MAX_BYTES, LoraConfig, check_there
from .pairing import FLOATS, OF_TABLES, AdapterChange, pair, parsed, stored_name
from .unmerged import FILES

SHOWN = 3
"""Number of layers that a note names."""


def check_complete(
    path: Path, config: LoraConfig, changes: Mapping[str, AdapterChange], base: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """Refuse an adapter whose file lacks trained tensors, and return a note on layers without a LoRA.

    Such layers are not an error: peft loads the adapter as well, with a warning, and a base may have more of them, such
    as those of a vision tower.

    Args:
        path: of the adapter.
        config: its config.
        changes: name of the base's tensors -> how the adapter changes it.
        base: name -> header of the base's tensors.

    Raises:
        CheckpointError: a module of ``modules_to_save`` that the base has, or a bias of ``lora_bias``, is missing; or a
            layer has a LoRA that ``target_modules`` leaves out, which peft would not load.
    """
    saved = [name for name, change in changes.items() if change.replacement]
    for module in config.saved:
        if _any_below(base, module) and not _any_below(saved, module):
            raise bad(path, f"lacks {printable(module)}, which modules_to_save names")
    biased = {change.layer for change in changes.values() if change.vector}
    for change in changes.values():
        is_linear = change.down and not change.down.endswith(OF_TABLES)
        if config.is_biased and is_linear and change.layer not in biased:
            raise bad(path, f"{printable(change.layer)} lacks lora_B.bias, which lora_bias asks for")
    kinds = {target.rpartition(".")[2] for target in config.targets}
    tied = (*EMBEDDINGS, *HEADS) if config.is_tying else ()  # peft adds the other of the two to no list
    for change in changes.values():
        if kinds and change.down and change.layer.rpartition(".")[2] not in (*kinds, *tied):
            raise bad(path, f"holds a LoRA of {printable(change.layer)}, and target_modules of its config "
                      f"({printable(', '.join(config.targets), 80)}) leaves that layer out: peft loads the LoRA only "
                      "if target_modules names the layer")  # fmt: skip
    endings = tuple(f".{target}.weight" for target in config.targets)
    layers = [
        name.removesuffix(".weight")
        for name, info in base.items()
        if f".{name}".endswith(endings) and len(info.shape) == 2 and name not in changes
    ]
    if not layers:
        return ()
    some, verb = ("1 layer", "has") if len(layers) == 1 else (f"{len(layers)} layers", "have")
    return (
        f"{some} that its target_modules name {verb} no LoRA in {printable(path.name)}, and "
        f"stay{'s as it is' if len(layers) == 1 else ' as they are'}: {listed(list(map(printable, layers)), SHOWN)}",
    )


def _any_below(names: Collection[str], module: str) -> bool:
    return any(f".{module}." in f".{name}" for name in names)


COPIES = (".modules_to_save.", ".original_module.")
"""Parts of the names of a module that was trained whole, in memory: of the trained one, and of the base's."""


def _copies(names: Collection[str]) -> list[str]:
    """Return the names that PEFT does not load, as the file has the trained tensor under its plain name, too.

    PEFT saves resized embeddings, and the head, with all of their names.
    """
    return [name for name in names for part in COPIES if part in name and name.replace(part, ".") in names]


PIECE = 1 << 23
"""Bytes of an adapter's tensor that are checked at a time."""

TILE = 1 << 18
"""Elements computed at a time; their intermediate results stay in the caches."""


class LoraAdapter:
    """An open adapter.

    Attributes:
        path: its folder.
        config: ranks and factors.
        reader: its tensors.
        digest: of its config's bytes.
    """

    def __init__(self, path: Path, config: LoraConfig, reader: Reader, digest: str):
        self.path, self.config, self.reader, self.digest = path, config, reader, digest

    @classmethod
    def open(cls, folder: Path) -> LoraAdapter:
        """Open a folder saved by peft.

        Raises:
            CheckpointError: the folder has no adapter, or one of a method that is not merged.
        """
        folder = snapshot_of(folder)
        check_there(folder)
        data = read_file(inside(folder, CONFIG, folder), folder, MAX_BYTES)
        config = LoraConfig.of(folder / CONFIG, data)
        name = next((name for name in FILES if is_there(folder / name)), None)
        if name is None:
            raise bad(folder, f"has neither {FILES[0]} nor {FILES[1]}")
        digest = new_digest()
        digest.update(data)
        reader = open_reader(inside(folder, name, folder))
        copies = _copies(reader.tensors)
        return cls(folder, config, Filtered(reader, copies, ()) if copies else reader, digest.hexdigest())

    def files(self) -> list[Path]:
        """Return its files."""
        return [self.path / CONFIG, *self.reader.files()]

    def in_manifest(self) -> dict[str, str]:
        """Return name -> digest of its config and of each of its tensors."""
        entries = {CONFIG: self.digest}
        for name, info in self.reader.tensors.items():
            digest = new_digest()
            digest.update(self.reader.read_range(name, 0, info.nbytes))
            entries[name] = digest.hexdigest()
        return entries


class Merged(Wrapped):
    """A base with an adapter in it.

    Args:
        reader: the base, by the names of `transformers`.
        adapter: the open adapter; it is closed with the base.
        model: the base's config.json.
        dtype: dtype of all floating-point tensors; "" keeps the base's dtype, tensor by tensor.
        tied: whether the base's head is its embeddings.
        becomes: name of a dequantised tensor -> its dtype, where `dtype` is "" and the base has another.

    Attributes:
        adapter: the adapter.
        base: the base.
        changes: name -> how the adapter changes it.

    Raises:
        CheckpointError: the adapter does not fit.
    """

    def __init__(
        self,
        reader: Reader,
        adapter: LoraAdapter,
        model: Mapping[str, object],
        dtype: str,
        tied: bool,
        *,
        becomes: Mapping[str, str] | None = None,
    ):
        super().__init__(reader)
        self.adapter, self.base = adapter, reader
        self.changes = pair(adapter.path, adapter.reader.tensors, adapter.config, reader.tensors, model, tied)
        own = becomes or {}
        self.tensors = {name: _cast(info, dtype or own.get(name, "")) for name, info in reader.tensors.items()}
        self._factors: tuple[str, Array, Array] | None = None
        self._ratios: tuple[str, Array] | None = None
        replaced = sum(bool(change.replacement) for change in self.changes.values())
        added = sum(bool(change.down or change.vector) for change in self.changes.values())
        more = f"; {replaced} of its tensors replace the base's" if replaced else ""
        note = f"merged {printable(adapter.path.name)} into {added} tensors of the base, in float32, rounded once{more}"
        self.notes = (
            *self.notes,
            note,
            *check_complete(adapter.path, adapter.config, self.changes, reader.tensors),
        )

    def files(self) -> list[Path]:
        """Return every file, those of the adapter too."""
        return [*self._reader.files(), *self.adapter.files()]

    def close(self) -> None:
        """Close all files."""
        self.adapter.reader.close()
        super().close()

    def check_numbers(self) -> None:
        """Refuse an adapter with numbers that are not finite: they would spoil every weight that they reach.

        Raises:
            CheckpointError: the first such tensor.
        """
        for change in self.changes.values():
            for name in filter(None, (change.down, change.up, change.vector, change.magnitude, change.replacement)):
                info = self.adapter.reader.tensors[name]
                step = PIECE // info.itemsize * info.itemsize
                for start in range(0, info.nbytes, step):
                    data = self.adapter.reader.read_range(name, start, min(info.nbytes, start + step))
                    values = np.frombuffer(data, numpy_dtype(info.dtype))
                    if not np.isfinite(values).all():
                        value = values[np.argmin(np.isfinite(values))]
                        raise bad(self.adapter.path, f"{printable(name)} holds {value}, which is not a finite number")

    def _is_plain(self, name: str) -> bool:
        """Return whether a tensor has the base's bytes."""
        return name not in self.changes and self.tensors[name].dtype == self._reader.tensors[name].dtype

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a tensor."""
        if self._is_plain(name):
            return self._reader.read_range(name, start, stop)
        info = self.tensors[name]
        check_range(self.path, info, start, stop)
        width = info.itemsize
        first, last = start // width, -(-stop // width)
        made = np.empty(last - first, numpy_dtype(info.dtype))
        self._fill(name, first, made)
        return made.view(np.uint8).data[start - first * width : stop - first * width]

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a tensor into memory that exists."""
        if self._is_plain(name):
            self._reader.read_into(name, start, into)
        else:
            super().read_into(name, start, into)

    def read_rows(self, name: str, start: int, step: int, into: Array) -> None:
        """Read a matrix, each row `step` elements behind the one before."""
        if self._is_plain(name):
            self._reader.read_rows(name, start, step, into)
        else:
            super().read_rows(name, start, step, into)

    def _fill(self, name: str, first: int, into: Array) -> None:
        """Fill `into` with merged elements, from element `first` in C order on."""
        change = self.changes.get(name, AdapterChange(name, ""))
        columns = self.tensors[name].shape[-1] if change.down else max(math.prod(self.tensors[name].shape), 1)
        rows = self.tensors[name].shape[0] if change.down else 1
        done = 0
        for box in boxes((rows, columns), first, first + into.size):
            part, across = box if len(box) > 1 else (*box, slice(0, columns))
            height, width = max(1, TILE // columns), TILE
            for top in range(part.start, part.stop, height):
                for left in range(across.start, across.stop, width):
                    bottom, right = min(part.stop, top + height), min(across.stop, left + width)
                    made = self._tile(change, columns, slice(top, bottom), slice(left, right))
                    into[done : done + made.size] = made.reshape(-1)
                    done += made.size

    def _tile(
        self, change: AdapterChange, columns: int, rows: slice, across: slice, *, is_scaled: bool = True
    ) -> Array:
        """Return whole rows, or a part of one row; unless `is_scaled`, the unrounded sum without DoRA's factors."""
        source, name = (self.adapter.reader, change.replacement) if change.replacement else (self._reader, change.name)
        dtype = numpy_dtype(source.tensors[name].dtype)
        kind = np.float64 if np.float64 in (dtype, numpy_dtype(self._reader.tensors[change.name].dtype)) else np.float32
        start, stop = rows.start * columns + across.start, (rows.stop - 1) * columns + across.stop
        data = source.read_range(name, start * dtype.itemsize, stop * dtype.itemsize)
        values = np.frombuffer(data, dtype).reshape(rows.stop - rows.start, -1)
        wanted = numpy_dtype(self.tensors[change.name].dtype)
        if not change.down and not change.vector:
            return rounded(values, wanted)
        with np.errstate(all="ignore"):
            total = values.astype(kind) + self._added(change, kind, rows, across)
            if not change.magnitude or not is_scaled:
                return rounded(total, wanted) if is_scaled else total
            ratios = self._ratios_of(change, columns)
            return rounded(total * (ratios[across] if change.is_transposed else ratios[rows, None]), wanted)

    def _ratios_of(self, change: AdapterChange, columns: int) -> Array:
        """Return DoRA's factor of each output: its magnitude over the norm of the merged row.

        Squares are summed in float64 over tiles that do not depend on the range that is read.
        """
        if self._ratios is None or self._ratios[0] != change.name:
            rows, height = self.tensors[change.name].shape[0], max(1, TILE // columns)
            squares: Array = np.zeros(columns if change.is_transposed else rows)
            for top in range(0, rows, height):
                part = slice(top, min(rows, top + height))
                tile = self._tile(change, columns, part, slice(0, columns), is_scaled=False).astype(np.float64) ** 2
                if change.is_transposed:
                    squares += tile.sum(0)
                else:
                    squares[part] = tile.sum(1)
            magnitude = self.adapter.reader.read(change.magnitude).astype(np.float64)
            kind = np.float64 if self._reader.tensors[change.name].dtype == "float64" else np.float32
            self._ratios = change.name, (magnitude / np.sqrt(squares)).astype(kind)
        return self._ratios[1]

    def _added(self, change: AdapterChange, kind: type[np.floating[Any]], rows: slice, across: slice) -> Array:
        """Return the adapter's addition to a rectangle; the order of its sum does not depend on the rectangle."""
        if change.vector:
            vector: Array = self.adapter.reader.read(change.vector)[across].astype(kind) * kind(change.scale)
            return vector
        if self._factors is None or self._factors[0] != change.name:
            down, up = (self.adapter.reader.read(name).astype(kind) for name in (change.down, change.up))
            left, right = (down.T, up.T) if change.is_transposed else (up, down)
            self._factors = change.name, left, right
        _, left, right = self._factors
        left, right = left[rows], right[:, across]
        total: Array = left[:, :1] * right[:1]
        product = np.empty_like(total)
        for index in range(1, len(right)):
            np.multiply(left[:, index : index + 1], right[index], out=product)
            total += product
        total *= kind(change.scale)
        return total


class Untied(Renamed):
    """A base with a separate head, which starts with the numbers of the embeddings that it was tied to.

    Args:
        reader: the base, by the names of `transformers`.
        config: its config.json.
        table: name of the embeddings.
        head: name of the head, which the base may lack.
    """

    def __init__(self, reader: Reader, config: Mapping[str, object], table: str, head: str):
        super().__init__(reader, {name: name for name in reader.tensors} | {head: self._source(reader, table, head)})
        self.unread = reader.unread
        inner = config.get("text_config")
        nested = {"text_config": {**inner, TIE: False}} if isinstance(inner, Mapping) else {}
        self._config = {**config, **nested, TIE: False}
        note = f"{printable(head)} becomes a tensor of its own ({TIE}: false): the adapter changes it or the embeddings"
        self.notes = (*reader.notes, note)

    @staticmethod
    def _source(reader: Reader, table: str, head: str) -> str:
        return head if head in reader.tensors else table


TIE = "tie_word_embeddings"


def untied(reader: Reader, adapter: LoraAdapter, config: Mapping[str, object]) -> Reader:
    """Return a base whose head is tied to its embeddings, untied if the adapter changes either of the two.

    PEFT computes with both apart: the model's layers share a matrix, and each has a separate addition or copy.
    A base whose head has no usual name is returned as it is.
    """
    names = [name for name in reader.tensors if name.endswith(TABLES)]
    own = [parsed(adapter.path, name, adapter.config)[2] for name in adapter.reader.tensors]
    changed = {stored_name(name, reader.tensors) for name in own}
    ends = {".".join(name.split(".")[-2:]) for name in changed}
    if len(names) != 1 or not ends & {"lm_head.weight", ".".join(names[0].split(".")[-2:])}:
        return reader
    front = names[0].removesuffix("model.embed_tokens.weight") if "language_model.model." in names[0] else ""
    return Untied(reader, config, names[0], f"{front}lm_head.weight")


TABLES = ("model.embed_tokens.weight", "language_model.embed_tokens.weight", "transformer.wte.weight")
"""Ends of the names of embeddings in models of `transformers` whose head is ``lm_head``."""


def _cast(info: TensorInfo, dtype: str) -> TensorInfo:
    return TensorInfo(info.name, dtype if dtype and info.dtype in FLOATS else info.dtype, info.shape, info.file)
