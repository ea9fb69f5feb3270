"""Short answers on reports: the verdict, the worst numbers, and the next step.

In: the data of a report. Out: a text of at most `MAX_BYTES`, whose last line begins with ``next:``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from attn_bridge.printable import printable

from ..rendering.text import folded, measured, not_given, number, one_line, relative, telling_notes, where, worst_first
from ..results.changes import Data
from ..results.findings import TensorVerdict
from ..results.report import Report
from ..results.stored import report_of

MAX_BYTES = 1900
"""Bytes of an answer: agents pay for each; the full report is a resource."""

MAX_LINE = 300
SHOWN = 5

NEXT = "next: "


def limited(lines: Iterable[str], step: str) -> str:
    """Return lines, as many as fit, and the next step as the last one."""
    last = f"{NEXT}{printable(step, 500)}"
    room, kept = MAX_BYTES - len(last.encode()), []
    for line in lines:
        text = printable(line, MAX_LINE)
        room -= len(text.encode()) + 1
        if room < 0:
            break
        kept.append(text)
    return "\n".join([*kept, last])


def on_comparison(data: Data, name: str) -> str:
    """Return the answer on a report of `compare`, which is stored as `name`."""
    return limited(_comparison(data, name), _step(data, name))


def _comparison(data: Data, name: str) -> Iterator[str]:
    """Yield the lines of the command's page, the most useful first."""
    report = report_of(data)
    yield one_line(report.summary())
    first = report.first_divergence
    if first is not None:
        inside = "" if first.between is not None else "in "
        yield f"first divergence ({first.direction}) {inside}{first.place}"
        yield from (line for line in (f"  {first.message}" if first.message else "",) if line)
        if first.others:
            yield f"not excluded: {first.others}"
        if first.hint:
            yield f"hint: {first.hint}"
    yield f"report: {name} (resource parity://reports/{name})"
    failures = worst_first(report.failures)
    if failures:
        yield f"{len(failures)} of {len(report.tensors)} tensors are not equal:"
    yield from (line for tensor in failures[:SHOWN] for line in _tensor(tensor, report))
    if len(failures) > SHOWN:
        yield f"  ... and {len(failures) - SHOWN} more"
    for title, names in (
        ("reached by no comparison", report.unexercised),
        ("the outputs do not depend on", report.invariances),
        ("not covered", not_given(report.unreached, SHOWN)),
    ):
        if names:
            yield f"{title}: {'; '.join(folded(names))}"
    yield from map(str, report.allowed)
    yield from (f"note: {note}" for note in telling_notes(report)[:SHOWN])


def _tensor(tensor: TensorVerdict, report: Report) -> Iterator[str]:
    yield f"{tensor.name} ({tensor.dtype}): {tensor.verdict}, {measured(tensor, report)}"
    if tensor.worst is not None:
        yield f"  {where(tensor, report)}"


def _step(data: Data, name: str) -> str:
    first = data.get("first_divergence")
    if data["verdict"] == "equal":
        missed = data.get("unexercised") or data.get("unreached")
        if missed:
            return "call compare with inputs that reach the parts that are not covered"
        return "done; call compare with other dtypes or shapes for more evidence"
    if data["verdict"] == "inconclusive":
        return "change the inputs or the sides as the summary asks, and call compare again"
    if isinstance(first, Mapping) and first.get("between") is not None:  # no submodule or tensor says more of it
        return f"compare the code of both sides {_place(data)}, mend the second side, and call compare again"
    path = first.get("path") if isinstance(first, Mapping) else None
    wrong = next((tensor["name"] for tensor in data["tensors"] if tensor["verdict"] != "equal"), "output")
    return f"call explain with report={name!r} and path={path or wrong!r}, mend the second side, and compare again"


def _place(data: Data) -> str:
    """Return where the first divergence of a report is, in words."""
    first = report_of(data).first_divergence
    return "" if first is None else first.place


# ---- one tensor, one submodule


def on_path(data: Data, name: str, path: str) -> str:
    """Return the answer on one tensor or submodule of a report.

    Raises:
        ValueError: the report has neither of that name.
    """
    tensors = [tensor for tensor in data.get("tensors", ()) if path in (tensor["name"], tensor.get("second_name"))]
    node = next((each for each in _walk(data.get("tree")) if path in (each.get("path"), each.get("second_path"))), None)
    if not tensors and node is None:  # reports of equal sides have no tree of submodules
        below = re.compile(rf"(grad )?{re.escape(path)}\.")
        tensors = [tensor for tensor in data.get("tensors", ()) if below.match(tensor["name"])]
    if not tensors and node is None:
        names = [tensor["name"] for tensor in data.get("tensors", ())]
        names += [str(each["path"]) for each in _walk(data.get("tree")) if each.get("path")]
        raise ValueError(f"{printable(path)} is no tensor or submodule of {name}; it has {', '.join(names[:20])}")
    report = report_of(data)
    chosen = [
        tensor for tensor, stored in zip(report.tensors, data.get("tensors", ()), strict=True) if stored in tensors
    ]
    lines = [*(line for tensor in chosen for line in _numbers(tensor, report)), *([] if node is None else _node(node))]
    first = data.get("first_divergence")
    if isinstance(first, Mapping) and path in (first.get("path"), first.get("second_path")):
        lines.insert(0, f"first divergence ({first.get('direction')}): {first.get('message')}")
        lines[1:1] = [f"hint: {first['hint']}"] if first.get("hint") else []
    return limited(lines, _step_in(node, name))


def _numbers(tensor: TensorVerdict, report: Report) -> Iterator[str]:
    yield from _tensor(tensor, report)
    if tensor.message:
        yield f"  {tensor.message}"
    beyond = f", {tensor.bad} of {tensor.count} numbers are beyond the limit" if tensor.bad else ""
    oracle = tensor.worst.oracle if tensor.worst is not None else None
    exact = "" if oracle is None else f", exact (float64) {number(oracle)}"
    yield f"  shape {list(tensor.shape)}, {tensor.second_name} in the second side{exact}{beyond}"


def _node(node: Data) -> Iterator[str]:
    yield f"submodule {node.get('path') or 'itself'}: {node.get('first_type')} and {node.get('second_type')}"
    errors = ", ".join(
        f"{way} {relative(node.get(f'{key}_error'))}" for way, key in (("fwd", "forward"), ("bwd", "backward"))
    )
    yield f"{node.get('verdict') or 'not judged'}, error of outputs and gradients, fed the same numbers: {errors}"
    if node.get("message"):
        yield str(node["message"])
    children = list(node.get("children") or ())
    yield from (f"  {child.get('path')}: {child.get('verdict') or 'not judged'}" for child in children[: SHOWN * 3])


def _step_in(node: Data | None, name: str) -> str:
    inner = [] if node is None else [child for child in node.get("children") or () if child.get("verdict") != "equal"]
    wrong = next((child for child in inner if child.get("verdict") in ("different", "precision")), None)
    if wrong is not None:
        return f"call explain with report={name!r} and path={wrong.get('path')!r}"
    return "compare the code of both sides here, mend the second, and call compare again"


def _walk(node: object) -> Iterator[Data]:
    if isinstance(node, Mapping):
        yield node
        for child in node.get("children") or ():
            yield from _walk(child)


# ---- laws and plans


def on_laws(data: Data, name: str) -> str:
    """Return the answer on a report of `laws`, which is stored as `name`."""
    broken = [law for law in data["laws"] if law["status"] == "broken"]
    lines = [str(data["summary"]), *(_law(law) for law in broken)]
    others = [law for law in data["laws"] if law["status"] != "broken"]
    lines += [f"{law['name']}: {law['status']}" for law in others]
    return limited([*lines, f"report: {name} (resource parity://reports/{name})"], _step_of_laws(broken))


def _step_of_laws(broken: list[Data]) -> str:
    if not broken:
        return "if this is a port, call compare with its original as first side"
    name, purpose = broken[0]["name"], broken[0].get("purpose")
    meant = f", above all if it is meant ({purpose})" if purpose else ""
    return (
        f"if this is an original, leave it as it is{meant}: a port of it must break {name} alike, which compare shows; "
        f"if it is a port, call laws on its original, and mend {name} if it holds there; else mend {name}"
    )


def _law(law: Data) -> str:
    witness = law.get("witness")
    line = f"{law['name']}: broken: {law.get('why')}"
    if not isinstance(witness, Mapping):
        return line
    where = f"{witness.get('tensor')}{witness.get('index')}"
    return f"{line}: {where} is {witness.get('expected')}, and {witness.get('got')} {witness.get('change')}"


def on_plan(data: Data, name: str) -> str:
    """Return the answer on the plan of a conversion, which is stored as `name`."""
    source, tensors = data["source"], data["tensors"]
    lines = [
        f"plan: {len(tensors)} tensors, {data['bytes']} bytes, "
        f"from {source['format']} ({source['layout']}) to the layout {data['layout']}",
        *(f"note: {note}" for note in data.get("notes", ())[:SHOWN]),
        *(f"left out: {entry}" for entry in data.get("left_out", ())[:SHOWN]),
    ]
    lines += [f"{each['name']} <- {', '.join(map(str, each['sources']))}: {each['operation']}" for each in tensors]
    step = "run attn-bridge convert with the same arguments, then attn-bridge verify"
    return limited([lines[0], f"report: {name} (resource parity://reports/{name})", *lines[1:]], step)
