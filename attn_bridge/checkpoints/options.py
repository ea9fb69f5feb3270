"""The options of a conversion, which `plan`, `tasks`, `convert`, `convert_share`, `finish` and `verify` take alike."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeGuard

from .containers import remote
from .containers.base import CheckpointError
from .selection import check_patterns

PathLike = str | os.PathLike[str]

_TEXTS = ("from_layout", "to_layout", "format", "dtype", "strip", "source_format", "item")

_MEANT = {"to": "to_layout", "from": "from_layout", "from_": "from_layout", "set": "settings", "layout": "to_layout"}
"""Name of a command-line option, or a likely guess -> the option."""

_BYTES = ("max_memory", "task_bytes")
_SWITCHES = ("dequantize", "overwrite", "resume")


class ShareKeywords(TypedDict, total=False):
    """The options of a worker's share as keywords; see `ConvertOptions`."""

    from_layout: str | None
    to_layout: str | None
    format: str | None
    rules: PathLike | None
    dtype: str | None
    settings: Mapping[str, Any] | None
    dequantize: bool
    strip: str | None
    drop: str | Sequence[str] | None
    source_format: str | None
    adapter: PathLike | None
    step: int | None
    item: str | None
    max_memory: int | None
    task_bytes: int | None
    overwrite: bool
    resume: bool


class ConvertKeywords(ShareKeywords, total=False):
    """The options as keywords; see `ConvertOptions`."""

    workers: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion, checked on construction.

    Attributes:
        from_layout: layout of the source; None detects it from the names (`verify`: from the manifest).
        to_layout: layout of the target; None is the twin (flax, or torch if the source is Flax); ``same`` keeps it.
        format: container of the target: ``safetensors``, ``torch``, ``npz``, ``msgpack``, ``orbax`` or ``dcp``; None
            takes it from the extension (`verify`: from the target itself).
        rules: a TOML file of a user's rules, which replace the layouts.
        dtype: cast floating-point tensors: ``bf16``, ``f16``, ``f32`` or ``f64``; None never casts. `verify` prefers
            the manifest's.
        settings: values that names and shapes don't determine, such as ``{"num_heads": 12}``; ``config.json`` may
            supply them as well.
        dequantize: convert MXFP4, float8 with scales, GPTQ, AWQ, bitsandbytes and compressed-tensors to the
            floating-point `dtype`; if that is None, to bfloat16 for the first two and to the dtype of the other tensors
            for the rest.
        strip: prefix to remove from the source's names, such as ``module.``; tensors without it are left out.
            `verify` takes None for the manifest's prefix, and "" for no prefix.
        drop: patterns of names to leave out, such as ``model.visual.*``; a pattern that matches no name is an error.
            `verify` takes None for the manifest's patterns, and [] for none.
        source_format: container of the source, if its extension is missing or misleading.
        adapter: folder of a LoRA of peft, merged into the source in float32, rounded once to `dtype` or the source's.
        step: step to read from a run of Orbax's CheckpointManager; None is the newest.
        item: item to read from such a step; None is the only item, or the one whose name is that of a model.
        max_memory: maximum memory in bytes; None takes about three times the largest tensor, or as needed by tasks.
        task_bytes: maximum bytes that a worker writes at a time; it takes twice as much memory. None: 256 MiB.
        workers: processes that share the work; the bytes are the same for any number. None: by cores and size.
        overwrite: replace an existing target.
        resume: continue where an interrupted run stopped.

    Raises:
        TypeError: an option has the wrong type.
        CheckpointError: (a ValueError) a pattern of `drop` is not valid, or a number of bytes is not a whole number.
    """

    from_layout: str | None = None
    to_layout: str | None = None
    format: str | None = None
    rules: PathLike | None = None
    dtype: str | None = None
    settings: Mapping[str, Any] | None = None
    dequantize: bool = False
    strip: str | None = None
    drop: str | Sequence[str] | None = None
    source_format: str | None = None
    adapter: PathLike | None = None
    step: int | None = None
    item: str | None = None
    max_memory: int | None = None
    task_bytes: int | None = None
    workers: int | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} ({value!r}) must be a text or None")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} ({getattr(self, name)!r}) must be True or False")
        for name in _BYTES:
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
                raise CheckpointError(f"{name} ({size!r}) must be a whole number of bytes, or None")
        if self.settings is not None and not isinstance(self.settings, Mapping):
            raise TypeError(f"settings ({self.settings!r}) must be a mapping of names to values, or None")
        if self.drop is not None:
            object.__setattr__(self, "drop", check_patterns(self.drop))
        if self.rules is not None:
            object.__setattr__(self, "rules", os.fspath(self.rules))
        if self.adapter is not None:
            object.__setattr__(self, "adapter", remote.text_of(self.adapter))


def is_path(source: object) -> TypeGuard[PathLike]:
    """Return whether a source is a path, local or behind a URL, and not arrays in memory."""
    return isinstance(source, str | bytes | os.PathLike) or remote.is_remote(source)


def options_of(options: ConvertOptions | None, keywords: ShareKeywords) -> ConvertOptions:
    """Return options with those of the keywords replaced.

    Raises:
        TypeError: a keyword is not an option, or an option has the wrong type.
    """
    fields = [field.name for field in dataclasses.fields(ConvertOptions)]
    unknown = sorted(keywords.keys() - {*fields})
    if unknown:
        near = _MEANT.get(unknown[0]) or next(iter(difflib.get_close_matches(unknown[0], fields, 1)), "")
        raise TypeError(f"{unknown[0]!r} is no option of a conversion" + (f"; did you mean {near}?" if near else ""))
    if options is not None and not isinstance(options, ConvertOptions):
        raise TypeError(f"options ({options!r}) must be ConvertOptions or None")
    return ConvertOptions(**keywords) if options is None else dataclasses.replace(options, **keywords)
