"""Repositories of the Hugging Face hub, each read as of one commit."""

from __future__ import annotations

import asyncio
from typing import Any

from .stores import Store


class HubStore(Store):
    """A repository, as of the commit that its revision is when it is first asked for."""

    is_tied = True

    def __init__(self, path: Any, system: Any):
        super().__init__(path, system)
        self._commits: dict[tuple[str, str, str], str] = {}

    async def _name(self, key: str) -> str:
        return await asyncio.to_thread(self._at_commit, key)

    def _at_commit(self, key: str) -> str:
        """Return a name with the commit in it."""
        found = self._system.resolve_path(key)
        if not hasattr(found, "repo_id"):
            return key  # a bucket of the hub, which has no commits
        place = found.repo_type, found.repo_id, found.revision
        if place not in self._commits:
            api = self._system._api
            info = api.repo_info(found.repo_id, repo_type=found.repo_type, revision=found.revision)
            self._commits[place] = str(info.sha)
        kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
        return f"{kind}{found.repo_id}@{self._commits[place]}/{found.path_in_repo}".rstrip("/")

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "cat_file":
            options["cache_type"] = "none"  # or else five MiB beyond the range are read
        return await super()._call(method, *arguments, **options)
