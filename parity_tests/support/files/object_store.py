"""An object store on loopback that speaks as much of S3 as checkpoints need, with faults, latency and rates to order.

It keeps everything in memory and checks no signatures. It is a web server, too: what is in a bucket can be read by its
plain URL, and folders are listed as pages of links.

    python -m parity_tests.support.files.object_store --rate 8 --latency 20

prints its address, and serves until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import bisect
import hashlib
import itertools
import json
import re
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

PIECE = 1 << 18
"""Bytes that are sent or received at a time."""

BUFFER = 1 << 19
"""Bytes that a connection may be late by and still come to its rate: what waits in sockets while processes are busy."""


class Object:
    """What is kept of an object.

    Args:
        pieces: its bytes; what is put together of parts shares them.
        tag: its ETag.
    """

    def __init__(self, pieces: Sequence[bytes], tag: str):
        self.pieces, self.tag = pieces, tag
        self._stops = list(itertools.accumulate(map(len, pieces)))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @property
    def data(self) -> bytes:
        """All its bytes."""
        return self.between(0, len(self))

    def between(self, start: int, stop: int) -> bytes:
        """Return some of its bytes."""
        first, last = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._stops, stop)
        found = []
        for piece, end in zip(self.pieces[first : last + 1], self._stops[first : last + 1], strict=True):
            begin = end - len(piece)
            found.append(piece if start <= begin and stop >= end else piece[max(0, start - begin) : stop - begin])
        return found[0] if len(found) == 1 else b"".join(found)


class ObjectStore:
    """A server in a thread of its own.

    Args:
        rate: bytes per second of a connection; None is as fast as it goes.
        latency: seconds that every request waits.
        page: keys of a page of a listing.

    Attributes:
        objects: (bucket, key) -> what is there.
        requests: all requests so far, as (method, "bucket/key", range or operation).
        fault: called with every request as it is noted; returns "" or the fault it meets: "drop", "500", "503",
            "truncate" (fewer bytes than announced), "short" (fewer bytes, and announced so), "other" (another range).
        before: called with every request before it is answered.
        after: called with every request once it is answered, and since when it was there (`time.time`).
        gate: called with every request; returns None, or a name and a number: it is answered once so many requests of
            that name are under way at the same time, and so are all later ones.
        token: what has to be in the header Authorization; "" for no such thing.
    """

    is_strict = False
    """Whether ranges of objects of 5 MiB or less are not copied, as S3 documents it."""

    def __init__(self, rate: float | None = None, latency: float = 0.0, page: int = 1000):
        self.rate, self.latency, self.page = rate, latency, page
        self.objects: dict[tuple[str, str], Object] = {}
        self.uploads: dict[str, dict[int, Object]] = {}
        self._goals: dict[str, tuple[str, str]] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.fault: Callable[[tuple[str, str, str]], str] = lambda request: ""
        self.before: Callable[[tuple[str, str, str]], None] = lambda request: None
        self.after: Callable[[tuple[str, str, str], float], None] = lambda request, since: None
        self.gate: Callable[[tuple[str, str, str]], tuple[str, int] | None] = lambda request: None
        self._gates: dict[str, tuple[list[None], asyncio.Event]] = {}
        self.token = ""
        self.has_ranges = True
        self.lists = True
        self._free: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self.port = 0

    # ---- from outside

    def start(self, port: int = 0) -> ObjectStore:
        """Begin to serve, on a free port by default."""
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def begin() -> None:
            app = web.Application(client_max_size=1 << 40)
            app.router.add_route("*", "/{bucket}", self._answer)
            app.router.add_route("*", "/{bucket}/{key:.*}", self._answer)
            self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", port)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            ready.set()

        def serve() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(begin())
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def stop(self) -> None:
        """End serving."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> ObjectStore:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object there."""
        self.objects[bucket, key] = Object((data,), f'"{hashlib.md5(data).hexdigest()}"')

    def keys(self, bucket: str) -> list[str]:
        """Return all keys of a bucket, sorted."""
        return sorted(key for one, key in self.objects.copy() if one == bucket)

    def contents(self, bucket: str = "bucket") -> dict[str, bytes]:
        """Return key -> bytes of all that is in a bucket now, whatever is under way: others may be writing."""
        return {key: one.data for (where, key), one in self.objects.copy().items() if where == bucket}

    # ---- requests

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        bucket, key = unquote(request.match_info["bucket"]), unquote(request.match_info.get("key", ""))
        query = request.query
        operation = request.headers.get("Range", "") or "&".join(
            name for name in query if name in ("uploads", "uploadId", "partNumber", "list-type", "delete")
        )
        noted = request.method, f"{bucket}/{key}", operation
        self.requests.append(noted)
        since = time.time()
        try:
            return await self._answered(request, bucket, key, noted)
        finally:
            self.after(noted, since)

    async def _answered(
        self, request: web.Request, bucket: str, key: str, noted: tuple[str, str, str]
    ) -> web.StreamResponse:
        query = request.query
        self.before(noted)
        fault = self.fault(noted)
        body = await self._received(request) if request.method in ("PUT", "POST") else b""
        await self._held_back(self.gate(noted))
        if self.latency:
            await asyncio.sleep(self.latency)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault in ("500", "503"):
            return _refused(int(fault), "InternalError" if fault == "500" else "SlowDown")
        if self.token and self.token not in request.headers.get("Authorization", ""):
            return _refused(403, "AccessDenied")
        if request.method in ("GET", "HEAD"):
            if "list-type" in query:
                return self._listing(bucket, query)
            if "uploads" in query:
                return self._listed_uploads(bucket, query.get("prefix", ""))
            return await self._sent(request, bucket, key, fault)
        if request.method == "PUT":
            return self._put(request, bucket, key, body)
        if request.method == "POST":
            return self._post(request, bucket, key, body)
        if "uploadId" in query:
            self.uploads.pop(query["uploadId"], None)
        else:
            self.objects.pop((bucket, key), None)
        return web.Response(status=204)

    async def _held_back(self, gate: tuple[str, int] | None) -> None:
        """Wait until a gate opens."""
        if gate is None:
            return
        here, opened = self._gates.setdefault(gate[0], ([], asyncio.Event()))
        here.append(None)
        try:
            if len(here) >= gate[1]:
                opened.set()
            await opened.wait()
        finally:
            here.pop()

    def _begin(self, transport: Any) -> None:
        """Begin to move bytes on a connection."""
        if self.rate:
            self._free[transport] = max(time.monotonic(), self._free.get(transport, 0.0))

    async def _paced(self, transport: Any, count: int) -> None:
        """Wait until so many bytes have had their time on a connection."""
        if self.rate:
            now = time.monotonic()
            self._free[transport] = max(now - BUFFER / self.rate, self._free[transport]) + count / self.rate
            await asyncio.sleep(self._free[transport] - now)

    async def _received(self, request: web.Request) -> bytes:
        found = bytearray()
        self._begin(request.transport)
        while data := await request.content.read(PIECE):
            await self._paced(request.transport, len(data))
            found += data
        return bytes(found)

    async def _sent(self, request: web.Request, bucket: str, key: str, fault: str) -> web.StreamResponse:
        found = self.objects.get((bucket, key))
        if found is None:
            if key.endswith("/") and self.lists and request.method == "GET":
                return self._page(bucket, key)
            return _refused(404, "NoSuchKey")
        if request.headers.get("If-Match", found.tag) != found.tag:
            return _refused(412, "PreconditionFailed")
        start, stop, headers, status = 0, len(found), {"ETag": found.tag, "Accept-Ranges": "bytes"}, 200
        hit = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")) if self.has_ranges else None
        if hit:
            start, stop = int(hit[1]), min(int(hit[2]) + 1, len(found))
            if start >= len(found):
                return web.Response(status=416, headers={"Content-Range": f"bytes */{len(found)}"})
            if fault == "other":
                start, stop = (start - 1, stop - 1) if start else (start + 1, min(stop + 1, len(found)))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(found)}"
            status = 206
        if request.method == "HEAD":
            return web.Response(status=status, headers={**headers, "Content-Length": str(stop - start)})
        data = found.between(start, stop)
        if fault == "short":
            data = data[: len(data) // 2]
        reply = web.StreamResponse(status=status, headers=headers)
        reply.content_length = len(data)
        await reply.prepare(request)
        self._begin(request.transport)
        view = memoryview(data)[: len(data) // 2] if fault == "truncate" else memoryview(data)
        for at in range(0, len(view), PIECE):
            piece = view[at : at + PIECE]
            await self._paced(request.transport, len(piece))
            await reply.write(piece)
        if fault == "truncate":
            assert request.transport is not None
            request.transport.close()
        return reply

    def _page(self, bucket: str, folder: str) -> web.Response:
        names = {key[len(folder) :].partition("/") for key in self.keys(bucket) if key.startswith(folder)}
        if not names:
            return _refused(404, "NoSuchKey")
        links = [f'<a href="{quote(name + slash)}">{name}</a>' for name, slash, _ in sorted(names)]
        return web.Response(text="<html>" + "".join(links) + "</html>", content_type="text/html")

    def _listing(self, bucket: str, query: Any) -> web.Response:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", "")
        entries: dict[str, bool] = {}
        for key in self.keys(bucket):
            if key.startswith(prefix):
                rest, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
                entries[prefix + rest + found] = bool(found)
        names = [name for name in sorted(entries) if name > after]
        most = min(self.page, int(query.get("max-keys", 1000)))
        parts = []
        for name in names[:most]:
            if entries[name]:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                one = self.objects[bucket, name]
                parts.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(one)}</Size><ETag>{escape(one.tag)}</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        more = len(names) > most
        token = f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>" if more else ""
        return _xml(
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(parts)}</ListBucketResult>"
        )

    def _listed_uploads(self, bucket: str, prefix: str) -> web.Response:
        goals = {number: self._goals[number] for number in self.uploads}
        parts = [
            f"<Upload><Key>{escape(key)}</Key><UploadId>{number}</UploadId></Upload>"
            for number, (one, key) in goals.items()
            if one == bucket and key.startswith(prefix)
        ]
        return _xml(f"<ListMultipartUploadsResult>{''.join(parts)}</ListMultipartUploadsResult>")

    def _put(self, request: web.Request, bucket: str, key: str, body: bytes) -> web.Response:
        if "aws-chunked" in request.headers.get("Content-Encoding", ""):
            return _refused(501, "NotImplemented")
        if not _is_whole(request, body):
            return _refused(400, "BadDigest")
        pieces: Sequence[bytes] = (body,)
        origin = request.headers.get("x-amz-copy-source")
        if origin is not None:
            from_bucket, _, from_key = unquote(origin).lstrip("/").partition("/")
            found = self.objects.get((from_bucket, from_key))
            if found is None:
                return _refused(404, "NoSuchKey")
            if request.headers.get("x-amz-copy-source-if-match", found.tag) != found.tag:
                return _refused(412, "PreconditionFailed")
            hit = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("x-amz-copy-source-range", ""))
            if hit and self.is_strict and len(found) <= 5 << 20:
                return _refused(400, "InvalidRequest")  # S3 copies a range of a longer object alone
            pieces = (found.between(int(hit[1]), min(int(hit[2]) + 1, len(found))),) if hit else found.pieces
        # Copies are hashed by no client: a store of many machines makes them in no time, and so does this one.
        said = request.headers.get("x-amz-copy-source-range", "")
        hashed = body if origin is None else f"{found.tag} {said}".encode()
        tag = f'"{hashlib.md5(hashed).hexdigest()}"'
        if "uploadId" in request.query:
            if request.query["uploadId"] not in self.uploads:
                return _refused(404, "NoSuchUpload")
            self.uploads[request.query["uploadId"]][int(request.query["partNumber"])] = Object(pieces, tag)
        elif request.headers.get("If-None-Match") == "*" and (bucket, key) in self.objects:
            return _refused(412, "PreconditionFailed")
        else:
            self.objects[bucket, key] = Object(pieces, tag)
        if origin is not None:
            kind = "CopyPartResult" if "uploadId" in request.query else "CopyObjectResult"
            return _xml(f"<{kind}><ETag>{escape(tag)}</ETag></{kind}>")
        return web.Response(headers={"ETag": tag})

    def _post(self, request: web.Request, bucket: str, key: str, body: bytes) -> web.Response:
        query = request.query
        if "uploads" in query:
            number = f"upload-{next(self._numbers)}"
            self.uploads[number], self._goals[number] = {}, (bucket, key)
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>")
        if "delete" in query:
            for one in ElementTree.fromstring(body).iter():
                if one.tag.endswith("Key"):
                    self.objects.pop((bucket, one.text or ""), None)
            return _xml("<DeleteResult></DeleteResult>")
        parts = self.uploads.get(query.get("uploadId", ""))
        if parts is None:
            return _refused(404, "NoSuchUpload")
        numbers = [int(one.text or 0) for one in ElementTree.fromstring(body).iter() if one.tag.endswith("PartNumber")]
        if not set(numbers) <= parts.keys() or numbers != sorted(set(numbers)):
            return _refused(400, "InvalidPart")
        if any(len(parts[one]) < 5 << 20 for one in numbers[:-1]):
            return _refused(400, "EntityTooSmall")
        if request.headers.get("If-None-Match") == "*" and (bucket, key) in self.objects:
            return _refused(412, "PreconditionFailed")
        pieces = [piece for one in numbers for piece in parts[one].pieces]
        del self.uploads[query["uploadId"]]
        tags = b"".join(bytes.fromhex(parts[one].tag.strip('"')) for one in numbers)
        tag = f'"{hashlib.md5(tags).hexdigest()}-{len(numbers)}"'
        self.objects[bucket, key] = Object(pieces, tag)
        return _xml(f"<CompleteMultipartUploadResult><ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>")


def _is_whole(request: web.Request, body: bytes) -> bool:
    """Whether a body is the one whose checksums the client sends."""
    wanted = request.headers.get("Content-MD5")
    if wanted and base64.b64encode(hashlib.md5(body).digest()).decode() != wanted:
        return False
    wanted = request.headers.get("x-amz-checksum-crc32")
    return not wanted or base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode() == wanted


def _xml(text: str) -> web.Response:
    return web.Response(text=f'<?xml version="1.0" encoding="UTF-8"?>{text}', content_type="application/xml")


def _refused(status: int, code: str) -> web.Response:
    """Return an error as S3 has it, with a message that holds what nobody should see."""
    text = f"<Error><Code>{code}</Code><Message>no, AKIASECRETKEY topsecret</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, help="MB/s of a connection")
    parser.add_argument("--latency", type=float, default=0.0, help="ms of a request")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--trace", help="file to note in when each request began and ended, a line of JSON for each")
    given = parser.parse_args()
    store = ObjectStore(given.rate * 1e6 if given.rate else None, given.latency / 1e3)
    if given.trace:
        lines = Path(given.trace).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as it serves
        store.after = lambda request, since: print(json.dumps([since, time.time(), *request]), file=lines)
    store.start(given.port)
    print(store.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
