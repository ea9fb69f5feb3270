"""The table of tensors on the HTML page, failures first; the page's script sorts and filters it."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from ...results.findings import SEVERITY, TensorVerdict, shown
from ..text import (
    LEGEND,
    NONE,
    closest,
    index,
    measured,
    number,
    relative,
    shape,
    share,
    ulps,
    used,
    where,
    worst_first,
)
from .markup import Child, Markup, badge, element, hint, named, scrolled

if TYPE_CHECKING:
    from ...results.report import Report

WORST = 5
"""Number of tensors on the first screen."""


def worst(report: Report) -> Markup | None:
    """Return the tensors that matter most, one number each, in a table that needs no scrolling."""
    failures = report.failures
    rows = (worst_first(failures) or closest(report))[:WORST]
    if not rows:
        return None
    count = f"{len(failures):,} of {len(report.tensors):,} tensors are not equal" + (
        f", the worst {len(rows)}" if len(failures) > len(rows) else ""
    )
    title = count if failures else LEGEND.capitalize()
    return element(
        "table",
        element("caption", title),
        element(
            "tbody",
            (
                element(
                    "tr",
                    element("th", named(one.name), scope="row"),
                    element("td", badge(one.verdict)),
                    element("td", measured(one, report)),
                    element("td", f"{where(one, report) or NONE}" if failures else f"on {one.on}", class_="kind"),
                )
                for one in rows
            ),
        ),
        class_="worst-tensors",
    )


def _columns(report: Report) -> tuple[tuple[str, str | None], ...]:
    first, second = shown(report.first_label), shown(report.second_label)
    return (
        ("Tensor", None),
        ("Verdict", None),
        ("float64 difference", "Largest difference in float64, relative to the largest value of the kind"),
        ("Error, % of what is allowed", "Largest error of either side, in % of what is allowed; a full bar fails"),
        (first, f"Root mean square error of {first}, in units of the last place of the largest value"),
        (second, f"Root mean square error of {second}, in units of the last place of the largest value"),
        ("Beyond", "Elements beyond what is allowed"),
    )


def section(report: Report) -> list[Markup]:
    """Return the body of the section on tensors."""
    if not report.tensors:
        return [hint("No tensor was compared.")]
    counts = Counter(tensor.verdict for tensor in report.tensors)
    boxes = [
        element(
            "label",
            element("input", type="checkbox", value=verdict, checked=True),
            badge(verdict, f"{verdict} {counts[verdict]:,}"),
        )
        for verdict in reversed(SEVERITY)
        if counts[verdict]
    ]
    controls = element(
        "div",
        element("label", "Name ", element("input", type="search", id="filter", autocomplete="off", spellcheck="false")),
        element("span", boxes, role="group", aria_label="Verdicts to show", class_="boxes"),
        element("span", f"{len(report.tensors):,} shown", role="status", id="shown", class_="hint"),
        class_="controls",
    )
    groups = element(
        "tr",
        element("td", colspan=4),
        element("th", "Error in ulps", colspan=2, scope="colgroup"),
        element("td", colspan=2),
    )
    heads = element(
        "tr",
        (
            element(
                "th",
                element("button", title, type="button", data_sort=place, title=meaning),
                scope="col",
                class_="number" if place > 1 else None,
            )
            for place, (title, meaning) in enumerate(_columns(report))
        ),
        element("th", "Worst element", scope="col"),
    )
    allowed = [tensor for tensor in report.tensors if tensor.allowed]
    passed = [tensor for tensor in report.tensors if tensor.verdict == "equal" and not tensor.allowed]
    rows = [_tensor(tensor, report) for tensor in (*report.failures, *allowed, *passed)]
    table = element("table", element("thead", groups, heads), element("tbody", rows), id="verdicts")
    return [controls, scrolled(table, "Verdict of each tensor")]


def _tensor(tensor: TensorVerdict, report: Report) -> Markup:
    facts = [tensor.kind, shape(tensor.shape), tensor.dtype]
    if tensor.verdict != "equal":
        facts += [tensor.on, tensor.mode]
    return element(
        "tr",
        element(
            "th",
            named(tensor.name),
            element("span", f"{shown(report.second_label)}: {tensor.second_name}", class_="kind")
            if tensor.second_name != tensor.name
            else None,
            element("span", ", ".join(facts), class_="kind"),
            element("span", tensor.message, class_="why") if tensor.message else None,
            element("span", f"allowed: {tensor.allowed}", class_="why") if tensor.allowed else None,
            scope="row",
        ),
        element(
            "td",
            badge(tensor.verdict),
            data_value=SEVERITY.index(tensor.verdict),
        ),
        _cell(relative(tensor.relative), tensor.relative),
        _share(used(tensor, report)),
        _cell(ulps(tensor.first_ulps), tensor.first_ulps),
        _cell(ulps(tensor.second_ulps), tensor.second_ulps),
        _cell(f"{tensor.bad:,} of {tensor.count:,}" if tensor.count else NONE, tensor.bad),
        element("td", _worst(tensor, report), class_="worst"),
    )


def _cell(text: str, value: float | None, *more: Markup) -> Markup:
    # A number that JavaScript reads; no number sorts below every one.
    written = "" if value is None else "Infinity" if not math.isfinite(value) else f"{value:.17g}"
    return element("td", text, more, class_="number", data_value=written)


def _share(value: float | None) -> Markup:
    if value is None:
        return _cell(share(value), value)
    filled = min(1.0, value) if math.isfinite(value) else 1.0
    over = " over" if not value <= 1 else ""
    return _cell(share(value), value, element("span", class_=f"meter{over}", style=f"--filled:{filled:.3f}"))


def _worst(tensor: TensorVerdict, report: Report) -> Child:
    worst = tensor.worst
    if worst is None:
        return NONE
    values = [
        (shown(report.first_label), worst.first),
        (shown(report.second_label), worst.second),
        ("float64", worst.oracle),
    ]
    return [
        element("span", f"{index(worst.index)} of sample {worst.sample}", class_="kind"),
        element(
            "dl", ((element("dt", side), element("dd", number(value))) for side, value in values if value is not None)
        ),
    ]
