"""Checkpoints: convert, inspect and verify them in any container and layout, without a framework.

convert("gpt2/", "gpt2-flax/")        to the twin, in bounded memory, without losing a bit
inspect("model.safetensors")          names, shapes, dtypes and layout, from headers alone
verify("gpt2/", "gpt2-flax/")         every byte against digests, and against the source converted again
open("model.safetensors")             a mapping of names to arrays, read when they are asked for
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from .containers.base import Reader, TensorInfo
    from .execution import Progress, Result
    from .planning.plans import Plan
    from .verification import Verification

__all__ = ["Checkpoint", "Inspection", "convert", "inspect", "open", "plan", "read", "verify"]

PathLike = str | os.PathLike[str]


class Checkpoint(Mapping[str, "np.ndarray[Any, Any]"]):
    """The tensors of a checkpoint by name; each is read from the file when it is asked for.

    Args:
        reader: the open container.

    Attributes:
        tensors: name -> shape, dtype and file, from headers alone.
        metadata: what the container says beside its tensors.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self.tensors: dict[str, TensorInfo] = reader.tensors
        self.metadata: dict[str, Any] = reader.metadata

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._reader.read(name).copy()  # the bytes of a file can't be written to

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __repr__(self) -> str:
        return f"<{self._reader.format} checkpoint {self._reader.path}: {len(self)} tensors>"

    def close(self) -> None:
        """Close its files."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open(path: PathLike, *, format: str | None = None) -> Checkpoint:
    """Open a checkpoint in any container as a mapping of names to arrays.

    Raises:
        CheckpointError: (a ValueError) it is absent, malformed, or no container that is known.
    """
    from . import containers
    from .containers import remote

    return Checkpoint(containers.open_reader(remote.to_path(path), format))


def read(path: PathLike) -> dict[str, np.ndarray[Any, Any]]:
    """Return all tensors of a checkpoint by name; bfloat16 comes as `ml_dtypes.bfloat16`.

    Raises:
        CheckpointError: (a ValueError) it is absent, malformed, or no container that is known.
    """
    with open(path) as checkpoint:
        return dict(checkpoint)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What headers say of a checkpoint.

    Attributes:
        path: where it is.
        format: its container.
        layout: its layout; "" if its names fit none.
        why: why they fit none.
        tensors: name -> shape, dtype, file.
        metadata: what the container says beside its tensors.
        has_manifest: whether there are digests beside it.
    """

    path: Path
    format: str
    layout: str
    why: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Any]
    has_manifest: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Dtype -> number of elements."""
        found: dict[str, int] = {}
        for info in self.tensors.values():
            found[info.dtype] = found.get(info.dtype, 0) + info.nbytes // info.itemsize
        return found


def inspect(path: PathLike, *, format: str | None = None) -> Inspection:
    """Say what a checkpoint holds, from headers alone.

    Raises:
        CheckpointError: (a ValueError) it is absent, malformed, or no container that is known.
    """
    from ..models import layouts
    from . import configs, containers, manifest
    from .containers import remote

    path = remote.to_path(path)
    with containers.open_reader(path, format) as reader:
        layout, why = "", ""
        try:
            layout = layouts.detect(reader.tensors, configs.beside(reader.path).get("model_type")).name
        except (layouts.LayoutError, containers.CheckpointError) as error:
            why = str(error)
        return Inspection(
            path, reader.format, layout, why, reader.tensors, reader.metadata, manifest.of(reader, path) is not None
        )


def plan(
    source: PathLike,
    target: PathLike,
    *,
    from_layout: str | None = None,
    to_layout: str | None = None,
    format: str | None = None,
    rules: PathLike | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dequantize: bool = False,
) -> Plan:
    """Return what `convert` would do with the same arguments, from headers alone."""
    from . import containers, manifest
    from .containers import remote

    origin = remote.to_path(source)
    with containers.open_reader(origin) as opened:
        reader = _dequantised(opened, dtype) if dequantize else opened
        before = manifest.of(reader, origin)
        return _plan(reader, before, remote.to_path(target), from_layout, to_layout, format, rules, dtype, settings)


def convert(
    source: PathLike,
    target: PathLike,
    *,
    from_layout: str | None = None,
    to_layout: str | None = None,
    format: str | None = None,
    rules: PathLike | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dequantize: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Convert a checkpoint from one layout and container to another, tensor by tensor, bit for bit.

    Nothing stands in the target's place until all of it is written and on disk. What the target's layout has no place
    for is kept beside it, so that the way back restores it.

    Args:
        source: file or folder.
        target: file (its extension names the container) or folder.
        from_layout: layout of the source; None detects it from the names.
        to_layout: layout of the target; None is the twin (flax, or torch for what is Flax's); ``same`` leaves it.
        format: container of the target: ``safetensors``, ``torch``, ``npz``, ``msgpack``, ``orbax`` or ``dcp``.
        rules: a TOML file of a user's own rules, in place of the layouts.
        dtype: cast floating-point tensors: ``bf16``, ``f16``, ``f32`` or ``f64``; None never casts.
        settings: what names and shapes don't tell, such as ``{"num_heads": 12}``; ``config.json`` may say it, too.
        dequantize: make floating point of MXFP4 and of float8 with scales: `dtype`, or bfloat16 where that is None.
        resume: go on where an interrupted run stopped.
        overwrite: replace an existing target.
        max_memory: bytes of memory to stay within; None takes about three times the largest tensor.
        progress: called with the bytes done, all bytes, and the tensor at hand.

    Returns:
        Digests of what was written, and how many elements a cast changed.

    Raises:
        CheckpointError: (a ValueError) the source is malformed or changed, or the target can't be written.
        LayoutError: (a ValueError) names, shapes or settings that don't fit; `WeightsMismatchError` lists names.
    """
    from . import configs, containers, execution, manifest
    from .containers import remote

    origin, target = remote.to_path(source), remote.to_path(target)
    with containers.open_reader(origin) as opened:
        reader = _dequantised(opened, dtype) if dequantize else opened
        before = manifest.of(reader, origin)
        kind, settings = containers.with_settings(containers.format_of(target, format), settings)
        planned = _plan(reader, before, target, from_layout, to_layout, kind, rules, dtype, settings)
        return execution.carry_out(
            planned,
            reader,
            target,
            kind,
            before=before,
            is_folder=configs.is_folder(target, kind),
            resume=resume,
            overwrite=overwrite,
            max_memory=max_memory,
            progress=progress or (lambda done, total, name: None),
        )


def verify(
    source: PathLike | None,
    target: PathLike,
    *,
    from_layout: str | None = None,
    to_layout: str | None = None,
    rules: PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    dequantize: bool = False,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check a checkpoint bit by bit: by the digests beside it, and by converting its source again in memory.

    Args:
        source: what it was made of; None checks the digests alone.
        target: the checkpoint to check.
        from_layout: layout of the source; None is what the manifest says, or detected.
        to_layout: layout of the target; None is what the manifest says, or detected.
        rules: the rules file it was converted with.
        settings: the settings it was converted with.
        dequantize: whether the source was dequantised; where there is a manifest, that says so.
        max_memory: bytes of memory to stay within.
        progress: called with the bytes done, all bytes, and the tensor at hand.

    Raises:
        CheckpointError: (a ValueError) one of them is malformed, or there is nothing to check by.
    """
    from ..models import layouts
    from ..weights import WeightsMismatchError
    from . import configs, containers, manifest, verification
    from .containers import remote
    from .containers.base import CheckpointError

    progress = progress or (lambda done, total, name: None)
    origin, target = None if source is None else remote.to_path(source), remote.to_path(target)
    with containers.open_reader(target) as there:
        known = manifest.of(there, target)
        problems: dict[str, str] = {}
        if known is not None:
            problems |= verification.by_digests(there, known, progress)
        elif origin is None:
            raise CheckpointError(f"{target} has no manifest beside it; give its source to hold it against")
        if origin is not None:
            if rules is None and known is not None and known.layout not in ("", *layouts.names()):
                raise CheckpointError(f"{target} was converted by rules of one's own; give them, too")
            if rules is None and known is not None:
                from_layout = from_layout or known.source.get("layout") or None
                to_layout = to_layout or known.layout or "same"
                settings = {**known.source.get("settings", {}), **(settings or {})} if to_layout != "same" else settings
            elif rules is None and to_layout is None:
                to_layout = layouts.detect(there.tensors, configs.beside(there.path).get("model_type")).name
            with containers.open_reader(origin) as opened:
                dtype = known.dtype if known is not None and known.dtype else None
                if known is not None and known.source.get("quantised"):
                    dequantize = True
                    problems |= verification.by_originals(opened, known)
                reader = _dequantised(opened, dtype) if dequantize else opened
                before = manifest.of(reader, origin)
                try:
                    planned = _plan(
                        reader, before, target, from_layout, to_layout, there.format, rules, dtype, settings
                    )
                except (WeightsMismatchError, layouts.LayoutError) as error:
                    made_of = None if known is None else known.source.get("layout")
                    if not made_of or from_layout != made_of:
                        raise
                    if isinstance(error, layouts.LayoutError) and layouts.find(made_of).match(reader.tensors)[1]:
                        raise  # its names are those of the layout
                    raise verification.another_source(origin, target, made_of, error) from None
                found = verification.by_source(planned, reader, before, there, max_memory, progress)
            problems = {**found, **problems}
    return verification.Verification(not problems, len(there.tensors), problems, known is not None, origin is not None)


def _dequantised(reader: Reader, dtype: str | None) -> Reader:
    """Return a quantised checkpoint as one of floating point."""
    from . import configs, planning, quantised

    return quantised.Dequantised(reader, configs.beside(reader.path), planning.check_dtype(dtype) or "bfloat16")


def _plan(
    reader: Reader,
    before: Any,
    target: Path,
    from_layout: str | None,
    to_layout: str | None,
    format: str | None,
    rules: PathLike | None,
    dtype: str | None,
    settings: Mapping[str, Any] | None,
) -> Plan:
    from ..models import rules_file
    from . import configs, containers, planning, quantised

    kind, settings = containers.with_settings(containers.format_of(target, format), settings)
    headers = reader.headers if isinstance(reader, quantised.Dequantised) else reader
    table = None
    if rules is not None:
        direction = rules_file.direction(from_layout, to_layout)
        own = before.layout if before is not None else ""
        table = rules_file.read(Path(rules), headers.tensors, own, direction)
        from_layout = to_layout = None
    made = planning.make(
        headers,
        source_layout=from_layout,
        target_layout=to_layout,
        target_format=kind.partition("+")[0],
        is_folder=configs.is_folder(target, kind),
        dtype=dtype,
        settings=settings,
        config=configs.beside(reader.path) if rules is None and to_layout != "same" else None,
        table=table,
        manifest=before,
    )
    return quantised.in_file_order(made, reader) if isinstance(reader, quantised.Dequantised) else made
