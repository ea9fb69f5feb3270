"""Load and save weights of modules as checkpoints of any layout and container, and as folders with a config.

The twin is `jax_attn.checkpoints.files`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from .undrawn import give_memory, undrawn

if TYPE_CHECKING:  # with every family of models, which most programs never read
    from attn_bridge.checkpoints.hub import publishing
    from attn_bridge.models.derived.family import Family

PathLike = str | os.PathLike[str]


def load(
    path: PathLike,
    module: nn.Module,
    *,
    from_layout: str | None = None,
    settings: Mapping[str, Any] | None = None,
    strip: str | None = None,
    drop: str | Sequence[str] | None = None,
    rules: PathLike | None = None,
) -> None:
    """Write a checkpoint's tensors into a module: all of them, or none; a parameter takes its tensor's dtype.

    Where layers of a whole model have several floating-point dtypes in the file (a GGUF's), they take the widest.

    Args:
        path: file or folder, in any container.
        module: a module of ours, or a module with the checkpoint's names.
        from_layout: layout of the checkpoint; None detects it from the names.
        settings: settings that names and shapes don't determine.
        strip: prefix that the checkpoint's names lose, such as ``model.``; tensors without it are left out.
        drop: patterns of names, such as ``my.*``, that are left out; a pattern that fits no name is refused.
        rules: a TOML file of rules from the checkpoint's names to the module's, instead of layouts.

    Raises:
        WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        CheckpointError: (a ValueError) the checkpoint is malformed.
        LayoutError: (a ValueError) its layout is ambiguous or unknown.
        TypeError: `path` and `module` are swapped, or the framework lacks a dtype or would narrow it.
    """
    from attn_bridge.checkpoints import modules

    modules.check_arguments("load(path, module)", "torch.nn.Module", nn.Module, module, path)
    modules.load("torch", Path(path), module, from_layout, settings, strip=strip, drop=drop, rules=rules)


def save(
    module: nn.Module,
    path: PathLike,
    *,
    to_layout: str = "same",
    format: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a module's weights to a checkpoint atomically.

    Args:
        module: any module; a module of ours if `to_layout` is given.
        path: file (its extension names the container) or folder.
        to_layout: layout of the checkpoint, such as ``hf-gpt2``; ``same`` keeps the module's names.
        format: container, if the path has no known extension.
        settings: settings that names and shapes don't determine.
        overwrite: replace an existing file or folder.

    Raises:
        CheckpointError: (a ValueError) the target exists or can't be written.
        LayoutError: (a ValueError) the weights do not fit the layout; `WeightsMismatchError` lists names.
        TypeError: `module` and `path` are swapped.
    """
    from attn_bridge.checkpoints import modules

    modules.check_arguments("save(module, path)", "torch.nn.Module", nn.Module, module, path)
    modules.save("torch", module, Path(path), to_layout, format, settings, overwrite)


class Pretrained:
    """Base of whole models: loads and saves a folder with config.json and safetensors, which both frameworks read."""

    config: Any

    @classmethod
    def from_pretrained(
        cls,
        folder: PathLike,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: PathLike | None = None,
        local_files_only: bool = False,
        family: Family | PathLike | None = None,
        **keywords: object,
    ) -> Self:
        """Return the model of a folder, in eval mode: one of ours, or one of `transformers` of the same kind.

        Args:
            folder: the folder; the id of a model on the Hugging Face hub, ``org/name``, is downloaded.
            revision: branch, tag or commit of the hub's repository; None is its main branch.
            token: of the hub; None takes the stored login, False sends no token.
            cache_dir: folder of downloads; None is the hub's own cache.
            local_files_only: use the cache without contacting the hub.
            family: reads config and names of a model that the package does not know: the result of
                `attn_bridge.models.derive`, or a file of ``attn-bridge derive``; None takes the folder's own file, if
                it has one.
            **keywords: of the constructor; parameters take the dtypes of the files.

        Raises:
            CheckpointError: (a ValueError) no such folder, no config, another model, or malformed files.
            WeightsMismatchError: (a ValueError) missing, unexpected and misshapen names, all of them.
        """
        from attn_bridge.checkpoints import configs, modules
        from attn_bridge.checkpoints.hub import reading
        from attn_bridge.models.derived import stored

        path = reading.find_folder(
            folder, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        device = keywords.pop("device", None)
        with stored.used(path, family):
            config = configs.read_config(cls.__name__, path)
            with undrawn():
                model: Any = cls(config, **keywords)  # type: ignore[call-arg]
            give_memory(model, device)
            modules.load("torch", path, model, None, None, adopt=True)
        model.eval()
        loaded: Self = model
        return loaded

    def save_pretrained(self, folder: PathLike, *, overwrite: bool = False) -> None:
        """Write config.json and the weights, under torch names, which the twin reads as well.

        Raises:
            CheckpointError: (a ValueError) the folder exists or can't be written.
        """
        from attn_bridge.checkpoints import configs, modules

        module: Any = self
        config = configs.own_config(type(self).__name__, self.config)
        modules.save("torch", module, Path(folder), "torch", "safetensors", None, overwrite, config)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        report: object = None,
        license: str | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        create_pr: bool = False,
    ) -> publishing.Published:
        """Send the files of `save_pretrained` to the Hugging Face hub, as one commit, with a model card.

        To resume an interrupted push, call it again: files that the hub has received are not sent twice.

        Args:
            repo_id: ``name`` or ``org/name``; created if missing.
            report: the result of `parity.compare`, `check_model`, `check` or `train`, its data or its JSON file; the
                card shows it, and the repository keeps a copy.
            license: identifier of the weights' licence for a new card, such as ``apache-2.0``.
            commit_message: first line of the commit.
            revision: a branch, created if missing; None is the main branch.
            private: whether a new repository is private; None is the owner's default.
            token: of the hub; None takes the stored login.
            create_pr: open a pull request instead.

        Raises:
            CheckpointError: (a ValueError) the hub refuses.
            ValueError: an argument is wrong.
        """
        from attn_bridge.checkpoints.hub import publishing

        return publishing.push_model(
            "torch",
            self,
            repo_id,
            report=report,
            license=license,
            commit_message=commit_message,
            revision=revision,
            private=private,
            token=token,
            create_pr=create_pr,
        )
