"""The HTML report is open to everyone, too."""

import pytest

from attn_bridge.parity.rendering.html import as_html

from ..support.other_pages import write_pages
from ..support.reports import different_report, equal_report, inconclusive_report
from .looking import barriers

REPORTS = {"different": different_report, "equal": equal_report, "inconclusive": inconclusive_report}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", REPORTS)
def test_axe_finds_nothing_serious_in_a_report(name, dark, browser, axe, tmp_path):
    as_html(REPORTS[name](), tmp_path / "report.html")
    for width in (1400, 400):
        browser.open(tmp_path / "report.html", width, 900, dark=dark, phone=width == 400)
        browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        assert barriers(browser, axe) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["checkpoint", "trained", "apart", "training"])
def test_axe_finds_nothing_serious_in_the_other_pages(name, dark, browser, axe, tmp_path):
    page = write_pages(tmp_path)[name]
    for width in (1400, 400):
        browser.open(page, width, 900, dark=dark, phone=width == 400)
        stop = "const live = document.getElementById('live'); if (live && live.checked) live.click();"
        unfold = "document.querySelectorAll('details').forEach((one) => { one.open = true });"
        browser.evaluate(f"(() => {{ {stop} {unfold} }})()")
        assert barriers(browser, axe) == []
