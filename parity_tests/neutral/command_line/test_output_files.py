"""Files that commands read whole and write reports to: a pipe is used if its other end is open, and refused else."""

from __future__ import annotations

import errno
import json
import os
import select
import threading

import numpy as np
import pytest

from attn_bridge import whole_files as files
from attn_bridge import whole_folders as folders
from attn_bridge.cli import output
from attn_bridge.cli.app import run

NOBODY = "cannot be written: it is a pipe that nothing reads"


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "report.pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def weights(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.arange(3.0))
    return tmp_path / "x.npz"


def read_by(path):
    """Begin to read a pipe, and return a function that waits for its end and gives what came."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    came = []

    def read():
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll()  # for what is written: until there is a writer, the pipe is at its end
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, encoding="utf-8") as stream:
            came.append(stream.read())

    thread = threading.Thread(target=read)

    def end():
        thread.join()
        return came[0]

    return thread, end


COMMANDS = [
    *(["inspect", "WEIGHTS", option, "PIPE"] for option in ("--html", "--json")),
    *([*command, "--json", "PIPE"] for command in (["verify", "WEIGHTS"], ["digest", "WEIGHTS"], ["doctor"])),
    *([command, "WEIGHTS", "y.npz", "--json", "PIPE"] for command in ("convert", "plan")),
    ["check", "LayerNorm", "--json", "PIPE"],
    ["check", "--model", "none", "--html", "PIPE"],
    ["mutate", "--markdown", "PIPE"],
    *(["compare", "a.py:f", "b.py:f", option, "PIPE"] for option in ("--html", "--json", "--junit")),
    *(["compare-dumps", "a", "b", option, "PIPE"] for option in ("--html", "--json", "--junit")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]} {command[-2]}")
def test_a_pipe_that_nothing_reads_is_refused(command, pipe, weights, capsys):
    named = {"PIPE": str(pipe), "WEIGHTS": str(weights)}
    assert run([named.get(word, word) for word in command]) == 2
    assert capsys.readouterr().err == f"error: {command[-2]} {pipe} {NOBODY}\n"


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_pipe_that_is_read_gets_the_whole_report(option, pipe, weights, tmp_path, capsys):
    thread, end = read_by(pipe)
    thread.start()
    assert run(["inspect", str(weights), option, str(pipe)]) == 0
    came = end()
    assert run(["inspect", str(weights), option, str(tmp_path / "file.txt")]) == 0
    assert came == (tmp_path / "file.txt").read_text()
    assert pipe.is_fifo()


def test_a_pipe_whose_reader_leaves_is_one_line(pipe):
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.check_writable(str(pipe))
    os.close(descriptor)
    with pytest.raises(ValueError, match=r"report\.pipe cannot be written: Broken pipe$"):
        output.write_json({"a": 1}, str(pipe))


def test_a_pipe_of_the_shell_is_written_by_its_descriptor():
    reading, writing = os.pipe()
    target = f"/dev/fd/{writing}"
    output.check_writable(target)
    output.write_json({"a": 1}, target)
    files.write(files.checked(target), "page")
    os.close(writing)
    with os.fdopen(reading) as stream:
        assert stream.read() == json.dumps({"a": 1}, indent=1) + "\npage"


def test_stdout_can_be_written_whatever_a_folder_is_called(tmp_path, monkeypatch):
    (tmp_path / "-").mkdir()
    monkeypatch.chdir(tmp_path)
    output.check_writable("-")


def test_a_device_is_written_as_it_is(weights, capsys):
    assert run(["inspect", str(weights), "--html", "/dev/null", "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err == "error: /dev/full cannot be written: No space left on device\n"


def test_a_report_is_complete_or_absent(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    target.write_text("earlier")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ValueError, match=r"report\.json cannot be written: No space left$"):
        output.write_json({"a": 1}, str(target))
    assert (target.read_text(), list(tmp_path.iterdir())) == ("earlier", [target])


def test_a_pipe_that_nothing_writes_is_not_waited_for(pipe):
    with pytest.raises(OSError, match="it is a pipe that nothing writes to"):
        files.read(pipe)


def test_a_pipe_is_read_to_its_end():
    reading, writing = os.pipe()
    pause = threading.Timer(0.05, lambda: (os.write(writing, b"late"), os.close(writing)))
    pause.start()
    assert files.read_text(f"/dev/fd/{reading}") == "late"
    pause.join()
    os.close(reading)


def test_a_file_without_end_is_refused():
    with pytest.raises(OSError, match="it has more than 5000000 bytes"):
        files.read("/dev/zero", 5_000_000)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            ["record", "a.py:f"],
            "No such command 'record'. Inputs of a run are recorded by attn-bridge compare --record",
        ),
        (["training"], "No such command 'training'. See attn-bridge --help"),
        (["comparee"], "No such command 'comparee'. Did you mean 'compare', "),
        (
            ["inspect", "openai-community/gpt2"],
            "openai-community/gpt2: does not exist; if it is an id of the hub, give ",
        ),
    ],
)
def test_a_usage_error_names_the_way(command, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def write_folder(target, interrupt):
    with folders.new(target, "OUT"):
        interrupt()


def test_a_folder_that_another_run_wrote_meanwhile_is_kept(tmp_path):
    target = tmp_path / "report"
    with pytest.raises(ValueError, match="was written meanwhile by another run"):
        write_folder(target, lambda: (target.mkdir(), (target / "theirs").touch()))
    assert [path.name for path in tmp_path.rglob("*")] == ["report", "theirs"]


def test_a_full_disk_is_named_with_the_folder(tmp_path):
    def fill():
        raise OSError(errno.ENOSPC, "No space left")

    with pytest.raises(ValueError, match=r"^OUT .*report cannot be written: No space left$"):
        write_folder(tmp_path / "report", fill)
    assert list(tmp_path.iterdir()) == []
