"""Record the calls of a class in a process that runs a command: ``pytest ...``, ``python FILE ...``, ``python -m ...``.

The parent starts this module as a program; it patches the class, runs the command's Python code, and writes the
recording. The command runs as it would alone, with the current folder in front of its path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..factories import Factory, guarded, load, text_of
from ..sides.libraries import Value
from ..sides.subject import load_adapter
from .calls import RecordedCall, Recording, framework_of, is_random, record

PATH = "PATH.TO.Module"
"""How the class is named: as the code of the command imports it."""

VALUE, RANDOM, LOST = "value", "random", "lost"
"""How a constructor argument is stored: itself; a source of random numbers of NNX; the class of one that can't be."""

TAIL = 300
"""Most characters of a command's last line that are passed on."""


@dataclasses.dataclass(frozen=True)
class RecordedClass:
    """The first recorded call of a class in a command, and what builds the class again.

    Attributes:
        factory: builds it with the recorded constructor arguments.
        call: the call.
        notes: lines for the report.
    """

    factory: Factory
    call: RecordedCall
    notes: list[str]


def recorded(command: str, target: str, timeout: float | None) -> RecordedClass:
    """Run a command in a process and return the first call of a class in it.

    Args:
        command: ``pytest ...``, ``python FILE ...`` or ``python -m MODULE ...``.
        target: ``package.module.Class``, or ``package.module:Class``.
        timeout: longest that the command may take, in seconds.

    Raises:
        ValueError: the command is of another kind, takes too long or calls nothing, or the class can't be built again.
    """
    name = _name(target)
    words = _words(command)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "recording"
        status, last = _run([str(out), name, *words], timeout, command)
        if not out.is_file():
            raise ValueError(
                f"--record {command} wrote no recording (exit status {status}){f': {last}' if last else ''}"
            )
        with out.open("rb") as stream:
            data = pickle.load(stream)
    if data["failed"]:
        raise ValueError(data["failed"])
    sys.path += [path for path in data["path"] if path not in sys.path]
    factory = load(name, "FIRST")
    recording: Recording
    with guarded("the recorded calls"):
        recording, constructor = pickle.loads(data["recording"])
    if not recording.calls:
        why = "; ".join(recording.left_out) or f"the command ended with status {status}{f': {last}' if last else ''}"
        raise ValueError(f"--record {command} has stored no call of {target}: {why}")
    call = recording.calls[0]
    return RecordedClass(_rebuilding(factory, call, constructor), call, _notes(recording, command, status))


def _name(target: str) -> str:
    """Return a class as `load` takes it."""
    where, colon, name = target.rpartition(":" if ":" in target else ".")
    if not colon or where.endswith(".py") or os.sep in where:
        raise ValueError(f"FIRST ({target}) must read {PATH} with --record, as the command imports it")
    return f"{where}:{name}"


def _words(command: str) -> list[str]:
    """Return a command as ``-m MODULE ...`` or ``FILE ...``."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--record ({command}) can't be read: {error}") from error
    head = Path(words[0]).name if words else ""
    if head in ("pytest", "py.test"):
        return ["-m", "pytest", *words[1:]]
    is_module, is_file = words[1:2] == ["-m"] and len(words) > 2, len(words) > 1 and not words[1].startswith("-")
    if head.startswith("python") and (is_module or is_file):
        return words[1:]
    raise ValueError(f"--record ({command}) must begin with pytest, python FILE or python -m MODULE")


def _run(arguments: Sequence[str], timeout: float | None, command: str) -> tuple[int, str]:
    """Run this module as a program; return its status and the last line of its output."""
    # A session of its own: what the command starts can be ended with it.
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"--record {command} took longer than {timeout:g} s (--timeout)") from error
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = text.strip().splitlines()
    return process.returncode, " ".join(lines[-1].split())[:TAIL] if lines else ""


def _rebuilding(factory: Factory, call: RecordedCall, constructor: Mapping[str, tuple[str, Value]]) -> Factory:
    """Return a factory that calls the class with its recorded constructor arguments."""
    kind = factory.target
    lost = [f"{key} is a {value}" for key, (how, value) in constructor.items() if how == LOST]

    def build() -> Value:
        if lost:
            raise ValueError(f"it can't be built again, as a constructor argument can't be stored: {', '.join(lost)}")
        framework = framework_of(kind)
        assert framework is not None, "it was recorded"
        arguments = {key: value for key, (how, value) in constructor.items() if how == VALUE}
        random = [key for key, (how, _) in constructor.items() if how == RANDOM]
        return load_adapter(framework, "listening").rebuilt(kind, arguments, random, call.inputs)

    return dataclasses.replace(factory, target=build)


def _notes(recording: Recording, command: str, status: int) -> list[str]:
    first, *others = recording.calls
    mode = " in train mode" if first.training else ""
    lines = [f"inputs: the first of {len(recording.calls)} stored calls of {recording.name} in {command}{mode}"]
    shapes = dict.fromkeys(str(call.shapes) for call in others if call.shapes != first.shapes)
    lines[0] += f"; others have other shapes: {', '.join(shapes)}" if shapes else ""
    lines += recording.left_out
    if status:
        lines.append(f"{command} ended with status {status}")
    return lines


# ---- the process that runs the command


def main(arguments: Sequence[str]) -> int:
    """Run a command with a class recorded, and write the recording."""
    out, name, *words = arguments
    sys.path[0] = str(Path.cwd())
    data: dict[str, Value] = {"failed": f"the command ended before {name} could be recorded", "recording": b""}
    run = _run_pytest if words[:2] == ["-m", "pytest"] else _run_python
    try:
        return run(name, words, data)
    finally:
        data["path"] = [path for path in sys.path if path]
        Path(out).write_bytes(pickle.dumps(data))


def _run_pytest(name: str, words: Sequence[str], data: dict[str, Value]) -> int:
    """Record while tests run: the class is imported after pytest has collected them and set up the path."""
    import pytest

    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtestloop(self) -> Iterator[None]:
            with _recording(name, data):
                return (yield)

    alone = ["-n0"] if importlib.util.find_spec("xdist") is not None else []
    with tempfile.TemporaryDirectory() as cache:
        return int(pytest.main([*words[2:], *alone, "-o", f"cache_dir={cache}"], plugins=[Plugin()]))


def _run_python(name: str, words: Sequence[str], data: dict[str, Value]) -> int:
    with _recording(name, data):
        try:
            if words[0] == "-m":
                sys.argv = list(words[1:])
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(words)
                sys.path[0] = str(Path(words[0]).resolve().parent)
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception as error:  # of the recorded program; its calls until then are kept
            print(f"{type(error).__name__}: {text_of(error)}")
            return 1
    return 0


@contextlib.contextmanager
def _recording(name: str, data: dict[str, Value]) -> Iterator[None]:
    """Record a class, or note why it can't be recorded and let the command go on."""
    try:
        kind = load(name, "FIRST").target
        if not isinstance(kind, type):
            raise ValueError(f"FIRST ({name}) must name a class with --record, it is of type {type(kind).__name__}")
        context = record(kind)
        recording = context.__enter__()
    except (ValueError, TypeError) as error:
        data["failed"] = str(error)
        yield
        return
    try:
        yield
    finally:
        context.__exit__(None, None, None)
        first = recording.calls[0].constructor if recording.calls else {}
        recording.calls = [dataclasses.replace(call, constructor={}) for call in recording.calls]
        data["recording"] = pickle.dumps((recording, {key: _stored(value) for key, value in first.items()}))
        data["failed"] = ""


def _stored(value: Value) -> tuple[str, Value]:
    """Return how a constructor argument is stored; the classes of this module have another name in the parent."""
    if is_random(value):
        return RANDOM, None
    try:
        pickle.dumps(value)
    except Exception:  # an object of a user refuses to be pickled in a way of its own
        return LOST, type(value).__name__
    return VALUE, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
