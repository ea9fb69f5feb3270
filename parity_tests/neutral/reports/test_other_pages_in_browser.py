"""The pages of a training and of a checkpoint in a real browser: nothing sticks out, and reloads can be stopped."""

from __future__ import annotations

import pytest

from attn_parity.rendering.html import training
from parity_tests.neutral.reports.test_html_in_browser import CHROMIUM, OVERFLOW, SCREENS
from parity_tests.support.judging.browser import running
from parity_tests.support.judging.other_pages import training_report, write_pages

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium; none was found")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with running(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {**write_pages(folder), "live": folder / "live.html"}


@pytest.mark.parametrize("name", ["checkpoint", "trained", "apart"])
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
LOADED = "document.readyState === 'complete'"


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


def test_a_page_reloads_new_content_unless_paused(page, paths, monkeypatch):
    monkeypatch.setattr(training, "SECONDS", 0.3)
    training.as_html(training_report(1), paths["live"], running=True)
    page.open(paths["live"], *SCREENS["desk"])
    wait_until(page, f"{STEPS} === 1")
    training.as_html(training_report(2), paths["live"], running=True)
    wait_until(page, f"{STEPS} === 2")
    # A click before the page's script runs would not be kept.
    wait_until(page, f"{LOADED} && {LIVE} && ({LIVE}.checked && {LIVE}.click(), !{LIVE}.checked)")
    training.as_html(training_report(3), paths["live"], running=True)
    page.open(paths["live"], *SCREENS["desk"])  # the reader reloads it: it stays paused
    wait_until(page, f"{STEPS} === 3 && !{LIVE}.checked")
    training.as_html(training_report(3), paths["live"])
    page.evaluate(f"{LIVE}.click()")
    wait_until(page, f"{LOADED} && {LIVE} === null")
    assert page.problems == []
