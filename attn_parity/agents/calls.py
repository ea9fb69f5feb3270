"""The calls of an agent: arguments checked, commands run confined below a root folder, reports kept.

In: the arguments of a tool. Out: a short text of `answers`. Every refusal is a `CallError` of one line.
"""

from __future__ import annotations

import collections
import json
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attn_bridge.printable import printable

from ..confinement import process
from ..results.changes import Data
from . import answers

MAX_REPORTS = 50
"""Reports that are kept; the oldest go first."""

MAX_WORD = 1000
"""Characters of an argument."""

_OPTION = re.compile(r"(?<!\S)--(inputs|shape|dtype|seeds|rules|fixed|vary|allow|only|from|to)(?= )")
_ARGUMENTS = {"shape": "shapes", "dtype": "dtypes", "from": "from_layout", "to": "to_layout"}
"""Option of a command -> argument of the tool, where the names differ."""

_SIDE = re.compile(r"[^\s:-][^:\0]*:[^\W\d][\w.]*")


class CallError(ValueError):
    """A call is refused or gave no result; the message is one line."""


class Calls:
    """The calls of one session, in as many threads as the caller likes.

    A call that runs a command takes `stop`, an event that ends its process when another thread sets it.

    Args:
        root: folder that all paths must be in; it is the current folder of every command, which can't write to it.
        seconds: limit of time of a call.
        memory: limit of memory of a call, in bytes.
    """

    def __init__(self, root: Path, seconds: float, memory: int):
        self.root, self.seconds, self.memory = root.resolve(), seconds, memory
        self._reports: collections.OrderedDict[str, Data] = collections.OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def compare(
        self,
        first: str,
        second: str,
        inputs: str | None = None,
        shapes: list[str] | None = None,
        dtypes: list[str] | None = None,
        seeds: int | None = None,
        rules: str | None = None,
        fixed: list[str] | None = None,
        vary: list[str] | None = None,
        allow: dict[str, str] | None = None,
        stop: threading.Event | None = None,
    ) -> str:
        """Judge two sides; the arguments are those of ``attn-bridge compare``."""
        for path, _ in (allow or {}).items():
            if "=" in path:
                raise CallError(f"allow ({printable(path)}) must not have '=' in a path")
        options: dict[str, Sequence[object]] = {
            "--inputs": self._files(inputs),
            "--shape": shapes or (),
            "--dtype": dtypes or (),
            "--seeds": [] if seeds is None else [seeds],
            "--rules": self._files(rules),
            "--fixed": fixed or (),
            "--vary": vary or (),
            "--allow": [f"{path}={reason}" for path, reason in (allow or {}).items()],
        }
        sides = [self._side(first, "first"), self._side(second, "second")]
        return self._run("compare", sides, options, answers.on_comparison, stop)

    def laws(
        self,
        side: str,
        inputs: str | None = None,
        shapes: list[str] | None = None,
        only: list[str] | None = None,
        stop: threading.Event | None = None,
    ) -> str:
        """Try laws on one side; the arguments are those of ``attn-bridge laws``."""
        options = {"--inputs": self._files(inputs), "--shape": shapes or (), "--only": only or ()}
        return self._run("laws", [self._side(side, "side")], options, answers.on_laws, stop)

    def convert_plan(
        self,
        source: str,
        target: str,
        from_layout: str | None = None,
        to_layout: str | None = None,
        rules: str | None = None,
        dtype: str | None = None,
        stop: threading.Event | None = None,
    ) -> str:
        """Plan a conversion; the arguments are those of ``attn-bridge plan``. Nothing is written."""
        options: dict[str, Sequence[object]] = {
            "--from": _word(from_layout),
            "--to": _word(to_layout),
            "--rules": self._files(rules),
            "--dtype": _word(dtype),
        }
        paths = [self._path(source), self._path(target, must_exist=False)]
        return self._run("plan", paths, options, answers.on_plan, stop)

    def explain(self, report: str, path: str) -> str:
        """Show one tensor or submodule of an earlier report."""
        data = self._report(report)
        if "tensors" not in data or "verdict" not in data:
            raise CallError(f"report {report} is not one of compare")
        try:
            return answers.on_path(data, report, path)
        except ValueError as error:
            raise CallError(str(error)) from None

    def full(self, report: str) -> str:
        """Return a whole report as JSON."""
        return json.dumps(self._report(report), indent=1)

    def _report(self, name: str) -> Data:
        with self._lock:
            if name not in self._reports:
                names = ", ".join(self._reports) or "none yet"
                raise CallError(f"report ({printable(name)}) is not known; reports: {names}")
            return self._reports[name]

    def _run(
        self,
        command: str,
        sides: list[str],
        options: Mapping[str, Sequence[object]],
        answer: Callable[[Data, str], str],
        stop: threading.Event | None,
    ) -> str:
        """Run a command in a confined process, keep its report, and return the answer."""
        words = [f"{option}={value}" for option, values in options.items() for value in values]
        for word in words:
            if len(word) > MAX_WORD or "\0" in word:
                raise CallError(f"{printable(word)} is too long")
        with tempfile.TemporaryDirectory(prefix="attn-bridge-") as folder:
            scratch = Path(folder).resolve()
            file = scratch / "report.json"
            line = [command, *sides, *words, f"--json={file}"]
            ending = process.run(line, self.root, scratch, seconds=self.seconds, memory=self.memory, stop=stop)
            text = process.content(file) if ending.end == "exit" else ""
        try:
            data = json.loads(text)
            with self._lock:
                name = f"r{self._count + 1}"
                short = answer(data, name)
                self._count += 1
                self._reports[name] = data
                while len(self._reports) > MAX_REPORTS:
                    self._reports.popitem(last=False)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no report, or a forged one
            reason = process.error_line(ending, self.seconds, self.memory)
            raise CallError(_OPTION.sub(lambda option: _ARGUMENTS.get(option[1], option[1]), reason)) from None
        return short

    # ---- arguments

    def _side(self, text: str, what: str) -> str:
        if len(text) > MAX_WORD or not _SIDE.fullmatch(text):
            raise CallError(f"{what} ({printable(text)}) must read file.py:factory or module:factory")
        where = text.rpartition(":")[0]
        if where.endswith(".py") or "/" in where:
            self._file(where)
        return text

    def _files(self, path: str | None) -> list[str]:
        return [] if path is None else [self._file(path)]

    def _file(self, text: str) -> str:
        """Return a path below the root of a regular file: a pipe would block, a device never end."""
        if not (self.root / self._path(text)).is_file():
            raise CallError(f"{printable(text)} is not a file")
        return text

    def _path(self, text: str, must_exist: bool = True) -> str:
        """Return a path that is below the root, also after following links."""
        if not text or len(text) > MAX_WORD or "\0" in text or "://" in text or text.startswith("-"):
            raise CallError(f"{printable(text)} must be a path below the root")
        try:
            path = (self.root / text).resolve()
        except (OSError, RuntimeError):
            raise CallError(f"{printable(text)} is a circle of links") from None
        if not path.is_relative_to(self.root):
            raise CallError(f"{printable(text)} is not below the root {self.root}")
        if must_exist and not path.exists():
            raise CallError(f"{printable(text)} does not exist below the root {self.root}")
        return text


def _word(text: str | None) -> list[str]:
    return [] if text is None else [text]
