"""Runs the steps of a composite GitHub Action in a folder, as a runner does, for the expressions that ours uses."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Run:
    """What a run of an action came to.

    Attributes:
        stdout: of all steps that ran.
        stderr: likewise.
        status: exit status of the first step that failed, or 0.
        outputs: of the action.
        summary: the step summary.
        uploaded: inputs of the steps that use another action, by its name.
        ran: ids and numbers of the steps that ran.
    """

    stdout: str = ""
    stderr: str = ""
    status: int = 0
    outputs: dict[str, str] = dataclasses.field(default_factory=dict)
    summary: str = ""
    uploaded: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    ran: list[str] = dataclasses.field(default_factory=list)


def run(action: dict[str, Any], folder: Path, given: dict[str, str], path: Path | None = None) -> Run:
    """Run an action.

    Args:
        action: as its action.yml says.
        folder: the workspace.
        given: inputs; the others have their defaults.
        path: a folder of programs that go before others.
    """
    unknown = given.keys() - action["inputs"].keys()
    assert not unknown, f"no inputs: {unknown}"
    inputs = {name: given.get(name, one["default"]) for name, one in action["inputs"].items()}
    context = {f"inputs.{name}": value for name, value in inputs.items()} | {"github.action_path": "/the/action"}
    found = Run()
    for number, step in enumerate(action["runs"]["steps"]):
        if not _holds(str(step.get("if", "success()")), context, found.status == 0):
            continue
        name = step.get("id", str(number))
        found.ran.append(name)
        if "uses" in step:
            found.uploaded[step["uses"]] = {key: _filled(str(one), context) for key, one in step["with"].items()}
            continue
        assert "${{" not in step["run"], "what is given goes through variables, not through the script"
        files = {key: folder.parent / f"{name}-{key}" for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "INPUT_"))},
            **{key: _filled(value, context) for key, value in step.get("env", {}).items()},
            **{key: str(file) for key, file in files.items()},
            "GITHUB_WORKSPACE": str(folder),
            "PATH": os.pathsep.join(
                [*([str(path)] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
        }
        where = folder / _filled(step.get("working-directory", "."), context)
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=where, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found.stdout, found.stderr = found.stdout + done.stdout, found.stderr + done.stderr
        found.status = found.status or done.returncode
        found.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        for line in files["GITHUB_OUTPUT"].read_text().splitlines():
            key, _, value = line.partition("=")
            context[f"steps.{name}.outputs.{key}"] = value
    found.outputs = {name: _filled(one["value"], context) for name, one in action.get("outputs", {}).items()}
    return found


def _filled(text: str, context: dict[str, str]) -> str:
    return re.sub(r"\$\{\{\s*(\S+)\s*\}\}", lambda match: context.get(match[1], ""), text)


def _holds(condition: str, context: dict[str, str], succeeded: bool) -> bool:
    """Evaluate ``A == 'b' && C != 'd'``; without always() a step runs only where those before it succeeded."""
    parts = condition.strip().removeprefix("${{").removesuffix("}}").strip().split(" && ")
    is_always = "always()" in parts
    for part in parts:
        if part in ("always()", "success()"):
            continue
        name, sign, value = part.split(" ")
        assert sign in ("==", "!=")
        if (context.get(name, "") == value.strip("'")) != (sign == "=="):
            return False
    return succeeded or is_always
