"""The hook of pre-commit: verifies the checkpoints that a commit touches, by the digests in their manifests.

A checkpoint without digests is skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...checkpoints.manifest import BESIDE_FILE, IN_FOLDER


def checkpoints_of(names: Iterable[str]) -> list[Path]:
    """Return the checkpoints with digests that some files belong to: folders and files, each once, sorted."""
    checkpoints: set[Path] = set()
    for name in names:
        path = Path(name)
        if path.name.endswith(BESIDE_FILE) and path.name != IN_FOLDER:
            checkpoints.add(path.with_name(path.name.removesuffix(BESIDE_FILE)))
        elif path.with_name(path.name + BESIDE_FILE).is_file():
            checkpoints.add(path)
        checkpoints |= {folder for folder in path.parents if (folder / IN_FOLDER).is_file()}
    return sorted(checkpoints)


def deleted() -> list[str]:
    """Return the files that the commit deletes, which pre-commit does not name."""
    command = ["git", "diff", "--cached", "--name-only", "--diff-filter=D", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else []


def main(names: Sequence[str]) -> int:
    """Verify them, and return the worst exit status: 0 = all are right, 1 = some are wrong, 2 = some can't be read."""
    from ..app import run

    return max((run(["verify", str(path)]) for path in checkpoints_of([*names, *deleted()])), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
