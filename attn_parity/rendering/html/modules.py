"""The module tree of the HTML page: folded where all is equal, unfolded down to the first divergence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...results.findings import ModuleNode, shown
from .. import outline
from ..text import NONE, growth, relative
from .markup import Markup, badge, element, hint, named

if TYPE_CHECKING:
    from ...results.report import Report


def section(report: Report) -> list[Markup]:
    """Return the body of the section on modules."""
    root = report.tree
    if root is None:
        return []
    collapse = outline.is_large(root)
    legend = (
        "Forward and backward: difference of outputs and gradients when both sides are fed the same numbers, relative "
        "to the largest value. Growth: how much larger the difference is behind the module than before it."
    )
    titles = ("Module", "Verdict", "Forward", "Backward", "Growth")
    return [
        hint(legend),
        element(
            "div",
            element("div", (element("span", title) for title in titles), class_="row head", aria_hidden="true"),
            element("ul", element("li", _node(root, None, collapse, report))),
            class_="tree",
        ),
    ]


def _node(node: ModuleNode, parent: ModuleNode | None, collapse: bool, report: Report) -> Markup:
    row = _row(
        [node],
        parent,
        report,
        element("span", "first divergence here", class_="first") if node.first else None,
        element("span", node.message, class_="why") if node.message else None,
    )
    if not node.children:
        return element("div", row, class_="leaf first-row" if node.first else "leaf")
    inner = []
    for nodes in outline.runs(node.children, collapse):
        items = [element("li", _node(one, node, collapse, report)) for one in nodes]
        if len(nodes) > 1:
            run = element("details", element("summary", _row(nodes, node, report)), element("ul", items))
            inner.append(element("li", run))
        else:
            inner += items
    unfolded = parent is None or not outline.entirely_equal(node)
    return element(
        "details",
        element("summary", row, class_="first-row" if node.first else None),
        element("ul", inner),
        open=unfolded,
    )


def _row(nodes: Sequence[ModuleNode], parent: ModuleNode | None, report: Report, *below: Markup | None) -> Markup:
    node, title = nodes[0], outline.name(nodes, parent)
    state = f"{len(nodes)} equal" if len(nodes) > 1 else outline.state(node, report)
    second = outline.second_name(node, parent) if len(nodes) == 1 else ""
    numbers = (
        ("forward", relative(outline.largest(one.forward_error for one in nodes))),
        ("backward", relative(outline.largest(one.backward_error for one in nodes))),
        ("growth", growth(outline.largest(one.amplification for one in nodes))),
    )
    return element(
        "span",
        element(
            "span",
            named(title),
            " ",
            element("span", outline.kind(node), class_="kind"),
            element("span", f" {shown(report.second_label)}: {second}", class_="kind")
            if second not in ("", title)
            else None,
            below,
            class_="module",
        ),
        element("span", badge(node.verdict or "none", state)),
        (
            element(
                "span",
                element("span", f"{label} ", class_="label"),
                value,
                class_="number missing" if value == NONE else "number",
            )
            for label, value in numbers
        ),
        class_="row",
    )
