"""Web servers with support for ranges, with folders if the server lists them; and the hub.

A repository of the Hugging Face hub is read as of one commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ..base import DCP_METADATA, ORBAX_METADATA
from . import faults
from .faults import AbsentError, ChangedError, DeniedError, FaultError, SlowError, as_faults
from .stores import FOLDER, HEAD, Store, StoreEntry

if TYPE_CHECKING:
    from .paths import RemotePath


SMALL = 1 << 24
"""Bytes up to which a file is read from a server that knows no ranges."""

USUAL = (
    *("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
    *(ORBAX_METADATA, DCP_METADATA, "config.json", "params.json", "attn-bridge.json", "attn-bridge.kept"),
)
"""Names to look for in a folder that its server does not list."""

NO_FILE = "attn-bridge.no-file"
"""A name that does not exist: the server's answer for it is its answer for any missing name."""

PAGE = "its server answers with a web page"

OTHER = "its server answers with another range than was asked for"

_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html)[\s>]", re.IGNORECASE)
_LINK = re.compile(rb"""<a\s[^>]*?href\s*=\s*["']([^"'?#]+)["']""", re.IGNORECASE)


class WebStore(Store):
    """Files of a web server.

    A request carries the ETag that the file had; if a server has none, its date and size must stay the same.
    """

    is_tied = True

    def __init__(self, path: RemotePath, system: Any):
        super().__init__(path, system)
        self._query = path.url.partition("?")[2]
        self._pages: set[str] = set()  # names for which the server sends a page
        self._nowhere: dict[str, StoreEntry | None] = {}  # folder -> its answer for a missing name
        self._asking = asyncio.Lock()

    def _url(self, key: str) -> str:
        return f"{self._protocol}://{key}{f'?{self._query}' if self._query and key == self._root else ''}"

    @contextlib.asynccontextmanager
    async def _request(self, key: str, ending: str = "", **headers: str) -> AsyncIterator[Any]:
        """Hold the answer to a request, of which the body is yet to be read."""
        aiohttp = importlib.import_module("aiohttp")
        session = await self._system.set_session()
        wait = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
        # A compressed answer would have another length, and ranges of compressed bytes are of no use.
        sent = {"Accept-Encoding": "identity", **headers}
        url = self._system.encode_url(self._url(key) + ending)
        try:
            async with asyncio.timeout(2 * faults.WINDOW) as limit:  # silence is limited by sock_read, and this is not
                reply = await session.get(url, headers=sent, timeout=wait)
        except TimeoutError:
            if limit.expired():
                raise SlowError(f"its server takes more than {2 * faults.WINDOW:g} s for an answer's headers") from None
            raise
        async with reply:
            if reply.status // 100 == 3:
                raise FaultError(f"its server answers HTTP {reply.status} and no URL to go to")
            yield reply

    async def _info(self, key: str, as_file: bool = False) -> StoreEntry | None:
        entry = await self._file(key)
        if entry is None and not as_file:
            inside = await self._list(key)
            if inside:
                self.note(key, inside)
                return FOLDER
            if key == self._root and key in self._pages:
                raise FaultError(PAGE)
        return entry

    async def _file(self, key: str) -> StoreEntry | None:
        """Return the metadata of a file; None if the server answers as it does for a missing name."""
        entry = await self._answered(key)
        folder = key.rpartition("/")[0]
        is_listed = folder in self._folders and folder not in self.guessed
        if entry is None or entry.is_folder or is_listed or key == self._root:
            return entry
        async with self._asking:
            if folder not in self._nowhere:
                try:
                    with as_faults():
                        answer = await self._answered(f"{folder}/{NO_FILE}")
                except DeniedError:
                    answer = None
                self._nowhere[folder] = answer
        nowhere = self._nowhere[folder]
        is_same = nowhere is not None and (nowhere.size, nowhere.head) == (entry.size, entry.head)
        return None if is_same else entry

    async def _answered(self, key: str) -> StoreEntry | None:
        """Return a server's answer for a name, with the beginning of the file.

        A page whose URL ends in a slash is a folder; any other page counts as a missing file.
        """
        async with self._request(key, Range=f"bytes=0-{HEAD - 1}") as reply:
            if reply.status == 404:
                return None
            # A file without bytes has no first range: the answer is 416 with "bytes */0" (RFC 9110, 15.5.17).
            if reply.status == 416:
                size = _total(reply)
                if size == 0:
                    return StoreEntry(0, _tag(reply))
            reply.raise_for_status()
            is_page = reply.headers.get("Content-Type", "").startswith("text/html")
            if is_page and reply.url.path.endswith("/"):
                return FOLDER
            size = _total(reply) if reply.status == 206 else _length(reply)
            most = HEAD if size is None else min(HEAD, size)
            if reply.status == 206 and size is not None:
                if reply.headers.get("Content-Range", "").partition("/")[0] != f"bytes 0-{most - 1}":
                    raise FaultError(OTHER, again=True)
                whole = bytearray(most)
                await faults.take(memoryview(whole), reply.content.readany)
                head = bytes(whole)
            else:
                head = await faults.beginning(most, reply.content.readany)
                reply.close()
            if _HTML.match(head):
                self._pages.add(key)
                return None
            if size is None:
                raise FaultError("its server does not say how many bytes it has")
            if len(head) < most:
                raise FaultError(f"the store sends {len(head)} bytes of {most}", again=True)
            return StoreEntry(size, _tag(reply), head=head)

    async def _list(self, key: str) -> dict[str, StoreEntry]:
        entries: dict[str, StoreEntry] = {}
        try:
            with as_faults():
                async with self._request(key, "/") as reply:
                    reply.raise_for_status()
                    is_page = reply.headers.get("Content-Type", "").startswith("text/html")
                    links = _LINK.findall(await faults.beginning(SMALL, reply.content.readany)) if is_page else []
        except (AbsentError, DeniedError):
            links = []
        for link in links:
            name = unquote(link.decode("utf-8", "replace")).removeprefix("./")
            short = name.removesuffix("/")
            if short and "/" not in short and short not in (".", ".."):
                entries[short] = FOLDER if name.endswith("/") else StoreEntry(-1)
        if not entries:
            self.guessed.add(key)
            usual = await asyncio.gather(*(self._perhaps(f"{key}/{name}") for name in USUAL))
            entries = {name: one for name, one in zip(USUAL, usual, strict=True) if one is not None}
        return entries

    async def _perhaps(self, key: str) -> StoreEntry | None:
        """Return the metadata of a file; None if access is denied."""
        try:
            with as_faults():
                return await self._file(key)
        except DeniedError:
            return None

    async def _get(self, key: str, entry: StoreEntry, start: int, into: memoryview) -> None:
        # If-Match compares strongly: a weak tag, W/"...", or a date never matches (RFC 9110, 13.1.1).
        tag = entry.tag if entry.tag.startswith('"') else ""
        tied = {"If-Match": tag} if tag else {}
        stop = start + len(into)
        async with self._request(key, Range=f"bytes={start}-{stop - 1}", **tied) as reply:
            reply.raise_for_status()
            if entry.tag and _tag(reply) != entry.tag:
                raise ChangedError("has changed while it was read")
            if reply.status == 206:
                content_range = reply.headers.get("Content-Range", "")
                if content_range.partition("/")[0] != f"bytes {start}-{stop - 1}":
                    raise FaultError(OTHER, again=True)
                if _total(reply) not in (None, entry.size):
                    raise ChangedError("has changed while it was read")
                await faults.take(into, reply.content.readany)
                return
            if entry.size > SMALL:
                raise FaultError("its server answers no requests for ranges; download the file first")
            whole = memoryview(bytearray(entry.size))
            await faults.take(whole, reply.content.readany)
            into[:] = whole[start:stop]


def _total(reply: Any) -> int | None:
    """Return how many bytes a file has by the answer to a request for a range."""
    size = reply.headers.get("Content-Range", "").rpartition("/")[2]
    return int(size) if size.isdecimal() else None


def _length(reply: Any) -> int | None:
    """Return the length that an answer declares."""
    size = reply.headers.get("Content-Length", "")
    return int(size) if size.isdecimal() else None


def _tag(reply: Any) -> str:
    """Return the version of a file: its ETag, or its date."""
    return str(reply.headers.get("ETag") or reply.headers.get("Last-Modified") or "")


class HubStore(Store):
    """A repository, at the commit of its revision on first use."""

    is_tied = True

    def __init__(self, path: Any, system: Any):
        super().__init__(path, system)
        self._commits: dict[tuple[str, str, str], str] = {}

    async def _name(self, key: str) -> str:
        return await asyncio.to_thread(self._at_commit, key)

    def _at_commit(self, key: str) -> str:
        """Return a name with the commit in it."""
        hub_path = self._system.resolve_path(key)
        if not hasattr(hub_path, "repo_id"):
            return key  # a bucket of the hub, which has no commits
        repository = hub_path.repo_type, hub_path.repo_id, hub_path.revision
        if repository not in self._commits:
            api = self._system._api
            info = api.repo_info(hub_path.repo_id, repo_type=hub_path.repo_type, revision=hub_path.revision)
            self._commits[repository] = str(info.sha)
        kind = "" if hub_path.repo_type == "model" else f"{hub_path.repo_type}s/"
        return f"{kind}{hub_path.repo_id}@{self._commits[repository]}/{hub_path.path_in_repo}".rstrip("/")

    async def _call(self, method: str, *arguments: object, **options: object) -> Any:
        if method == "cat_file":
            options["cache_type"] = "none"  # or else five MiB beyond the range are read
        return await super()._call(method, *arguments, **options)
