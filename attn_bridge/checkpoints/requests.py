"""A conversion as requested, in plain data that can be sent to other processes and machines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from ..models import layouts, rules_file
from ..models.derived import stored
from ..printable import printable
from ..weights import WeightsMismatchError
from . import accompanying, adapters, configs, containers, manifest, planning, quantised
from .containers import remote
from .containers.base import CheckpointError, Reader
from .containers.sources import snapshot_of
from .manifest import Manifest
from .options import ConvertOptions, PathLike
from .planning import model_checks
from .planning.plans import Plan, is_float
from .selection import Selection, select


@dataclasses.dataclass(frozen=True)
class Request(ConvertOptions):
    """The arguments of `convert`: source and target as text, and the options.

    Attributes:
        source: file or folder.
        target: file or folder.
    """

    source: str
    target: str

    @classmethod
    def of(cls, source: PathLike, target: PathLike, options: ConvertOptions) -> Self:
        """Return the request for a source and a target."""
        own = {field.name: getattr(options, field.name) for field in dataclasses.fields(ConvertOptions)}
        return cls(remote.text_of(source), remote.text_of(target), **own)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Prepared]:
        """Open the source, and plan the conversion, from headers alone.

        Raises:
            CheckpointError: (a ValueError) the source is absent or malformed, or the target's format is unknown.
            LayoutError: (a ValueError) names, shapes or settings that don't fit.
        """
        source, target = snapshot_of(remote.to_path(self.source)), remote.to_path(self.target)
        remote.check_writable(target)
        stamps = stamps_of(source)
        with (
            family_beside(source),
            containers.open_reader(source, self.source_format, step=self.step, item=self.item) as opened,
        ):
            keep_wrappers = self.rules is not None or self.to_layout == "same"
            selected, selection = select(opened, self.strip, self.drop or (), keep_wrappers=keep_wrappers)
            if self.adapter is None:
                adapters.check_base(selected, source, takes_any_names=keep_wrappers)
            reader = seen(selected, self.dequantize, self.dtype, self.adapter)
            beside = manifest.of(reader, source)
            is_another = self.strip is not None or selection.unwrapped or self.adapter is not None
            before = None if is_another else beside
            plan = plan_of(reader, before, target, self, selection)
            plan = with_notes(plan, None if before is beside else beside)
            kind, _ = containers.with_settings(containers.format_of(target, self.format), self.settings)
            is_folder = configs.is_folder(target, kind)
            plan = with_files(plan, reader, is_folder)
            yield Prepared(plan, reader, before, target, kind, is_folder, stamps, options=self)


def family_beside(source: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the family that a local source's folder describes is known; a store's is not read.

    Raises:
        ValueError: the file of the family does not describe one.
    """
    return contextlib.nullcontext() if remote.is_remote(source) else stored.used(accompanying.folder_of(source))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A conversion that is ready to run.

    Attributes:
        plan: the plan.
        reader: the open source.
        before: the manifest next to the source.
        target: file or folder.
        format: its container.
        is_folder: whether it is a folder.
        there: stamps of the source's files from before they were opened, to detect replaced files.
        config: a model's config.json for a folder; None copies the source's, an empty mapping writes none.
        options: the options of the request; the run reads `overwrite` and `resume`.
    """

    plan: Plan
    reader: Reader
    before: Manifest | None
    target: Path
    format: str
    is_folder: bool
    there: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    options: ConvertOptions = dataclasses.field(default_factory=ConvertOptions)

    def identity(self) -> str:
        """Return a key of this conversion and of the state of its source, which differs for any other conversion.

        Raises:
            CheckpointError: a file was replaced since it was opened, so that later reads would see other bytes.
        """
        key = f"{self.plan.identity(self.reader)} {self.format}"
        for path in self.reader.files():
            if str(path) in self.there and self.there[str(path)] != stamp_of(str(path)):
                raise CheckpointError(f"{self.reader.path} changed while it was read; convert it again")
        return key


def stamps_of(source: Path) -> dict[str, tuple[int, ...]]:
    """Return stamps of the files of a local source, to detect changes; {} for a store, whose reads check versions."""
    if remote.is_remote(source):
        return {}
    stamps: dict[str, tuple[int, ...]] = {}
    paths = [str(source)]
    for folder, _, names in os.walk(source):
        above = Path(folder)
        paths += names if above == Path() else [f"{above}/{name}" for name in names]
    for path in paths:
        with contextlib.suppress(OSError):
            stamps[path] = stamp_of(path)
    return stamps


def stamp_of(path: str) -> tuple[int, ...]:
    """Return device, inode, size and modification time of a file, which differ once another file has its name."""
    status = os.stat(path)  # noqa: PTH116 - a path for each file of a large folder takes longer than this does
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def seen(reader: Reader, dequantize: bool, dtype: str | None, adapter: str | os.PathLike[str] | None = None) -> Reader:
    """Return the reader for a conversion: dequantised, with an adapter merged, or unchanged.

    Raises:
        CheckpointError: it can't be dequantised, or the adapter can't be merged into it.
    """
    if adapter is not None:
        return _merged(adapters.without_adapter(reader), dequantize, planning.check_dtype(dtype), adapter)
    if not dequantize:
        return reader
    config = {} if reader.format in configs.MADE else configs.of_reader(reader)  # its types are in its header
    return quantised.Dequantised(reader, config, planning.check_dtype(dtype))


def _merged(reader: Reader, dequantize: bool, dtype: str, adapter: str | os.PathLike[str]) -> adapters.Merged:
    config = configs.of_reader(reader)
    base, becomes = reader, {}
    if dequantize:
        base = _in_order(reader, config, "float64" if dtype == "float64" else "float32")
        usual = quantised.default_dtype(reader.tensors, base.packed.quantised, config)
        becomes = dict.fromkeys(base.quantised, usual)
    else:
        quantised.check_plain(reader, config)
    tied = model_checks.tied_by(config, {name: info.shape for name, info in base.tensors.items()})
    opened = adapters.LoraAdapter.open(remote.to_path(adapter))
    if tied and not dequantize:
        base, before = adapters.untied(base, opened, config), base
        tied = base is before
    return adapters.Merged(base, opened, config, dtype, bool(tied), becomes=becomes)


def _in_order(reader: Reader, config: Mapping[str, object], dtype: str) -> quantised.TurnedTensors:
    """Return a quantised base in the form that adapters are merged into.

    Raises:
        CheckpointError: a tensor is stored neither as a matrix nor as its transpose.
    """
    base = quantised.TurnedTensors(quantised.Dequantised(reader, {} if reader.format == "gguf" else config, dtype))
    odd = next((name for name, one in base.quantised.items() if not quantised.is_in_order(one)), None)
    if odd is not None:
        raise CheckpointError(
            f"{printable(odd)} of {printable(str(reader.path), 400)} has an order of its own in the file: convert with "
            "--to same --dequantize --dtype f32 first, and what comes of it with --adapter"
        )
    return base


def with_notes(plan: Plan, unused: Manifest | None) -> Plan:
    """Return a plan with notes on the tensors that are left out.

    Args:
        plan: the plan.
        unused: the manifest next to the source, if its restore data is unusable because names lost their prefix.
    """
    kept = unused is not None and unused.kept is not None
    lost = "left out, as names without their prefix lead nowhere back: what was kept aside beside the source"
    return dataclasses.replace(plan, notes=(*plan.notes, *plan.selection.notes(), *([lost] if kept else ())))


def with_files(plan: Plan, reader: Reader, is_folder: bool) -> Plan:
    """Return the plan with the files of the source's folder that are copied, and notes on those that are left out."""
    has_config = accompanying.config_beside(plan, reader, None, is_folder=is_folder) is not None
    files, notes = accompanying.find(configs.home_of(reader), is_folder=is_folder, has_config=has_config)
    is_model = plan.target_layout.startswith("hf-") and layouts.find(plan.target_layout).whole
    if is_folder and is_model and not has_config:
        notes = (*notes, "no config.json is written, without which no model is loaded: copy that of the model")
    notes = (*configs.notes_on_files(reader.path), *notes)
    return dataclasses.replace(plan, files=files, notes=(*plan.notes, *reader.notes, *notes))


def plan_of_copy(reader: Reader, target: Path, layout: str | None, format: str, dtype: str | None) -> Plan | None:
    """Return the plan to copy a source that already has the target's layout; None if the layouts differ.

    A conversion there and back leads to such a target, whose manifest names the layout between the two.
    """
    try:
        options = ConvertOptions(from_layout=layout, to_layout=layout, format=format, dtype=dtype)
        return plan_of(reader, None, target, options, None)
    except (layouts.LayoutError, WeightsMismatchError):
        return None


def plan_of(
    reader: Reader, before: Manifest | None, target: Path, options: ConvertOptions, selection: Selection | None
) -> Plan:
    """Plan a conversion of an open source.

    Args:
        reader: the source as it is converted: dequantised or merged already.
        before: the manifest of the source.
        target: file or folder.
        options: layouts, container, rules, dtype and settings are read of them.
        selection: which tensors of the source are taken; None: all, which need not be a whole model.
    """
    kind, settings = containers.with_settings(containers.format_of(target, options.format), options.settings)
    from_layout, to_layout = options.from_layout, options.to_layout
    headers = reader.headers if isinstance(reader, quantised.Dequantised) else reader
    table = None
    if options.rules is not None:
        direction = rules_file.direction(from_layout, to_layout)
        own = before.layout if before is not None else ""
        table = rules_file.read(Path(options.rules), headers.tensors, own, direction)
        from_layout = to_layout = None
    is_folder = configs.is_folder(target, kind)
    is_read = options.rules is None and to_layout != "same"
    if not isinstance(reader, quantised.Dequantised):
        quantised.check_blocks(reader)
    config = configs.checked_of(reader) if is_read or (is_folder and reader.format != "gguf") else None
    if is_read and not isinstance(reader, quantised.Dequantised):
        quantised.check_plain(reader, config or {})
    made = planning.make(
        headers,
        source_layout=from_layout,
        target_layout=to_layout,
        target_format=kind.partition("+")[0],
        is_folder=is_folder,
        dtype=options.dtype,
        settings=settings,
        config=config if is_read else None,
        table=table,
        manifest=before,
        selection=selection,
    )
    return _with_numbers(made, reader, config or {}, is_read=is_read)


def _with_numbers(plan: Plan, reader: Reader, config: Mapping[str, object], *, is_read: bool) -> Plan:
    """Return an executable plan, with notes on the numbers that are read.

    Args:
        plan: made from headers.
        reader: the source.
        config: the model's.
        is_read: whether names map to tensors of ours.
    """
    dtypes = sorted({one.info.dtype for one in plan.targets if is_float(one.info.dtype)})
    if is_read and reader.format == "gguf" and len(dtypes) > 1:  # llama.cpp has all vectors in float32
        unlike = (
            f"{' and '.join(dtypes)} stay as they are; torch loads such a model in the wider one, --dtype casts here"
        )
        plan = dataclasses.replace(plan, notes=(*plan.notes, unlike))
    if isinstance(reader, quantised.Dequantised):
        return quantised.in_file_order(plan, reader)
    packed = quantised.dequantised_in(reader.base) if isinstance(reader, adapters.Merged) else None
    if packed is None:
        kept_tensors = {name: info for name, info in reader.tensors.items() if name not in plan.dropped}
        notes = quantised.notes_on_codes(kept_tensors) if is_read else []
        notes += quantised.notes_on_config(config, plan.config)
        return dataclasses.replace(plan, notes=(*plan.notes, *notes)) if notes else plan
    scales = {one.name: one.others for one in packed.quantised.values()}
    return dataclasses.replace(plan, scales=scales, notes=(*plan.notes, *quantised.notes_of(packed)))
