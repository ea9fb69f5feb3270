"""Regenerate what was measured in README.md and docs: run the commands in them and write what they print.

Run it as ``make docs``, or for some of the files as ``docs/generate.py README.md docs/report.svg``. In Markdown a
block stands between ``<!-- begin: COMMAND -->`` and ``<!-- end -->``; several commands have ``; `` between them. The
commands of a page run in order in one temporary folder, those of this repository (``python -m ...``) in the repository.
A block below a line with nothing but a file name is that file, from there on. A page with ``<!-- continues: PAGE -->``
runs behind that page, in its folder.
docs/report.svg is the picture of a report that `compare` prints. docs/mutants.md is made by the two commands that it
names, faults that came after the rest alone as ``docs/generate.py docs/mutants.md#later``, and for another size by
``attn-bridge mutate --configs N --markdown docs/mutants.md``; docs/mesh-mutants.md and docs/gallery-results.md are made
likewise. docs/benchmarks.md is made from what was measured before: ``make bench BENCH='--json docs/benchmarks.json'``;
the lists of docs/families.md are made from what ``make families`` found. The table of docs/uses.md is what the command
above it prints, and so is that of docs/laws.md; docs/agents.md is written by the command that it names.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- begin: (?P<command>.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
FILE = re.compile(r"^`(?P<file>[\w/.-]+\.\w+)`\n+```\w+\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
CONTINUES = re.compile(r"^<!-- continues: (.+) -->$", re.MULTILINE)
MADE_BY = re.compile(r"<!-- made by: (?P<command>.+?) -->")
TABLE = re.compile(r"(?<=-->\n\n)\|.*?\)\.$", re.DOTALL | re.MULTILINE)
"""A table behind the comment that names its command, with the line that counts it."""

LATER_MADE_BY = re.compile(r"<!-- later faults made by: (?P<command>.+?) -->")
GALLERY_MADE_BY = re.compile(r"<!-- gallery made by: (?P<command>.+?) -->")
LATER = "attn-bridge mutate --configs 0 --only mamba- --seed 80000 --jobs 2"
GALLERY = "attn-bridge mutate --configs 0 --faults 0 --gallery parity_tests.wild.gallery --jobs 2"
AGENTS = "python -m benchmarks.agents"
MESH_MUTANTS = "attn-bridge mutate --mesh tensor=2,context=2"
REPORT = "attn-bridge compare demo/pairs.py:torch_norm demo/pairs.py:flax_norm --inputs demo/inputs.npz"
FILES = (
    "README.md",
    *("docs/guides/start.md", "docs/guides/test-my-port.md", "docs/guides/convert-a-checkpoint.md"),
    *("docs/report.svg", "docs/compare.md", "docs/laws.md", "docs/check.md", "docs/pairs.md"),
    *("docs/checkpoints.md", "docs/layouts.md", "docs/containers.md", "docs/rules.md", "docs/checkpoints-in-python.md"),
    *(
        "docs/mutants.md",
        "docs/gallery-results.md",
        "docs/mesh-mutants.md",
        "docs/benchmarks.md",
        "docs/agents.md",
        "docs/speed.md",
        "docs/models.md",
        "docs/encoder-decoders.md",
        "docs/judging-models.md",
        "docs/workers.md",
        "docs/port-llama.md",
        "docs/port-llama-judge.md",
        "docs/port-llama-weights.md",
        "docs/two-environments.md",
        "docs/devices.md",
        "docs/judging-devices.md",
        "docs/uses.md",
    ),
)

PARTS = ("docs/mutants.md#later",)
"""Parts of a page that are made alone."""

GALLERY_PAGE = "docs/gallery-results.md"

FAMILIES = "docs/families.md"
"""Page that is made by ``make families`` alone, as its survey takes hours."""

SURVEY = ROOT / "build/families/survey.json"
PACKAGED = re.compile(r"(?<=<!-- packaged -->\n).*?(?=<!-- end -->)", re.DOTALL)
LISTED = re.compile(r"(?<=<!-- survey -->\n).*?(?=<!-- end -->)", re.DOTALL)

PICTURE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""The picture of a terminal as rich makes it, without its fonts from the network."""


def main() -> None:
    """Rewrite the files that are asked for, by default all; stop at the first command that fails."""
    wanted = sys.argv[1:] or FILES
    for name in wanted:
        if name not in (*FILES, *PARTS, FAMILIES):
            sys.exit(f"error: {name} must be one of {', '.join((*FILES, *PARTS, FAMILIES))}")
        if name == "docs/mutants.md":
            _make_mutants(ROOT / name)
        elif name == "docs/mutants.md#later":
            _make_later(ROOT / "docs/mutants.md")
        elif name == GALLERY_PAGE:
            _make_gallery(ROOT / name)
        elif name == "docs/mesh-mutants.md":
            _make_mesh_mutants(ROOT / name)
        elif name == "docs/benchmarks.md":
            _make_benchmarks(ROOT / name)
        elif name == "docs/agents.md":
            _make_agents(ROOT / name)
        elif name == FAMILIES:
            _make_families(ROOT / name)
        elif name == "docs/uses.md":
            _make_uses(ROOT / name)
        elif name == "docs/report.svg":
            _make_report(ROOT / name)
        else:
            _make_page(ROOT / name)


def _make_mutants(path: Path) -> None:
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    faults, gallery = _parts(_mutate(MADE_BY.search(page), "attn-bridge mutate"))
    path.write_text(faults.rstrip("\n") + "\n", encoding="utf-8")
    if gallery:
        _write_gallery(ROOT / GALLERY_PAGE, gallery)


def _make_later(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    later = _mutate(LATER_MADE_BY.search(page), LATER)
    whole = page.partition("## Later faults\n")[0].rstrip("\n")
    path.write_text(f"{whole}\n\n{later}", encoding="utf-8")


def _make_gallery(path: Path) -> None:
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    _write_gallery(path, _parts(_mutate(GALLERY_MADE_BY.search(page), GALLERY))[1])


def _write_gallery(path: Path, section: str) -> None:
    """Write the section on a gallery as a page of its own."""
    body = section.removeprefix("## Gallery\n").lstrip("\n")
    path.write_text(f"# Ports of the gallery, judged\n\n{body}", encoding="utf-8")


def _make_mesh_mutants(path: Path) -> None:
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(_mutate(MADE_BY.search(page), MESH_MUTANTS), encoding="utf-8")


def _parts(page: str) -> tuple[str, str]:
    """Return what a page of `mutate` says of faults, and what of a gallery."""
    faults, heading, gallery = page.partition("## Gallery\n")
    return faults, heading + gallery


def _mutate(found: re.Match[str] | None, usual: str) -> str:
    """Return the page that a command makes."""
    command = found["command"] if found else usual
    _, *arguments = shlex.split(command)
    print(f"running {command}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as work:
        page = Path(work) / "page.md"
        subprocess.run([sys.executable, "-m", "attn_bridge", *arguments, "--markdown", page], check=True, cwd=ROOT)
        return page.read_text(encoding="utf-8")


def _make_benchmarks(path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--from", path.with_suffix(".json"), "--markdown", path]
    print(f"making {path.relative_to(ROOT)}", file=sys.stderr)
    subprocess.run(command, check=True, cwd=ROOT)


def _make_uses(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    made_by = MADE_BY.search(page)
    assert made_by, "the page names the command that makes its table"
    path.write_text(f"{page[: made_by.end()]}\n\n{_run(made_by['command'], ROOT)}", encoding="utf-8")


def _make_agents(path: Path) -> None:
    page = _run(AGENTS, ROOT)
    if not page:
        sys.exit(f"error: {AGENTS} printed nothing")
    path.write_text(page, encoding="utf-8")


def _make_families(path: Path) -> None:
    """Write the table of packaged families, and the lists of a survey if there is one from ``make families``."""
    from attn_bridge.models.derived import known

    rows = [
        f"| `{one.model_type}` | `{one.layout}` | {one.proof['configs_equal']} | {one.proof['configs_refused']} "
        f"| {one.proof['gradients']} |"
        for one in known.DESCRIPTIONS
        if one.proof
    ]
    lines = ["| `model_type` | tensors as in | configs equal | refused | gradients |", "|---|---|---|---|---|", *rows]
    page = PACKAGED.sub(lambda _: "\n".join((*lines, "")), path.read_text(encoding="utf-8"), count=1)
    if SURVEY.is_file():
        page = LISTED.sub(lambda listed: _surveyed(listed[0]), page, count=1)
    path.write_text(page, encoding="utf-8")


def _surveyed(listed: str) -> str:
    """Return the lists of families: proven, run by a file written by hand, refused, and those that `listed` lacks."""
    from attn_bridge.models.derived import known

    document = json.loads(SURVEY.read_text(encoding="utf-8"))
    before = set(re.findall(r"`([\w-]+)`", listed))
    found = document["families"]
    hand = {one.model_type for one in known.DESCRIPTIONS if not one.proof}
    proven = [name for name, one in found.items() if one["kind"] == "proven"]
    by_hand = [name for name in found if name in hand and name not in proven]
    rest = [name for name in found if name not in proven and name not in by_hand]
    new = [name for name in found if name not in before]

    def shown(names: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in names) or "none"

    lines = [
        f"Of the {len(found)} causal models of `transformers` {document['transformers']}:",
        "",
        f"- {len(proven)} proven: {shown(proven)}",
        f"- {len(by_hand)} refused by the derivation, with a file written by hand: {shown(by_hand)}",
        f"- {len(rest)} refused, with the first part that is not understood and the nearest part of ours:",
        "",
        "| `model_type` | why |",
        "|---|---|",
        *(f"| `{name}` | {found[name]['detail'].replace('|', '/')} |" for name in rest),
        "",
        *((f"New since the survey before: {shown(new)}.", "") if before and new else ()),
    ]
    return "\n".join(lines)


def _make_report(path: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        _run("attn-bridge demo", Path(work))
        shown = _run(REPORT, Path(work), {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": ""})
    path.write_text(picture(shown, REPORT), encoding="utf-8")


def picture(shown: str, command: str) -> str:
    """Return an SVG of a terminal with a command and what it printed, in its colours."""
    console = Console(record=True, file=io.StringIO(), width=82)
    console.print(Text(f"$ {command}", "bold"), Text.from_ansi(shown.rstrip("\n")), sep="\n")
    svg = console.export_svg(title="", code_format=PICTURE, unique_id="report")
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines())


def _make_page(path: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        found = _run_page(path, Path(work))

    def shown(block: re.Match[str]) -> str:
        # A command may stand on a page several times, between changes of a file: the next of its outputs.
        number = next(number for number, (command, _) in enumerate(found) if command == block["command"])
        return f"{block[1]}```console\n{found.pop(number)[1]}\n```\n{block[3]}"

    # Read again: commands take minutes, and the page may have been edited meanwhile.
    page = BLOCK.sub(shown, path.read_text(encoding="utf-8"))
    if (made_by := MADE_BY.search(page)) and TABLE.search(page):
        table = _run(made_by["command"], ROOT).strip("\n")
        page = TABLE.sub(lambda _: table, page, count=1)
    path.write_text(page, encoding="utf-8")


def _run_page(path: Path, work: Path) -> list[tuple[str, str]]:
    """Run the commands of a page, behind those of the page that it continues; return each with its output."""
    page = path.read_text(encoding="utf-8")
    if continued := CONTINUES.search(page):
        _run_page(path.with_name(continued[1]), work)
    found = []
    for block in sorted([*BLOCK.finditer(page), *FILE.finditer(page)], key=lambda one: one.start()):
        if block.re is FILE:
            file = work / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["text"], encoding="utf-8")
        else:
            lines = [line for command in block["command"].split("; ") for line in _shown(command, work)]
            found.append((block["command"], "\n".join(lines)))
    return found


def _shown(command: str, folder: Path) -> list[str]:
    lines = [line.rstrip() for line in _run(command, folder).splitlines()]
    return [f"$ {command}", *"\n".join(lines).strip("\n").splitlines()]


def _run(command: str, folder: Path, more: dict[str, str] | None = None) -> str:
    """Return what a command prints; it may say that a check failed, by status 1."""
    program, *arguments = shlex.split(command)
    print(f"running {command}", file=sys.stderr)
    folder = ROOT if program == "python" and arguments[0] == "-m" else folder
    programs = {"attn-bridge": [sys.executable, "-m", "attn_bridge"], "python": [sys.executable]}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (more or {})
    done = subprocess.run(
        [*programs[program], *arguments], capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    if done.returncode > 1:
        sys.exit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
