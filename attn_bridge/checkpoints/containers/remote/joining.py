"""Files made of objects of a store: copied there where the store can do that, and visible all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from .staged import Span, Staged
from .stores import Upload

LEAST = 5 << 20
"""Bytes that each part of an object has at least, but for the last: a rule of S3."""

MOST = 1 << 28
"""Bytes that are copied by one request, at most."""

SENT = 1 << 23
"""Bytes from which on what is sent, and not copied, is a part."""

AT_ONCE = 8
"""Parts that are copied or sent at the same time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a file: a copy of one span, or what is put together of several."""

    spans: tuple[Span, ...]

    @property
    def is_copied(self) -> bool:
        """Whether the store can copy it."""
        return len(self.spans) == 1 and self.spans[0].name != ""

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.spans[-1].stop - self.spans[0].start


def parts_of(spans: list[Span]) -> Iterator[Part]:
    """Cut a file into parts: long spans are copied, short ones are put together to parts that are long enough."""
    waiting: list[Span] = []
    held = 0
    for span in spans:
        here = span
        while here.start < here.stop:
            left = here.stop - here.start
            if not waiting and here.name and left >= LEAST:
                # A rest that would be too short to be copied goes along, or is left to the ones behind.
                count = left if left <= MOST else min(MOST, left - LEAST)
                yield Part((Span(here.start, here.start + count, here.name, here.at),))
            else:
                count = min(left, SENT - held)
                waiting.append(Span(here.start, here.start + count, here.name, here.at))
                held += count
                if held >= (LEAST if here.name and left - count >= LEAST else SENT):
                    yield Part(tuple(waiting))
                    waiting, held = [], 0
            here = Span(here.start + count, here.stop, here.name, here.at + count)
    if waiting:
        yield Part(tuple(waiting))


def prepare(staged: Staged, file: str, size: int, key: str) -> Upload:
    """Make a file of its objects, which is there once it is completed.

    Raises:
        CheckpointError: the store can't do it.
    """
    spans = staged.spans(file, 0, size)
    upload = staged.store.begin(key, size)
    try:
        with ThreadPoolExecutor(AT_ONCE, "attn-bridge-join") as threads:
            list(threads.map(lambda numbered: _add(staged, upload, *numbered), enumerate(parts_of(spans), 1)))
    except BaseException:
        upload.abort()
        raise
    return upload


def _add(staged: Staged, upload: Upload, number: int, part: Part) -> None:
    if part.is_copied and upload.copies:
        span = part.spans[0]
        origin, entry = staged.object(span.name)
        upload.copy(number, origin, entry, span.at, part.size)
        return
    whole = bytearray(part.size)
    with memoryview(whole) as view:
        for span in part.spans:
            if span.name:
                origin, entry = staged.object(span.name)
                first = span.start - part.spans[0].start
                staged.store.read(origin, entry, [(span.at, view[first : first + span.stop - span.start])])
    upload.send(number, whole)
