"""Runs the command for the inputs of the action in a separate process, and shows the outcome on GitHub.

Inputs come as variables ``INPUT_...``, never as text of a shell's script. The exit status is that of the command.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoints.hub import card
from . import places, workflow
from .places import SourceLine
from .workflow import annotation

COMMANDS = ("compare", "review", "pytest", "check")
MOST = 10
"""Annotations of one kind that GitHub shows per step."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the action.

    Attributes:
        command: ``compare``, ``review``, ``pytest`` or ``check``.
        first: the first side, as `attn-bridge compare` takes it.
        second: the second side, whose source is annotated.
        arguments: further arguments of the command.
        reports: folder for the reports.
    """

    command: str
    first: str
    second: str
    arguments: tuple[str, ...]
    reports: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Inputs:
        """Read the inputs.

        Raises:
            ValueError: one is wrong or missing.
        """
        inputs = {
            name: environment.get(f"INPUT_{name.upper()}", "").strip()
            for name in ("command", "first", "second", "arguments", "reports")
        }
        command = inputs["command"] or "compare"
        if command not in COMMANDS:
            raise ValueError(f"command ({command}) must be one of {', '.join(COMMANDS)}")
        for name in ("first", "second"):
            if (command == "compare") != bool(inputs[name]):
                raise ValueError(f"{name} is needed with command: compare, and goes with it alone")
        try:
            arguments = tuple(shlex.split(inputs["arguments"]))
        except ValueError as error:
            raise ValueError(f"arguments can't be split into words: {error}") from None
        return cls(
            command, inputs["first"], inputs["second"], arguments, Path(inputs["reports"] or "attn-bridge-report")
        )

    def line(self) -> list[str]:
        """Return the command line, without the interpreter."""
        if self.command == "pytest":
            reports = ["--parity-html", str(self.reports), "--parity-json", str(self.reports)]
            junit = ["-o", "junit_family=xunit1", f"--junitxml={self.reports / 'tests.xml'}"]
            return ["-m", "pytest", *reports, *junit, *self.arguments]
        if self.command == "review":
            return ["-m", "attn_bridge", "review", *self.arguments, "--out", str(self.reports)]
        files = ["--json", str(self.reports / "report.json")]
        if self.command == "compare":
            sides = [self.first, self.second]
            return ["-m", "attn_bridge", "compare", *sides, "--html", str(self.reports / "report.html"), *files,
                    *self.arguments]  # fmt: skip
        return ["-m", "attn_bridge", "check", *files, *self.arguments]


def main() -> int:
    """Run the action, and return the exit status: that of the command, 2 for invalid inputs."""
    try:
        inputs = Inputs.of(os.environ)
        folder = inputs.reports.parent if inputs.command == "review" else inputs.reports
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(annotation("error", "attn-bridge", str(error)))
        return 2
    with workflow.other_peoples_output():
        done = subprocess.run([sys.executable, *inputs.line()], stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        sys.stderr.flush()
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    if inputs.command == "pytest":
        lines, verdict = _of_tests(inputs.reports / "tests.xml", workspace)
    else:
        lines, verdict = _of_report(inputs, workspace)
    error_line = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), "")
    if done.returncode > 1 and error_line:
        location = None
        if inputs.command == "compare":
            location = places.of_report({}, inputs.second, Path.cwd(), workspace)
        lines.append(annotation("error", "attn-bridge could not judge", error_line.removeprefix("error: "), location))
    for line in lines:
        print(line)
    pages = sorted(inputs.reports.glob("*.html"))
    is_there = inputs.reports.is_dir() and any(inputs.reports.iterdir())
    workflow.set_outputs(
        {
            "verdict": verdict or ("inconclusive" if done.returncode else "equal"),
            "reports": str(inputs.reports) if is_there else "",
            "html": str(pages[0]) if len(pages) == 1 else "",
        }
    )
    return done.returncode


def _of_report(inputs: Inputs, workspace: Path) -> tuple[list[str], str]:
    """Return the annotations of a report, and its verdict; add it to the step's summary."""
    try:
        data = json.loads((inputs.reports / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [], ""
    if inputs.command == "review":
        return _of_review(data, inputs.reports, workspace), str(data["verdict"])
    workflow.summarise([f"## attn-bridge {inputs.command}", "", *card.describe(data)[2:]])
    verdict = str(data.get("verdict") or ("equal" if data.get("passed") else "different"))
    if data.get("passed"):
        return [], verdict
    if inputs.command == "check":
        cells = [one for one in data.get("cells", ()) if one.get("verdict") != "equal"]
        texts = [f"{one['variant']}, {one['case']}, {one['dtype']}: {one['what']}" for one in cells]
        return [annotation("error", f"attn-bridge check: {verdict}", text) for text in texts[:MOST]], verdict
    location = places.of_report(data, inputs.second, Path.cwd(), workspace)
    return [annotation("error", f"attn-bridge: {verdict}", _explained(data), location)], verdict


def _of_review(data: places.Data, reports: Path, workspace: Path) -> list[str]:
    """Return the annotations of a review, one per pair that is not equal; add its pairs to the step's summary."""
    rows = [f"| {pair['name']} | {pair['verdict']} |" for pair in data["pairs"]]
    lines = [f"- {line}" for line in (*data["earlier"], *data["notes"])]
    head = ["## attn-bridge review", "", str(data["summary"]), "", "| pair | verdict |", "|---|---|"]
    workflow.summarise([*head, *rows, "", *lines])
    annotations = []
    for pair in data["pairs"]:
        if pair["verdict"] != "equal":
            file = reports / pair["report"] if "report" in pair else None
            report = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
            line = places.of_report(report, pair["second"], Path.cwd(), workspace)
            text = _explained(report) if report else str(pair["message"])
            title = f"attn-bridge: {pair['name']} is {pair['verdict']}"
            annotations.append(annotation("error", title, text, line))
    return annotations[:MOST]


def _explained(data: Mapping[str, Any]) -> str:
    """Return an annotation's text on a comparison: where it diverges, a hint, and the worst tensors."""
    lines = [str(data.get("summary", ""))]
    first = data.get("first_divergence")
    if isinstance(first, Mapping):
        where = first.get("path") or f"{first.get('first_name') or 'the module'} itself"
        lines.append(f"first divergence, {first.get('direction')}: {where} ({first.get('second_path') or 'itself'})")
        lines += [f"hint: {first['hint']}"] if first.get("hint") else []
    wrong = [one for one in data.get("tensors", ()) if one.get("verdict") != "equal" and not one.get("allowed")]
    lines += [f"{one.get('name')}: {one.get('message') or one.get('verdict')}" for one in wrong[:3]]
    return "\n".join(lines)


def _of_tests(file: Path, workspace: Path) -> tuple[list[str], str]:
    """Return the annotations of failed tests, at their lines, and the verdict."""
    try:
        cases: Sequence[ET.Element] = list(ET.parse(file).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return [], ""
    failed = [(case, found) for case in cases for found in case if found.tag in ("failure", "error")]
    lines = []
    for case, failure in failed[:MOST]:
        name, line = case.get("file"), case.get("line")
        path = Path(name) if name else None
        if path is not None:
            path = Path(os.path.relpath(path.absolute(), workspace.absolute()))
        at = None if path is None else SourceLine(path.as_posix(), int(line or 0) + 1)
        text = failure.get("message") or (failure.text or "").strip()
        lines.append(annotation("error", f"{case.get('name')} failed", text[:4000], at))
    head = f"{len(cases)} tests, {len(failed)} failed"
    workflow.summarise(["## attn-bridge pytest", "", head, ""])
    return lines, "different" if failed else "equal"


if __name__ == "__main__":
    sys.exit(main())
