"""Worker processes: results in order, errors as they are, and none that outlives whoever started it."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attn_parity import workers
from parity_tests.support.processes import crew

from . import worker_tasks

ROOT = Path(__file__).parents[4]

shows_processes = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are seen in /proc")


def test_results_arrive_in_task_order_from_the_requested_processes():
    found = list(workers.run(worker_tasks.echo, range(20), jobs=2))
    assert [task for _, task in found] == list(range(20))
    assert len({process for process, _ in found} - {os.getpid()}) == 2
    (only,) = workers.run(worker_tasks.echo, ["one task"], jobs=3)
    assert only[1] == "one task"
    assert list(workers.run(worker_tasks.echo, [], jobs=2)) == []


def test_a_result_that_comes_early_waits_for_its_turn(tmp_path):
    path = str(tmp_path / "made by the last task")
    tasks = [("wait", path), ("", ""), ("touch", path)]
    assert list(workers.run(worker_tasks.wait_or_touch, tasks, jobs=2)) == ["wait", "", "touch"]
    assert Path(path).exists()


def test_a_tasks_error_is_raised_at_its_turn():
    found = workers.run(worker_tasks.fail, ["fine", "value", "fine"], jobs=2)
    assert next(found) == "fine"
    with pytest.raises(ValueError, match="no such thing") as caught:
        next(found)
    assert (str(caught.value), caught.value.__notes__) == ("no such thing", ["try another"])
    assert "in fail" in str(caught.value.__cause__), "where it was raised"


@pytest.mark.parametrize(("task", "message"), [("two parts", "^TwoPartsError: one two"), ("lambda", "lambda")])
def test_results_that_can_not_be_sent_are_named(task, message):
    with pytest.raises((RuntimeError, AttributeError, TypeError, ValueError), match=message):
        list(workers.run(worker_tasks.fail, [task, "fine"], jobs=2))


@pytest.mark.parametrize(("task", "how"), [("killed", "was ended by SIGKILL"), ("left", "ended with status 3")])
def test_a_worker_that_dies_is_named_in_one_line(task, how):
    with pytest.raises(workers.WorkerDiedError, match=f"^a worker process {how} while it ran the task {task}$"):
        list(workers.run(worker_tasks.fail, ["fine", task], jobs=2, name=lambda task: f"the task {task}"))


def test_workers_ignore_interrupts():
    assert list(workers.run(worker_tasks.interrupt, ["one", "two", "three"], jobs=2)) == ["one", "two", "three"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("variable", workers.THREADS)
def test_workers_share_the_cores(variable, monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 7)
    monkeypatch.delenv(variable, raising=False)
    assert list(workers.run(worker_tasks.threads, [variable] * 3, jobs=3)) == ["2"] * 3
    assert list(workers.run(worker_tasks.threads, [variable] * 8, jobs=8)) == ["1"] * 8
    monkeypatch.setenv(variable, "5")
    assert list(workers.run(worker_tasks.threads, [variable] * 2, jobs=2)) == ["5"] * 2


@shows_processes
def test_leaving_early_ends_all_processes(tmp_path):
    tasks = [str(tmp_path)] * 2
    with contextlib.closing(workers.run(worker_tasks.echo_or_hold, ["", *tasks], jobs=2)) as found:
        next(found)
        processes = _held(tmp_path)
    assert not _alive(processes)


@shows_processes
@pytest.mark.parametrize("whom", ["the process", "its group"])
def test_an_interrupt_leaves_no_process_and_no_word_from_one(whom, tmp_path):
    parent = _start(tmp_path)
    processes = _held(tmp_path)
    (os.killpg if whom == "its group" else os.kill)(parent.pid, signal.SIGINT)
    assert parent.communicate(timeout=600) == ("", "interrupted\n")
    assert parent.returncode == 130
    assert not _alive(processes)


def test_an_interrupt_while_a_process_starts_waits_until_it_can_be_ended(monkeypatch):
    started, popen = [], subprocess.Popen

    def interrupted(*arguments, **options):
        started.append(popen(*arguments, **options))
        _thread.interrupt_main()  # also where the main thread blocks it: the system gives it to one that does not
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(workers.run(worker_tasks.echo, range(2), jobs=2))
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@shows_processes
def test_workers_of_a_killed_process_end_with_what_they_started(tmp_path):
    parent = _start(tmp_path)
    processes = _held(tmp_path)
    parent.kill()
    parent.communicate(timeout=600)
    assert not _alive(processes)


def _start(folder: Path) -> subprocess.Popen[str]:
    """Start a process whose two workers hold, and that says when it is interrupted."""
    program = f"""
import signal, sys
from attn_parity import workers
from parity_tests.neutral.judge.processes.worker_tasks import hold
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell leaves it ignored in the background
try:
    list(workers.run(hold, [{str(folder)!r}] * 2, jobs=2))
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _held(folder: Path) -> list[int]:
    """Return two workers and their children, once all of them are there."""
    deadline = time.monotonic() + 600
    while len(found := list(folder.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == 4
    return [int(path.name) for path in found]


def _alive(processes: list[int]) -> list[int]:
    """Return those that run on; one that is killed ends when it gets its turn, a moment later on a busy machine."""
    deadline = time.monotonic() + 600
    while (found := [one for one in processes if _is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _is_alive(process: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_crew_of_tests_stays_for_the_next_call_until_a_task_fails():
    first = crew.run(worker_tasks.echo, ["a", "b"])
    assert [task for _, task in first] == ["a", "b"]
    assert crew.run(worker_tasks.echo, ["c"]) == [(first[0][0], "c")]
    with pytest.raises(ValueError, match="no such thing"):
        crew.run(worker_tasks.fail, ["fine", "value"])
    second = crew.run(worker_tasks.echo, ["d", "e"])
    assert not {process for process, _ in first} & {process for process, _ in second}
    with pytest.raises(workers.WorkerDiedError, match="was ended by SIGKILL while it ran killed"):
        crew.run(worker_tasks.fail, ["fine", "killed"])
    crew.end()
