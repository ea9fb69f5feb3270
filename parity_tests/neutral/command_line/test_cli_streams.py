"""The command line where stdout, stderr or the working folder can't be used."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attn_bridge.cli import streams
from attn_bridge.cli.app import run

CLOSED = "error: stdout is closed (Bad file descriptor): output was lost\n"
FULL = "error: stdout is full (No space left on device): output was lost\n"


LOST = {
    "--help >/dev/full": (FULL, 2),
    "inspect weights.npz >&-": (CLOSED, 2),
    "inspect weights.npz >&- 2>&-": ("", 2),
    "bogus 2>/dev/full": ("", 2),
}
"""Command -> what is on stderr, and its status."""


def test_lost_output_is_one_line_and_status_2(tmp_path):
    np.savez(tmp_path / "weights.npz", a=np.arange(3.0))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = {
        line: subprocess.Popen(
            ["sh", "-c", f"exec {sys.executable} -m attn_bridge {line}"],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in LOST
    }
    assert {line: (process.communicate()[1], process.returncode) for line, process in started.items()} == LOST


def test_work_goes_on_where_output_is_lost():
    with Path("/dev/full").open("wb") as full:
        stdout = streams.Descriptor(full.fileno())
        assert stdout.write(b"progress") == 8
        assert stdout.write(b"and more") == 8
    assert stdout.report() == FULL.removeprefix("error: ").strip()


def test_a_reader_of_stdout_that_has_gone_raises_once(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    stdout = streams.Descriptor(writing)
    monkeypatch.setattr(stdout, "fileno", lambda: 1)
    with pytest.raises(BrokenPipeError):
        stdout.write(b"line")
    assert stdout.write(b"line") == 4
    assert stdout.report() == ""
    os.close(writing)


def test_streams_of_a_caller_are_left_alone(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    monkeypatch.setattr(sys, "stderr", text)
    streams.protect()
    assert sys.stdout is sys.stderr is text


def test_a_deleted_working_folder_is_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run(["inspect", "model.safetensors"]) == 2
    said = "error: the working folder does not exist any more (No such file or directory): change to another\n"
    assert capsys.readouterr() == ("", said)
