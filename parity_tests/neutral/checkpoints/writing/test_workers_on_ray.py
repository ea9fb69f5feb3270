"""Conversions as tasks of Ray, on a cluster of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.workers.executors import ray_tasks
from parity_tests.support.calls import cover

from ..checkpoint_files import sharded
from .test_workers import TASK, everything

pytest.importorskip("ray", reason="the extra ray is not installed")

CLUSTER = """
import os, signal, sys
from attn_bridge import checkpoints
from attn_bridge.checkpoints.workers.executors import ray_tasks

KIND, source, target, marker = sys.argv[1:]

def dies_once(asked):
    import os, signal, time
    from attn_bridge.checkpoints.workers.executors import processes

    done = 0

    def advance(count, name):
        nonlocal done
        done += count
        if KIND == "task" and asked["index"] == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if KIND == "driver" and asked["index"] == 1 and done > asked["job"]["task_bytes"]:  # more than a piece is noted
            open(marker, "w").close()
            time.sleep(1000)  # until it is ended with the driver

    processes.do_share(asked, advance)
    return 0

def watch():
    while not os.path.exists(marker):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if KIND != "plain":
    ray_tasks.share_of_task = dies_once
if KIND == "driver":
    import threading, time
    threading.Thread(target=watch, daemon=True).start()
done = checkpoints.convert(source, target, ray="", workers=3, task_bytes=4096, dtype="bf16")
assert done.changed
if KIND == "plain":
    try:
        checkpoints.convert(marker, target + "-other", ray="", workers=2, to_layout="same")
    except checkpoints.containers.CheckpointError as error:
        print(error)
"""


def converted(kind, tmp_path, source, marker, target=None):
    """Convert on Ray in a process of its own: it can be started once in one, and is ended with it."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, "-c", CLUSTER, kind, str(source), str(target or tmp_path / "x"), str(marker)],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(("slow", "error"), [(2, ""), (3, "timed out during startup"), (1, "no port is free")])
def test_a_cluster_that_starts_slowly_is_started_again(slow, error, monkeypatch):
    done = []

    def init(**options):
        done.append("init")
        if len(done) // 2 < slow:
            raise Exception(f"The current node {error or 'timed out during startup'}.")

    module = types.SimpleNamespace(
        init=init, shutdown=lambda: done.append("shutdown"), is_initialized=lambda: False, exceptions=None
    )
    monkeypatch.setitem(sys.modules, "ray", module)
    if error:
        with pytest.raises(checkpoints.containers.CheckpointError, match=f"^--ray: The current node {error}"):
            ray_tasks.Cluster("")
        assert done == ["init", "shutdown"] * (1 if slow == 1 else 3)
    else:
        with ray_tasks.Cluster(""):
            assert done == ["init", "shutdown", "init", "shutdown", "init"]


def test_a_cluster_that_wants_a_token_is_said_to(monkeypatch):
    def init(**options):
        try:
            raise RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing or incorrect")
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379") from error

    module = types.SimpleNamespace(init=init, shutdown=lambda: None, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", module)
    with pytest.raises(checkpoints.containers.CheckpointError, match=r"at 10.0.0.1:6379; .* RAY_AUTH_MODE=token says"):
        ray_tasks.Cluster("auto")


@cover.some("kind", ["plain", "task", "driver"], ["task"])
def test_ray_writes_the_same_bytes_whatever_is_killed(tmp_path, kind):
    source = sharded(tmp_path / "hf", width=48)
    plain = checkpoints.convert(source, tmp_path / "plain", dtype="bf16")
    done = converted(kind, tmp_path, source, tmp_path / "marker")
    if kind == "driver":
        assert done.returncode == -signal.SIGKILL
        assert not (tmp_path / "x").exists()
        result = checkpoints.convert(source, tmp_path / "x", dtype="bf16", workers=2, task_bytes=TASK, resume=True)
        assert result.resumed
    else:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "marker").exists() == (kind == "task")
    if kind == "plain":
        assert "marker: does not exist" in done.stdout
    assert everything(tmp_path / "x") == everything(tmp_path / "plain")
    assert checkpoints.verify(source, tmp_path / "x").passed
    assert plain.changed
    assert not (tmp_path / ".x.partial").exists()


def test_an_address_of_no_cluster_is_one_line(tmp_path):
    source = sharded(tmp_path / "hf")
    code = (
        "import sys; from attn_bridge.cli.app import run;"
        f"sys.exit(run(['convert', {str(source)!r}, {str(tmp_path / 'x')!r}, '--ray', 'localhost:1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --ray localhost:1: no cluster is there: ")
    assert not list(tmp_path.glob(".*"))


@cover.some("kind", ["task", "driver"], ["driver"])
def test_ray_writes_to_a_store_whatever_is_killed(tmp_path, store, kind):
    pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")
    source, target = sharded(tmp_path / "hf", width=48), "s3://bucket/x"
    checkpoints.convert(source, tmp_path / "x", dtype="bf16")
    done = converted(kind, tmp_path, source, tmp_path / "marker", target)
    if kind == "driver":
        assert done.returncode == -signal.SIGKILL
        assert not [key for key in store.contents() if key.startswith("x")]
        checkpoints.convert(source, target, dtype="bf16", workers=2, task_bytes=TASK, resume=True)
    else:
        assert done.returncode == 0, done.stderr
    assert store.contents() == {f"x/{path.name}": path.read_bytes() for path in (tmp_path / "x").iterdir()}
