"""The HTML page of a report: what it says, that it needs nothing else, and that no text can break out of it."""

import base64
import dataclasses
import hashlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from attn_parity.rendering.html import as_html
from attn_parity.results.report import Report
from parity_tests.support.judging.html_outline import Outline
from parity_tests.support.judging.reports import (
    COMMAND,
    HOSTILE,
    different_report,
    equal_report,
    equal_tensor,
    hostile_report,
    inconclusive_report,
    large_report,
)

EMPTY = Report("equal", [])


@pytest.mark.parametrize("make", [different_report, equal_report, inconclusive_report, large_report, lambda: EMPTY])
def test_the_page_needs_nothing_but_itself(make):
    page = as_html(make())
    outline_ = Outline(page)
    for _, attributes in outline_.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href"):
                assert value.startswith(("data:", "#"))
    assert "@import" not in page
    assert "url(" not in page
    assert "http" not in re.sub(r'http-equiv="', "", page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = outline_.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert f"script-src 'sha256-{digest}'" in policy["content"]
    assert policy["content"].startswith("default-src 'none'; img-src data:;")


def test_the_page_shows_differences_their_place_and_the_command():
    page = Outline(as_html(different_report()))
    assert page.words.startswith("different: GPTModel (torch) and GPTModel (Flax)")
    assert "First divergence, forward blocks.3.norm1 Flax: layers.3.norm1 eps is 1e-05 on the torch side" in page.words
    assert page.words.count("first divergence here") == 1
    for phrase in (
        COMMAND,
        "54 tensors , 9 runs (3 seeds)".replace(" ,", ","),
        "1.3 GB at the peak",
        "Flax alone returned it",
        "412 of 8,640",
        "0.727935218",
        "3.1e+09x",
        "49 parameters: 48 by names, 1 by probe.",
        "Unexercised parameters (13)",
        "blocks.11.attn.W_key.bias",
        "the Flax module's `attention_mask` (you gave none)",
        "jax_default_matmul_precision",
        "torch, run twice 0",
        "lifted to float64 in 2 layers",
        "torch only",
        "8 equal",
    ):
        assert phrase in page.words, phrase


def test_the_first_screen_has_five_tensors_and_counts_all():
    tensors = [equal_tensor(f"t{number}", verdict="different", message="apart") for number in range(7)]
    (table,) = re.findall(r'<table class="worst-tensors">.*?</table>', as_html(Report("different", tensors)), re.S)
    assert "7 of 7 tensors are not equal, the worst 5" in table
    assert table.count("<tr>") == 5


def test_the_pages_table_lists_failures_first_and_sorts():
    (table,) = re.findall(r'<table id="verdicts">.*?</table>', as_html(different_report()), re.S)
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", table, re.S)
    names = [re.search(r'class="name">([^<]*)', row)[1] for row in rows]
    assert names[:5] == ["output", "grad x", "grad head.weight", "weight probe", "output[1]"]
    assert len(rows) == 54
    assert re.findall(r'data-value="([^"]*)"', rows[1])[:3] == ["3", "Infinity", "Infinity"]
    assert re.findall(r'data-value="([^"]*)"', rows[3])[:3] == ["1", "", ""]


def test_the_pages_tree_opens_the_way_to_the_divergence():
    page = as_html(different_report())
    (tree,) = re.findall(r'<section id="tree".*?</section>', page, re.S)
    opened = [tag for tag, attributes in Outline(tree).elements if tag == "details" and "open" in attributes]
    assert len(opened) == 2  # the model and block 3
    before = tree[: tree.index("first divergence here")]
    assert before.count("<details open>") == 2
    assert (
        "<details open>" not in re.findall(r'<section id="tree".*?</section>', as_html(equal_report()), re.S)[0][900:]
    )


def test_the_page_is_accessible():
    page = Outline(as_html(different_report()))
    assert page.all("html")[0]["lang"] == "en"
    assert "initial-scale=1" in page.all("meta", name="viewport")[0]["content"]
    assert [len(page.all(landmark)) for landmark in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        assert attributes.get("aria-labelledby", ids[0]) in ids
        assert attributes.get("href", "#").removeprefix("#") in ("", "data:,", *ids)
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if tag == "th":
            assert "scope" in attributes
        if "scroll" in attributes.get("class", ""):
            assert (attributes["tabindex"], attributes["role"]) == ("0", "region")  # else no key could scroll it
            assert attributes["aria-label"]


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme):
    blocks = re.findall(r":root \{(.*?)\}", as_html(EMPTY), re.S)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", blocks[theme == "dark"]))
    verdicts = ("equal", "precision", "different", "inconclusive", "none")
    pairs = [(verdict, f"{verdict}-back") for verdict in verdicts] + [(verdict, "card") for verdict in verdicts]
    pairs += [(front, back) for front in ("ink", "soft", "link") for back in ("page", "card", "faint")]
    pairs += [("ink", "different-back"), ("focus", "card")]
    assert len(pairs) == 21
    for front, back in pairs:
        lighter, darker = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (front, back)


def test_hostile_text_changes_no_element_of_the_page():
    page = as_html(hostile_report())
    shape, plain = (
        [(tag, list(attributes)) for tag, attributes in Outline(one).elements]
        for one in (page, as_html(tamed(hostile_report())))
    )
    assert shape == plain
    assert page.count(r"&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;\x1b[31m\ud800\u202e]]") > 20
    page.encode("utf-8")


def tamed(value: object) -> object:
    """Return a report with a plain word in place of every hostile text."""
    if isinstance(value, str):
        return "name" if value == HOSTILE else value
    if isinstance(value, list | tuple):
        return type(value)(tamed(one) for one in value)
    if isinstance(value, dict):
        return {tamed(key): tamed(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{f.name: tamed(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def test_a_report_without_tensors_claims_no_coverage():
    words = Outline(as_html(inconclusive_report())).words
    assert "No tensor was compared." in words
    assert "the Flax side takes no argument attention_mask" in words
    assert "exercised" not in words
    some = dataclasses.replace(EMPTY, tensors=[equal_tensor("output")])
    assert "Every parameter was exercised" in Outline(as_html(some)).words
    assert "1 tensor, 0 runs (0 seeds)" in Outline(as_html(some)).words


def test_the_files_of_the_page_are_packaged():
    root = Path(__file__).parents[3]
    package = "attn_parity.rendering.html"
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    folder = root / package.replace(".", "/")
    assert {one.name for one in folder.iterdir() if one.suffix not in (".py", "") and one.is_file()} == set(data)
