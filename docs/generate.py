"""Regenerate the measured blocks of README.md: run their commands here and paste what they print.

Run it as ``make docs``. A block stands between ``<!-- begin: COMMAND -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- begin: (?P<command>.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Rewrite every block in place; stop at the first command that fails."""
    text = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(_run, text), encoding="utf-8")


def _run(match: re.Match[str]) -> str:
    command = match["command"]
    program, *arguments = shlex.split(command)
    path = Path(sys.executable).parent / program
    print(f"running {command}", file=sys.stderr)
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    body = "\n".join(lines).strip("\n")
    return f"{match[1]}```console\n$ {command}\n{body}\n```\n{match[3]}"


if __name__ == "__main__":
    main()
