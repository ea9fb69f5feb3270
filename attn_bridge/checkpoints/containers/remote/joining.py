"""Assembles files from staged objects of a store: by server-side copies if possible, and visible all at once."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..base import CheckpointError
from ..files import bad
from .faults import AbsentError, FaultError, as_faults
from .s3 import Body, S3Store
from .staged import Span, Staged
from .stores import PART, Store

LEAST = 5 << 20
"""Bytes that each part of an object has at least, but for the last; ranges are copied of longer objects: S3's rules."""

MOST = 1 << 28
"""Maximum bytes copied by one request."""

SENT = 1 << 23
"""Bytes of a part that is sent and not copied, at most, and of a file that is not made of parts at all."""

COPIED = 1 << 20
"""Files of at least this many bytes that are a single copy are made of parts: three requests replace sending them."""

AT_ONCE = 16
"""Parts of a file that are copied or sent at the same time."""

COUNT = 9_000
"""Parts of a file, about, at most: S3 takes 10,000."""

_IN_MEMORY = threading.BoundedSemaphore(8)
"""Parts that are in memory to be sent, of all files together."""

_ALONE = threading.Lock()
"""Held by the one part in memory that is longer than most are."""


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A part of a file: a copy of one span, or a concatenation of several."""

    spans: tuple[Span, ...]

    @property
    def is_copied(self) -> bool:
        """Whether the store can copy it."""
        return len(self.spans) == 1 and self.spans[0].name != ""

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.spans[-1].stop - self.spans[0].start


def parts_of(spans: Sequence[Span]) -> Iterator[FilePart]:
    """Cut a file into parts: long spans are copied, short ones are concatenated to parts of sufficient size.

    The sufficient size grows with the file, so that the number of parts stays within the store's limit.
    """
    # Parts of at least size / COUNT bytes are about COUNT at most, which leaves a margin below S3's 10,000.
    least = max(LEAST, -(-spans[-1].stop // COUNT)) if spans else LEAST
    sent, most = max(SENT, least), max(MOST, 2 * least)
    waiting: list[Span] = []
    num_bytes = 0
    for span in spans:
        rest = span
        while rest.start < rest.stop:
            left = rest.stop - rest.start
            is_long = left >= least or span is spans[-1]
            if rest.name and is_long and (not waiting or num_bytes >= least):
                if waiting:
                    yield FilePart(tuple(waiting))
                    waiting, num_bytes = [], 0
                # What is left behind a copy must itself be long enough for a part.
                count = left if left <= most else min(most, left - least)
                yield FilePart((Span(rest.start, rest.start + count, rest.name, rest.at),))
            else:
                # A long enough span completes a part to send, and the rest of the span is copied.
                has_rest = num_bytes < least and rest.name and left - (least - num_bytes) >= least
                enough = least if has_rest else sent
                count = min(left, (enough if has_rest else sent + least) - num_bytes)  # a short rest goes along
                waiting.append(Span(rest.start, rest.start + count, rest.name, rest.at))
                num_bytes += count
                if num_bytes >= enough:
                    yield FilePart(tuple(waiting))
                    waiting, num_bytes = [], 0
            rest = Span(rest.start + count, rest.stop, rest.name, rest.at + count)
    if waiting:
        yield FilePart(tuple(waiting))


def read_part(staged: Staged, part: FilePart) -> bytearray:
    """Return the bytes of a part."""
    whole = bytearray(part.size)
    with memoryview(whole) as view:
        for span in part.spans:
            if span.name:
                key, entry = staged.object(span.name)
                first = span.start - part.spans[0].start
                staged.store.read(key, entry, [(span.at, view[first : first + span.stop - span.start])])
    return whole


class Joined:
    """A file that exists once it is completed; in this class, all of it is written then.

    Args:
        staged: its staged bytes.
        file: its name there.
        size: its bytes.
        key: its name in the store.
    """

    def __init__(self, staged: Staged, file: str, size: int, key: str):
        self.staged, self.key, self.size = staged, key, size
        self.parts = list(parts_of(staged.spans(file, 0, size)))

    @property
    def is_in_parts(self) -> bool:
        """Whether a begun upload must be aborted if it is not completed."""
        return False

    def prepare(self) -> None:
        """Do all work that is possible before the file exists.

        Raises:
            CheckpointError: the store refuses it.
        """

    def complete(self) -> None:
        """Make the file visible.

        Raises:
            CheckpointError: the store refuses it.
        """
        if self.size <= SENT:
            self.staged.store.put(self.key, b"".join(read_part(self.staged, part) for part in self.parts))
        else:
            self.staged.store.stream(self.key, self._pieces, self.size)

    def _pieces(self) -> Iterator[bytearray]:
        for part in self.parts:
            if not part.is_copied:
                yield read_part(self.staged, part)
                continue
            span = part.spans[0]
            for first in range(span.start, span.stop, PART):
                stop = min(span.stop, first + PART)
                yield read_part(self.staged, FilePart((Span(first, stop, span.name, span.at + first - span.start),)))

    def abort(self) -> None:
        """Abandon the file."""


class S3Joined(Joined):
    """A file that S3 makes of copies, by a multipart upload; what fits into one request is sent at the end."""

    def __init__(self, staged: Staged, file: str, size: int, key: str, store: S3Store):
        super().__init__(staged, file, size, key)
        self._store, self._id = store, ""
        self._tags: dict[int, str] = {}

    @property
    def is_in_parts(self) -> bool:
        """Whether it is longer than a single request's limit, or the store can copy all of it."""
        return self.size > SENT or (self.size >= COPIED and all(part.is_copied for part in self.parts))

    def _is_whole(self, part: FilePart) -> bool:
        return part.size == self.staged.object(part.spans[0].name)[1].size

    def _ask(self, method: str, **options: object) -> Any:
        return self._run(functools.partial(self._store.call, method, self.key, **options))

    def _run(self, work: Callable[[], Coroutine[object, object, object]]) -> Any:
        try:
            return self._store.run(work)
        except FaultError as fault:
            raise bad(self._store.shown(self.key), f"can't be written: {fault}") from None

    def prepare(self) -> None:
        """Copy and send all parts."""
        if not self.is_in_parts:
            return
        self._id = str(self._ask("create_multipart_upload")["UploadId"])
        with ThreadPoolExecutor(AT_ONCE, "attn-bridge-join") as threads:
            self._tags = dict(threads.map(self._add, range(1, len(self.parts) + 1), self.parts))

    def _add(self, number: int, part: FilePart) -> tuple[int, str]:
        named: dict[str, object] = {"PartNumber": number, "UploadId": self._id}
        if part.is_copied:
            try:
                return number, self._copy(part, named)
            except CheckpointError:  # S3 refuses to copy a range of so short an object
                if self._is_whole(part) or self.staged.object(part.spans[0].name)[1].size > LEAST:
                    raise
        with _ALONE if part.size > SENT + LEAST else contextlib.nullcontext(), _IN_MEMORY:
            return number, self._send(part, named)

    def _copy(self, part: FilePart, named: dict[str, object]) -> str:
        span = part.spans[0]
        key, entry = self.staged.object(span.name)
        bucket, _, name = key.partition("/")
        some = {} if self._is_whole(part) else {"CopySourceRange": f"bytes={span.at}-{span.at + part.size - 1}"}
        source = {"Bucket": bucket, "Key": name}
        reply = self._ask("upload_part_copy", CopySource=source, CopySourceIfMatch=entry.tag, **some, **named)
        return str(reply["CopyPartResult"]["ETag"])

    def _send(self, part: FilePart, named: dict[str, object]) -> str:
        data = read_part(self.staged, part)
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()

        async def send() -> Any:
            return await self._store.call("upload_part", self.key, Body=Body(data), ContentMD5=digest, **named)

        return str(self._run(send)["ETag"])

    def complete(self) -> None:
        """Make the file visible."""
        if not self._id:
            super().complete()
            return
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]

        tries = 0

        async def work() -> None:
            nonlocal tries
            tries += 1
            whole = {"UploadId": self._id, "MultipartUpload": {"Parts": parts}}
            try:
                with as_faults():
                    await self._store.call("complete_multipart_upload", self.key, **whole)
            except AbsentError:
                if tries == 1:  # else an earlier try may have come through
                    raise FaultError("what was sent of it is gone") from None
            reply = await self._store.call("head_object", self.key)
            # The ETag of a multipart upload ends in a dash and the number of its parts.
            if reply["ContentLength"] != self.size or not reply["ETag"].strip('"').endswith(f"-{len(parts)}"):
                raise FaultError("is not there as it was written")

        self._run(work)
        self._id = ""

    def abort(self) -> None:
        """Have the store forget the parts."""
        if self._id:
            with contextlib.suppress(CheckpointError):
                self._ask("abort_multipart_upload", UploadId=self._id)


def join(staged: Staged, file: str, size: int, key: str) -> Joined:
    """Return a file to assemble from staged bytes."""
    if isinstance(staged.store, S3Store):
        return S3Joined(staged, file, size, key, staged.store)
    return Joined(staged, file, size, key)


def abandon(store: Store, keys: Sequence[str]) -> None:
    """Abort multipart uploads that a killed process began, if the store lists them."""
    if not isinstance(store, S3Store):
        return
    for key in keys:
        name = key.partition("/")[2]
        with contextlib.suppress(FaultError):
            reply = store.run(functools.partial(store.call, "list_multipart_uploads", key, Prefix=name))
            for upload in reply.get("Uploads", ()):
                if upload["Key"] == name:
                    ask = functools.partial(store.call, "abort_multipart_upload", key, UploadId=upload["UploadId"])
                    store.run(ask)
