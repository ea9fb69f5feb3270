"""Known, accepted differences: the tensors of a report that they cover, and the verdict on the rest."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from .findings import Allowance, Divergence, ModuleNode, TensorVerdict, worst
from .report import Report

_PREFIXES = ("grad ", "weight ", "dropout ")
"""Prefixes of the name of a parameter or submodule in the name of a tensor."""


def parse(texts: Sequence[str], what: str = "--allow") -> dict[str, str]:
    """Return path -> reason of ``PATH=REASON``, as the command line takes them.

    Raises:
        ValueError: one that has no path or no reason, or a path that is given twice.
    """
    reasons: dict[str, str] = {}
    for text in texts:
        path, equals, reason = (part.strip() for part in text.partition("="))
        if not (path and equals and reason):
            raise ValueError(f"{what} ({text}) must read PATH=REASON, such as blocks.3.norm=eps is 1e-6 on purpose")
        if path in reasons:
            raise ValueError(f"{what} names {path} twice")
        reasons[path] = reason
    return reasons


def checked(allow: Mapping[str, str] | Sequence[str], what: str = "allow") -> dict[str, str]:
    """Return path -> reason of the caller's allowances.

    Raises:
        TypeError: `allow` is neither a mapping of strings nor a sequence of ``PATH=REASON``.
        ValueError: a path or a reason is empty.
    """
    if isinstance(allow, str):
        allow = [allow]
    if not isinstance(allow, Mapping):
        if not isinstance(allow, Iterable) or not all(isinstance(one, str) for one in allow):
            raise TypeError(f"{what} must map a path to the reason why it may differ")
        return parse(list(allow), what)
    if not all(isinstance(one, str) for pair in allow.items() for one in pair):
        raise TypeError(f"{what} must map a path to the reason why it may differ")
    return parse([f"{path}={reason}" for path, reason in allow.items()], what)


def accept(
    report: Report, allow: Mapping[str, str], left: Divergence | Literal["nothing", "unknown"] = "unknown"
) -> Report:
    """Return the report with the verdict on all but the accepted differences.

    A path covers the tensor of that name, the gradients of the parameters below it, and every difference that begins in
    that submodule. If each submodule that differs on equal inputs is inside an accepted one, the differences elsewhere
    follow from it, and are accepted with it.

    Args:
        report: the report of the comparison.
        allow: path -> reason.
        left: the difference that remains when the accepted submodules return the other side's numbers: its location,
        ``nothing``, or ``unknown`` if that could not be tried.
    """
    if not allow:
        return report
    covers: dict[str, list[str]] = {path: [] for path in allow}
    follows = _follows(report, covers)
    follows = "" if isinstance(left, Divergence) else follows
    tensors = []
    for tensor in report.tensors:
        if tensor.verdict in ("different", "precision"):
            path = next((path for path in allow if _covers(path, tensor)), follows)
            if path:
                covers[path].append(tensor.name)
                tensor = dataclasses.replace(tensor, allowed=path)
        tensors.append(tensor)
    known_paths = _known(report)
    allowances = [
        Allowance(path, reason, tuple(covers[path]), bool(covers[path]) or path in known_paths)
        for path, reason in allow.items()
    ]
    verdict = worst([one.verdict for one in tensors if not one.allowed])
    changed = dataclasses.replace(report, tensors=tensors, allowed=[*report.allowed, *allowances])
    if report.verdict in ("inconclusive", "equal") or not any(covers.values()):
        return changed
    first = report.first_divergence
    if first is not None and _inside(first.path, allow):
        first, tree = _next(report, allow, left)
        changed = dataclasses.replace(changed, first_divergence=first, tree=tree)
    notes = _noted(report, follows, is_sure=left == "nothing")
    return dataclasses.replace(changed, verdict=verdict, notes=notes)


def _known(report: Report) -> set[str]:
    """Return every name that the report has: tensors, parameters, and the submodules around them."""
    names = {name for one in report.tensors for name in (one.name, one.second_name)}
    names |= {name for one in report.pairing for name in (one.first, one.second)}
    nodes = () if report.tree is None else report.tree.walk()
    names |= {path for node in nodes for path in (node.path, node.second_path) if path}
    for name in list(names):
        bare = next((name.removeprefix(one) for one in _PREFIXES if name.startswith(one)), name)
        words = bare.split(".")
        names |= {".".join(words[:count]) for count in range(1, len(words) + 1)}
    return names


def unknown(report: Report) -> Iterator[str]:
    """Yield a line on each allowance that names nothing in the report, with the names that are nearest to it."""
    names = _known(report)
    # Only a tree knows submodules that hold no parameter, and there is none where nothing differs.
    what = "nothing" if report.tree is not None else "no tensor and no submodule with parameters"
    for allowance in report.allowed:
        if not allowance.known:
            near = difflib.get_close_matches(allowance.path, names)
            yield f"{allowance.path}: {what} has that name" + (f"; the nearest: {', '.join(near)}" if near else "")


def _noted(report: Report, follows: str, *, is_sure: bool) -> list[str]:
    if not follows:
        return report.notes
    inside = follows.rpartition(".")[0] or report.first_name
    premise = (
        f"every difference follows from {follows}, which may differ: given the other side's numbers, all else agrees"
    )
    if not is_sure:
        premise = (
            f"no other submodule than {follows} differs, which may; code of {inside} around it was not judged apart"
        )
    return [premise, *report.notes]


def _covers(path: str, tensor: TensorVerdict) -> bool:
    if path in (tensor.name, tensor.second_name):
        return True
    for name in (tensor.name, tensor.second_name):
        for prefix in _PREFIXES:
            if name.startswith(prefix) and _inside(name.removeprefix(prefix), [path]):
                return True
    return False


def _inside(path: str | None, paths: Iterable[str]) -> str:
    """Return the accepted path that equals or contains the submodule's, "" if none does."""
    containing = (one for one in paths if path is not None and (path == one or path.startswith(f"{one}.")))
    return next(containing, "")


def _follows(report: Report, covers: dict[str, list[str]]) -> str:
    """Return the accepted path that explains all differences, "" if another submodule differs independently."""
    first = report.first_divergence
    path = "" if first is None else _inside(first.path, covers) or _inside(first.second_path, covers)
    if not path or report.tree is None:
        return ""
    guilty = list(_guilty(report.tree))
    for node in guilty:
        inside = _inside(node.path, covers) or _inside(node.second_path, covers)
        if not inside:
            return ""
        covers[inside].append(f"in {node.path}")
    return path if guilty else ""


def _guilty(node: ModuleNode) -> Iterator[ModuleNode]:
    """Yield the innermost submodules that differ: those without a differing submodule inside."""
    inner = [found for child in node.children for found in _guilty(child)]
    yield from inner
    if not inner and node.verdict in ("different", "precision"):
        yield node


def _next(
    report: Report, allow: Mapping[str, str], left: Divergence | str
) -> tuple[Divergence | None, ModuleNode | None]:
    """Return the first divergence that is not accepted, and the tree with its mark there."""
    if report.tree is None or report.first_divergence is None:
        return None, report.tree
    if isinstance(left, Divergence):
        node = next((one for one in report.tree.walk() if (one.path or "") == left.path), None)
        return dataclasses.replace(left, second_label=report.second_label), _marked(report.tree, node)
    others = [one for one in _guilty(report.tree) if not (_inside(one.path, allow) or _inside(one.second_path, allow))]
    other = next(iter(others), None)
    tree = _marked(report.tree, other)
    if other is None:
        return None, tree
    old = report.first_divergence
    forward = (other.forward_error or 0.0) > (other.backward_error or 0.0) * 1e-6 or old.direction == "forward"
    direction: Literal["forward", "backward"] = "forward" if forward else "backward"
    path, second = other.path or "", other.second_path or ""
    return Divergence(path, second, direction, other.message, second_label=old.second_label), tree


def _marked(node: ModuleNode, first: ModuleNode | None) -> ModuleNode:
    children = tuple(_marked(child, first) for child in node.children)
    return dataclasses.replace(node, first=node is first, children=children)
