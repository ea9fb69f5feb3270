"""Weights of modules from and to checkpoints of any layout and container, and folders with a config beside them.

The twin is `torch_attn.checkpoints.files`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from flax import nnx

from attn_bridge.checkpoints import configs, modules

from ..linear import undrawn

PathLike = str | os.PathLike[str]


def load(
    path: PathLike, module: nnx.Module, *, from_layout: str | None = None, settings: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint's tensors into a module: all of them, or none; a parameter takes its tensor's dtype.

    Args:
        path: file or folder, in any container.
        module: a module of ours, or one whose names are the checkpoint's.
        from_layout: layout of the checkpoint; None detects it from the names.
        settings: what names and shapes don't tell.

    Raises:
        WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        CheckpointError: (a ValueError) the checkpoint is malformed.
        LayoutError: (a ValueError) its layout can't be told.
        TypeError: `path` and `module` are taken for each other, or the framework lacks a dtype or would narrow it.
    """
    modules.check_arguments("load(path, module)", "flax.nnx.Module", nnx.Module, module, path)
    modules.load("flax", Path(path), module, from_layout, settings)


def save(
    module: nnx.Module,
    path: PathLike,
    *,
    to_layout: str = "same",
    format: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a module's weights to a checkpoint, all at once.

    Args:
        module: any module; one of ours where `to_layout` is given.
        path: file (its extension names the container) or folder.
        to_layout: layout of the checkpoint, such as ``hf-gpt2``; ``same`` keeps the module's names.
        format: container, where the path does not say it.
        settings: what names and shapes don't tell.
        overwrite: replace what is there.

    Raises:
        CheckpointError: (a ValueError) the target exists or can't be written.
        LayoutError: (a ValueError) the weights do not fit the layout; `WeightsMismatchError` lists names.
        TypeError: `module` and `path` are taken for each other.
    """
    modules.check_arguments("save(module, path)", "flax.nnx.Module", nnx.Module, module, path)
    modules.save("flax", module, Path(path), to_layout, format, settings, overwrite)


class Pretrained:
    """What whole models have in common: a folder with config.json and safetensors, which both frameworks read."""

    config: Any

    @classmethod
    def from_pretrained(cls, folder: PathLike, **keywords: Any) -> Self:
        """Return the model of a folder, in eval mode: one of ours, or one of `transformers` of the same kind.

        Args:
            folder: the folder; the id of a model on the Hugging Face hub is downloaded.
            **keywords: of the constructor; parameters take the dtypes of the files. Without ``rngs``, dropout in
                training draws from ``nnx.Rngs(0)``.

        Raises:
            CheckpointError: (a ValueError) no such folder, no config, another model, or malformed files.
            WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        """
        path = modules.find_folder(folder if isinstance(folder, str) else Path(folder))
        config, given = configs.read_config(cls.__name__, path), dict(keywords)
        rngs = given.pop("rngs", None) or nnx.Rngs(0)
        kind: Any = cls
        with undrawn():
            model: Any = kind(config, rngs=rngs, **given)
        modules.load("flax", path, model, None, None, adopt=True)
        model.eval()
        found: Self = model
        return found

    def save_pretrained(self, folder: PathLike, *, overwrite: bool = False) -> None:
        """Write config.json and the weights, under torch names, which the twin reads as well.

        Raises:
            CheckpointError: (a ValueError) the folder exists or can't be written.
        """
        module: Any = self
        config = configs.own_config(type(self).__name__, self.config)
        modules.save("flax", module, Path(folder), "torch", "safetensors", None, overwrite, config)
