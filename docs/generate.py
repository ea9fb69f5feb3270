"""Regenerate what was measured in README.md and docs/mutants.md: run the commands in them and write what they give.

Run it as ``make docs``, or for one of the files as ``docs/generate.py README.md``. In the README a block stands between
``<!-- begin: COMMAND -->`` and ``<!-- end -->``; docs/mutants.md as a whole is made by the command that it names, and
for another size by ``attn-bridge mutate --configs N --markdown docs/mutants.md``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- begin: (?P<command>.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
MUTANTS = Path(__file__).parent / "mutants.md"
MADE_BY = re.compile(r"<!-- made by: (?P<command>.+?) -->")


def main() -> None:
    """Rewrite the files that are asked for, by default all; stop at the first command that fails."""
    makers = {"README.md": _make_readme, "mutants.md": _make_mutants}
    wanted = [Path(name).name for name in sys.argv[1:]] or list(makers)
    for name in wanted:
        if name not in makers:
            sys.exit(f"error: {name} must be one of {', '.join(makers)}")
        makers[name]()


def _make_readme() -> None:
    text = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(_run, text), encoding="utf-8")


def _make_mutants() -> None:
    found = MADE_BY.search(MUTANTS.read_text(encoding="utf-8")) if MUTANTS.exists() else None
    program, *arguments = shlex.split(found["command"] if found else "attn-bridge mutate")
    print(f"running {' '.join([program, *arguments])}", file=sys.stderr)
    subprocess.run([Path(sys.executable).parent / program, *arguments, "--markdown", MUTANTS], check=True)


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
