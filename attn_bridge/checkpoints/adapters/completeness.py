"""Parts that an adapter's config names and its file lacks: trained modules, biases, layers of the base."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ...printable import printable
from ..containers.base import TensorInfo
from ..containers.files import bad, listed
from .config import LoraConfig
from .pairing import OF_TABLES, Change

SHOWN = 3
"""Layers that a note names."""


def check(
    path: Path, config: LoraConfig, changes: Mapping[str, Change], base: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """Refuse an adapter whose file lacks trained tensors, and return a note on layers without a LoRA.

    Such layers are no error: peft loads the adapter as well, with a warning, and a base may have more of them, such as
    those of a vision tower.

    Args:
        path: of the adapter.
        config: its config.
        changes: name of the base's tensors -> how the adapter changes it.
        base: name -> header of the base's tensors.

    Raises:
        CheckpointError: a module of ``modules_to_save`` that the base has, or a bias of ``lora_bias``, is missing.
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
