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
"""Option of the command line, or what it is likely to be called -> the option."""

_BYTES = ("max_memory", "task_bytes")
_SWITCHES = ("dequantize", "overwrite", "resume")


class ShareKeywords(TypedDict, total=False):
    """The options of a worker's share as keywords; `ConvertOptions` says what each means."""

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
    """The options as keywords; `ConvertOptions` says what each means."""

    workers: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How a checkpoint is converted; checked when it is made.

    Attributes:
        from_layout: layout of the source; None detects it from the names, `verify` what the manifest says.
        to_layout: layout of the target; None is the twin (flax, or torch for what is Flax's); ``same`` leaves it.
        format: container of the target: ``safetensors``, ``torch``, ``npz``, ``msgpack``, ``orbax`` or ``dcp``; None
            goes by its extension, and `verify` looks.
        rules: a TOML file of a user's own rules, in place of the layouts.
        dtype: cast floating-point tensors: ``bf16``, ``f16``, ``f32`` or ``f64``; None never casts. `verify` goes by
            the manifest.
        settings: what names and shapes don't tell, such as ``{"num_heads": 12}``; ``config.json`` may say it, too.
        dequantize: make floating point of MXFP4, float8 with scales, GPTQ, AWQ and bitsandbytes: `dtype`; where that is
            None, bfloat16 for the first two and the dtype of the other tensors for the rest.
        strip: what to take from the beginning of the source's names, such as ``module.``; what has it not is left out.
            `verify` takes None for what the manifest says, and "" for nothing.
        drop: patterns of names, such as ``model.visual.*``, that are left out; what fits no name is refused. `verify`
            takes None for what the manifest says, and [] for nothing.
        source_format: container of the source, where its extension says none, or another.
        adapter: folder of a LoRA of peft, merged into the source in float32, rounded once to `dtype` or the source's.
        step: which step of a run of Orbax's CheckpointManager is read; None is the newest.
        item: which item of such a step; None is the only one, or the one that holds a model by its name.
        max_memory: bytes of memory to stay within; None takes about three times the largest tensor, or what tasks need.
        task_bytes: what a worker writes at a time, at most, in bytes; it takes twice as much memory. None: 256 MiB.
        workers: processes that share the work; the bytes are the same for any number. None: as many as pay.
        overwrite: replace an existing target.
        resume: go on where an interrupted run stopped.

    Raises:
        TypeError: an option is of another type.
        CheckpointError: (a ValueError) a pattern of `drop` is none, or a number of bytes is no whole one.
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
    """Whether a source is a path, local or behind a URL, and not arrays in memory."""
    return isinstance(source, str | bytes | os.PathLike) or remote.is_remote(source)


def options_of(options: ConvertOptions | None, keywords: ShareKeywords) -> ConvertOptions:
    """Return options with keywords in place of what they say.

    Raises:
        TypeError: a keyword is no option, or an option is of another type.
    """
    fields = [field.name for field in dataclasses.fields(ConvertOptions)]
    unknown = sorted(keywords.keys() - {*fields})
    if unknown:
        near = _MEANT.get(unknown[0]) or next(iter(difflib.get_close_matches(unknown[0], fields, 1)), "")
        raise TypeError(f"{unknown[0]!r} is no option of a conversion" + (f"; did you mean {near}?" if near else ""))
    if options is not None and not isinstance(options, ConvertOptions):
        raise TypeError(f"options ({options!r}) must be ConvertOptions or None")
    return ConvertOptions(**keywords) if options is None else dataclasses.replace(options, **keywords)
