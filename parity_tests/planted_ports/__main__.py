"""Lay out the pairs, without the truth, in a folder of someone who is to judge and mend them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from . import FAULTS, HERE, RIGHT


def lay_out(folder: Path) -> None:
    """Copy each pair to a folder of its own."""
    for name in sorted([*FAULTS, *RIGHT]):
        (folder / name).mkdir(parents=True)
        for file in ("original.py", "port.py"):
            shutil.copy(HERE / name / file, folder / name / file)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
