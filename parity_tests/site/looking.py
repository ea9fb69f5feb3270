"""What is asked of a page in the browser."""

from __future__ import annotations

from typing import Any

from ..support.judging.browser import Page

TOO_WIDE = """
(() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push(`the page: ${document.documentElement.scrollWidth}`);
  for (const one of document.querySelectorAll("main *")) {
    if (one.getBoundingClientRect().right <= width + 1 || !one.checkVisibility({visibilityProperty: true})) continue;
    let inside = false;
    for (let up = one.parentElement; up && !inside; up = up.parentElement)
      inside = !["BODY", "HTML"].includes(up.tagName)
        && ["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX);
    if (!inside) found.push(one.outerHTML.slice(0, 160));
  }
  return found.slice(0, 5);
})()
"""
"""What sticks out of the window on the right, but for what scrolls by itself."""

IMAGES = """
[...document.querySelectorAll("main img")].map((one) => [one.getAttribute("alt"), one.naturalWidth, one.currentSrc])
"""

AXE = """
axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => [one.id, one.nodes.length, one.nodes[0].html.slice(0, 200), one.nodes[0].failureSummary]))
"""

THINNED = """
(() => {
  const alike = "tbody tr:nth-child(n + 7), dl.py:nth-of-type(n + 7)", seen = new Map();
  document.querySelectorAll(alike).forEach((one) => one.remove());
  for (const one of document.querySelectorAll("pre span[class]")) {
    const count = (seen.get(one.className) ?? 0) + 1;
    seen.set(one.className, count);
    if (count > 5) one.replaceWith(...one.childNodes);
  }
})()
"""
"""Leaves few of what is alike, of which axe-core looks at a thousand for a minute: rows of a table, names of the
reference, words of code in one colour.
"""


def too_wide(page: Page) -> list[str]:
    """Return what does not fit into the window."""
    return page.evaluate(TOO_WIDE)


def bad_images(page: Page) -> list[tuple[str | None, str]]:
    """Return the images that did not load, or whose alternative text says nothing."""
    page.evaluate("document.querySelectorAll('img').forEach((one) => { one.loading = 'eager' })")
    page.evaluate("Promise.all([...document.images].map((one) => one.decode().catch(() => null)))")
    return [
        (alt, source)
        for alt, width, source in page.evaluate(IMAGES)
        if width == 0 or alt is None or " " not in alt.strip() or alt.endswith((".png", ".svg"))
    ]


def barriers(page: Page, axe: str) -> list[Any]:
    """Return what axe-core calls serious or critical."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(axe + "; 0")
    page.evaluate(THINNED)
    return page.evaluate(AXE)
