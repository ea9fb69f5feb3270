"""Every page of the site in a browser: at 400 and at 1400 pixels, in light and in dark."""

import html
import re

import pytest

from .conftest import SITE, serving
from .looking import bad_images, barriers, too_wide

NAMES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PAGES = [name for name in NAMES if not name.startswith("_")]
SCREENS = [(1400, False), (400, True), (1400, True), (400, False)]
MACHINE = re.compile(r"/(?:work|home|root|Users|tmp)/\w+|site-packages")


def test_the_site_has_its_parts():
    wanted = {"index", "changelog", "gallery", "models", "devices", "workers", "attention", "benchmarks"}
    wanted |= {f"guides/{name}" for name in ("start", "use-a-backend", "test-my-port", "convert-a-checkpoint")}
    wanted |= {"concepts/judge", "concepts/weights", "concepts/masks", "learn/faults", "reference/index"}
    wanted |= {"notebooks/chapter-3-in-two-frameworks"}
    assert wanted <= {name.removesuffix(".html") for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_works(name, browser, address, axe):
    for width, dark in SCREENS:
        browser.open(f"{address}/{name}", width, 900, dark=dark, phone=width == 400)
        screen = f"{width} pixels, {'dark' if dark else 'light'}"
        assert browser.problems == [], screen
        assert [one for one in browser.requests if not one.startswith((address, "blob:"))] == [], screen
        assert too_wide(browser) == [], screen
        red, green, blue = browser.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (red + green + blue < 150) is dark, screen
        if (width, dark) in ((1400, False), (400, True)):
            assert bad_images(browser) == [], screen
            assert barriers(browser, axe) == [], screen


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_no_folder_of_this_machine(name):
    text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", "", (SITE / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert MACHINE.findall(html.unescape(text)) == []


def test_search_finds_a_word(browser, address):
    browser.open(f"{address}/search.html?q=dropout", 1400, 900)
    found = browser.evaluate("""new Promise((done) => {
        const results = document.querySelector("#search-results");
        const look = () => {
            const links = [...results.querySelectorAll("li a")].map((one) => one.getAttribute("href"));
            if (links.some((one) => one.includes("chapter-3"))) done(links);
        };
        new MutationObserver(look).observe(results, {childList: true, subtree: true});
        look();
        setTimeout(() => done([]), 50000);
    })""")
    assert any("chapter-3-in-two-frameworks" in one for one in found)
    assert browser.problems == []


def test_the_keyboard_reaches_the_content(browser, address):
    browser.open(f"{address}/guides/test-my-port.html", 1400, 900)
    browser.press("Tab")
    assert "Skip to main content" in browser.evaluate("document.activeElement.textContent")
    browser.press("Enter")
    assert browser.evaluate("location.hash") == "#main-content"
    for _ in range(40):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.closest('article') !== null"):
            break
    assert browser.evaluate("document.activeElement.closest('article') !== null")
    style = "(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.boxShadow; })()"
    assert browser.evaluate(style) != "nonenone"  # it shows where it is


def test_the_theme_is_switched_by_hand(browser, address):
    browser.open(f"{address}/index.html", 1400, 900)
    for mode in ("dark", "light"):
        browser.evaluate("document.querySelector('.theme-switch-button').click()")
        browser.evaluate(f"document.querySelector('.theme-change-button[data-mode={mode}]').click()")
        assert browser.evaluate("document.documentElement.dataset.theme") == mode
    browser.evaluate("localStorage.clear()")


def test_a_picture_with_a_dark_version_follows_the_theme(browser, address):
    look = """(() => {
        const picture = document.querySelector("picture"), image = getComputedStyle(picture.querySelector("img"));
        return [picture.querySelector("source").media, image.filter,
            getComputedStyle(picture.parentElement).backgroundColor];
    })()"""
    browser.open(f"{address}/notebooks/chapter-3-in-two-frameworks.html", 1400, 900, dark=True)
    assert browser.evaluate(look) == ["all", "none", "rgba(0, 0, 0, 0)"]
    browser.evaluate("document.querySelector('.theme-change-button[data-mode=light]').click()")
    assert browser.evaluate(look)[0] == "not all"
    browser.evaluate("localStorage.clear()")


def test_a_bad_page_is_seen(browser, axe, tmp_path):
    (tmp_path / "bad.html").write_text(
        "<html><meta name='viewport' content='width=device-width'><link rel='icon' href='data:,'><body><main>"
        "<p style='width: 900px'>wide</p><img src='missing.png' alt='missing.png'>"
        "<p style='color: #bbb'>pale</p></main><script>console.error('planted')</script></body></html>",
        encoding="utf-8",
    )
    with serving(tmp_path) as there:
        browser.open(f"{there}/bad.html", 400, 900, phone=True)
        assert "planted" in str(browser.problems)
        assert "900px" in str(too_wide(browser))
        assert [alt for alt, _ in bad_images(browser)] == ["missing.png"]
        assert {"color-contrast", "html-has-lang"} <= {one[0] for one in barriers(browser, axe)}
