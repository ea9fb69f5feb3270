"""A model's folder: one of this machine, or a repository of the Hugging Face hub, downloaded into its cache."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ...models.derived import stored
from .. import configs
from ..containers.base import CheckpointError

WANTED = ["*.safetensors", "*.safetensors.index.json", configs.CONFIG, configs.PARAMS, stored.FILE]
"""Files that a model is read from."""

_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


def find_folder(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return a folder: an existing one, or the download of a model of the Hugging Face hub.

    Args:
        name: a folder, or the id of a model on the hub, ``org/name``.
        revision: branch, tag or commit of the hub's repository; None is its main branch.
        token: of the hub; None is that of the login, False sends no token.
        cache_dir: folder for downloads; None is the hub's own cache.
        local_files_only: use the cache alone, without requests to the hub.

    Raises:
        CheckpointError: the folder does not exist, and the hub does not supply it.
    """
    path = Path(name)
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{path} is a folder, which has no revision ({revision}); it goes with an id of the hub"
            )
        return path
    if not isinstance(name, str) or not is_id(name):
        raise CheckpointError(f"{name} is no folder")
    hub = import_hub(f"{name} is no folder", "get it from the hub")
    try:
        download = hub.snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=WANTED,
        )
    except Exception as error:  # of the hub, its network or its disk, all with different classes
        at = name if revision is None else f"{name}@{revision}"
        raise CheckpointError(f"{name} is no folder, and the hub does not give {at}: {reason(error, token)}") from None
    return Path(download)


def is_id(name: str) -> bool:
    """Whether a text can be the id of a repository: ``name`` or ``org/name``."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def import_hub(what: str, why: str) -> ModuleType:
    """Return `huggingface_hub`.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise CheckpointError(f"{what}; pip install 'attn-bridge[hub]' to {why}") from None


_SAID = {
    "GatedRepoError": "access to it has to be asked for on its page, and the token must be of who was given it",
    "RepositoryNotFoundError": "there is no such repository, or it is private and the token does not open it",
    "RevisionNotFoundError": "it has no such revision",
    "LocalEntryNotFoundError": "the hub can't be reached, and the cache does not hold it",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the cache does not hold it",
    "LocalTokenNotFoundError": "no token is given; log in with: hf auth login, or set HF_TOKEN",
}
"""Class of an error -> our message, where the hub's own is long or misleading."""


def reason(error: BaseException, token: str | bool | None = None) -> str:
    """Return why the hub refused, in one line without a token in it."""
    chain = list(_chain(error))
    explanations = [_SAID.get(kind.__name__) for one in chain for kind in type(one).__mro__]
    explanation = next((one for one in (*explanations, *map(_status, chain)) if one), None)
    if explanation is None:
        texts = dict.fromkeys(" ".join(str(one).split()).rstrip(".") for one in (chain[0], chain[-1]))
        explanation = ": ".join(text for text in texts if text) or type(error).__name__
    return without_secrets(" ".join(explanation.split()), token)[:300]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, since the hub wraps errors."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__


def _status(error: BaseException) -> str | None:
    """Return our message for a status of the hub's answer that needs advice; else None."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "401: no token, or one that is not valid; log in with: hf auth login, or set HF_TOKEN"
    if status == 403:
        return f"403: the token may not do this: {getattr(error, 'server_message', None) or error}"
    return None


def without_secrets(text: str, token: str | bool | None = None) -> str:
    """Return a text with tokens redacted: the argument, that of the login, and strings in the form of tokens."""
    secrets: list[object] = [token, *(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))]
    try:
        secrets.append(importlib.import_module("huggingface_hub").get_token())
    except Exception:  # not installed, or a file of tokens that can't be read: then it is in no message either
        secrets.append(None)
    for secret in secrets:
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "***")
    return re.sub(r"\bhf_\w{8,}|(?<=://)[^/@\s]+@", "***", text)
