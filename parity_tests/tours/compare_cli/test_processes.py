"""`attn-bridge compare` in separate processes: output, hangs, signals, forks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .files import SHAPE, TORCH

NOISE = """
import atexit, ctypes, logging, os, sys, threading, warnings
warnings.warn("a warning")
logging.basicConfig()
logging.warning("logged")
os.write(1, b"raw\\n")
ctypes.CDLL(None).puts(b"from C")
atexit.register(print, "at exit")
atexit.register(lambda: os.write(2, b"raw at exit\\n"))
print("printed")
print("printed on stderr", file=sys.stderr)
"""


def test_only_json_is_on_stdout(here):
    (here / "quiet.py").write_text(NOISE)
    (here / "noisy.py").write_text(NOISE + TORCH.replace("return self.out", "print('in forward'); return self.out"))
    command = [sys.executable, "-m", "attn_bridge", "compare", "noisy.py:make", "theirs.py:wrong", "--seeds", "1"]
    done = subprocess.run([*command, *SHAPE, "--json"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["verdict"] == "different"
    command[4] = "quiet.py:gone"
    done = subprocess.run([*command, *SHAPE, "--json"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: quiet.py has no gone\n")


HANG = """
import subprocess, sys, threading, time
import torch
from flax import nnx

def building():
    time.sleep(600)

class Running(torch.nn.Module):
    def forward(self, x):
        while True:
            time.sleep(0.01)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(600)

class Gradient(torch.nn.Module):
    def forward(self, x):
        return Slow.apply(x)

class Child(nnx.Module):
    def __call__(self, x):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(601)"])
        return x

class Identity(torch.nn.Module):
    def forward(self, x):
        return x

class Same(nnx.Module):
    def __call__(self, x):
        return x
"""


LIMITS = (3, 20, 120)
"""Seconds for --timeout: the shortest in which a machine, however busy, does everything but the call that hangs."""


def limited(command: list[str], message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that hangs, with longer limits until the call that hangs is the one that exceeds it."""
    for limit in LIMITS:
        done = subprocess.run(
            [*command, "--timeout", str(limit)],
            capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        if done.stderr.startswith(message.format(limit=limit)):
            break
    assert done.stderr.startswith(message.format(limit=limit))
    return done


@pytest.mark.parametrize(
    ("first", "second", "separate", "message"),
    [
        (
            "building",
            "Child",
            False,
            "the first side has been building for more than {limit} s (--timeout): hang.py:7 in ",
        ),
        (
            "Gradient",
            "Same",
            False,
            "the first side (torch) has been computing its gradient for more than {limit} s (--timeout)",
        ),
        (
            "Identity",
            "Child",
            False,
            "the second side (Flax) has been running for more than {limit} s (--timeout): hang.py:28",
        ),
        (
            "Identity",
            "Child",
            True,
            "the second side has been running for more than {limit} s (--timeout): hang.py:28 in __c",
        ),
    ],
)
def test_a_hang_is_named_and_leaves_no_files_or_processes(first, second, separate, message, here):
    (here / "hang.py").write_text(HANG)
    command = [sys.executable, "-m", "attn_bridge", "compare", f"hang.py:{first}", f"hang.py:{second}", *SHAPE]
    before = {path.name for path in here.iterdir()} | {"__pycache__"}
    done = limited([*command, *(["--separate"] if separate else [])], f"error: {message}", here)
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (2, "")
    assert {path.name for path in here.iterdir()} <= before
    assert not alive("time.sleep(601)")


def test_a_hang_in_site_packages_is_named_with_its_line(here):
    """The line is the side's own, although its folder is one that is taken for a library's elsewhere."""
    folder = here / "site-packages"
    folder.mkdir()
    (folder / "hang.py").write_text(HANG.replace("time.sleep(0.01)", "threading.Event().wait(600)"))
    command = [sys.executable, "-m", "attn_bridge", "dump", "site-packages/hang.py:Running", "d", *SHAPE]
    message = "error: the side has been running for more than {limit} s (--timeout): site-packages/hang"
    done = limited(command, message, here)
    assert done.stderr.endswith("in forward: threading.Event().wait(600)\n")
    assert not (here / "d").exists()


def alive(words: str) -> bool:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return any(words in line and "pytest" not in line for line in lines)


def test_a_terminated_process_ends_its_sides(here):
    text = "import pathlib, subprocess, sys\npathlib.Path('started').touch()\n"
    (here / "hang.py").write_text(text + "subprocess.run([sys.executable, '-c', 'import time; time.sleep(602)'])\n")
    command = [sys.executable, "-m", "attn_bridge", "compare", "hang.py:Running", "hang.py:Child", *SHAPE, "--separate"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(here)}) as process:
        while not (here / "started").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        process.terminate()
        process.wait()
    assert process.returncode == 143
    assert not alive("time.sleep(602)")
    assert not list(here.glob("tmp*"))


def test_a_forked_child_keeps_its_exit_status(here):
    (here / "forks.py").write_text(
        "import os\n" + TORCH.replace(
            "def make():", "def make():\n    child = os.fork()\n    if not child:\n        os._exit(7)\n"
            "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7"
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "attn_bridge", "compare", "forks.py:make", "theirs.py:make", *SHAPE]
    done = subprocess.run([*command, "--seeds", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


LEFT = """
import os
from torch import nn

def make():
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "654.25"])
    return nn.Linear(6, 6)
"""


def test_a_process_that_a_factory_leaves_ends_with_the_command(here):
    (here / "left.py").write_text(LEFT)
    command = [sys.executable, "-m", "attn_bridge", "laws", "left.py:make", *SHAPE, "--only", "determinism"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not alive("sleep 654.25")
