"""Pages, JSON files and GitHub's annotations of failed comparisons, from workers too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

from .pytest_runs import FAILING, GRID


def test_pages_are_written_for_failing_comparisons_only(run, tmp_path):
    source = """
@pytest.mark.parametrize("what", ["a/b", "a b", "x" * 300])
def test_it(parity, what):
    parity("a", "a", [1])
    for verdict in ("different", "inconclusive"):
        with pytest.raises(AssertionError):
            parity("a", verdict, [1])
    parity("a", "different", [1])
"""
    done = run(source, "--parity-html=out/pages", "--parity-json", str(tmp_path / "data"))
    pages = sorted(path.name for path in (tmp_path / "out" / "pages").iterdir())
    data = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert len(pages) == len(data) == 9
    assert [Path(name).stem for name in pages] == [Path(name).stem for name in data]
    assert all(re.fullmatch(r"[\w.-]{1,120}", name, re.ASCII) for name in pages)
    plain = [name for name in pages if name.startswith("test_it.py-test_it-a-b-")]
    assert [re.sub("-[0-9a-f]{8}", "", name) for name in plain] == [
        f"test_it.py-test_it-a-b-{call}.html" for call in (2, 3, 4)
    ] * 2
    assert "<title>inconclusive</title>" in (tmp_path / "out" / "pages" / plain[1]).read_text()
    assert f"\nhtml: out/pages/{plain[2]}\njson: data/{Path(plain[2]).stem}.json\n" in done.out


def test_the_ini_folder_is_relative_to_the_root(run, tmp_path):
    (tmp_path / "inside").mkdir()
    run(FAILING, "..", "-c", "../pyproject.toml", ini="parity_html = 'pages'", folder="inside")
    assert len(list((tmp_path / "pages").iterdir())) == 2


def test_github_gets_one_annotation_per_failed_test(run, tmp_path):
    source = """
@pytest.mark.xfail(strict=True)
def test_expected(parity):
    parity("a", "different", [1])

@pytest.mark.parametrize("odd", ["a:b,c"])
def test_odd(parity, odd):
    parity("a", "different", [1])

def test_unrelated(parity):
    parity("a", "a", [1])
    assert False
"""
    done = run(FAILING + source, GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(tmp_path.parent))
    found = [line for line in done.out.splitlines() if line.startswith("::")]
    file = f"file={tmp_path.name}/test_it.py"
    message = (
        "different: T (torch) and F (Flax), 0 tensors, 0 runs (0 seeds), 0.0 s%0A"
        "first divergence (forward) in blocks.0 (Flax: layers.0): 100%25, a:b,c%0A"
    )
    assert found == [
        f"::error {file},line=5,title=parity%3A different in test_other::{message}"
        "  again: pytest test_it.py::test_other",
        f"::error {file},line=19,title=parity%3A different in test_odd[a%3Ab%2Cc]::{message}"
        "  again: pytest 'test_it.py::test_odd[a:b,c]'",
    ]


def test_carriage_returns_are_escaped():
    from attn_parity.plugin.summary import _annotation

    found = _annotation({"verdicts": [], "title": "50%\r\n", "message": "a\r\nb::c"})
    assert found == "::error title=50%25%0D%0A::a%0D%0Ab::c"


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_workers_report_to_the_process_that_prints(run, tmp_path):
    source = FAILING + GRID
    done = run(
        source, "-p", "xdist.plugin", "-n2", "--parity-html=pages", "--junit-xml=junit.xml", GITHUB_ACTIONS="true"
    )
    assert done.status == 1
    assert "\nparity: 7 comparisons, 1 different, 1 precision, 5 equal\n" in done.out
    assert done.out.count("::error file=test_it.py,line=5,title=") == done.out.count("::error") == 1
    assert len(list((tmp_path / "pages").iterdir())) == 2
    assert 'name="parity_verdict" value="different"' in (tmp_path / "junit.xml").read_text()
