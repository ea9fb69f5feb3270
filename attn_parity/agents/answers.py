"""Short answers on reports: the verdict, the worst numbers, and the next step.

In: the data of a report. Out: a text of at most `MAX_BYTES`, whose last line begins with ``next:``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attn_bridge.printable import printable

from ..rendering.text import folded, not_given, one_line, telling_notes, worst_first
from ..results.changes import Data
from ..results.report import Report
from ..results.stored import report_of
from .explained import explained, tensor_lines
from .steps import after_comparison

MAX_BYTES = 1900
"""Bytes of an answer: agents pay for each; the full report is a resource."""

MAX_LINE = 300
"""Characters of a line: an answer has room for six of them."""

SHOWN = 5
"""Most tensors, notes or gaps that an answer lists."""

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
    report = report_of(data)
    return limited(_comparison(report, name), after_comparison(report, name))


def _comparison(report: Report, name: str) -> Iterator[str]:
    """Yield the lines of the command's page, the most useful first."""
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
    yield from (line for tensor in failures[:SHOWN] for line in tensor_lines(tensor, report))
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


# ---- one tensor, one submodule


def on_path(data: Data, name: str, path: str) -> str:
    """Return the answer on one tensor or submodule of a report.

    Raises:
        ValueError: the report has neither of that name.
    """
    return limited(*explained(data, name, path))


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
