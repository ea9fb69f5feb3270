"""Workers that are killed, at every moment: nothing stands at the target before the end, and others go on."""

from __future__ import annotations

import _thread
import itertools
import os
import shutil
import signal
import subprocess
import sys

import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.workers.executors import processes
from attn_bridge.checkpoints.workers.executors.nursery import Nursery
from attn_bridge.checkpoints.workers.executors.processes import Processes
from attn_bridge.checkpoints.workers.places.local import LocalPlace
from parity_tests.support.calls import cover

from ..checkpoint_files import sharded
from .test_workers import TASK, WIDTH, everything, shares


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sharded(tmp_path_factory.mktemp("killed") / "hf", width=WIDTH)


MOMENTS = {"worker": 20, "finisher": 8, "parent": 25, "alone": 20}
"""What is killed -> how many moments there are to do so, at least."""


@cover.some("kind", list(MOMENTS), always=["parent", "alone"])
def test_kills_at_every_moment_leave_nothing_there_and_are_gone_on_from(tmp_path, kind):
    source = sharded(tmp_path / "source", width=16, layers=1)
    checkpoints.convert(source, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPlace, "take_over", lambda self: False)
        shares(source, tmp_path / "x", 2)
    (tmp_path / ".x.partial").rename(tmp_path / "written")
    done = subprocess.run(
        [sys.executable, "-m", "parity_tests.support.processes.killed_workers", str(tmp_path), kind],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= MOMENTS[kind]


KILLED = """
import os, signal, sys
from attn_bridge.checkpoints.workers.executors import nursery
from attn_bridge.checkpoints.workers.places.local import LocalPlace
record, seen = LocalPlace.record, []

def die(self, entries):
    record(self, entries)
    seen.append(entries)
    if len(seen) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

LocalPlace.record = die
nursery.main()
"""


def test_a_killed_process_is_named_and_gone_on_from(tmp_path, source, monkeypatch):
    monkeypatch.setattr(Nursery, "command", (sys.executable, "-c", KILLED))
    monkeypatch.setattr(Processes, "may_fork", lambda: False)
    with pytest.raises(
        CheckpointError, match=rf"worker 1 of 2 .* was killed by signal {int(signal.SIGKILL)}.*--resume"
    ):
        checkpoints.convert(source, tmp_path / "x", workers=2, task_bytes=TASK)
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    checkpoints.convert(source, tmp_path / "x", workers=2, resume=True, task_bytes=TASK)
    assert everything(tmp_path / "x") == everything(checkpoints.convert(source, tmp_path / "plain").target)


PARENT = """
import os, signal, sys
from attn_bridge import checkpoints

def die(done, total, name):
    if done > total / 4:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints.convert(sys.argv[1], sys.argv[2], workers=2, task_bytes=4096, progress=die)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path, source):
    done = subprocess.run([sys.executable, "-c", PARENT, str(source), str(tmp_path / "x")], stdin=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()
    checkpoints.convert(source, tmp_path / "x", workers=1, resume=True, task_bytes=TASK)
    assert everything(tmp_path / "x") == everything(checkpoints.convert(source, tmp_path / "plain").target)


def interrupted(place):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["fork", "hear"])
def test_an_interrupt_while_workers_start_ends_them_and_leaves_nothing(tmp_path, source, monkeypatch, moment):
    """It waits until all of them can be ended, and is none in the workers."""
    started, fork, hear = [], os.fork, Processes._hear

    def interrupt():
        _thread.interrupt_main()  # also where the main thread blocks it: the system gives it to one that does not

    def forked():
        child = fork()
        if child:
            interrupt()
        else:
            os.kill(os.getpid(), signal.SIGINT)  # a keyboard interrupts all processes
        return child

    def heard(workers, names):
        started.extend(workers._children)
        hear(workers, names)
        if moment == "hear":
            interrupt()

    monkeypatch.setattr(Processes, "may_fork", lambda: True)
    monkeypatch.setattr(Processes, "_hear", heard)
    monkeypatch.setattr(
        processes, "write_share", lambda *_: signal.pause()
    )  # so that they are killed before they write
    if moment == "fork":
        monkeypatch.setattr(os, "fork", forked)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.convert(source, tmp_path / "x", workers=2, task_bytes=TASK)
    assert started
    assert [child.poll() for child in started] == [-signal.SIGKILL] * len(started)
    assert not any(tmp_path.iterdir())


def test_a_worker_makes_no_folder_for_a_run_that_has_ended(tmp_path):
    place = LocalPlace(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"\.x\.partial"), place.helping(None):
        pass
    assert not any(tmp_path.iterdir())


def test_a_run_killed_after_publication_does_not_answer_for_another_conversion(tmp_path, source, monkeypatch):
    """Of a model of the same names and shapes, which nothing but its numbers tells apart."""
    other, target = sharded(tmp_path / "other", width=WIDTH, seed=1), tmp_path / "x"
    options = {"workers": 2, "task_bytes": TASK}
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.convert(source, target, **options)
    written = everything(target)
    with pytest.raises(CheckpointError, match="exists; --overwrite"):
        checkpoints.convert(other, target, **options)
    assert everything(target) == written
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.convert(other, target, overwrite=True, **options)
    assert everything(target) != written
    checkpoints.convert(other, target, resume=True, **options)
    assert checkpoints.verify(other, target).passed
    assert not list(tmp_path.glob(".*.partial"))


def test_a_kill_while_the_leftovers_are_deleted_leaves_what_is_known(tmp_path, source, monkeypatch):
    """At each of its steps, whatever the order in which the disk lists them."""
    target, clear = tmp_path / "x.safetensors", LocalPlace.clear
    wanted = everything(checkpoints.convert(source, tmp_path / "plain.safetensors").target)
    for moment in itertools.count():
        shares(source, target, 2, [0])
        steps = itertools.count()

        def stops(function, steps=steps, moment=moment):
            def step(*args, **options):
                if next(steps) == moment:
                    raise KeyboardInterrupt
                return function(*args, **options)

            return step

        def cleared(place, stops=stops):
            with monkeypatch.context() as patch:
                for name in ("unlink", "rmdir"):
                    patch.setattr(os, name, stops(getattr(os, name)))
                clear(place)

        with monkeypatch.context() as patch:
            patch.setattr(LocalPlace, "clear", cleared)
            try:
                shares(source, target, 2, [1])
                break
            except KeyboardInterrupt:
                assert everything(target) == wanted
        assert shares(source, target, 2, [1])[0].was_there
        assert checkpoints.finish(source, target).was_there
        assert everything(target) == wanted
        checkpoints.convert(source, target, overwrite=True)
        assert everything(target) == wanted
        assert not list(tmp_path.glob(".*.partial"))
        for path in tmp_path.glob("x.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert moment > 3
