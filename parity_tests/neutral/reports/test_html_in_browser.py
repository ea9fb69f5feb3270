"""The HTML page in a real browser: at a desk and on a phone, light and dark, with a mouse and with keys."""

import dataclasses
import struct

import pytest

from attn_parity.rendering.html import as_html
from parity_tests.support.judging.browser import find_chromium, running
from parity_tests.support.judging.reports import (
    COMMAND,
    SUSPECT,
    different_report,
    equal_report,
    hostile_report,
    inconclusive_report,
)

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium; none was found")

SCREENS = {"desk": (1280, 800), "phone": (390, 844)}
REPORTS = {
    "different": different_report,
    "equal": equal_report,
    "inconclusive": inconclusive_report,
    "hostile": hostile_report,
}
OVERFLOW = """
[...document.querySelectorAll("body *")].filter((one) =>
  !one.closest(".scroll, .skip, .label") && one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map((one) => one.outerHTML.slice(0, 200))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with running(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, make in REPORTS.items():
        as_html(make(), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in REPORTS}


@pytest.fixture
def desk(page, paths):
    """The page of a report that differs, at a desk; no test may leave a complaint of the browser."""
    page.open(paths["different"], *SCREENS["desk"])
    yield page
    assert page.problems == []


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_fits_and_the_browser_does_not_complain(screen, dark, name, page, paths, tmp_path):
    width, height = SCREENS[screen]
    page.open(paths[name], width, height, dark=dark, phone=screen == "phone")
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("Math.max(document.body.scrollWidth, document.documentElement.scrollWidth)") <= width
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate("[...document.images].every((one) => one.complete && one.naturalWidth > 0)")
    assert page.problems == []
    assert page.requests == [paths[name].as_uri()]
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red + green + blue < 120) is dark
    page.screenshot(shot := tmp_path / "page.png")
    assert struct.unpack(">2I", shot.read_bytes()[16:24]) == (width, height)


@pytest.mark.parametrize("screen", SCREENS)
def test_the_first_divergence_is_seen_without_scrolling(screen, page, paths):
    width, height = SCREENS[screen]
    page.open(paths["different"], width, height, phone=screen == "phone")
    found = page.evaluate("""(() => {
        const where = document.querySelector(".divergence .where"), box = where.getBoundingClientRect();
        const seen = document.elementFromPoint(box.left + 20, box.top + box.height / 2);
        return [where.textContent, box.top, box.bottom, where.contains(seen)];
    })()""")
    assert found[0] == SUSPECT
    assert 0 < found[1] < found[2] < height
    assert found[3]
    assert page.evaluate("document.querySelector('.tree .first').checkVisibility()")


def test_the_first_screen_shows_verdict_place_hint_and_worst_tensors(desk):
    found = desk.evaluate("""[".verdict", ".divergence .where", ".clue", ".worst-tensors tr:last-child"].map((one) => {
        const box = document.querySelector(`header ${one}`), seen = box.getBoundingClientRect();
        return [seen.top >= 0 && seen.bottom <= innerHeight, box.closest(".scroll") === null];
    })""")
    assert found == [[True, True]] * 4
    assert desk.evaluate("document.querySelectorAll('header .worst-tensors tr').length") == 4
    assert "both eps differ by a factor of 10" in desk.evaluate("document.querySelector('.clue').textContent")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_large_enough_on_a_narrow_screen(dark, page, paths):
    page.open(paths["different"], 400, 844, dark=dark, phone=True)
    sizes = page.evaluate("""[...document.querySelectorAll("header *, section *")].filter((one) => one.checkVisibility()
        && [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())
        && !one.closest("svg")).map((one) => parseFloat(getComputedStyle(one).fontSize))""")
    assert min(sizes) >= 12
    drawn = page.evaluate("""[...document.querySelectorAll("svg text")].filter((one) => one.checkVisibility())
        .map((one) => one.getBoundingClientRect().height)""")
    assert min(drawn) >= 10


def test_a_browser_that_complains_is_heard(page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('planted'); missing()</script><img src='http://127.0.0.1:9/x.png'>")
    page.open(bad, 400, 400)
    assert "planted" in str(page.problems)
    assert "missing is not defined" in str(page.problems)
    assert "http://127.0.0.1:9/x.png" in page.requests


def test_a_script_that_slipped_in_would_not_run(page, paths, tmp_path):
    bad = tmp_path / "bad.html"
    planted = "<img src='data:,' onerror='window.ran = 1'><script>window.ran = 1</script><main"
    bad.write_text(paths["equal"].read_text(encoding="utf-8").replace("<main", planted, 1), encoding="utf-8")
    page.open(bad, 400, 400)
    assert page.evaluate("window.ran === undefined")
    assert "Content Security Policy" in str(page.problems)


def shown(page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('#verdicts tbody tr')].filter((row) => !row.hidden)"
        ".map((row) => row.querySelector('.name').textContent)"
    )


def test_tensors_are_filtered_by_name_and_verdict(desk):
    names = [tensor.name for tensor in different_report().tensors]
    assert sorted(shown(desk)) == sorted(names)
    desk.evaluate("document.getElementById('filter').focus()")
    desk.call("Input.insertText", text="KEY blocks.1")
    assert shown(desk) == [f"grad blocks.{index}.attn.W_key.weight" for index in (1, 10, 11)]
    assert desk.evaluate("document.getElementById('shown').textContent") == "3 of 54 shown"
    desk.evaluate("(() => { filter.value = ''; filter.dispatchEvent(new Event('input')); })()")
    desk.evaluate("document.querySelector('.boxes input[value=equal]').click()")
    assert shown(desk) == ["output", "grad x", "grad head.weight", "weight probe"]


def test_tensors_are_sorted_by_any_number_and_by_name(desk):
    def sort(title: str) -> list[str]:
        desk.evaluate(f'document.querySelector("#verdicts thead button[title^={title!r}]").click()')
        return shown(desk)

    first = sort("Largest error of either")
    assert first[:3] == ["grad x", "output", "grad head.weight"]  # infinity, 3.1e9, 1.8
    assert first[-1] == "weight probe"  # which has no number
    assert desk.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"
    assert sort("Largest error of either")[0] == "weight probe"
    assert desk.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
    desk.evaluate("document.querySelector('[data-sort=\"0\"]').click()")
    by_name = shown(desk)
    assert by_name[:2] == ["grad blocks.0.attn.out_proj.weight", "grad blocks.0.attn.W_key.weight"]
    assert by_name.index("grad blocks.2.attn.W_key.weight") < by_name.index("grad blocks.10.attn.W_key.weight")
    assert desk.evaluate("document.querySelectorAll('[aria-sort]').length") == 1


@pytest.mark.parametrize("clipboard", ["granted", "denied", "absent"])
def test_the_command_is_copied_or_selected(clipboard, desk):
    if clipboard == "absent":
        desk.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    else:
        permission = {"name": "clipboard-write"}
        desk.call("Browser.setPermission", permission=permission, setting=clipboard)
    desk.evaluate("document.getElementById('copy').click()")
    desk.evaluate("new Promise((done) => setTimeout(done, 100))")
    said = desk.evaluate("document.getElementById('copied').textContent")
    assert said in ("copied", "selected; copy it with the keyboard")
    if clipboard != "granted":
        assert desk.evaluate("getSelection().toString()") == COMMAND


def test_the_page_is_walked_with_keys(desk):
    stops = []
    for _ in range(9):
        desk.press("Tab")
        stops.append(
            desk.evaluate("""(() => {
                const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
                const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 && box.left >= 0;
                return [one.textContent.slice(0, 20), seen];
            })()""")
        )
    assert all(seen for _, seen in stops)
    assert [text for text, _ in stops[:4]] == ["Skip to the results", "Copy", "Modules", "Tensors"]
    desk.evaluate("document.querySelector('.skip').focus()")
    desk.press("Enter")
    assert desk.evaluate("document.activeElement.id") == "results"


def test_the_table_scrolls_by_itself_on_a_phone(page, paths):
    page.open(paths["different"], *SCREENS["phone"], phone=True)
    assert page.evaluate(
        "(() => { const one = document.querySelector('.tall'); return one.scrollWidth > one.clientWidth })()"
    )
    page.evaluate("document.querySelector('.tall').scrollLeft = 300")
    assert page.evaluate("[document.querySelector('.tall').scrollLeft > 200, scrollX]") == [True, 0]


def test_a_long_path_breaks_and_does_not_widen_the_page(page, tmp_path):
    report = different_report()
    long = "encoder.layers." + "a_module_with_a_long_name" * 8
    first = dataclasses.replace(report.first_divergence, path=long)
    tree = dataclasses.replace(report.tree, first_type="T" * 200)
    changed = dataclasses.replace(report, first_divergence=first, tree=tree, first_name="X" * 90, command="y" * 300)
    as_html(changed, path := tmp_path / "long.html")
    page.open(path, *SCREENS["phone"], phone=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(OVERFLOW) == []
