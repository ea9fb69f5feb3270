"""Review a commit: export its files, judge each pair of its manifest, and watch for files that a pair changes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attn_bridge.printable import listed, printable

from ..attestation import subjects
from ..confinement import landlock
from ..results.changes import Data
from . import judging, manifest, snapshot
from .commit import Commit, Export
from .judging import Judgement
from .manifest import ManifestPair
from .report import Review

SECONDS = 600.0
"""Limit of a pair, unless the user gives another."""

MEMORY = 16 << 30
"""Limit of a pair in bytes, likewise."""

Progress = Callable[[str, int, int], None]


def review(
    folder: Path,
    ref: str | None = None,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    progress: Progress | None = None,
    own: Sequence[Path] = (),
) -> Review:
    """Judge the pairs of a repository's manifest at a commit.

    Args:
        folder: a folder in the repository.
        ref: name of the commit; None for HEAD.
        seconds: limit of each pair.
        memory: limit of each pair, in bytes.
        progress: called with a text, the number of pairs that are judged, and the number of all.
        own: folders of reports, which are not uncommitted changes.

    Raises:
        RepositoryError: there is no repository, or no such commit.
        ManifestError: the manifest is missing or malformed.
    """
    commit = Commit.of(folder, ref, own)
    work = Path(tempfile.mkdtemp(prefix="attn-bridge-review-")).resolve()
    try:
        tree = _Tree(commit, work)
        path = tree.folder / manifest.NAME
        if manifest.NAME not in tree.export.digests:
            raise manifest.ManifestError(
                f"commit {commit.name[:12]} has no file {manifest.NAME} at the top of the repository (a link is none)"
            )
        pairs = manifest.read(path)
        results = []
        for number, pair in enumerate(pairs):
            if progress is not None:
                progress(pair.name, number, len(pairs))
            results.append(_judge(pair, tree, work / f"pair-{number}", seconds, memory))
        return Review.of(commit, subjects.of_file(path), tuple(results), tree.export.notes)
    finally:
        shutil.rmtree(work, onerror=_make_removable)


class _Tree:
    """The files of a commit in a folder, which is written again after a pair changed it."""

    def __init__(self, commit: Commit, work: Path):
        self.commit, self.folder = commit, work / "worktree"
        self.export: Export = commit.export(self.folder)
        self.state = snapshot.take(self.folder)

    def restore(self) -> list[str]:
        """Return the files of the commit that changed since the last call, after writing all of them again."""
        paths = snapshot.changed(self.state, snapshot.take(self.folder))
        if paths:
            shutil.rmtree(self.folder, onerror=_make_removable)
            self.export = self.commit.export(self.folder)
        before, self.state = self.state, snapshot.take(self.folder) if paths else self.state
        return [path for path in paths if path in before]


def _judge(pair: ManifestPair, tree: _Tree, scratch: Path, seconds: float, memory: int) -> Judgement:
    """Judge one pair; one that changes the repository, or files of the commit, is refused."""
    root = tree.commit.root
    scratch.mkdir()
    before = snapshot.take(root)
    result = judging.judge(pair, tree.folder, scratch, seconds=seconds, memory=memory, avoid=root, is_open=True)
    # With Landlock the kernel refuses writes there: a file that changed was changed by its user, who goes on working.
    outside = snapshot.changed(before, snapshot.take(root), modes_only=landlock.version() > 0)
    digests, inside = tree.export.digests, tree.restore()
    shutil.rmtree(scratch, onerror=_make_removable)
    if outside:
        return result.refused(f"while it ran, files of the repository changed: {listed([*map(printable, outside)], 3)}")
    if inside:
        return result.refused(f"it changed files of the commit: {listed([*map(printable, inside)], 3)}")
    strangers = [] if result.report is None else _strangers(result.report["subjects"], digests)
    names = listed([*map(printable, strangers)], 3)
    return result.refused(f"it ran code that is not the commit's: {names}") if strangers else result


def _strangers(data: Data, digests: Mapping[str, str]) -> list[str]:
    """Return the files of both sides that differ from those of the commit."""
    files = [item for side in subjects.SIDES for item in dict(data.get(side, {})).get("files", {}).items()]
    return sorted({name for name, digest in files if digests.get(name) != digest})


def _make_removable(function: Callable[[str], object], path: str, _: object) -> None:
    """Remove a file whose folder was made read-only."""
    try:
        Path(path).parent.chmod(0o700)
        # Never of a file: it may be a second name of one elsewhere.
        if Path(path).is_dir() and not Path(path).is_symlink():
            Path(path).chmod(0o700)
        function(path)
    except OSError:
        pass
