"""Regenerate what was measured in README.md and docs: run the commands in them and write what they print.

Run it as ``make docs``, or for one of the files as ``docs/generate.py README.md``. In Markdown a block stands between
``<!-- begin: COMMAND -->`` and ``<!-- end -->``; several commands, with ``; `` between them, run one after the other in
a folder of their own that is thrown away. docs/mutants.md as a whole is made by the command that it names, and for
another size by ``attn-bridge mutate --configs N --markdown docs/mutants.md``. docs/benchmarks.md is made from what was
measured before: ``make bench BENCH='--json docs/benchmarks.json'``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- begin: (?P<command>.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
MADE_BY = re.compile(r"<!-- made by: (?P<command>.+?) -->")
FILES = (
    "README.md",
    *("docs/checkpoints.md", "docs/pairs.md", "docs/mutants.md", "docs/benchmarks.md", "docs/attention.md"),
)


def main() -> None:
    """Rewrite the files that are asked for, by default all; stop at the first command that fails."""
    wanted = sys.argv[1:] or FILES
    for name in wanted:
        if name not in FILES:
            sys.exit(f"error: {name} must be one of {', '.join(FILES)}")
        if name == "docs/mutants.md":
            _make_mutants(ROOT / name)
        elif name == "docs/benchmarks.md":
            _make_benchmarks(ROOT / name)
        else:
            path = ROOT / name
            path.write_text(BLOCK.sub(_run, path.read_text(encoding="utf-8")), encoding="utf-8")


def _make_mutants(path: Path) -> None:
    found = MADE_BY.search(path.read_text(encoding="utf-8")) if path.exists() else None
    program, *arguments = shlex.split(found["command"] if found else "attn-bridge mutate")
    print(f"running {' '.join([program, *arguments])}", file=sys.stderr)
    subprocess.run([Path(sys.executable).parent / program, *arguments, "--markdown", path], check=True)


def _make_benchmarks(path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--from", path.with_suffix(".json"), "--markdown", path]
    print(f"making {path.relative_to(ROOT)}", file=sys.stderr)
    subprocess.run(command, check=True, cwd=ROOT)


def _run(match: re.Match[str]) -> str:
    commands = match["command"].split("; ")
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "examples").symlink_to(ROOT / "examples")
        shown = [_output(command, ROOT if len(commands) == 1 else Path(work)) for command in commands]
    body = "\n".join(line for lines in shown for line in lines)
    return f"{match[1]}```console\n{body}\n```\n{match[3]}"


def _output(command: str, folder: Path) -> list[str]:
    program, *arguments = shlex.split(command)
    print(f"running {command}", file=sys.stderr)
    path = Path(sys.executable).parent / program
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode > 1:  # 1 says that a check failed, which an example may show
        sys.exit(done.stderr)
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    return [f"$ {command}", *"\n".join(lines).strip("\n").splitlines()]


if __name__ == "__main__":
    main()
