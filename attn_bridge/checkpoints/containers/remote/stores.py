"""Stores through fsspec: their metadata, and ranges of bytes; failed requests are retried."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..files import bad
from ..writing import Threads
from . import faults
from .faults import AbsentError, ChangedError, DeniedError, FaultError, GivenUpError, as_faults, patiently

if TYPE_CHECKING:
    from .paths import RemotePath

PART, LEAST = 8 << 20, 1 << 20
"""Bytes of one of the requests that a long range is read by, at most, and at least."""

SPREAD = 8
"""Requests that one range is spread over, at most, where they are shorter than `PART`."""

HEAD = 1 << 16
"""Bytes from the beginning of a file that a request for its metadata also returns."""

# S3 takes 1,000 keys per `DeleteObjects`.
BATCH = 1000
"""Objects that are deleted by one request."""

TAGS = ("ETag", "etag", "generation", "lfs", "blob_id", "checksum", "md5", "LastModified", "mtime", "Last-Modified")
"""Keys under which fsspec's packages have a file's version; the first that exists is used."""

_STREAMS = Threads(8, "stream")
"""Threads that write piece by piece: pieces come from requests that wait for turns and for the loop's threads."""

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class StoreEntry:
    """A store's metadata of a name.

    Attributes:
        size: bytes of a file.
        tag: changes whenever the file changes (an ETag).
        is_folder: whether it is a folder.
        head: the first bytes of a file, if they came along.
    """

    size: int
    tag: str = ""
    is_folder: bool = False
    head: bytes = b""


FOLDER = StoreEntry(0, is_folder=True)


class Store:
    """A store through fsspec.

    Args:
        path: a path of the store; all keys have its form.
        system: fsspec's file system.

    Metadata of folders and files is cached, so that each is requested once; `forget` clears the cache.
    """

    def __init__(self, path: RemotePath, system: Any):
        self._path, self._protocol, self._root, self._system = path, path.protocol, path.key, system
        self._folders: dict[str, dict[str, StoreEntry]] = {}
        self._entries: dict[str, StoreEntry | None] = {}
        self._no_files: set[str] = set()
        self.guessed: set[str] = set()  # folders that may hold more than is known
        self._stale: set[str] = set()
        self._surveyed: set[str] = set()
        self._lock = threading.Lock()
        self._turns: asyncio.Semaphore | None = None
        self._is_down = False

    at_once: ClassVar[int] = 16
    """Requests that are under way at the same time, in one process."""

    is_tied: ClassVar[bool] = False
    """Whether a range is always read from the version of the entry, so that no check is needed afterwards."""

    # ---- methods that other kinds of stores override

    async def _info(self, key: str, as_file: bool = False) -> StoreEntry | None:
        """Return the metadata of a name; with `as_file`, folders need not be recognised."""
        try:
            with as_faults():
                return entry_of(await self._call("info", await self._name(key)))
        except AbsentError:
            return None

    async def _list(self, key: str) -> dict[str, StoreEntry]:
        """Return the entries of a folder."""
        refreshes = {"refresh": True} if "refresh" in inspect.signature(self._system.ls).parameters else {}
        name = await self._name(key)
        listing = await self._call("ls", name, detail=True, **refreshes)
        inside = {str(one["name"]).rstrip("/").rpartition("/")[2]: one for one in listing}
        own = str(name).rstrip("/")
        return {short: entry_of(one) for short, one in inside.items() if str(one["name"]).rstrip("/") != own}

    async def _find(self, key: str) -> dict[str, StoreEntry]:
        """Return all files below a folder, by their names from it on."""
        name = await self._name(key)
        listing = await self._call("find", name, detail=True)
        return {str(path)[len(name) + 1 :]: entry_of(one) for path, one in listing.items()}

    async def _get(self, key: str, entry: StoreEntry, start: int, into: memoryview) -> None:
        """Fill `into` with bytes of a file from position `start` on; a shorter answer is an error."""
        data = await self._call("cat_file", await self._name(key), start=start, end=start + len(into))
        fill(into, data)

    async def _get_small(self, key: str) -> bytes | None:
        """Return all of an object by one request, or None where that can't be done; absence is an `AbsentError`."""
        return None

    async def _confirm(self, key: str, entry: StoreEntry) -> None:
        """Check that a file is unchanged: a separate request, for stores whose ranges are not tied to a version."""
        now = await self._info(key)
        if now is None or (now.size, now.tag) != (entry.size, entry.tag):
            raise ChangedError("has changed while it was read")

    async def _put(self, key: str, data: bytes | bytearray, if_absent: bool) -> str:
        """Write an object, and return its tag; if it has to be absent and is not, that is a `ChangedError`."""
        if if_absent and await self._info(key) is not None:
            raise ChangedError("is there already")
        name = await self._name(key)
        await self._call("pipe_file", name, bytes(data))
        entry = await self._info(key)
        back = await self._call("cat_file", name)
        if entry is None or bytes(back) != bytes(data):
            raise FaultError("holds other bytes than were written", again=True)
        return entry.tag

    async def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are not an error."""
        for key in keys:
            with contextlib.suppress(AbsentError), as_faults():
                await self._call("rm_file" if hasattr(self._system, "rm_file") else "rm", await self._name(key))

    # ---- calls

    async def _name(self, key: str) -> str:
        """Return a name in the form of fsspec's file system."""
        return str(self._system._strip_protocol(f"{self._protocol}://{key}"))

    async def _call(self, method: str, *arguments: object, **options: object) -> Any:
        """Call a method of the file system, which may be a coroutine or one that blocks."""
        if getattr(self._system, "async_impl", False):
            return await getattr(self._system, f"_{method}")(*arguments, **options)
        return await asyncio.to_thread(getattr(self._system, method), *arguments, **options)

    def shown(self, key: str) -> str:
        """Return a name as it is shown to people."""
        return str(self._path.derived(key))

    @contextlib.contextmanager
    def _naming(self, key: str, front: str = "") -> Iterator[None]:
        """Convert a fault to an error that names an object."""
        try:
            yield
        except FaultError as fault:
            raise bad(self.shown(key), f"{front}{fault}") from None

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine in fsspec's event loop and wait for it.

        Raises:
            FaultError: after all tries.
        """
        return _wait_for(lambda: self._patiently(work))

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Make a request in its turn, and again where it fails."""
        turns = self._turns = self._turns or asyncio.Semaphore(self.at_once)

        async def once() -> Result:
            async with turns:
                return await work()

        try:
            result = await patiently(
                once, min(faults.TRIES, faults.TRIES_WHILE_DOWN) if self._is_down else faults.TRIES
            )
        except GivenUpError:
            self._is_down = True
            raise
        self._is_down = False
        return result

    # ---- existing entries

    def forget(self) -> None:
        """Clear the cached metadata."""
        with self._lock:
            self._stale |= self._folders.keys()
            self._folders.clear()
            self._entries.clear()
            self._no_files.clear()

    def _renew(self, key: str) -> None:
        """List a folder again, together with others where it was listed together with them."""
        with self._lock:
            is_stale = key in self._stale and key not in self._folders
            above = next((one for one in self._surveyed if key == one or key.startswith(f"{one}/")), None)
        if is_stale and above is not None:
            self.survey(above)
        elif is_stale:
            self._stale.discard(key)
            self.children(key)

    def entry(self, key: str, *, as_file: bool = False) -> StoreEntry | None:
        """Return the entry of a name; None if it does not exist (or, `as_file`, is a folder).

        A name that may not be read counts as missing, except the root that the user named: stores deny access to
        missing names for users who may not list them.

        Raises:
            CheckpointError: the store does not answer.
        """
        folder, _, name = key.rpartition("/")
        self._renew(folder)
        with self._lock:
            if key in self._folders:
                return FOLDER
            listed = self._folders.get(folder, {})
            is_known = listed[name].size >= 0 if name in listed else folder not in self.guessed
            if folder in self._folders and is_known:
                return listed.get(name)
            if key in self._entries:
                return self._entries[key]
            above = [(one, part) for one, part in _ways(key) if one not in self.guessed]
            if any(part not in self._folders.get(one, (part,)) for one, part in above):
                return None
            if as_file and key in self._no_files:
                return None
        with self._naming(key):
            try:
                entry = self.run(lambda: self._info(key, as_file))
            except DeniedError:
                if key == self._root:
                    raise
                entry = None
        with self._lock:
            if entry is None and as_file:
                self._no_files.add(key)
            else:
                self._entries[key] = entry
        return entry

    def children(self, key: str) -> dict[str, StoreEntry]:
        """Return the entries of a folder, by name.

        Raises:
            CheckpointError: the store does not answer.
        """
        self._renew(key)
        with self._lock:
            if key in self._folders:
                return self._folders[key]
        with self._naming(key):
            entries = self.run(lambda: self._list(key))
        return self.note(key, entries)

    def note(self, key: str, inside: dict[str, StoreEntry]) -> dict[str, StoreEntry]:
        """Cache the entries of a folder, and return them sorted by name."""
        entries = {name: inside[name] for name in sorted(inside)}
        with self._lock:
            self._folders[key] = entries
        return entries

    def survey(self, key: str, ending: str = "") -> None:
        """List everything below a folder at once, and read the beginnings of the files with that ending, if any.

        Raises:
            CheckpointError: the store can't be asked.
        """
        with self._naming(key):
            below = self.run(lambda: self._find(key))
        wanted = {
            name: bytearray(min(HEAD, one.size)) for name, one in below.items() if ending and name.endswith(ending)
        }
        heads = [
            functools.partial(self._get, f"{key}/{name}", below[name], 0, memoryview(head))
            for name, head in wanted.items()
        ]
        with self._naming(key):
            _wait_for(lambda: self._all(heads))
        folders: dict[str, dict[str, StoreEntry]] = {key: {}}
        for name in sorted(below):
            entry = dataclasses.replace(below[name], head=bytes(wanted.get(name, b"")))
            folder, (*above, last) = key, name.split("/")
            for part in above:
                folders[folder][part] = FOLDER
                folder = f"{folder}/{part}"
                folders.setdefault(folder, {})
            folders[folder][last] = entry
        with self._lock:
            self._folders.update(folders)
            self._surveyed.add(key)
            self._stale -= folders.keys()

    # ---- writing

    def put(self, key: str, data: bytes | bytearray) -> str:
        """Write an object, make sure that the store holds these very bytes, and return its tag.

        Raises:
            CheckpointError: it can't be written.
        """
        with self._naming(key, "can't be written: "):
            return self.run(lambda: self._put(key, data, False))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether it was written.

        Raises:
            CheckpointError: it can't be written.
        """
        with self._naming(key, "can't be written: "):
            try:
                self.run(lambda: self._put(key, data, True))
            except ChangedError:
                return self.get(key) == data  # an earlier try of ours may have come through
        return True

    def get(self, key: str) -> bytes | None:
        """Return the current bytes of a small object; None if it does not exist.

        Raises:
            CheckpointError: it can't be read.
        """
        with self._naming(key), contextlib.suppress(AbsentError):
            while True:
                content = self.run(lambda: self._get_small(key))
                if content is not None:
                    return content
                entry = self.run(lambda: self._info(key, True))
                if entry is None:
                    return None
                data = bytearray(entry.size)
                with memoryview(data) as view, contextlib.suppress(ChangedError, AbsentError):
                    for part in parts(0, view):
                        self.run(functools.partial(self._get, key, entry, *part))
                    return bytes(data)
        return None

    def below(self, key: str) -> dict[str, StoreEntry]:
        """Return all files below a folder as they are now, by their names from it on.

        Raises:
            CheckpointError: the store can't be asked.
        """
        with self._naming(key), contextlib.suppress(AbsentError):
            return self.run(lambda: self._find(key))
        return {}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects.

        Raises:
            CheckpointError: one can't be deleted.
        """
        for first in range(0, len(keys), BATCH):
            some = keys[first : first + BATCH]
            with self._naming(some[0], "can't be deleted: "):
                self.run(functools.partial(self._delete, some))

    def stream(self, key: str, pieces: Callable[[], Iterable[bytes | bytearray]], size: int) -> None:
        """Write an object piece by piece; each attempt requests the pieces again.

        Raises:
            CheckpointError: it can't be written.
        """

        async def work() -> None:
            name = await self._name(key)
            await asyncio.wrap_future(_STREAMS.submit(self._stream, name, pieces()))
            entry = await self._info(key)
            if entry is None or entry.size != size:
                raise FaultError("is not as long as what was written")

        with self._naming(key, "can't be written: "):
            self.run(work)

    def _stream(self, name: str, pieces: Iterable[bytes | bytearray]) -> None:
        file = self._system.open(name, "wb")
        try:
            for piece in pieces:
                file.write(piece)
        except BaseException:
            with contextlib.suppress(Exception):  # whatever a store's package has of this
                file.closed = True  # closing it would commit the incomplete object
                file.discard()
            raise
        file.close()

    # ---- reading

    def read(self, key: str, entry: StoreEntry, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill memory with bytes of a file, each from a position on; all at the same time.

        Raises:
            CheckpointError: the file is not the one of the entry, or can't be read.
        """
        with self._naming(key):
            _wait_for(lambda: self._read(key, entry, ranges))

    def begin(self, key: str, entry: StoreEntry, ranges: Sequence[tuple[int, memoryview]]) -> Future[None]:
        """Begin to fill memory as `read` does; return a future, which fails with a `FaultError`."""
        asyn = importlib.import_module("fsspec.asyn")
        return asyncio.run_coroutine_threadsafe(self._read(key, entry, ranges), asyn.get_loop())

    async def _read(self, key: str, entry: StoreEntry, ranges: Sequence[tuple[int, memoryview]]) -> None:
        cut = [part for start, into in ranges for part in parts(start, into)]
        await self._all([functools.partial(self._get, key, entry, start, into) for start, into in cut])
        # Behind the ranges, not in front of them: a file that is replaced between two of them is noticed, too.
        if not self.is_tied:
            await self._all([functools.partial(self._confirm, key, entry)])

    async def _all(self, requests: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Make requests concurrently; if one fails for good, the others are cancelled."""
        jobs = [asyncio.ensure_future(self._patiently(one)) for one in requests]
        try:
            await asyncio.gather(*jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise


def _wait_for(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Return the result of a coroutine that runs in fsspec's event loop."""
    asyn = importlib.import_module("fsspec.asyn")
    result: Result = asyn.sync(asyn.get_loop(), work)
    return result


def _ways(key: str) -> Iterator[tuple[str, str]]:
    """Yield the folders above a name, each with the next part of the path to it."""
    at = key.rfind("/")
    while at > 0:
        yield key[:at], key[at + 1 :].partition("/")[0]
        at = key.rfind("/", 0, at)


def parts(start: int, into: memoryview) -> list[tuple[int, memoryview]]:
    """Cut a long range for several requests."""
    size = min(PART, max(LEAST, -(-len(into) // SPREAD)))
    return [(start + at, into[at : at + size]) for at in range(0, len(into), size)]


def fill(into: memoryview, data: bytes) -> None:
    """Copy the response into the buffer; raise if its length differs from the requested range."""
    if len(data) != len(into):
        raise FaultError(f"the store sends {len(data)} bytes of {len(into)}", again=True)
    into[:] = data


def entry_of(metadata: dict[str, Any]) -> StoreEntry:
    """Return the entry for fsspec's metadata of a name."""
    if metadata.get("type") == "directory":
        return FOLDER
    size = metadata.get("size")
    tag = next((str(metadata[name]) for name in TAGS if metadata.get(name)), "")
    return StoreEntry(size if isinstance(size, int) else -1, tag)
