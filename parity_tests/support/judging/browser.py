"""A headless Chromium, driven through a pipe in its DevTools protocol, so that no driver needs to be installed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chromium-headless-shell")
CACHED = ("chromium-*/chrome-linux*/chrome", "chromium_headless_shell-*/chrome-*/*headless*shell")
"""Where Playwright keeps the browsers that it fetched, below its cache folder."""

FLAGS = (
    "--headless",
    "--no-sandbox",  # it opens a page of our own, and root has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
    "about:blank",
)
SECONDS = 60.0


def find_chromium() -> str | None:
    """Return a Chromium that starts: of ``CHROME``, the path, or Playwright's cache; None if there is none."""
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found = [os.environ.get("CHROME"), *map(shutil.which, NAMES)]
    found += [str(path) for pattern in CACHED for path in sorted(cache.glob(pattern))]
    return next((path for path in found if path and _starts(path)), None)


def _starts(path: str) -> bool:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class Page:
    """The one page of a running browser.

    Attributes:
        problems: what it complained about: exceptions, console errors, refused or failed loads.
        requests: the addresses that it asked for.
    """

    def __init__(self, read: int, write: int):
        self._read, self._write, self._rest, self._last = read, write, b"", 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in target if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, page: Path | str, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Load a file or an address in a window of this size and wait until it is there."""
        self.problems.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._loaded:
            self._next()
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """Save what is in the window, or the full page, as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))

    def press(self, key: str) -> None:
        """Press and release a key such as ``Tab``."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(str(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {event['message']}")
            self.call("Page.handleJavaScriptDialog", accept=True)
        elif method == "Network.requestWillBeSent" and not event["request"]["url"].startswith("data:"):
            self.requests.append(event["request"]["url"])


@contextlib.contextmanager
def running(program: str, profile: Path) -> Iterator[Page]:
    """Start a browser with an empty profile, and end it."""
    theirs_read, write = _high(os.pipe())
    read, theirs_write = _high(os.pipe())
    start = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    start += "os.execv(sys.argv[3], sys.argv[3:])"
    command = [sys.executable, "-c", start, str(theirs_read), str(theirs_write), program, *FLAGS]
    command.insert(-1, f"--user-data-dir={profile}")
    browser = subprocess.Popen(
        command, pass_fds=(theirs_read, theirs_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Page(read, write)
    finally:
        os.close(write)  # the end of the pipe is the end of the browser
        os.close(read)
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()


def _high(pipe: tuple[int, int]) -> tuple[int, int]:
    """Move a pipe out of the way of descriptors 3 and 4."""
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe)
    for end in pipe:
        os.close(end)
    return moved
