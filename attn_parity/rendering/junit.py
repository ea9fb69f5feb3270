"""The report as JUnit XML, which continuous integration shows as tests."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bridge import whole_files as files
from attn_bridge.printable import visible

from ..results.findings import TensorVerdict, Verdict, shown
from .text import index, number, share

if TYPE_CHECKING:
    from ..results.report import Report

ELEMENTS: dict[Verdict, str] = {"different": "failure", "precision": "failure", "inconclusive": "error"}


def as_junit(report: Report, path: str | Path | None = None) -> str:
    """Return the report as JUnit XML: one test case per tensor, an inconclusive one as an error.

    A verdict that no tensor explains, such as that of a failed run, is a separate test case.

    Args:
        report: a report of `compare`.
        path: file to write it to as well.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    suite = ET.Element("testsuite", name=visible(report.sides))
    properties = ET.SubElement(suite, "properties")
    for key, value in report.environment.items():
        ET.SubElement(properties, "property", name=visible(key), value=visible(value))
    reasons = {one.path: str(one) for one in report.allowed}
    for tensor in report.tensors:
        details, reason = _details(report, tensor), reasons.get(tensor.allowed)
        _case(suite, report, tensor.name, tensor.verdict, tensor.message, details, reason)
    if not report.passed and not report.failures:
        _case(suite, report, "comparison", report.verdict, report.message, report.explain())
    ET.SubElement(suite, "system-out").text = visible(report.explain())

    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    for key, count in counts.items():
        suite.set(key, str(count))
    suite.set("time", f"{report.seconds:.3f}")
    root = ET.Element("testsuites", {key: str(count) for key, count in counts.items()})
    root.append(suite)
    ET.indent(root)
    text = '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
    files.write(target, text)
    return text


def _case(
    suite: ET.Element,
    report: Report,
    name: str,
    verdict: Verdict,
    message: str,
    details: str,
    allowed: str | None = None,
) -> None:
    """Add a test case; a difference that is allowed is a skipped one, with the reason."""
    case = ET.SubElement(suite, "testcase", classname=visible(report.first_name or "parity"), name=visible(name))
    if allowed is not None:
        ET.SubElement(case, "skipped", message=visible(allowed)).text = visible(details)
    elif verdict in ELEMENTS:
        problem = ET.SubElement(case, ELEMENTS[verdict], type=verdict, message=visible(message or verdict))
        problem.text = visible(details)


def _details(report: Report, tensor: TensorVerdict) -> str:
    first, second = shown(report.first_label), shown(report.second_label)
    lines = [str(tensor), f"{second}: {tensor.second_name}", f"seen on {tensor.on}, {tensor.mode}"]
    if tensor.worst is not None:
        worst = tensor.worst
        lines.append(
            f"worst at {index(worst.index)} of sample {worst.sample}: {first} {number(worst.first)}, "
            f"{second} {number(worst.second)}, float64 {number(worst.oracle)}"
        )
    lines.append(
        f"{tensor.bad} of {tensor.count} elements beyond what is allowed; share of the allowed error: float64 "
        f"{share(tensor.meaning_used)}, {first} {share(tensor.first_used)}, {second} {share(tensor.second_used)}"
    )
    if report.command:
        lines.append(f"again: {report.command}")
    return "\n".join(lines)
