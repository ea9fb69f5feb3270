"""The options of a conversion, which `plan`, `tasks`, `convert`, `convert_share`, `finish` and `verify` take alike."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .containers import remote
from .selection import check_patterns

PathLike = str | os.PathLike[str]

_TEXTS = ("from_layout", "to_layout", "format", "dtype", "strip", "source_format", "item")


class ConvertKeywords(TypedDict, total=False):
    """The options as keywords; `ConvertOptions` says what each means."""

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

    Raises:
        TypeError: an option is of another type.
        CheckpointError: (a ValueError) a pattern of `drop` is none.
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

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} ({value!r}) must be a text or None")
        if self.settings is not None and not isinstance(self.settings, Mapping):
            raise TypeError(f"settings ({self.settings!r}) must be a mapping of names to values, or None")
        if self.drop is not None:
            object.__setattr__(self, "drop", check_patterns(self.drop))
        if self.rules is not None:
            object.__setattr__(self, "rules", os.fspath(self.rules))
        if self.adapter is not None:
            object.__setattr__(self, "adapter", remote.text_of(self.adapter))


def options_of(options: ConvertOptions | None, keywords: ConvertKeywords) -> ConvertOptions:
    """Return options with keywords in place of what they say.

    Raises:
        TypeError: a keyword is no option, or an option is of another type.
    """
    unknown = sorted(keywords.keys() - {field.name for field in dataclasses.fields(ConvertOptions)})
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no option of a conversion")
    if options is not None and not isinstance(options, ConvertOptions):
        raise TypeError(f"options ({options!r}) must be ConvertOptions or None")
    return ConvertOptions(**keywords) if options is None else dataclasses.replace(options, **keywords)
