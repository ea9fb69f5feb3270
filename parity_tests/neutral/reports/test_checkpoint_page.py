"""The page of `attn-bridge inspect --html`: the tree, the numbers, the histograms, and what is hostile in names."""

from __future__ import annotations

import re
import webbrowser

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import TensorInfo
from attn_bridge.cli.app import run
from attn_parity.rendering.html import checkpoint


def values(array, dtype=None):
    return checkpoint.values_of(TensorInfo("x", dtype or array.dtype.name, array.shape, "f"), array)


def test_numbers_are_those_of_the_values():
    array = np.random.default_rng(0).normal(2, 3, size=(64, 48)).astype(np.float32)
    array[0, :7] = 0
    found = values(array)
    assert (found.low, found.high) == (array.min(), array.max())
    assert found.mean == pytest.approx(array.mean(), rel=1e-5)
    assert found.deviation == pytest.approx(array.std(), rel=1e-5)
    assert found.zeros == 7
    wanted, _ = np.histogram(array, checkpoint.BINS)
    assert found.counts == tuple(wanted)


@pytest.mark.parametrize(
    ("array", "low", "high", "broken"),
    [
        (np.array([np.nan, np.inf, 1.0, 3.0]), 1.0, 3.0, 2),
        (np.array([np.nan, -np.inf]), None, None, 2),
        (np.array([-1.7e308, 1.7e308]), -1.7e308, 1.7e308, 0),
        (np.full(5, 2.5), 2.5, 2.5, 0),
        (np.array(3), 3.0, 3.0, 0),
        (np.zeros((0, 4)), None, None, 0),
        (np.array([1.5, -2], ml_dtypes.bfloat16), -2.0, 1.5, 0),
        (np.array([0.5, 4], ml_dtypes.float8_e4m3fn), 0.5, 4.0, 0),
        (np.array([True, False]), 0.0, 1.0, 0),
    ],
)
def test_values_of_every_kind_have_their_ends(array, low, high, broken):
    found = values(array)
    assert (found.low, found.high, found.not_finite) == (low, high, broken)
    assert sum(found.counts) == (array.size - broken if low is not None else 0)
    if low != high:
        assert found.counts[0]
        assert found.counts[-1]


def test_a_large_tensor_is_counted_by_a_part_of_it(monkeypatch):
    monkeypatch.setattr(checkpoint, "DRAWN", 100)
    array = np.arange(1000.0)
    found = values(array)
    assert sum(found.counts) == 100
    assert (found.low, found.high, found.zeros) == (0.0, 990.0, 1)


@pytest.fixture
def model(tmp_path):
    random = np.random.default_rng(0)
    arrays = {f"layers.{i}.{part}.weight": random.normal(size=(4, 6)) for i in range(4) for part in "abcd"}
    arrays["<script>alert(1)</script>.weight"] = np.array([np.nan, 1.0])
    np.savez(tmp_path / "source.npz", **arrays)
    checkpoints.convert(tmp_path / "source.npz", tmp_path / "model.safetensors", to_layout="same")
    return tmp_path / "model.safetensors"


def test_the_page_holds_every_tensor_and_a_picture_with_words(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert run(["inspect", "model.safetensors", "--html"]) == 0
    assert "17 tensors" in capsys.readouterr().out
    page = (model.parent / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<summary>") >= 2
    for part in "abcd":
        assert page.count(f'<span class="name">{part}.weight</span>') == 4
    pictures = re.findall(r'<svg[^>]*role="img"[^>]*aria-label="([^"]+)"', page)
    assert len(pictures) == 17
    assert all(words.startswith("histogram of ") for words in pictures)
    assert "<script>alert" not in page
    assert "Not finite: &lt;script&gt;" in page
    assert page.count("<table>") == page.count("<thead>") + 1  # one without heads: the facts


def facts(model):
    """Return the table on top of a checkpoint's page, without its layout."""
    page = model.parent / "facts.html"
    assert run(["inspect", str(model), "--html", str(page)]) == 0
    rows = re.findall(r'<tr><th scope="row">([^<]+)</th><td>([^<]*)</td></tr>', page.read_text())
    return {name: value for name, value in rows if name != "Layout"}


def test_the_page_lists_container_numbers_digests_and_metadata(tmp_path):
    arrays = {"a": np.ones((40, 50), np.float32), "b": np.ones(3, np.float16)}
    save_file(arrays, tmp_path / "x.safetensors", {"made by": "us"})
    bare = {"Container": "safetensors", "Numbers": "2,000 float32, 3 float16", "Digests": "none beside it"}
    assert facts(tmp_path / "x.safetensors") == bare | {"Metadata: made by": "us"}
    target = checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "y.npz", to_layout="same").target
    assert facts(target) == bare | {"Container": "npz", "Digests": "beside it"}


def test_the_page_is_opened_where_there_is_a_browser(model, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    assert run(["inspect", str(model), "--html", str(model.parent / "x.html"), "--open"]) == 0
    assert opened == [(model.parent / "x.html").as_uri()]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert run(["inspect", str(model), "--open"]) == 0
    said = capsys.readouterr().err
    assert re.fullmatch(r"no browser could be started; the page is file:///\S+/attn-bridge-\w+\.html\n", said)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("-", "--html - cannot be written"),
        ("absent/x.html", "--html absent/x.html cannot be written"),
        ("model.safetensors", "--html model.safetensors must not be part of"),
        ("other.safetensors", "--html other.safetensors is named as a checkpoint is"),
        ("x.html", "--html and --json must be different files"),
    ],
)
def test_an_unwritable_page_is_refused_before_the_work(model, capsys, monkeypatch, page, said):
    monkeypatch.chdir(model.parent)
    before = model.read_bytes()
    assert run(["inspect", str(model), "--html", page, "--json", "./x.html"]) == 2
    assert said in capsys.readouterr().err
    assert model.read_bytes() == before


def test_inspect_prints_numbers_to_the_right_and_names_to_the_left(tmp_path, capsys):
    arrays = {"h.0.w": np.zeros((20, 30)), "h.1.w": np.zeros((20, 30)), "b": np.zeros(3, np.float32)}
    save_file(arrays, tmp_path / "x.safetensors")
    assert run(["inspect", str(tmp_path / "x.safetensors")]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines[:3]) == [
        "b              float32  3           12 B",
        "h.{i}.w (x 2)  float64  20 x 30  4.7 KiB",
        "tensor         dtype    shape      bytes  file",
    ]
