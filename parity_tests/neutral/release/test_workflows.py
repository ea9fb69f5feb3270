"""Workflows: least rights, pinned actions, steps that exist, and nothing from outside pasted into a shell."""

from __future__ import annotations

import re

import pytest

from release.versions import ROOT

yaml = pytest.importorskip("yaml", reason="comes with transformers")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE = (ROOT / "Makefile").read_text()


def read(path):
    return yaml.safe_load(path.read_text())


def steps(data):
    return [(name, step) for name, job in data["jobs"].items() for step in job["steps"]]


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} >= {"ci", "links", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_least_rights_and_pinned_actions(path):
    data = read(path)
    assert data["permissions"] == {"contents": "read"}
    for name, job in data["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
    for name, step in steps(data):
        if "uses" in step:
            assert re.search(r"@(v[0-9]+|release/v[0-9]+)$", step["uses"]), (name, step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
        # What an event says (titles, branches) is given to a shell as a variable, never as text of the script.
        pasted = set(re.findall(r"\$\{\{\s*([\w.]+)", step.get("run", "")))
        assert all(one.startswith("matrix.") for one in pasted), (name, pasted)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_makes_is_a_target(path):
    data = read(path)
    asked = re.findall(r"\bmake ([a-z][a-z -]*)", "\n".join(step.get("run", "") for _, step in steps(data)))
    asked += [
        one for job in data["jobs"].values() for one in job.get("strategy", {}).get("matrix", {}).get("target", [])
    ]
    targets = {word for one in asked for word in one.split()}
    known = (
        set(re.findall(r"^([a-z][\w-]*):", MAKE, re.MULTILINE))
        | {"test", "tours", "meshes", "lanes", "check"}
        | set(re.findall(r"test-\w+", MAKE))
    )
    assert targets <= known


def test_the_workflow_runs_all_that_make_full_runs():
    (full,) = re.findall(r"^\t@\$\(MAKE\) .* FULL=1 (.+)$", MAKE, re.MULTILINE)
    (parts,) = re.findall(r"^PARTS := (.+)$", MAKE, re.MULTILINE)
    data = read(ROOT / ".github" / "workflows" / "ci.yml")
    jobs = " ".join(["release", *data["jobs"]["tests"]["strategy"]["matrix"]["target"]]).split()
    assert sorted(jobs) == sorted(full.replace(" test ", f" {parts} ").split())
    assert "make FULL=1 ${{ matrix.target }}" in [step.get("run") for step in data["jobs"]["tests"]["steps"]]


def test_ci_runs_a_part_of_make_full():
    (full,) = re.findall(r"^\t@\$\(MAKE\) .* FULL=1 (.+)$", MAKE, re.MULTILINE)
    gate = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert set(full.split()) - set(" ".join(gate).split()) == {"faults", "site"}


def test_only_the_job_that_publishes_may_prove_who_it_is():
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    with_identity = [name for name, job in jobs.items() if job.get("permissions", {}).get("id-token") == "write"]
    assert with_identity == ["publish"]
    publish = jobs["publish"]
    assert publish["environment"]["name"] == "pypi"
    last = publish["steps"][-1]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert last["with"] == {"attestations": True}
    # It runs nothing of the project, and nothing is published that was not installed and checked.
    assert all("run" not in step for step in publish["steps"])
    assert publish["needs"] == "installed"
    assert jobs["installed"]["needs"] == "build"
    assert jobs["installed"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
