"""S3 and compatible stores."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib
import io
import re
from collections.abc import Sequence
from typing import Any

from ....printable import printable
from .faults import AbsentError, ChangedError, FaultError, as_faults, take
from .stores import FOLDER, Store, StoreEntry

PIECE = 1 << 18
"""Bytes that are taken from a connection at a time."""

SMALL = 1 << 20
"""Bytes up to which an object is read by one request, without asking for its size before."""

PIECE_BACK = 1 << 23
"""Bytes read back at a time, where the store's tag is not the checksum of the upload."""

WAIT = {"connect_timeout": 10, "read_timeout": 30}
"""Seconds after which a silent connection is given up, and the request is made again."""


class Body(io.BytesIO):
    """The body of an upload; its size is computed without a copy."""

    def __init__(self, data: bytes | bytearray):
        super().__init__(data)
        self._data = data

    def getbuffer(self) -> memoryview:
        """Return the bytes that it was made of."""
        return memoryview(self._data)


@functools.cache
def loader(folder: str | None) -> object:
    """Return a cached loader of botocore's descriptions of S3, which take half a second per process otherwise."""
    return importlib.import_module("botocore.loaders").create_loader(folder)


def preload() -> None:
    """Read those descriptions, and import the modules that make requests, by making a client without requests."""
    importlib.import_module("aiobotocore.httpsession")
    importlib.import_module("aiobotocore.client")
    session = importlib.import_module("botocore.session").get_session()
    session.register_component("data_loader", loader(session.get_config_variable("data_path")))
    named = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    session.create_client("s3", region_name="us-east-1", endpoint_url="http://localhost", **named)


class S3Store(Store):
    """A bucket; each range is requested with the ETag that the file had when it was opened."""

    at_once = 32  # read-ahead requests run concurrently
    is_tied = True

    @classmethod
    def system(cls, kind: Any) -> Any:
        """Return s3fs's file system, with the credentials and the endpoint that AWS's own tools would use."""
        config = {"max_pool_connections": 2 * cls.at_once, "retries": {"total_max_attempts": 1}, **WAIT}
        config |= {"request_checksum_calculation": "when_required"}  # uploads carry an MD5
        system = kind(config_kwargs=config, skip_instance_cache=True, use_listings_cache=False)
        system.retries = 1  # made again by us: by both of us, it would be the square of it
        session = importlib.import_module("aiobotocore.session").AioSession(**system.kwargs)
        session.register_component("data_loader", loader(session.get_config_variable("data_path")))
        system.session = session
        return system

    async def call(self, method: str, key: str, **options: Any) -> Any:
        """Call a method of botocore's client for an object, or for the bucket where a prefix is given."""
        bucket, _, name = key.partition("/")
        named = {"Key": name} if name and "Prefix" not in options else {}
        return await self._system._call_s3(method, Bucket=bucket, **named, **options)

    async def _info(self, key: str, as_file: bool = False) -> StoreEntry | None:
        if "/" in key:
            try:
                with as_faults():
                    reply = await self.call("head_object", key)
                return StoreEntry(int(reply["ContentLength"]), str(reply.get("ETag", "")))
            except AbsentError:
                if as_file:
                    return None
        inside = await self._list(key)
        if not inside and "/" in key:
            return None
        self.note(key, inside)
        return FOLDER

    async def _list(self, key: str) -> dict[str, StoreEntry]:
        return await self._listed(key, Delimiter="/")

    async def _find(self, key: str) -> dict[str, StoreEntry]:
        entries = await self._listed(key)
        return {name: one for name, one in entries.items() if not name.endswith("/")}

    async def _listed(self, key: str, **options: str) -> dict[str, StoreEntry]:
        prefix = key.partition("/")[2]
        # With the slash: a listing of "a" must not have the objects of "ab".
        prefix = f"{prefix}/" if prefix else ""
        entries: dict[str, StoreEntry] = {}
        more: dict[str, str] = {}
        while True:
            page = await self.call("list_objects_v2", key, Prefix=prefix, **options, **more)
            for listing in page.get("CommonPrefixes", ()):
                entries[listing["Prefix"][len(prefix) : -1]] = FOLDER
            for listing in page.get("Contents", ()):
                if listing["Key"] != prefix:
                    entries[listing["Key"][len(prefix) :]] = StoreEntry(
                        int(listing["Size"]), str(listing.get("ETag", ""))
                    )
            if not page.get("IsTruncated"):
                return entries
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _get(self, key: str, entry: StoreEntry, start: int, into: memoryview) -> None:
        tied = {"IfMatch": entry.tag} if entry.tag else {}
        reply = await self.call("get_object", key, Range=f"bytes={start}-{start + len(into) - 1}", **tied)
        body = reply["Body"]
        try:
            if entry.tag and reply.get("ETag", entry.tag) != entry.tag:
                raise ChangedError("has changed while it was read")
            content_range = str(reply.get("ContentRange", ""))
            if not content_range.startswith(f"bytes {start}-{start + len(into) - 1}/"):
                raise FaultError("the store answers with another range than was asked for", again=True)
            await take(into, lambda: body.read(PIECE))
        finally:
            body.close()

    async def _get_small(self, key: str) -> bytes | None:
        with contextlib.suppress(ChangedError):  # an empty one has no such range
            with as_faults():
                reply = await self.call("get_object", key, Range=f"bytes=0-{SMALL - 1}")
            body = reply["Body"]
            try:
                hit = re.fullmatch(r"bytes 0-(\d+)/(\d+)", str(reply.get("ContentRange", "")))
                if hit is None or int(hit[1]) + 1 != int(hit[2]) or int(hit[2]) > SMALL:
                    return None
                data = bytearray(int(hit[2]))
                await take(memoryview(data), lambda: body.read(PIECE))
                return bytes(data)
            finally:
                body.close()
        return None

    async def _put(self, key: str, data: bytes | bytearray, if_absent: bool) -> str:
        digest = await asyncio.to_thread(hashlib.md5, data, usedforsecurity=False)
        tied = {"IfNoneMatch": "*"} if if_absent else {}
        checked = {"ContentMD5": base64.b64encode(digest.digest()).decode()}
        try:
            with as_faults():
                reply = await self.call("put_object", key, Body=Body(data), **checked, **tied)
        except FaultError as fault:
            if not if_absent or "HTTP 501" not in str(fault):
                raise
            if await self._info(key, True) is not None:  # a store that can't do both in one step
                raise ChangedError("is there already") from None
            reply = await self.call("put_object", key, Body=Body(data), **checked)
        tag = str(reply.get("ETag", ""))
        if tag.strip('"') != digest.hexdigest():  # of a store that encrypts, or computes other tags
            await self._hold_against(key, tag, data)
        return tag

    async def _hold_against(self, key: str, tag: str, data: bytes | bytearray) -> None:
        """Read an object back, and compare it with the bytes sent."""
        for first in range(0, len(data), PIECE_BACK):
            part = data[first : first + PIECE_BACK]
            object_bytes = memoryview(bytearray(len(part)))
            await self._get(key, StoreEntry(len(data), tag), first, object_bytes)
            if bytes(object_bytes) != bytes(part):
                raise FaultError("holds other bytes than were written", again=True)

    async def _delete(self, keys: Sequence[str]) -> None:
        bucket = keys[0].partition("/")[0]
        named = [{"Key": key.partition("/")[2]} for key in keys]
        reply = await self.call("delete_objects", bucket, Delete={"Objects": named, "Quiet": True})
        if reply.get("Errors"):
            code = str(reply["Errors"][0].get("Code", ""))
            raise FaultError(f"the store answers {printable(code, 60)}", again=code in ("InternalError", "SlowDown"))
