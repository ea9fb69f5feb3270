"""What sdist and wheel hold, on small archives made for it; `make release` asks the same of the real ones."""

from __future__ import annotations

import io
import tarfile
import zipfile

import pytest

from release import contents, environments

VERSION = "1.2.3"
INFO = f"attn_bridge-{VERSION}.dist-info"
METADATA = f"Metadata-Version: 2.4\nVersion: {VERSION}\nLicense-Expression: Apache-2.0\nRequires-Python: >=3.11\n\n"
POINTS = "[console_scripts]\nattn-bridge = attn_bridge.cli:main\n\n[pytest11]\nattn_bridge = attn_parity.plugin\n"


@pytest.fixture
def project(tmp_path):
    for package in contents.PACKAGES:
        (tmp_path / package / "__pycache__").mkdir(parents=True)
        for name in ("__init__.py", "py.typed", "__pycache__/x.pyc"):
            (tmp_path / package / name).write_text("")
    return tmp_path


def archives(project, *, wheel=(), sdist=(), without=(), metadata=METADATA, link=None):
    """Build both archives: the packages, with names added, and some left out of both."""
    files = contents.source_files(project)
    paths = project / "attn_bridge-1.2.3-py3-none-any.whl", project / "attn_bridge-1.2.3.tar.gz"
    with zipfile.ZipFile(paths[0], "w") as archive:
        for name in [*files, *wheel, f"{INFO}/RECORD", f"{INFO}/licenses/LICENSE"]:
            if name not in without:
                archive.writestr(name, "")
        archive.writestr(f"{INFO}/METADATA", metadata)
        archive.writestr(f"{INFO}/entry_points.txt", POINTS)
    with tarfile.open(paths[1], "w:gz") as archive:
        for name in [*files, *contents.NEEDED, *sdist]:
            if name not in without:
                archive.addfile(tarfile.TarInfo(f"attn_bridge-{VERSION}/{name}"), io.BytesIO())
        if link is not None:
            one = tarfile.TarInfo(f"attn_bridge-{VERSION}/{link}")
            one.type, one.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(one)
    return paths


def test_whole_archives_have_no_problem(project):
    assert contents.problems(*archives(project), VERSION, project) == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"without": ["torch_attn/py.typed"]}, ["whl lacks torch_attn/py.typed", "gz lacks torch_attn/py.typed"]),
        ({"without": [f"{INFO}/licenses/LICENSE"]}, ["whl holds no licence"]),
        ({"without": ["CHANGELOG.md"]}, ["gz lacks CHANGELOG.md"]),
        ({"wheel": ["parity_tests/__init__.py"]}, ["whl holds parity_tests/__init__.py"] * 2),
        ({"wheel": ["attn_bridge/left_over.py"]}, ["whl holds attn_bridge/left_over.py"]),
        ({"sdist": ["attn_bridge/x.cpython-311.pyc"]}, ["gz holds attn_bridge/x.cpython-311.pyc"]),
        ({"link": "docs"}, ["gz holds attn_bridge-1.2.3/docs, which is no file or folder"]),
        ({"metadata": METADATA.replace("1.2.3", "1.2.4")}, ["whl says Version: 1.2.4, not 1.2.3"]),
        ({"metadata": METADATA.replace("Apache-2.0", "MIT")}, ["whl says License-Expression: MIT, not Apache-2.0"]),
    ],
)
def test_what_is_wrong_with_them_is_named(project, made, said):
    found = contents.problems(*archives(project, **made), VERSION, project)
    assert len(found) == len(said)
    for line, words in zip(found, said, strict=True):
        assert words in line


def test_every_extra_has_something_to_do_in_its_environment():
    import tomllib

    from release.versions import ROOT

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert environments.EXTRAS.keys() - {""} == extras.keys() - {"test", "dev", "release", "site"}
    assert all(environments.EXTRAS.values())


def test_a_python_that_is_not_here_is_named(tmp_path):
    found = environments.install(tmp_path / "x.whl", "3.99", "", tmp_path / "environment")
    assert found.problem == "there is no Python 3.99 here"
