"""Paths and URLs of checkpoints on other machines, with what readers use of `pathlib.Path`; several opened at once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, cast

from ....printable import printable
from ..base import CheckpointError

if TYPE_CHECKING:
    from .stores import Store, StoreEntry


AT_ONCE = 16
"""Files of a checkpoint that are opened at the same time."""

Opened = TypeVar("Opened")

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

WEB = ("http", "https")
"""Protocols of web servers, whose URLs may have a query."""

LOCAL = ("file", "local")
"""Protocols of files on this machine."""

UNWRITABLE = {
    **dict.fromkeys(WEB, "a web server can't be written to"),
    "hf": "a repository of the hub is written by its own tools: convert to a folder, and upload that",
}
"""Protocol -> why nothing is written there."""

EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "fsspec and s3fs: pip install 'attn-bridge[remote]'"),
    **dict.fromkeys(("gs", "gcs"), "fsspec and gcsfs: pip install 'attn-bridge[remote]' gcsfs"),
    "hf": "fsspec and huggingface_hub: pip install 'attn-bridge[remote]' huggingface_hub",
}
"""Protocol -> the packages to install for it."""


def is_url(text: str) -> bool:
    """Whether a text is a URL, and not a path."""
    return URL.fullmatch(text) is not None


def split(text: str) -> tuple[str, str]:
    """Split a URL into its protocol, in lower case, and the rest."""
    hit = URL.fullmatch(text)
    if hit is None:
        raise ValueError("is no URL")
    return hit[1].lower(), hit[2]


def shown(text: str) -> str:
    """Return a URL without the user, the password and the query, which may be a signature."""
    protocol, rest = split(text)
    host, slash, path = rest.partition("/")
    if ":" in host.rpartition("@")[0] or protocol in WEB:
        host = host.rpartition("@")[2]
    if protocol in WEB:
        path = re.split(r"[?#]", path, maxsplit=1)[0]
        host = re.split(r"[?#]", host, maxsplit=1)[0]
    return f"{protocol}://{host}{slash}{path}"


@dataclasses.dataclass(frozen=True)
class Status:
    """A store's metadata of a file, under the attribute names of `os.stat_result`.

    Attributes:
        st_size: its bytes.
        st_mtime_ns: changes whenever the file changes: derived from its ETag, or from the store's equivalent.
    """

    st_size: int
    st_mtime_ns: int


class RemotePath:
    """A file or folder of a store.

    Metadata of files and folders is cached; `fresh` returns a path with an empty cache.

    Args:
        url: the URL; for a derived path, the store's own name for it.
        root: the path that this path is derived from.

    Attributes:
        protocol: the protocol of its URL.
    """

    __slots__ = ("_key", "_query", "_root", "_store", "protocol")

    def __init__(self, url: str, root: RemotePath | None = None):
        self._query, self._key = "", url
        if root is None:
            self.protocol, rest = split(url)
            if self.protocol in WEB:
                rest, mark, query = rest.partition("?")
                self._query = mark + query
            self._key = rest.rstrip("/")
        else:
            self.protocol = root.protocol
        self._root: RemotePath = self if root is None else root._root
        self._store: Store | None = None

    def fresh(self) -> RemotePath:
        """Return the same path with an empty cache of the store's metadata."""
        fresh_path = RemotePath(self._key, self)
        fresh_path._query, fresh_path._root = self._query, fresh_path
        return fresh_path

    # ---- names

    def __str__(self) -> str:
        return shown(f"{self.protocol}://{self._key}")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemotePath):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __lt__(self, other: RemotePath) -> bool:
        return self._identity < other._identity

    @property
    def _identity(self) -> tuple[str, str, str]:
        return self.protocol, self._key, self._query

    @property
    def is_web(self) -> bool:
        """Whether a web server has it."""
        return self.protocol in WEB

    @property
    def needed(self) -> str:
        """The packages that its protocol needs, and how to install them."""
        return EXTRAS.get(self.protocol, "fsspec and its package for that protocol: pip install 'attn-bridge[remote]'")

    @property
    def key(self) -> str:
        """Its name in the store, with bucket or server."""
        return self._key

    @property
    def url(self) -> str:
        """Its whole URL, with all that is secret in it."""
        return f"{self.protocol}://{self._key}{self._query}"

    @property
    def name(self) -> str:
        """The last part; "" for a bucket or server."""
        return self._key.rpartition("/")[2] if "/" in self._key else ""

    @property
    def suffix(self) -> str:
        """The extension of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Path:
        """The folder it is in."""
        return as_path(self if not self.name else self.derived(self._key.rpartition("/")[0]))

    @property
    def parents(self) -> tuple[Path, ...]:
        """All folders it is in, the nearest first."""
        folders, path = [], self
        while path.name:
            path = cast(RemotePath, path.parent)
            folders.append(as_path(path))
        return tuple(folders)

    def __truediv__(self, other: str | PurePath) -> Path:
        part = other.as_posix() if isinstance(other, PurePath) else other
        return as_path(self.derived(f"{self._key}/{part}".rstrip("/")))

    def derived(self, key: str) -> RemotePath:
        """Return another path of the same store."""
        return RemotePath(key, self)

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        """Return how it is named in a folder above it."""
        if not self.is_relative_to(other):
            raise ValueError(f"{self} is not in {other}")
        return PurePosixPath(self._key[len(other._key) :].lstrip("/"))

    def with_name(self, name: str) -> Path:
        """Return the path of a sibling file with that name."""
        return self.parent / name

    def is_relative_to(self, other: object) -> bool:
        """Whether this path equals `other` or is below it."""
        return self == other or other in self.parents

    def resolve(self) -> Path:
        """Return itself: stores have no links."""
        return as_path(self)

    def absolute(self) -> Path:
        """Return itself."""
        return as_path(self)

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    # ---- existing entries

    @property
    def store(self) -> Store:
        """The store, connected to; that of the path which this one is derived from."""
        if self._root._store is None:
            from .connecting import connect

            self._root._store = connect(self)
        return self._root._store

    def entry(self) -> StoreEntry | None:
        """Return the store's metadata of this path; None if it does not exist."""
        return self.store.entry(self._key)

    def exists(self) -> bool:
        """Whether a file or folder exists."""
        return self.entry() is not None

    def is_file(self) -> bool:
        """Whether a file exists."""
        entry = self.store.entry(self._key, as_file=True)
        return entry is not None and not entry.is_folder

    def is_dir(self) -> bool:
        """Whether a folder exists."""
        entry = self.entry()
        return entry is not None and entry.is_folder

    def iterdir(self) -> Iterator[Path]:
        """Yield the entries of a folder."""
        for name in self.store.children(self._key):
            yield self / name

    def rglob(self, pattern: str) -> Iterator[Path]:
        """Yield everything below a folder; the pattern has to be ``*``."""
        for path in self.iterdir():
            yield path
            if path.is_dir():
                yield from path.rglob(pattern)

    def stat(self) -> Status:
        """Return the store's metadata of a file.

        Raises:
            OSError: it does not exist.
        """
        entry = self.entry()
        if entry is None:
            raise FileNotFoundError(2, "does not exist")
        digest = hashlib.sha256(entry.tag.encode()).digest()
        return Status(entry.size, int.from_bytes(digest[:8], "little"))

    def read_bytes(self) -> bytes:
        """Return a whole file."""
        from .files import RemoteFile

        file = RemoteFile(as_path(self))
        return bytes(file.read(0, file.size))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return a whole file as text."""
        return self.read_bytes().decode(encoding)


def as_path(path: RemotePath) -> Path:
    """Return a remote path under the type that readers and writers annotate; it has the methods that they use."""
    return cast(Path, path)


def to_path(location: str | os.PathLike[str] | RemotePath) -> Path:
    """Return the path that a user names: a local one, or one behind a URL with fresh metadata.

    Raises:
        CheckpointError: (a ValueError) a `pathlib.Path` made from a URL.
    """
    if isinstance(location, RemotePath):
        return as_path(location.fresh())
    if isinstance(location, str) and is_url(location):
        protocol, rest = split(location)
        return Path(rest) if protocol in LOCAL else as_path(RemotePath(location))
    path = Path(location)
    if isinstance(location, PurePath) and path.parts and path.parts[0] in ("s3:", "gs:", "hf:", "http:", "https:"):
        raise CheckpointError(
            f"a {printable(path.parts[0][:-1])} URL was made a pathlib.Path, which drops one of its slashes; give it "
            "as text"
        )
    return path


def check_writable(target: Path) -> None:
    """Refuse a target in a place that is never written.

    Raises:
        CheckpointError: it is on a web server or the hub.
    """
    if isinstance(target, RemotePath) and target.protocol in UNWRITABLE:
        raise CheckpointError(f"{target}: {UNWRITABLE[target.protocol]}")


def text_of(path: str | os.PathLike[str] | RemotePath) -> str:
    """Return a path as text that `to_path` parses again, including all secrets."""
    return path.url if isinstance(path, RemotePath) else os.fspath(path)


def is_remote(path: object) -> bool:
    """Whether a path is behind a URL."""
    return isinstance(path, RemotePath)


def forget(path: Path) -> None:
    """Clear the cached metadata of a store; does nothing for local paths."""
    if isinstance(path, RemotePath):
        path.store.forget()


def survey(folder: Path, ending: str) -> None:
    """List everything below a folder of a store, and read its files with that ending; a no-op for local folders."""
    if isinstance(folder, RemotePath):
        folder.store.survey(folder.key, ending)


def is_there(path: Path) -> bool:
    """Return whether a file of that name exists; on this machine, anything: a pipe is refused later, not ignored."""
    return path.is_file() if isinstance(path, RemotePath) else os.path.lexists(path)


def sizes_in(folder: Path) -> dict[str, int]:
    """Return name -> bytes of all in a folder; fewer than 0 where a store lists names alone."""
    if isinstance(folder, RemotePath):
        return {name: entry.size for name, entry in folder.store.children(folder.key).items()}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


def open_all(open_one: Callable[[Path], Opened], paths: Iterable[Path]) -> list[Opened]:
    """Open several files in order; those of a store at the same time, since each is waited for."""
    paths = list(paths)
    if len(paths) < 2 or not is_remote(paths[0]):
        return [open_one(path) for path in paths]
    with ThreadPoolExecutor(AT_ONCE, "attn-bridge-open") as threads:
        return list(threads.map(open_one, paths))
