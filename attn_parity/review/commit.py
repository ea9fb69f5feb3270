"""A repository's commit, and the export of its files into a folder.

Files are read from git's objects, not checked out: no hook and no filter of the repository's configuration runs, and
nothing is written to it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from attn_bridge.printable import printable

# Programs that a repository's configuration names are not run: a monitor of its files, hooks, fetches of objects.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-c", "protocol.allow=never",
        "--no-optional-locks")  # fmt: skip

_LINK, _SUBMODULE, _EXECUTABLE = "120000", "160000", "100755"

_LFS = b"version https://git-lfs.github.com/spec/v1\n"


class RepositoryError(ValueError):
    """The folder is not in a repository, or the commit can't be read; the message names the cause."""


@dataclasses.dataclass(frozen=True)
class CommitFile:
    """A file of a commit.

    Attributes:
        mode: git's mode, such as ``100644``.
        blob: git's name of its content.
        path: relative to the root.
    """

    mode: str
    blob: str
    path: str


@dataclasses.dataclass(frozen=True)
class Commit:
    """A commit of a repository.

    Attributes:
        root: the top folder of the working tree.
        name: its full hash.
        tree: the hash of its files.
        ref: as the user named it.
        changes: paths in the working tree that differ from HEAD.
    """

    root: Path
    name: str
    tree: str
    ref: str
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, ref: str | None, own: Sequence[Path] = ()) -> Commit:
        """Return the commit that a ref names in the repository around a folder; None is HEAD.

        Args:
            folder: a folder in the repository.
            ref: name of the commit.
            own: paths that are left out of `changes`.

        Raises:
            RepositoryError: no git, no repository, or no such commit.
        """
        try:
            top = _git(folder, "rev-parse", "--show-toplevel").decode("utf-8", "surrogateescape").rstrip("\n")
        except FileNotFoundError:
            raise RepositoryError("git is not installed, or not on the path") from None
        except RepositoryError as error:
            raise RepositoryError(f"the current folder is not in a git repository: {error}") from None
        root, wanted = Path(top).resolve(), ref or "HEAD"
        try:
            name = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")
        except RepositoryError:
            raise RepositoryError(f"there is no commit {printable(wanted)} in this repository") from None
        commit = name.decode().strip()
        tree = _git(root, "rev-parse", f"{commit}^{{tree}}").decode().strip()
        words = ("status", "--porcelain", "-z", "--ignore-submodules", "--untracked-files=normal")
        status = _git(root, *_without_filters(root), *words)
        entries = (entry.decode("utf-8", "surrogateescape") for entry in status.split(b"\0") if entry[2:3] == b" ")
        changes = (entry[3:] for entry in entries)
        return cls(root, commit, tree, wanted, tuple(path for path in changes if root / path not in own))

    def entries(self) -> Iterator[CommitFile]:
        """Yield its files.

        Raises:
            RepositoryError: a path leads out of the root, which git itself would not write.
        """
        for line in _git(self.root, "ls-tree", "-r", "-z", "--full-tree", self.name).split(b"\0"):
            if line:
                head, _, path = line.decode("utf-8", "surrogateescape").partition("\t")
                mode, _, blob = head.split(" ")
                parts = path.split("/")
                if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
                    raise RepositoryError(f"the commit has a file with the path {printable(path)}")
                yield CommitFile(mode, blob, path)

    def export(self, folder: Path) -> Export:
        """Write its files into a new folder, links last, and return their digests.

        Raises:
            RepositoryError: an object can't be read, or two files have one path.
        """
        entries = list(self.entries())
        submodules = [entry.path for entry in entries if entry.mode == _SUBMODULE]
        regular = [entry for entry in entries if entry.mode not in (_SUBMODULE, _LINK)]
        links = [entry for entry in entries if entry.mode == _LINK]
        folder.mkdir()
        digests, pointers = {}, []
        for entry, content in zip(regular, self._contents(regular), strict=True):
            path = folder / entry.path
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as stream:
                    stream.write(content)
            except OSError as error:
                raise RepositoryError(f"{printable(entry.path)} can't be written: {error.strerror}") from error
            path.chmod(0o755 if entry.mode == _EXECUTABLE else 0o644)
            digests[entry.path] = hashlib.sha256(content).hexdigest()
            pointers += [entry.path] * content.startswith(_LFS)
        made: list[str] = []
        outside: list[str] = []
        for entry, content in zip(links, self._contents(links), strict=True):
            (made if _link(folder / entry.path, os.fsdecode(content)) else outside).append(entry.path)
        # Links lead through each other: only together they show where.
        while leaving := [name for name in made if not _is_inside(folder, name)]:
            for name in leaving:
                (folder / name).unlink()
            made = [name for name in made if name not in leaving]
            outside += leaving
        return Export(digests, tuple(submodules), tuple(pointers), tuple(outside))

    def _contents(self, entries: Sequence[CommitFile]) -> Iterator[bytes]:
        """Yield the contents of files, in order."""
        if not entries:
            return
        process = subprocess.Popen(
            [*_GIT, "cat-file", "--batch"],
            cwd=self.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "likewise"
        try:
            for entry in entries:
                process.stdin.write(f"{entry.blob}\n".encode())
                process.stdin.flush()
                head = process.stdout.readline().split()
                if len(head) != 3 or head[1] != b"blob":
                    raise RepositoryError(f"git has no content of {printable(entry.path)}")
                content = process.stdout.read(int(head[2]))
                process.stdout.read(1)
                yield content
        finally:
            process.stdin.close()
            process.stdout.close()
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class Export:
    """The files of a commit in a folder.

    Attributes:
        digests: path of a file -> its SHA-256.
        submodules: paths of submodules, whose files are missing.
        pointers: pointers of Git LFS, exported without the files' contents.
        outside: links that were left out, because they lead out of the folder.
    """

    digests: Mapping[str, str]
    submodules: tuple[str, ...]
    pointers: tuple[str, ...]
    outside: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """A line on each kind of file that is missing."""
        kinds = (
            (self.submodules, "submodules are not reviewed"),
            (self.pointers, "files of Git LFS are pointers in a review"),
            (self.outside, "links lead out of the repository and were left out"),
        )
        return [f"{len(paths)} {text}: {_some(paths)}" for paths, text in kinds if paths]


def _some(paths: Sequence[str]) -> str:
    return ", ".join(map(printable, paths[:3])) + (", ..." if len(paths) > 3 else "")


def _link(path: Path, target: str) -> bool:
    """Make a symbolic link, unless its target is absolute or the path exists."""
    if PurePosixPath(target).is_absolute():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    except (OSError, ValueError):
        return False
    return True


def _is_inside(folder: Path, path: str) -> bool:
    try:
        return (folder / path).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a circle
        return False


def _without_filters(root: Path) -> list[str]:
    """Return options that switch off the filters of the repository's own configuration: they are programs."""
    pattern = r"^filter\..*\.(clean|smudge|process)$"
    try:
        keys = _git(root, "config", "--local", "--includes", "--name-only", "-z", "--get-regexp", pattern)
    except RepositoryError:  # it has none
        return []
    names = {key.decode("utf-8", "surrogateescape") for key in keys.split(b"\0") if key}
    required = {f"{name.rpartition('.')[0]}.required=false" for name in names}
    return [
        word for setting in (*(f"{name}=" for name in sorted(names)), *sorted(required)) for word in ("-c", setting)
    ]


def _environment() -> dict[str, str]:
    """Return the environment without git's variables, such as those of a hook."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}


def _git(folder: Path, *words: str) -> bytes:
    done = subprocess.run(
        [*_GIT, *words], cwd=folder, capture_output=True, env=_environment(), stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {done.returncode}"]
        raise RepositoryError(printable(lines[0], 300))
    return done.stdout
