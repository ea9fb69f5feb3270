"""Failed requests: messages without secrets, decisions on retries, and a minimum speed of answers.

Messages are ours alone: those of servers and libraries may contain keys, tokens and signed URLs. An answer's body is
read into preallocated memory, up to the requested length, and at a minimum speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from ....printable import printable
from ..base import CheckpointError

TRIES = 10
"""Attempts per request before it is given up."""

SLOW_TRIES = 2
"""Attempts for an answer that is too slow: each attempt takes the full waiting time."""

TRIES_WHILE_DOWN = 2
"""Attempts after a request was given up, until a request succeeds: each cleanup request would wait as long again."""

# Ten tries have nine pauses: 0.1, 0.2, 0.4, 0.8, 1.6, 3.2 and three of 5 seconds, of which half to all is waited: 11 to
# 21 seconds.
PAUSE, MAX_PAUSE = 0.1, 5.0
"""Seconds before the second try, and at most; each pause is about twice the one before."""

AGAIN = {408, 425, 429, 500, 502, 503, 504, 509}
"""HTTP statuses after which a request is made again."""

CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
"""Codes of S3 after which a request is made again: another one was just under way, and its end is not known yet."""

NETWORK = ("aiohttp", "aiobotocore", "botocore", "urllib3", "requests", "httpx", "httpx2", "httpcore", "ssl", "fsspec")
"""Packages whose errors without an HTTP status are of the connection."""

UNSIGNED = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError")
"""Names of errors of credentials that are not there."""

REDIRECTS = {
    "TooManyRedirects": "its server redirects requests without end",
    "RedirectClientError": "its server redirects requests to what is no http or https URL",
}
"""Names of redirect errors -> their message; another try would be redirected as well."""

FINAL = ("ParamValidationError", "InvalidURL", "UnsupportedProtocol", "InvalidRegionError", "ProfileNotFound")
"""Names of errors of invalid requests."""

Answer = TypeVar("Answer")


class FaultError(Exception):
    """A failed request, in words; `again` is whether a retry may succeed."""

    def __init__(self, words: str, *, again: bool = False):
        super().__init__(words)
        self.again = again


class AbsentError(FaultError):
    """The requested object does not exist."""


class DeniedError(FaultError):
    """Reading or writing the requested object is denied."""


class GivenUpError(FaultError):
    """A request failed in all attempts."""


class SlowError(FaultError):
    """An answer is too slow."""

    def __init__(self, words: str):
        super().__init__(words, again=True)


class ChangedError(FaultError):
    """The requested object changed since it was opened, or exists although it must not."""


@dataclasses.dataclass(frozen=True)
class _Answer:
    status: int = 0
    code: str = ""


def fault_of(error: BaseException) -> FaultError:
    """Return the fault for an error of a library or of the system."""
    if isinstance(error, FaultError):
        return error
    answer = _answer(error)
    status, code = answer.status, answer.code
    status_text = f"HTTP {status}" + (f", {code}" if code and code != str(status) else "")
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    if names & set(UNSIGNED):
        return DeniedError("no credentials for it are found")
    if redirects := [words for name, words in REDIRECTS.items() if name in names]:
        return FaultError(redirects[0])
    if names & set(FINAL):
        return FaultError(f"it can't be asked for ({type(error).__name__})")
    if status == 404 or code in ("NoSuchKey", "NoSuchBucket", "NoSuchUpload"):
        return AbsentError("does not exist" if code != "NoSuchBucket" else "its bucket does not exist")
    if status in (401, 403, 407):
        return DeniedError(f"access is denied ({status_text})")
    if code in CONFLICTS:
        return FaultError(f"the store answers {status_text}", again=True)
    if status in (409, 412, 416) or code in ("PreconditionFailed", "InvalidRange"):
        return ChangedError("has changed while it was read")
    if status:
        return FaultError(f"the store answers {status_text}", again=status in AGAIN)
    if isinstance(error, RecursionError):  # a redirect that leads back
        return FaultError("the store sends requests elsewhere without end: is its region or endpoint another one?")
    if isinstance(error, FileNotFoundError):
        return AbsentError("does not exist")
    if isinstance(error, PermissionError):
        return DeniedError("access is denied")
    if isinstance(error, TimeoutError) or any("Timeout" in name for name in names):
        return FaultError("the store does not answer in time", again=True)
    root = type(error).__module__.partition(".")[0]
    if isinstance(error, (ConnectionError, EOFError)) or root in NETWORK:
        return FaultError(f"the connection fails ({type(error).__name__})", again=True)
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return FaultError(os.strerror(error.errno), again=error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOSPC))
    return FaultError(f"it fails ({type(error).__name__})")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _answer(error: BaseException) -> _Answer:
    """Return the HTTP status, and the store's error code, from an error of any library."""
    for cause in _chain(error):
        response: object = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore's
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response.get("Error", {}).get("Code", ""))
            return _Answer(status if isinstance(status, int) else 0, printable(code, 60))
        number = getattr(cause, "status", None) or getattr(response, "status_code", None)
        if number is None and type(cause).__name__.lower() == "httperror":  # gcsfs's, urllib's
            number = getattr(cause, "code", None)
        if isinstance(number, int) and 400 <= number < 600:
            return _Answer(number)
    return _Answer()


@contextlib.contextmanager
def as_faults() -> Iterator[None]:
    """Convert errors raised within to faults: fsspec, its packages and their dependencies have various error classes.

    Raises:
        FaultError: something failed.
    """
    try:
        yield
    except (CheckpointError, MemoryError):  # in words already, or not the store's
        raise
    except Exception as error:  # of whichever library; interrupts go on
        raise fault_of(error) from None


async def patiently(ask: Callable[[], Awaitable[Answer]], tries: int) -> Answer:
    """Make a request until it succeeds, at most `tries` times, with increasing pauses.

    Raises:
        FaultError: no further try is worth it.
    """
    pause = PAUSE
    slow = 0
    for number in range(1, tries + 1):
        try:
            with as_faults():
                return await ask()
        except FaultError as error:
            fault = error
        if not fault.again:
            raise fault from None
        slow += isinstance(fault, SlowError)
        if slow == SLOW_TRIES or number == tries:
            break
        # Random, so that many workers that failed at once do not all ask again at once.
        await asyncio.sleep(min(pause, MAX_PAUSE) * random.uniform(0.5, 1.0))
        pause *= 2
    raise GivenUpError(f"given up after {number} tries: {fault}") from None


WINDOW = 30.0
"""Seconds over which the speed of an answer is measured: as long as a connection may be silent."""

MIN_SPEED = 100
"""Minimum speed of an answer in bytes per second, over a window.

A link of GPRS, the slowest in use, carries about 2,500. The 16 concurrent requests of a store share that, so each gets
156; the margin is for their headers and for unequal shares.
"""


class Pace:
    """Measures how fast one answer comes.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._since, self._count = clock, clock(), 0

    def add(self, count: int) -> None:
        """Note bytes that have come.

        Raises:
            SlowError: fewer came in the last window than the minimum speed makes. A window that took longer, as where
                this process was stopped, has to bring no more for that.
        """
        self._count += count
        seconds = self._clock() - self._since
        if seconds < WINDOW:
            return
        if self._count < MIN_SPEED * WINDOW:
            raise SlowError(f"its server sends {self._count} bytes in {seconds:.3g} s: fewer than {MIN_SPEED} a second")
        self._since, self._count = self._clock(), 0


async def take(into: memoryview, read: Callable[[], Awaitable[bytes]]) -> None:
    """Fill memory with an answer that has to be as long.

    Args:
        into: where the bytes go.
        read: gives the next bytes; none at the end.

    Raises:
        FaultError: it is longer or shorter, or comes too slowly.
    """
    pace, done = Pace(), 0
    while data := await read():
        if done + len(data) > len(into):
            raise FaultError(f"the store sends more than the {len(into)} bytes that were asked for", again=True)
        into[done : done + len(data)] = data
        done += len(data)
        pace.add(len(data))
    if done < len(into):
        raise FaultError(f"the store sends {done} bytes of {len(into)}", again=True)


async def beginning(most: int, read: Callable[[], Awaitable[bytes]]) -> bytes:
    """Return the first bytes of an answer, and all of one that is shorter.

    Raises:
        FaultError: it comes too slowly.
    """
    pace, body = Pace(), bytearray()
    while len(body) < most and (data := await read()):
        body += data
        pace.add(len(data))
    return bytes(body[:most])
