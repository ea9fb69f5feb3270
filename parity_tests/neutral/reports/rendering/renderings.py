"""An empty report, and reports as a terminal and JUnit show them."""

import io
import xml.etree.ElementTree as ET

from rich.console import Console

from attn_parity.rendering import terminal
from attn_parity.rendering.junit import as_junit
from attn_parity.results.report import Report

EMPTY = Report("equal", [])


def printed(report: Report, width: int = 110, full: bool = False) -> str:
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=width), full)
    return out.getvalue()


def parsed(report: Report) -> ET.Element:
    return ET.fromstring(as_junit(report).encode("utf-8"))
