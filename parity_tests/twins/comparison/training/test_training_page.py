"""The page of `parity.train`: it grows while both sides train, and stays when they are done."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from flax import nnx

import jax_attn
import torch_attn
from attn_bridge import parity
from attn_parity.rendering.html import charts
from attn_parity.training import live

SIZES = (8, 8, 6, 0.1, 2)


def pair():
    torch.manual_seed(0)
    return torch_attn.MultiHeadAttention(*SIZES), jax_attn.MultiHeadAttention(*SIZES, rngs=nnx.Rngs(0))


def data():
    random = np.random.default_rng(0)
    return [tuple(random.normal(size=(2, 6, 8)).astype(np.float32) for _ in range(2)) for _ in range(2)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train with a page, and keep what stood there at each step."""
    path, seen = tmp_path_factory.mktemp("page") / "train.html", []

    def look(what, done, total):
        seen.append(path.read_text() if path.exists() else "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "LEAST_SECONDS", 0.0)
        report = parity.train(*pair(), data(), steps=4, html=path, progress=look)
    return report, seen, path.read_text()


def test_the_page_grows_while_both_train(trained):
    _, seen, _ = trained
    assert seen[0] == ""
    for step, page in enumerate(seen[1:], 1):
        assert page.startswith("<!doctype html>")
        assert page.endswith("</html>\n")
        assert f"{step} of 4 steps" in page
        assert '<span class="verdict running">running</span>' in page
        assert 'id="live"' in page


def test_the_last_page_is_the_report_and_stands_still(trained):
    report, _, page = trained
    assert f'<span class="verdict {report.verdict}">' in page
    assert 'id="live"' not in page
    assert 'http-equiv="refresh"' not in page  # a page that reloads by itself can't be read by everyone
    assert page == report.to_html()


def test_losses_and_tensors_are_those_of_the_report(trained):
    report, _, page = trained
    torch_losses = report.losses["torch"]
    assert f"torch from {torch_losses[0]:.4g} to {torch_losses[-1]:.4g}" in page
    assert report.divergence.keys() == {one.name for one in report.tensors}
    assert all(len(values) == 4 for values in report.divergence.values())
    for name in report.divergence:
        assert f'<span class="name">{name}</span>' in page
    by_kind = [
        max(report.divergence[name][step] for name in report.divergence if name.startswith("grad "))
        for step in range(4)
    ]
    kinds = ("matrix gradient", "vector gradient")
    wanted = [max(report.synchronised[kind][step] for kind in kinds) for step in range(4)]
    assert by_kind == wanted
    pictures = re.findall(r'<svg[^>]*role="img"[^>]*aria-label="([^"]+)"', page)
    assert len(pictures) == 2 + len(report.divergence)


def test_a_fault_is_seen_on_the_page(tmp_path):
    one, two = pair()
    two.out_proj.bias[...] = two.out_proj.bias[...] * 1.5 + 1
    rate = 1e-3
    optimizer = (
        lambda named: torch.optim.SGD([value for _, value in named], lr=rate),
        __import__("optax").sgd(1.01 * rate),
    )
    report = parity.train(one, two, data(), steps=2, optimizer=optimizer, dropout=False, html=tmp_path / "x.html")
    assert report.verdict == "different"
    page = (tmp_path / "x.html").read_text()
    assert "first difference at step 1 in update" in page


def test_a_page_that_can_not_be_written_costs_no_training(tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        parity.train(*pair(), data(), steps=10**6, html=tmp_path / "absent" / "x.html")


def test_lines_leave_gaps_where_values_are_not_finite():
    svg = charts.lines({"a": ("side-first", [1.0, float("nan"), 2.0, 3.0])}, "words")
    assert svg.count("<circle") == 1
    assert svg.count("<polyline") == 1
    assert "nan" not in svg
    assert "logarithmic" in charts.lines({"a": ("side-first", [1e-9, 1.0])}, "words")
    assert "linear" in charts.lines({"a": ("side-first", [-1.0, 1.0])}, "words")
    assert charts.lines({"a": ("side-first", [])}, "words").count("<polyline") == 0
    many = charts.lines({"a": ("side-first", list(range(10_001)))}, "words")
    assert many.count(",") < 2 * charts.POINTS
