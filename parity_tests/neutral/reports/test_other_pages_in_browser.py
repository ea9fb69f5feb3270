"""The pages of a training and of a checkpoint in a real browser: nothing sticks out, and reloads can be stopped."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge.checkpoints.containers.base import TensorInfo
from attn_bridge.parity.rendering.html import checkpoint, training
from attn_bridge.parity.training.report import TrainingReport
from parity_tests.neutral.reports.test_html_in_browser import CHROMIUM, OVERFLOW, SCREENS
from parity_tests.support.browser import running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium; none was found")


def report(steps=3):
    losses = {"torch": [0.5, 0.25, 0.125][:steps], "flax": [0.5, 0.25, 0.126][:steps]}
    apart = {f"update {'very.long.name.' * 6}{part}": [1e-14, 3e-15, 2e-14][:steps] for part in ("weight", "bias")}
    return TrainingReport(
        verdict="equal", first_difference=None, tensors=[], losses=losses, growth={"torch and flax": [1e-8] * steps},
        synchronised={}, settings=["lr: 0.1"], notes=[], message="", steps=3, dtype="float32", divergence=apart,
        environment={"torch": "2"}, torch_name="Net", flax_name="Net",
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with running(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    random = np.random.default_rng(0)
    values = {}
    for i in range(30):
        array = random.normal(size=(4, 6))
        name = f"model.layers.{i}.{'attention.' * 8}weight"
        values[name] = checkpoint.values_of(TensorInfo(name, "float64", array.shape, "f"), array)
    checkpoint.as_html("model", {"Container": "npz"}, values, folder / "checkpoint.html")
    training.as_html(report(), folder / "done.html")
    return {name: folder / f"{name}.html" for name in ("checkpoint", "done", "live")}


@pytest.mark.parametrize("name", ["checkpoint", "done"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_sticks_out_of_the_page(page, paths, name, dark, screen):
    page.open(paths[name], *SCREENS[screen], dark=dark, phone=screen == "phone")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.evaluate(OVERFLOW) == []
    assert page.problems == []
    assert page.requests == [paths[name].as_uri()]
    assert page.evaluate("document.querySelectorAll('svg[role=img]:not([aria-label])').length") == 0


STEPS = "document.querySelector('progress')?.value"
LIVE = "document.getElementById('live')"


def read(page, expression):
    """Return the value of an expression; a reload in the middle of it is no answer."""
    for _ in range(1000):
        try:
            return page.evaluate(expression)
        except AssertionError:
            continue
    raise AssertionError(expression)


def wait_until(page, expression):
    """Wait until reloads have made an expression true, however long they take."""
    while not read(page, expression):
        page.problems.clear()


def test_a_page_that_is_written_anew_shows_it_unless_its_reader_paused_it(page, paths, monkeypatch):
    monkeypatch.setattr(training, "SECONDS", 0.3)
    training.as_html(report(1), paths["live"], running=True)
    page.open(paths["live"], *SCREENS["desk"])
    wait_until(page, f"{STEPS} === 1")
    training.as_html(report(2), paths["live"], running=True)
    wait_until(page, f"{STEPS} === 2")
    wait_until(page, f"{LIVE} && ({LIVE}.checked && {LIVE}.click(), !{LIVE}.checked)")
    training.as_html(report(3), paths["live"], running=True)
    page.open(paths["live"], *SCREENS["desk"])  # the reader reloads it: it stays paused
    assert page.evaluate(STEPS) == 3
    assert page.evaluate(f"{LIVE}.checked") is False
    training.as_html(report(3), paths["live"])
    page.evaluate(f"{LIVE}.click()")
    wait_until(page, f"document.readyState === 'complete' && {LIVE} === null")
    assert page.problems == []
