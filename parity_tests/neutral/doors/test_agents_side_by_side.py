"""Calls of the server run side by side, it answers meanwhile, and a cancelled call ends its process.

No test depends on time: each waits for events that only right code brings about.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from attn_parity.agents.calls import Calls
from attn_parity.confinement import process
from attn_parity.confinement.keeper import Ending

from ...support.judging.reports import different_report

anyio = pytest.importorskip("anyio")
client = pytest.importorskip("mcp.client")

CALL = {"first": "net.py:A", "second": "net.py:B"}
PATIENCE = 300.0
"""Seconds after which a test fails that would wait for ever."""


@pytest.fixture
def calls(tmp_path):
    (tmp_path / "net.py").write_text("")
    return Calls(tmp_path, PATIENCE, 1 << 30)


class Runs:
    """Takes the place of `process.run`: each run waits for `ready`, and counts how many are inside at once."""

    def __init__(self, ready=lambda stop: None):
        self.ready, self.lock, self.inside, self.most = ready, threading.Lock(), 0, 0
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, words, folder, scratch, *, seconds, memory, stop):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.started.set()
        self.ready(stop)
        with self.lock:
            self.inside -= 1
        (scratch / "report.json").write_text(json.dumps(different_report().to_json()))
        self.ended.set()
        return Ending("stop" if stop.is_set() else "exit", 1, "")


def session(calls, monkeypatch, runs, talk, cores=2, **options):
    """Let a client of the SDK talk to the server, whose commands are `runs`."""
    from attn_parity.agents import server

    monkeypatch.setattr(process, "run", runs)
    monkeypatch.setattr(server, "usable_cores", lambda: cores)

    async def both():
        async with client.Client(server.serve(calls), **options) as connection:
            with anyio.fail_after(PATIENCE):
                return await talk(connection)

    return anyio.run(both)


async def until(event):
    """Wait for an event of another thread."""
    await anyio.to_thread.run_sync(event.wait, PATIENCE)


def test_calls_run_side_by_side(calls, monkeypatch):
    both_are_in = threading.Barrier(2)
    runs = Runs(lambda stop: both_are_in.wait(PATIENCE))

    async def talk(connection):
        names = []

        async def call():
            [content] = (await connection.call_tool("compare", CALL)).content
            names.append(content.text.partition("report: ")[2][:2])

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            group.start_soon(call)
        return names

    assert sorted(session(calls, monkeypatch, runs, talk)) == ["r1", "r2"]


def test_no_more_calls_run_than_there_are_cores(calls, monkeypatch):
    runs = Runs()

    async def talk(connection):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(connection.call_tool, "compare", CALL)

    session(calls, monkeypatch, runs, talk, cores=1)
    assert runs.most == 1


def test_the_server_answers_while_a_call_runs(calls, monkeypatch):
    release = threading.Event()
    runs = Runs(lambda stop: release.wait(PATIENCE))

    async def talk(connection):
        async with anyio.create_task_group() as group:
            group.start_soon(connection.call_tool, "compare", CALL)
            await until(runs.started)
            with pytest.warns(match="^ping is removed as of 2026-07-28"):  # clients of today send it
                await connection.send_ping()
            tools = await connection.list_tools()
            unknown = await connection.call_tool("explain", {"report": "r1", "path": "output"})
            assert runs.inside == 1
            release.set()
        return len(tools.tools), unknown.is_error

    assert session(calls, monkeypatch, runs, talk, cores=1, mode="legacy") == (4, True)


def test_a_cancelled_call_stops_its_process_and_frees_its_core(calls, monkeypatch):
    def wait(stop):
        if not first.is_set():
            first.set()
            assert stop.wait(PATIENCE)

    first, runs = threading.Event(), Runs(wait)

    async def talk(connection):
        async with anyio.create_task_group() as group:
            group.start_soon(connection.call_tool, "compare", CALL)
            await until(runs.started)
            group.cancel_scope.cancel()
        await until(runs.ended)
        with pytest.raises(ValueError, match="reports: none yet"):
            calls.full("r1")
        return (await connection.call_tool("compare", CALL)).content[0].text

    assert "report: r1 " in session(calls, monkeypatch, runs, talk, cores=1)


def test_a_stopped_process_ends_all_that_it_started(tmp_path):
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)'])\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(child.pid))\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).rename({str(tmp_path / 'child')!r})\n"
        "time.sleep(1e6)\n"
    )
    (tmp_path / "net.py").write_text(f"def make():\n    exec({program!r})\n")
    stop, child = threading.Event(), tmp_path / "child"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    endings = []

    def work():
        words = ["laws", "net.py:make", "--shape=2,3"]
        endings.append(process.run(words, tmp_path, scratch, writable=[tmp_path], seconds=PATIENCE, stop=stop))

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive() and not child.exists():
        thread.join(0.02)
    stop.set()
    thread.join()
    [ending] = endings
    assert ending.end == "stop", ending
    assert process.error_line(ending, 1.0) == "was cancelled"
    if sys.platform == "linux":
        state = Path(f"/proc/{child.read_text()}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
