"""Publishes a model's folder as one commit to the Hugging Face hub: weights, config, card and parity report.

Weights that the hub already has are not sent again, so that an interrupted push resumes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import backends
from ...backends import Framework
from ...models import families
from ...models.ours import OWN
from ...models.reading import multimodal
from ...printable import printable
from .. import configs
from ..containers.base import CheckpointError
from ..containers.files import LinkError, resolve_below
from . import card
from .reading import import_hub, is_id, reason

CARD, REPORT, PAGE = "README.md", "parity.json", "parity.html"

_WEIGHTS = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?")
"""Files of weights that a push replaces: older shards are deleted if the new model has fewer."""


@dataclasses.dataclass(frozen=True)
class Published:
    """Result of a push.

    Attributes:
        url: page of the commit, or of the pull request.
        commit: the commit, which `from_pretrained` takes as ``revision``.
        repo_id: of the repository.
    """

    url: str
    commit: str
    repo_id: str

    def __str__(self) -> str:
        return self.url


def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    report: object = None,
    license: str | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
) -> Published:
    """Send a model's folder to the Hugging Face hub, as one commit, with a model card; a model's own method does so.

    A concurrent download of the repository gets either the former model or the new one.

    Args:
        folder: written by `save_pretrained` or ``attn-bridge convert``: config.json and safetensors.
        repo_id: ``name`` or ``org/name``; created if missing.
        report: the result of `parity.compare`, `check_model`, `check` or `train`, its data or its JSON file, which the
            card shows and the repository contains.
        license: identifier of the weights' licence for a new card, such as ``apache-2.0``.
        commit_message: first line of the commit.
        revision: a branch, created if missing; None is the main branch.
        private: whether a new repository is private; None is the owner's default.
        token: of the hub; None is that of the login.
        create_pr: open a pull request instead.

    Returns:
        The page of the commit, and the commit, which `from_pretrained` takes as ``revision``.

    Raises:
        CheckpointError: (a ValueError) the folder has no model, or the hub refuses.
        ValueError: an argument is wrong.
    """
    path = Path(folder)
    if not (path / configs.CONFIG).is_file():
        raise CheckpointError(f"{path} has no {configs.CONFIG}")
    if not any(_WEIGHTS.fullmatch(one.name) for one in path.iterdir()):
        raise CheckpointError(f"{path} has no model.safetensors")
    check_push(repo_id, revision, create_pr)
    data = card.read_report(report)
    files = _files_of(path)
    hub = import_hub(f"{repo_id} can't be pushed", "send it to the hub")
    api = hub.HfApi(token=token, library_name="attn-bridge")
    kind = _model_of(path)

    with tempfile.TemporaryDirectory() as scratch:
        beside = _reports(Path(scratch), report, data)
        try:
            made = api.create_repo(repo_id, private=private, exist_ok=True)
            repository = str(getattr(made, "repo_id", None) or repo_id)
            if revision is not None and not create_pr and not revision.startswith("refs/"):
                api.create_branch(repository, branch=revision, exist_ok=True)
            remote_files = set(api.list_repo_files(repository, revision=revision))
            before = _former_card(api, repository, revision, scratch) if CARD in remote_files else None
            text = card.write(
                repository, kind, data, before=before, files=[one.name for one in beside], license=license
            )
            sent = {**files, **{one.name: one for one in beside}}
            stale = {name for name in remote_files - sent.keys() if _WEIGHTS.fullmatch(name) or name in (REPORT, PAGE)}
            info = api.create_commit(
                repository,
                [
                    *(hub.CommitOperationAdd(name, str(one)) for name, one in sent.items()),
                    hub.CommitOperationAdd(CARD, text.encode()),
                    *(hub.CommitOperationDelete(name) for name in sorted(stale)),
                ],
                commit_message=commit_message or f"{kind} by attn-bridge",
                revision=revision,
                create_pr=create_pr,
            )
        except Exception as error:  # of the hub, its network or its disk, all with different classes
            raise CheckpointError(f"{repo_id} can't be pushed: {reason(error, token)}") from None
    return Published(str(info.pr_url if create_pr and info.pr_url else info.commit_url), str(info.oid), repository)


def push_model(side: Framework, model: Any, repo_id: str, *, report: Any = None, **options: Any) -> Published:
    """Push a model of a framework, see `push_to_hub`; the arguments are checked before its weights are written.

    Raises:
        ValueError: an argument is wrong, or devices share the model's weights.
    """
    check_push(repo_id, options.get("revision"), bool(options.get("create_pr")))
    data = card.read_report(report)
    if backends.load(side).shared_names(model):
        raise ValueError(
            f"{repo_id} can't be pushed from a model whose weights devices share; save_pretrained(folder) in every "
            "process, then attn_bridge.checkpoints.push_to_hub(folder, repo_id) in one"
        )
    import_hub(f"{repo_id} can't be pushed", "send it to the hub")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)
        return push_to_hub(folder, repo_id, report=report if hasattr(report, "to_html") else data, **options)


def check_push(repo_id: str, revision: str | None, create_pr: bool) -> None:
    """Check arguments before weights are written.

    Raises:
        ValueError: an argument is not valid.
        TypeError: `repo_id` is not a string.
    """
    if not isinstance(repo_id, str):
        raise TypeError(f"repo_id must be a str, got {type(repo_id).__name__}")
    if not is_id(repo_id):
        raise ValueError(f"repo_id ({repo_id}) must be the id of a repository: name or org/name")
    if revision is not None and create_pr:
        raise ValueError(f"revision ({revision}) does not go with create_pr: a pull request is made to the main branch")


def _model_of(path: Path) -> str:
    """Return the class that reads a folder."""
    kind = str(multimodal.registered_type(configs.beside(path)))
    if kind.startswith(OWN):
        return kind.removeprefix(OWN)
    family = families.FAMILIES.get(kind)
    if family is None:
        return "BertEncoder" if kind == "bert" else "DecoderModel"
    return family.whole.__name__.removesuffix("Config") + "Model"


def _files_of(folder: Path) -> dict[str, Path]:
    """Return name -> resolved file for all files of a folder except the card.

    Raises:
        CheckpointError: a file is a link out of the folder, so that another file of this machine would be published.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != CARD and path.is_file():
            try:
                files[path.name] = resolve_below(folder, path)[0]
            except LinkError as error:
                raise CheckpointError(f"{folder}: the file {printable(path.name)} {error}") from None
    return files


def _reports(folder: Path, report: object, data: dict[str, object] | None) -> Sequence[Path]:
    """Write the report's files and return them."""
    if data is None:
        return []
    files = [folder / REPORT]
    files[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if hasattr(report, "to_html"):
        files.append(folder / PAGE)
        report.to_html(files[1])
    return files


def _former_card(api: Any, repo_id: str, revision: str | None, scratch: str) -> str:
    # Not into the hub's cache: a snapshot of a card alone would be taken for the model where the hub can't be reached.
    card_path = api.hf_hub_download(repo_id, CARD, revision=revision, cache_dir=f"{scratch}/cache")
    return Path(card_path).read_text(encoding="utf-8")
