"""A server of the built site, a browser, and axe-core, which looks for what keeps people out."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.judging.browser import Page, find_chromium, running

ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "build" / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of the built site."""
    assert (SITE / "index.html").exists(), f"{SITE} is not there: make site builds it and then runs these tests"
    with serving(SITE) as address:
        yield address


def serving(folder: Path) -> _Serving:
    """Serve a folder on a free port while the context lasts."""
    return _Serving(folder)


class _Serving:
    def __init__(self, folder: Path):
        handler = functools.partial(Quiet, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Start a browser; a machine without one fails: `make site` installs Debian's Chromium where it may."""
    program = find_chromium()
    assert program is not None, "no Chromium was found; apt-get install chromium, or set CHROME to one"
    with running(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    found = importlib.util.find_spec("axe_playwright_python")
    assert found is not None, "axe-playwright-python is not there: make site installs it"
    return Path(next(iter(found.submodule_search_locations or ())), "axe.min.js").read_text(encoding="utf-8")
