"""User code that ends, outlives or breaks the process of a command: the line about it, its status, its output."""

from __future__ import annotations

import builtins
import io
import os
import signal
import subprocess
import sys

import pytest

from attn_parity import factories, stack
from attn_parity.commands.isolation import supervision

USER = """
import atexit, os, threading, time

def gone():
    os.abort()

def killed():
    os.kill(os.getpid(), 9)

def left():
    import ctypes
    ctypes.CDLL(None).exit(0)

def stays():
    global log
    log = open("log.txt", "w")
    log.write(str(os.getpid()))
    threading.Thread(target=threading.Event().wait, args=(600,)).start()
    raise RuntimeError("the verdict")

def patched():
    import sys
    sys.exit = print
    atexit.register(os._exit, 0)
    raise RuntimeError("the verdict")

early = open(f"early.{os.getpid()}", "w")
early.write("kept")
"""

ENDS = {
    "gone": "the side crashed (SIGABRT) while building: mine.py:5 in gone: os.abort()",
    "killed": "the side was killed (SIGKILL; out of memory?) while building",
    "left": "the side ended the process (exit status 0) while building",
    "stays": "mine.py:stays raised RuntimeError: the verdict (mine.py:19)",
    "patched": "mine.py:patched raised RuntimeError: the verdict (mine.py:25)",
}
"""Factory -> the line."""


def test_the_process_ends_with_one_line_whatever_a_factory_does(tmp_path):
    (tmp_path / "mine.py").write_text(USER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = {
        factory: subprocess.Popen(
            [sys.executable, "-m", "attn_bridge", "dump", f"mine.py:{factory}", "out", "--shape", "2,3"],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for factory in ENDS
    }
    ended = {factory: (process.communicate(timeout=600)[1], process.returncode) for factory, process in started.items()}
    assert ended == {factory: (f"error: {line}\n", 2) for factory, line in ENDS.items()}
    pid = (tmp_path / "log.txt").read_text()
    assert (tmp_path / f"early.{pid}").read_text() == "kept"


def test_a_terminated_command_ends_by_that_signal_with_its_child(tmp_path):
    (tmp_path / "mine.py").write_text("import threading\nprint(open('started', 'w'))\nthreading.Event().wait(600)\n")
    os.mkfifo(tmp_path / "started")
    command = [sys.executable, "-m", "attn_bridge", "dump", "mine.py:make", "out", "--shape", "2,3"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.PIPE
    ) as process:
        (tmp_path / "started").read_bytes()  # until the child has opened it
        process.terminate()
        assert process.communicate(timeout=600)[1] == b""  # once the child has ended, too
    assert process.returncode == -signal.SIGTERM


STACK = """Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "{user}", line 2 in forward
  File "/env/site-packages/torch/nn/modules/module.py", line 1762 in _call_impl
  File "/work/attn_parity/frameworks/torch/running/execution.py", line 60 in run
  File "/work/attn_parity/commands/compare.py", line 280 in judged

Extension modules: numpy (total: 1)
"""


def test_a_crash_is_named_from_the_stack(tmp_path):
    (tmp_path / "mine.py").write_text("def forward(x):\n    crash(x)\n")
    text = STACK.format(user=tmp_path / "mine.py")
    names = {"torch": "first side (torch)"}
    notes = {"phase": ("", "running"), "names": names, "sources": {"": str(tmp_path / "mine.py")}}
    place = f"{tmp_path / 'mine.py'}:2 in forward: crash(x)"
    assert supervision.crash(-11, notes, text) == f"the first side (torch) crashed (SIGSEGV) while running: {place}"
    backward = text.replace(
        "line 2 in forward\n", 'line 2 in forward\n  File "/torch/autograd/graph.py", line 1 in backward\n'
    )
    assert "while computing its gradient" in supervision.crash(-11, notes, backward)
    assert supervision.crash(-11, {}, "") == "the command crashed (SIGSEGV)"
    assert [line.number for line in stack.dumped(text)] == [2, 1762, 60, 280]


def test_commands_without_user_code_are_not_forked(monkeypatch):
    monkeypatch.setattr(os, "fork", pytest.fail)
    for arguments in ([], ["--help"], ["convert", "a", "b"], ["compare", "a", "b", "--separate"]):
        supervision.begin(arguments)


def test_replaced_builtins_are_put_back_and_named(monkeypatch):
    before = dict(vars(builtins))

    def replace():
        builtins.len = builtins.zip = None
        builtins.print = repr
        builtins.added = 1

    for code, names in (
        (replace, r"len, zip"),
        (lambda: vars(builtins).clear(), "ArithmeticError, .* and 1[0-9]+ more"),
    ):
        message = rf"^mine:make replaced Python's builtins \({names}\), which"
        with pytest.raises(ValueError, match=message), factories.guarded("mine:make"):
            code()
        now = {name: value for name, value in vars(builtins).items() if name != "added"}
        assert {name for name in before if now[name] is not before[name]} <= {"print"}
        vars(builtins).update(before)
    with factories.guarded("mine:make"):
        builtins.print = repr
    assert builtins.print is repr  # code for several devices replaces it, and calls its own later
    with factories.intact_builtins("mine:make", everything=True):
        builtins.print = io.StringIO
    assert builtins.print is repr
    builtins.print = before["print"]
    del builtins.added
