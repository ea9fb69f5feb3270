"""One version, a changelog in its form, and a recipe that asks for what pyproject.toml asks for."""

from __future__ import annotations

import datetime
import re
import shutil
import tomllib

import pytest

import attn_bridge
from release import changelog, versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())
CONDA = {"torch": "pytorch", "ray": "ray-core", "matplotlib": "matplotlib-base"}
"""Package -> what conda-forge calls it."""


def test_the_version_stands_in_one_place_and_its_readers_agree():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "attn_bridge.__version__"}
    assert versions.current() == attn_bridge.__version__
    assert versions.problems() == []
    assert versions.problems(tag=f"v{attn_bridge.__version__}") == []
    assert versions.problems(tag="v9.9.9") == [
        f"the tag is v9.9.9; attn_bridge/__init__.py has {attn_bridge.__version__}, "
        f"whose tag is v{attn_bridge.__version__}"
    ]


@pytest.fixture
def project(tmp_path):
    for name in (versions.HOME, *versions.REPEATED, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(versions.ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    before, _, after = changes.read_text().partition("## [Unreleased]\n")
    changes.write_text(f"{before}## [Unreleased]\n\n### Added\n\n- Another layer.\n\n## [{after.partition('## [')[2]}")
    return tmp_path


def test_a_new_version_goes_everywhere(project):
    versions.bump("7.1.0rc1", project, datetime.date(2031, 1, 2))
    assert versions.current(project) == "7.1.0rc1"
    assert versions.problems(project) == []
    text = (project / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [7.1.0rc1] - 2031-01-02\n\n### Added\n" in text
    assert changelog.problems(text, "7.1.0rc1") == []
    assert changelog.section(text, "7.1.0rc1").startswith("### Added\n\n- Another layer.")
    with pytest.raises(ValueError, match="nothing under"):
        versions.bump("7.1.0", project)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.0", r"version \(1.0\) must be like 0.2.0"),
        ("0.0.9", "must be later than"),
        ("0.1.0rc1", "must be later than"),
    ],
)
def test_a_version_that_is_none_or_earlier_changes_nothing(project, version, said):
    before = {path: path.read_text() for path in project.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=said):
        versions.bump(version, project)
    assert {path: path.read_text() for path in before} == before


def test_a_place_that_says_another_version_is_named(project):
    file = project / "CITATION.cff"
    file.write_text(re.sub(r"^version: .*$", "version: 8.8.8", file.read_text(), flags=re.MULTILINE))
    assert versions.problems(project) == [
        f"CITATION.cff says version 8.8.8; attn_bridge/__init__.py has {attn_bridge.__version__}"
    ]


# ---- changelog


def test_the_changelog_keeps_its_form():
    assert changelog.problems((versions.ROOT / "CHANGELOG.md").read_text()) == []


HEAD = "# Changelog\n\nAs keepachangelog.com says.\n\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "## [Unreleased]\n\n## 1.0.0\n", "CHANGELOG.md:7 must be '## [Unreleased]' or"),
        (HEAD + "## [Unreleased]\n\n## [1.0.0]\n", "CHANGELOG.md:7 must be"),
        (HEAD + "## [Unreleased]\n\n## [1.0.0] - 2026-02-30\n", "CHANGELOG.md:7 must be"),
        (HEAD + "## [Unreleased]\n\n### New\n", "CHANGELOG.md:7 must be '### ' and one of Added"),
        (HEAD + "## [1.0.0] - 2026-01-31\n", "first section must be '## [Unreleased]'"),
        ("# Changelog\n\n## [Unreleased]\n", "keeps to keepachangelog.com"),
        ("# News\n\nkeepachangelog.com\n\n## [Unreleased]\n", "CHANGELOG.md:1 must be '# Changelog'"),
    ],
)
def test_what_is_not_in_the_form_is_named(text, said):
    found = changelog.problems(text)
    assert len(found) == 1
    assert said in found[0]


def test_a_release_needs_a_section():
    assert changelog.problems(HEAD + "## [Unreleased]\n", "1.0.0") == [
        "CHANGELOG.md has no section of 1.0.0; make it with: python -m release bump 1.0.0"
    ]


# ---- conda


def recipe() -> dict[str, list[str]]:
    """Return the recipe's lists by their key, without a reader of YAML."""
    found: dict[str, list[str]] = {}
    key = ""
    for line in (versions.ROOT / "recipe" / "recipe.yaml").read_text().splitlines():
        if said := re.fullmatch(r"\s+(host|run|run_constraints):", line):
            key = said[1]
        elif said := re.fullmatch(r"    - (.+)", line):
            found.setdefault(key, []).append(said[1])
        elif line and not line.startswith("    "):
            key = ""
    return found


def conda(requirements: list[str]) -> set[str]:
    split = (re.fullmatch(r"([\w-]+)(\S*)", one) for one in requirements)
    return {f"{CONDA.get(one[1], one[1])} {one[2]}" for one in split if one}


def test_the_recipe_asks_for_what_the_project_asks_for():
    found = recipe()
    assert set(found["run"]) - {"python >=${{ python_min }}"} == conda(PROJECT["project"]["dependencies"])
    extras = PROJECT["project"]["optional-dependencies"]
    names = ("torch", "jax", "cpu", "remote", "ray", "hub", "gguf", "keras", "viz", "attest", "sigstore", "mcp")
    optional = {one for name in names for one in extras[name]}
    assert set(found["run_constraints"]) == conda(sorted(optional))
    assert f"setuptools {PROJECT['build-system']['requires'][0].removeprefix('setuptools')}" in found["host"]
    text = (versions.ROOT / "recipe" / "recipe.yaml").read_text()
    assert PROJECT["project"]["description"] in text
    for name, target in PROJECT["project"]["scripts"].items():
        assert f"- {name} = {target}\n" in text
