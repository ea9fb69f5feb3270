"""Watching user code that never comes back: what is said about it, and when nothing is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import pytest

from attn_parity import factories, watch
from attn_parity.watch import Watchdog


class Looking(Watchdog):
    """Counts its looks."""

    looks = 0

    def _late(self):
        late = super()._late()
        self.looks += 1
        return late


def watched(seconds: float, work, names=None, **sources: Path) -> list[str]:
    """Return what a watchdog says while some work is done: no time passes but where the work sleeps."""
    said: list[str] = []
    dog = Looking(seconds, sources)
    dog.names |= names or {}
    dog.end = said.append
    now, wait = [0.0], time.sleep

    def be_looked_at():
        enough = dog.looks + 2  # the first may have begun before
        while dog.looks < enough and dog._watch.is_alive():
            wait(0.001)

    def sleep(duration):
        be_looked_at()
        now[0] += duration
        be_looked_at()

    for one in (be_looked_at, sleep):  # a sleep is no code of anybody, as time's is not
        one.__code__ = one.__code__.replace(co_filename="<sleep>")
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    with (
        mock.patch.multiple(watch, time=clock, TICK=0.001),
        mock.patch.object(time, "sleep", sleep),
        dog,
    ):
        work()
    return said


def module(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_slow_phase_is_named_with_its_line(tmp_path):
    slow = module(tmp_path / "slow.py", "import time\n\ndef make():\n    time.sleep(1)  # forever\n")

    def work():
        with watch.phase("first", "building"):
            slow.make()

    (said,) = watched(0.3, work, first=tmp_path / "slow.py")
    where = f"{tmp_path / 'slow.py'}:4 in make: time.sleep(1)  # forever"
    assert said == f"the first side has been building for more than 0.3 s (--timeout): {where}"


def test_phases_that_each_take_less_are_not_added_up():
    def work():
        for _ in range(6):
            with watch.phase("first", "running"):
                time.sleep(0.2)
        time.sleep(0.8)  # our own work is nobody's hang

    assert watched(0.5, work) == []


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_an_unlabelled_side_is_named_by_its_backend(tmp_path, package):
    user = module(tmp_path / "user.py", "import time\n\ndef forward():\n    time.sleep(1)\n")
    runner = module(tmp_path / "attn_parity" / "frameworks" / package / "subject.py", "def run(call):\n    call()\n")
    (said,) = watched(0.3, lambda: runner.run(user.forward), **{"": tmp_path / "user.py"})
    label, shown = {"torch": ("torch", "torch"), "jax": ("flax", "Flax")}[package]
    assert said.startswith(
        f"the {shown} side has been running for more than 0.3 s (--timeout): {tmp_path / 'user.py'}:4 "
    )
    (said,) = watched(0.3, lambda: runner.run(user.forward), {label: "one side"}, **{"": tmp_path / "user.py"})
    assert said.startswith("the one side has been running")
    (said,) = watched(0.3, lambda: runner.run(user.forward), second=tmp_path / "user.py")
    assert said.startswith("the second side has been running")


def test_short_calls_of_a_backend_are_not_added_up(tmp_path):
    user = module(tmp_path / "user.py", "import time\n\ndef forward():\n    time.sleep(0.2)\n")
    runner = module(tmp_path / "attn_parity" / "frameworks" / "torch" / "subject.py", "def run(call):\n    call()\n")
    assert watched(0.5, lambda: [runner.run(user.forward) for _ in range(6)]) == []


def test_a_backward_pass_is_called_a_gradient(tmp_path):
    user = module(tmp_path / "user.py", "import time\n\ndef rule():\n    time.sleep(1)\n")
    engine = module(tmp_path / "torch" / "autograd" / "graph.py", "def backward(call):\n    call()\n")
    runner = module(tmp_path / "attn_parity" / "frameworks" / "torch" / "subject.py", "def run(call):\n    call()\n")
    (said,) = watched(0.3, lambda: runner.run(lambda: engine.backward(user.rule)), torch=tmp_path / "user.py")
    assert said.startswith("the torch side has been computing its gradient for more than 0.3 s")


def test_slow_imports_are_excused_for_libraries_only(tmp_path):
    library = module(tmp_path / "site-packages" / "library.py", "import time\n\ndef load():\n    time.sleep(0.8)\n")
    user = module(
        tmp_path / "user.py", "import time\n\ndef load(call):\n    call()\n\ndef hang():\n    time.sleep(0.8)\n"
    )

    def importing(call):
        with watch.phase("first", "importing"):
            user.load(call)

    assert watched(0.4, lambda: importing(library.load), first=tmp_path / "user.py") == []
    (said,) = watched(0.4, lambda: importing(user.hang), first=tmp_path / "user.py")
    assert said.startswith("the first side has been importing for more than 0.4 s")


def test_phases_of_other_threads_are_their_own():
    started, done = threading.Event(), threading.Event()

    def other():
        with watch.phase("second", "running"):
            started.set()
            done.wait(600)

    thread = threading.Thread(target=other)
    thread.start()
    started.wait(600)
    assert watched(0.2, lambda: time.sleep(0.6)) == []
    done.set()
    thread.join()
    assert watch._phases == {}


def test_a_phase_ends_when_it_fails():
    with pytest.raises(KeyboardInterrupt), watch.phase("first", "running"):
        raise KeyboardInterrupt
    assert watch._phases == {}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_children_and_their_children_end():
    text = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 500
        while not (inner := watch._children(child.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(inner) == 1
        watch.end_children(child.pid)
        assert child.wait(500) == 0  # it was waiting for its own child
    assert not Path(f"/proc/{inner[0]}").exists()


def test_only_our_staging_folders_are_removed(tmp_path):
    (tmp_path / ".theirs.part").mkdir()
    code = f"""
import time
from pathlib import Path
from attn_parity import watch
with watch.Watchdog(0.3) as dog:
    dog.leave_nothing_beside(Path({str(tmp_path / "out")!r}))
    Path({str(tmp_path / ".ours.part")!r}).mkdir()
    with watch.phase("first", "running"):
        time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the first side has been running for more than 0.3 s (--timeout)")
    assert [path.name for path in tmp_path.iterdir()] == [".theirs.part"]


# ---- the seed that a factory is built with


def test_seeding_repeats_draws_and_restores_the_state():
    import random

    import numpy as np

    def drawn(seed: int) -> tuple[float, float]:
        with factories.seeded(seed):
            return random.random(), float(np.random.rand())

    before = random.getstate(), np.random.get_state()[1].tolist()
    assert drawn(0) == drawn(0) != drawn(1)
    assert drawn(2**32 - 1) == drawn(2**32 - 1)
    with pytest.raises(ZeroDivisionError), factories.seeded(0):
        assert random.random() / 0
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
