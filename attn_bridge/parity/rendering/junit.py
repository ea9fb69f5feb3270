"""The report as JUnit XML, which continuous integration shows as tests."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from ..compare.report import Report, TensorVerdict, Verdict
from . import files
from .text import index, number, share, visible

ELEMENTS: dict[Verdict, str] = {"different": "failure", "precision": "failure", "inconclusive": "error"}


def as_junit(report: Report, path: str | Path | None = None) -> str:
    """Return the report as JUnit XML: one test case per tensor, an inconclusive one as an error.

    A verdict that no tensor explains, as when nothing could be run, is a test case of its own.

    Args:
        report: what `compare` found.
        path: file to write it to as well.

    Raises:
        ValueError: the file cannot be written.
    """
    target = files.checked(path)
    suite = ET.Element("testsuite", name=visible(f"{report.first_name} (torch) and {report.second_name} (Flax)"))
    properties = ET.SubElement(suite, "properties")
    for key, value in report.environment.items():
        ET.SubElement(properties, "property", name=visible(key), value=visible(value))
    for tensor in report.tensors:
        _case(suite, report, tensor.name, tensor.verdict, tensor.message, _details(report, tensor))
    if not report.passed and not report.failures:
        _case(suite, report, "comparison", report.verdict, report.message, report.explain())
    ET.SubElement(suite, "system-out").text = visible(report.explain())

    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
    }
    for key, count in counts.items():
        suite.set(key, str(count))
    suite.set("skipped", "0")
    suite.set("time", f"{report.seconds:.3f}")
    root = ET.Element("testsuites", {key: str(count) for key, count in counts.items()})
    root.append(suite)
    ET.indent(root)
    text = '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
    files.write(target, text)
    return text


def _case(suite: ET.Element, report: Report, name: str, verdict: Verdict, message: str, details: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=visible(report.first_name or "parity"), name=visible(name))
    if verdict in ELEMENTS:
        problem = ET.SubElement(case, ELEMENTS[verdict], type=verdict, message=visible(message or verdict))
        problem.text = visible(details)


def _details(report: Report, tensor: TensorVerdict) -> str:
    lines = [str(tensor), f"Flax: {tensor.second_name}", f"judged with {tensor.weights} weights, {tensor.mode}"]
    if tensor.worst is not None:
        worst = tensor.worst
        lines.append(
            f"worst at {index(worst.index)} of sample {worst.sample}: torch {number(worst.first)}, "
            f"Flax {number(worst.second)}, float64 {number(worst.oracle)}"
        )
    lines.append(
        f"{tensor.bad} of {tensor.count} elements beyond the allowance; used of the allowance: "
        f"float64 {share(tensor.meaning_used)}, torch {share(tensor.first_used)}, Flax {share(tensor.second_used)}"
    )
    if report.command:
        lines.append(f"again: {report.command}")
    return "\n".join(lines)
