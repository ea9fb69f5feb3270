"""One tensor or one submodule of a report: a witness, candidates for the cause, and what agrees around it.

In: the data of a report and a path. Out: lines, the most useful first, and the next step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from attn_bridge.printable import printable

from ..rendering.text import folded, measured, number, relative, where
from ..results.changes import Data
from ..results.findings import Divergence, TensorVerdict
from ..results.report import Report
from ..results.stored import report_of
from . import steps

NAMES = 6
"""Most names of a list."""

BAD = ("different", "precision", "inconclusive")


def explained(data: Data, name: str, path: str) -> tuple[list[str], str]:
    """Return the lines on one tensor or submodule of a report, and the next step.

    Raises:
        ValueError: the report has neither of that name.
    """
    report = report_of(data)
    tensors = [tensor for tensor in report.tensors if path in (tensor.name, tensor.second_name)]
    nodes = list(_walk(data.get("tree")))
    node = next((each for each in nodes if path in (each.get("path"), each.get("second_path"))), None)
    if not tensors and node is None:  # reports of equal sides have no tree of submodules
        tensors = [tensor for tensor in report.tensors if re.match(rf"(grad )?{re.escape(path)}\.", tensor.name)]
    if tensors:
        own = _submodule_of(tensors[0], nodes)
        lines = [*_tensors(tensors, report), *_around_tensor(tensors[0], own, report), *_causes(own, data, report)]
        unequal = next((tensor for tensor in tensors if tensor.verdict != "equal"), None)
        if unequal is None:
            return lines, steps.elsewhere(report, name, f"{path} is equal: mend nothing for it")
        return lines, steps.after_tensor(unequal, own, report, name)
    if node is None:
        names = [tensor.name for tensor in report.tensors] + [str(each["path"]) for each in nodes if each.get("path")]
        raise ValueError(f"{printable(path)} is no tensor or submodule of {name}; it has {', '.join(names[:20])}")
    lines = [*_submodule(node), *_causes(node, data, report), *_around(node, nodes, report), *_inside(node)]
    return lines, steps.after_submodule(node, report, name)


def _walk(node: object) -> Iterator[Data]:
    if isinstance(node, Mapping):
        yield node
        for child in node.get("children") or ():
            yield from _walk(child)


# ---- tensors


def tensor_lines(tensor: TensorVerdict, report: Report) -> Iterator[str]:
    """Yield the verdict on a tensor, and its worst element with both numbers."""
    yield f"{tensor.name} ({tensor.dtype}): {tensor.verdict}, {measured(tensor, report)}"
    if tensor.worst is not None:
        yield f"  {where(tensor, report)}"


def _tensors(tensors: list[TensorVerdict], report: Report) -> Iterator[str]:
    for tensor in tensors[:NAMES]:
        yield from tensor_lines(tensor, report)
        exact = tensor.worst.oracle if tensor.worst is not None else None
        facts = [
            f"shape {list(tensor.shape)}",
            f"{tensor.second_name} in the second side" if tensor.second_name != tensor.name else "",
            "" if exact is None else f"exact (float64) {number(exact)}",
            f"{tensor.bad} of {tensor.count} numbers are beyond the limit" if tensor.bad else "",
        ]
        yield f"  {', '.join(fact for fact in facts if fact)}"
        # The message of a difference repeats the numbers above.
        if tensor.message and tensor.worst is None:
            yield f"  {tensor.message}"
    if len(tensors) > NAMES:
        yield f"  ... and {len(tensors) - NAMES} more"


def _submodule_of(tensor: TensorVerdict, nodes: list[Data]) -> Data | None:
    """Return the submodule that holds a parameter; None for outputs and inputs."""
    owner = tensor.name.removeprefix("grad ").rpartition(".")[0]
    return next((node for node in nodes if owner and node.get("path") == owner), None)


def _around_tensor(tensor: TensorVerdict, own: Data | None, report: Report) -> Iterator[str]:
    """Yield the verdict on the tensor's submodule, and which other tensors agree."""
    if own is not None:
        yield from _submodule(own)
    others = [other for other in report.tensors if other is not tensor]
    agreeing = folded(other.name for other in others if other.verdict == "equal")
    if others and tensor.verdict != "equal":
        count = sum(other.verdict == "equal" for other in others)
        listed = f": {'; '.join(agreeing[:NAMES])}{'; ...' if len(agreeing) > NAMES else ''}" if agreeing else ""
        yield f"{count} of {len(others)} other tensors agree{listed}"


# ---- submodules


def _submodule(node: Data) -> Iterator[str]:
    types = list(dict.fromkeys(str(node.get(key) or "none") for key in ("first_type", "second_type")))
    errors = ", ".join(
        f"{way} {relative(node.get(f'{key}_error'))}"
        for way, key in (("outputs", "forward"), ("gradients", "backward"))
        if node.get(f"{key}_error") is not None
    )
    verdict = node.get("verdict") or "not judged alone"
    fed = f", fed the same numbers the sides are apart by: {errors}" if errors else ""
    yield f"submodule {node.get('path') or 'itself'} ({' and '.join(types)}): {verdict}{fed}"
    if node.get("message"):
        yield f"  {node['message']}"


def _causes(node: Data | None, data: Data, report: Report) -> Iterator[str]:
    """Yield the witness, the hint and the candidates, if the first divergence is here or inside."""
    first = report.first_divergence
    if first is None:
        return
    path = "" if node is None else str(node.get("path") or "")
    if not _holds(path, first):
        yield f"the sides part first ({first.direction}) {'' if first.between else 'in '}{first.place}"
        return
    inside = "" if first.path == path and first.between is None else f" {'' if first.between else 'in '}{first.place}"
    yield f"first divergence ({first.direction}){inside}"
    if first.witness:
        yield f"witness: fed the same numbers, {first.witness}"
    if first.hint:
        yield f"cause, as far as the numbers show: {first.hint}"
    if first.others:
        yield f"not excluded: {first.others}"
    pairs = data.get("pairing") or ()
    guessed = [
        pair for pair in pairs if _is_below(str(pair.get("first")), path) and pair.get("how") in ("order", "probe")
    ]
    if guessed:
        names = "; ".join(f"{pair['first']} with {pair['second']} (by {pair['how']})" for pair in guessed[:NAMES])
        yield f"weights that no name paired: {names}"


def _holds(path: str, first: Divergence) -> bool:
    return not path or first.path == path or _is_below(first.path, path)


def _is_below(path: str, parent: str) -> bool:
    return not parent or path.startswith(f"{parent}.")


def _around(node: Data, nodes: list[Data], report: Report) -> Iterator[str]:
    """Yield the verdicts on the submodules that run before and after a submodule, and on its parameters' gradients."""
    parent = next((each for each in nodes if any(child is node for child in each.get("children") or ())), None)
    siblings = [] if parent is None else list(parent["children"])
    position = next((at for at, child in enumerate(siblings) if child is node), 0)
    for word, near in (("before it", siblings[:position][-NAMES:]), ("after it", siblings[position + 1 :][:NAMES])):
        if near:
            yield f"{word}: {_verdicts(near)}"
    path = str(node.get("path") or "")
    own = [tensor for tensor in report.tensors if path and tensor.name.startswith(f"grad {path}.")]
    if own:
        bad = [tensor for tensor in own if tensor.verdict in BAD]
        worst = f": {'; '.join(tensor.name for tensor in bad[:NAMES])}" if bad else ""
        equal = f"{len(own) - len(bad)} of {len(own)} are equal{', not' if bad else ''}{worst}"
        yield f"gradients of its parameters as the whole ran: {equal}"


def _inside(node: Data) -> Iterator[str]:
    children = list(node.get("children") or ())
    if children:
        yield f"inside: {_verdicts(children[:15])}"


def _verdicts(nodes: list[Data]) -> str:
    return ", ".join(
        f"{each.get('path') or each.get('second_path')} {each.get('verdict') or 'not judged'}" for each in nodes
    )
