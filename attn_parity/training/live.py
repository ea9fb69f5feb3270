"""The page of a training that is being watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .report import TrainingReport

LEAST_SECONDS = 1.0
"""Between two pages, so that quick steps are not held up by them."""


class LivePage:
    """Writes the page while both sides train; each is whole when a browser reads it.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._last = float("-inf")

    def show(self, so_far: Callable[[], TrainingReport]) -> None:
        """Write an intermediate page, unless one was written less than `LEAST_SECONDS` ago."""
        now = time.monotonic()
        if self.path is not None and now - self._last >= LEAST_SECONDS:
            self._write(so_far(), running=True)
            self._last = time.monotonic()

    def end(self, report: TrainingReport) -> None:
        """Write the page that stays."""
        if self.path is not None:
            self._write(report, running=False)

    def _write(self, report: TrainingReport, *, running: bool) -> None:
        from ..rendering.html.training import as_html

        as_html(report, self.path, running=running)
