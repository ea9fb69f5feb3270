"""The HTML report is open to everyone, too."""

import pytest

from attn_parity.rendering.html import as_html

from ..support.judging.other_pages import write_pages
from ..support.judging.reports import different_report, equal_report, inconclusive_report
from .looking import barriers

REPORTS = {"different": different_report, "equal": equal_report, "inconclusive": inconclusive_report}


SCREENS = {"wide and light": (1400, False), "narrow and dark": (400, True)}


def _look(browser, axe, page, screen):
    width, dark = SCREENS[screen]
    browser.open(page, width, 900, dark=dark, phone=width == 400)
    stop = "const live = document.getElementById('live'); if (live && live.checked) live.click();"
    unfold = "document.querySelectorAll('details').forEach((one) => { one.open = true });"
    browser.evaluate(f"(() => {{ {stop} {unfold} }})()")
    return barriers(browser, axe)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", REPORTS)
def test_axe_finds_nothing_serious_in_a_report(name, screen, browser, axe, tmp_path):
    as_html(REPORTS[name](), tmp_path / "report.html")
    assert _look(browser, axe, tmp_path / "report.html", screen) == []


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["checkpoint", "trained", "apart", "training"])
def test_axe_finds_nothing_serious_in_the_other_pages(name, screen, browser, axe, tmp_path):
    assert _look(browser, axe, write_pages(tmp_path)[name], screen) == []
