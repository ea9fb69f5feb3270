"""S3 and what speaks as it does."""

from __future__ import annotations

from typing import Any

from .faults import AbsentError, ChangedError, FaultError, fault_of
from .stores import AT_ONCE, FOLDER, Entry, Store

PIECE = 1 << 18
"""Bytes that are taken from a connection at a time."""

WAIT = {"connect_timeout": 10, "read_timeout": 30}
"""Seconds after which a connection that gives nothing is given up, and the request is made again."""


class S3Store(Store):
    """A bucket: each range is asked for with the ETag that the file had when it was opened."""

    is_tied = True

    @staticmethod
    def system(kind: Any) -> Any:
        """Return s3fs's file system, with the credentials and the endpoint that AWS's own tools would use."""
        given = {"max_pool_connections": AT_ONCE, "retries": {"total_max_attempts": 1}, **WAIT}
        found = kind(config_kwargs=given, skip_instance_cache=True, use_listings_cache=False)
        found.retries = 1  # made again by us: by both of us, it would be the square of it
        return found

    async def _s3(self, method: str, key: str, **options: Any) -> Any:
        bucket, _, name = key.partition("/")
        named = {"Key": name} if name and "Prefix" not in options else {}
        return await self._system._call_s3(method, Bucket=bucket, **named, **options)

    async def _info(self, key: str, as_file: bool = False) -> Entry | None:
        if "/" in key:
            try:
                found = await self._s3("head_object", key)
                return Entry(int(found["ContentLength"]), str(found.get("ETag", "")))
            except Exception as error:
                fault = fault_of(error)
                if not isinstance(fault, AbsentError):
                    raise fault from None
                if as_file:
                    return None
        inside = await self._list(key)
        if not inside and "/" in key:
            return None
        self.note(key, inside)
        return FOLDER

    async def _list(self, key: str) -> dict[str, Entry]:
        return await self._listed(key, Delimiter="/")

    async def _find(self, key: str) -> dict[str, Entry]:
        found = await self._listed(key)
        return {name: one for name, one in found.items() if not name.endswith("/")}

    async def _listed(self, key: str, **options: str) -> dict[str, Entry]:
        prefix = key.partition("/")[2]
        prefix = f"{prefix}/" if prefix else ""
        found: dict[str, Entry] = {}
        more: dict[str, str] = {}
        while True:
            page = await self._s3("list_objects_v2", key, Prefix=prefix, **options, **more)
            for one in page.get("CommonPrefixes", ()):
                found[one["Prefix"][len(prefix) : -1]] = FOLDER
            for one in page.get("Contents", ()):
                if one["Key"] != prefix:
                    found[one["Key"][len(prefix) :]] = Entry(int(one["Size"]), str(one.get("ETag", "")))
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _get(self, key: str, entry: Entry, start: int, into: memoryview) -> None:
        tied = {"IfMatch": entry.tag} if entry.tag else {}
        reply = await self._s3("get_object", key, Range=f"bytes={start}-{start + len(into) - 1}", **tied)
        body = reply["Body"]
        try:
            if entry.tag and reply.get("ETag", entry.tag) != entry.tag:
                raise ChangedError("has changed while it was read")
            told = str(reply.get("ContentRange", ""))
            if not told.startswith(f"bytes {start}-{start + len(into) - 1}/"):
                raise FaultError("the store answers with another range than was asked for", again=True)
            await take(into, lambda: body.read(PIECE))
        finally:
            body.close()


async def take(into: memoryview, read: Any) -> None:
    """Fill memory from a connection, which has to give as many bytes and no more."""
    done = 0
    while True:
        data = await read()
        if not data:
            break
        if done + len(data) > len(into):
            raise FaultError(f"the store sends more than the {len(into)} bytes that were asked for", again=True)
        into[done : done + len(data)] = data
        done += len(data)
    if done < len(into):
        raise FaultError(f"the store sends {done} bytes of {len(into)}", again=True)
