"""``--open`` and ``--html`` without a file, of the commands that write the report of a comparison."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

from attn_bridge.cli.app import complete
from attn_parity.commands.outputs import Outputs
from parity_tests.support.judging.reports import different_report, equal_report


@pytest.fixture
def opened(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr(webbrowser, "open", lambda address: found.append(address) or True)
    return found


def test_the_page_is_opened_when_it_is_written(opened, tmp_path, capsys):
    assert Outputs(html="x.html", is_shown=True).write(different_report()) == 1
    assert opened == [(tmp_path / "x.html").as_uri()]
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().err == ""


def test_without_a_file_the_page_is_a_temporary_one(opened, tmp_path):
    assert Outputs(is_shown=True).write(equal_report()) == 0
    [address] = opened
    page = Path(url2pathname(urlparse(address).path))
    assert page.read_text().startswith("<!doctype html>")
    page.unlink()
    assert list(tmp_path.iterdir()) == []


def test_where_no_browser_is_the_page_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    page = tmp_path / "x.html"
    assert Outputs(html=str(page), is_shown=True).write(equal_report()) == 0
    assert capsys.readouterr().err == f"no browser could be started; the page is {page.as_uri()}\n"


def test_nothing_is_opened_unasked(opened):
    Outputs(html="x.html").write(equal_report())
    assert opened == []


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["compare", "a", "b", "--html"], ["compare", "a", "b", "--html=report.html"]),
        (["compare", "a", "b", "--html", "--open"], ["compare", "a", "b", "--html=report.html", "--open"]),
        (["compare", "a", "b", "--html", "x.html"], ["compare", "a", "b", "--html", "x.html"]),
        (["compare", "a", "b", "--html", "-"], ["compare", "a", "b", "--html", "-"]),
        (["compare", "a", "b", "--html=y", "--open"], ["compare", "a", "b", "--html=y", "--open"]),
    ],
)
def test_html_needs_no_file(given, read):
    assert complete(given) == read
