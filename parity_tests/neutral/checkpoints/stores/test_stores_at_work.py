"""Conversions in object stores keep many requests under way, and have the store do what it can do itself."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.checkpoints.containers.remote import faults, joining, s3, staged
from attn_bridge.checkpoints.requests import Request
from attn_bridge.checkpoints.workers import jobs
from attn_bridge.checkpoints.workers.executors import nursery
from attn_bridge.checkpoints.workers.executors.nursery import Nursery
from attn_bridge.checkpoints.workers.executors.processes import Processes
from attn_bridge.cli.app import run
from attn_parity import watch
from parity_tests.neutral.checkpoints.conftest import name_in_environment
from parity_tests.neutral.checkpoints.stored_checkpoints import ours
from parity_tests.support.calls import cover

SIZES = [3, 500_000, 17, 0, 1_200_001, 1_100_000, 9, 3_000_001, 40_000, 1, 1_300_000, 2_200_000, 1_100_000, 5]
"""Elements of tensors of 42 MB: large ones, small ones, an empty one, and one that is cut."""

NAMES = ["x.safetensors", "folder", "x.msgpack", "x.dcp", "x.orbax", "ocdbt"]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint in one file, and one in three."""
    root = tmp_path_factory.mktemp("large")
    random = np.random.default_rng(7)
    tensors = {f"t{index:02d}": random.standard_normal(size, np.float32) for index, size in enumerate(SIZES)}
    np.savez(root / "x.npz", **tensors)
    (root / "folder").mkdir()
    for part, names in enumerate(np.array_split(list(tensors), 3)):
        np.savez(root / "part.npz", **{name: tensors[name] for name in names})
        checkpoints.convert(root / "part.npz", root / "folder" / f"{part}.safetensors", to_layout="same")
    for beside in (root / "folder").glob("*.json"):
        beside.unlink()
    return root


@cover.some("name", NAMES, ["x.safetensors", "folder", "ocdbt"])
def test_whoever_publishes_has_the_store_copy_what_is_large(store, large, tmp_path, monkeypatch, name):
    sent = []
    read_part = joining.read_part

    def noted(staged, part):
        sent.append(part.size)
        return read_part(staged, part)

    monkeypatch.setattr(joining, "read_part", noted)
    source = large / ("folder" if name == "folder" else "x.npz")
    options = {"to_layout": "same"}
    if name == "folder":
        options["format"] = "safetensors"
    if name == "ocdbt":
        options |= {"format": "orbax", "settings": {"ocdbt": 1}}
    wanted = ours(source, tmp_path, name, **options)
    workers = 1 if name == "folder" else 3  # where a share ends within 5 MiB of a file's beginning, that much is sent
    for index in range(workers):
        checkpoints.convert_share(source, f"s3://bucket/{name}", index, workers, **options)
    assert store.contents() == wanted
    assert not store.uploads
    assert sum(sent) < 2 << 20


def test_a_tensor_that_one_worker_wrote_in_pieces_is_not_read_again(store, large, tmp_path):
    wanted = ours(large / "x.npz", tmp_path, "x.safetensors", to_layout="same")
    result = checkpoints.convert(
        large / "x.npz", "s3://bucket/x.safetensors", to_layout="same", workers=1, task_bytes=1 << 20
    )
    assert store.contents() == wanted
    assert result.digests == checkpoints.convert(large / "x.npz", tmp_path / "x.npz", to_layout="same").digests
    read = [key for method, key, _ in store.requests if method == "GET" and "/parts/" in key]
    assert len(read) <= 2


@cover.some("counts", [(1, 30, 4), (3, 30, 6)], [(1, 30, 4)])
def test_many_requests_are_under_way_at_once(store, large, monkeypatch, counts):
    """The store answers once so many are under way: a conversion that waits for one before the next would fail."""
    workers, reads, sent = counts
    monkeypatch.setattr(faults, "TRIES", 1)
    monkeypatch.setitem(s3.WAIT, "read_timeout", 300)
    checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", to_layout="same")

    def gate(request):
        method, key, what = request
        if method == "PUT" and "/parts/" in key:
            return "sent", sent
        if method == "GET" and key == "bucket/x.safetensors" and "-" in what:
            start, stop = what.removeprefix("bytes=").split("-")
            return ("read", reads) if int(stop) - int(start) >= 1 << 18 else None
        return None

    store.gate = gate
    options = {"to_layout": "same", "workers": workers, "task_bytes": 1 << 26}
    checkpoints.convert("s3://bucket/x.safetensors", "s3://bucket/y.safetensors", **options)
    assert store.objects["bucket", "y.safetensors"].data == store.objects["bucket", "x.safetensors"].data


def test_objects_of_a_worker_are_alike_so_that_none_is_waited_for_longer(store, large):
    sizes = []

    def noted(request, since):
        method, key, _ = request
        if method == "PUT" and "/parts/" in key:
            sizes.append(len(store.objects[tuple(key.split("/", 1))].data))

    store.after = noted
    checkpoints.convert_share(large / "x.npz", "s3://bucket/x.safetensors", 0, 2, to_layout="same", task_bytes=1 << 22)
    assert len(sizes) >= 3
    assert max(sizes) < 1.05 * min(sizes)


def test_objects_of_a_long_file_that_is_written_in_order_are_as_few_as_a_store_copies(store, large, monkeypatch):
    for name, most in (("x", staged.PARTS), ("y", 2)):
        monkeypatch.setattr(staged, "PARTS", most)
        checkpoints.convert(large / "x.npz", f"s3://bucket/{name}.pt", to_layout="same")
    sent = [
        {key for one, key, _ in store.requests if one == "PUT" and f".{name}.pt.partial/parts" in key} for name in "xy"
    ]
    assert len(sent[0]) > 6
    assert len(sent[1]) <= 3
    assert store.objects["bucket", "y.pt"].data == store.objects["bucket", "x.pt"].data


@pytest.mark.parametrize(("nbytes", "objects"), [((64 << 20) + 40_000, 12), (60 << 20, 12), (11 << 20, 2)])
def test_a_share_that_fits_is_sent_at_once(nbytes, objects):
    """The store takes the first object once the last one is under way: one that waits for another would fail."""
    together = threading.Barrier(objects)
    store = types.SimpleNamespace(put=lambda key, data: str(together.wait(timeout=300)))
    parts = staged.Staged(store, "bucket/parts")
    parts.suit(1 << 26)
    parts.spread(nbytes)
    for start in range(0, nbytes, 1 << 20):
        parts.write("x", start, memoryview(bytes(min(1 << 20, nbytes - start))))
    parts.flush()
    assert parts.sent == objects


KILLED = """
import os, signal, sys
from attn_bridge.checkpoints.workers.executors import nursery
from attn_bridge.checkpoints.workers.places.stored import StoredPlace
record = StoredPlace.record

def die(self, entries):
    record(self, entries)
    os.kill(os.getpid(), signal.SIGKILL)

StoredPlace.record = die
sys.exit(nursery.main())
"""


def test_a_killed_worker_is_named_and_gone_on_from(store, large, tmp_path, monkeypatch):
    monkeypatch.setattr(Nursery, "command", (sys.executable, "-c", KILLED))
    monkeypatch.setattr(Processes, "may_fork", lambda: False)
    options = {"to_layout": "same", "workers": 2, "task_bytes": 1 << 22}
    with pytest.raises(
        CheckpointError, match=rf"worker 1 of 2 .* was killed by signal {int(signal.SIGKILL)}.*--resume"
    ):
        checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", **options)
    assert "x.safetensors" not in store.contents()
    monkeypatch.undo()
    name_in_environment(monkeypatch, store.url)
    wanted = ours(large / "x.npz", tmp_path, "x.safetensors", to_layout="same")
    checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", resume=True, **options)
    assert store.contents() == wanted


def test_parts_of_a_file_whose_publication_is_killed_are_not_kept_by_the_store(store, large, tmp_path):
    """Nobody sees them, and they are paid for."""
    command = ["convert", str(large / "x.npz"), "s3://bucket/x.safetensors", "--to", "same", "--task-bytes", "4MiB"]
    process = subprocess.Popen([sys.executable, "-m", "attn_bridge", *command], stderr=subprocess.DEVNULL)

    def before(request):
        if request[0] == "PUT" and "uploadId" in request[2]:
            process.kill()

    store.before = before
    assert process.wait() == -signal.SIGKILL
    assert store.uploads
    store.before = lambda request: None
    checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", to_layout="same", resume=True)
    assert store.contents() == ours(large / "x.npz", tmp_path, "x.safetensors", to_layout="same")
    assert not store.uploads


@cover.rotated(("moment", "killed"), ["writing", "opening"], ["the command", "it and what its workers are forked from"])
def test_workers_end_with_the_process_that_started_them(store, large, moment, killed):
    checkpoints.convert(large / "x.npz", "s3://bucket/source.safetensors", to_layout="same")
    held, inherited = os.pipe()
    command = ["convert", "s3://bucket/source.safetensors", "s3://bucket/x.safetensors", "--to", "same"]
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_bridge", *command, "--workers", "3"],
        pass_fds=[inherited],
        stderr=subprocess.DEVNULL,
    )
    os.close(inherited)
    workers = []

    def before(request):
        method, key, _ = request
        opened = [(one, name) for one, name, _ in store.requests].count(("GET", "bucket/source.safetensors"))
        is_then = opened == 3 if moment == "opening" else method == "PUT" and "/parts/" in key
        if is_then and not workers:
            (nursery,) = watch._children(process.pid)
            forked = watch._children(nursery)
            if len(forked) < 2:  # the command was faster: so the next request
                return
            workers.extend(forked)
            process.send_signal(signal.SIGSTOP)  # so that it does nothing about it
            if killed != "the command":
                os.kill(nursery, signal.SIGKILL)
            process.kill()

    store.requests.clear()
    if moment == "opening":  # the headers never come
        store.gate = lambda request: ("open", 99) if request[:2] == ("GET", "bucket/source.safetensors") else None
    store.before = before
    assert process.wait() == -signal.SIGKILL
    assert os.read(held, 1) == b""  # the end: nobody holds the other side any more
    os.close(held)
    assert len(workers) == 2
    assert "x.safetensors" not in store.contents()


def test_workers_begin_without_importing_anything_each(store, large, tmp_path):
    """A process of the command is forked: each worker has what it had imported, and its own connections."""
    script = """
import sys
import threading
import time
import types
from pathlib import Path
from attn_bridge.checkpoints.workers.executors import nursery
from attn_bridge.cli.app import run

begun = nursery.Fork.__init__
def noted(self, work, others):
    begun(self, work, others)
    print("forked", "aiobotocore.client" in sys.modules, flush=True)

nursery.Fork.__init__ = noted
nursery.subprocess.Popen = None
sys.exit(run(["convert", sys.argv[1], "s3://bucket/x.safetensors", "--to", "same", "--workers", "3"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(large / "x.npz")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == ["forked True"] * 3  # what they are forked from, and two of them
    assert store.contents() == ours(large / "x.npz", tmp_path, "x.safetensors", to_layout="same")


def test_workers_open_the_source_at_the_same_time(store, large, tmp_path, monkeypatch):
    """The store answers once all three ask for the header: one that waits for a plan before it asks would fail."""
    monkeypatch.setattr(faults, "TRIES", 1)
    monkeypatch.setitem(s3.WAIT, "read_timeout", 300)
    checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", to_layout="same")
    store.gate = lambda asked: ("open", 3) if asked[:2] == ("GET", "bucket/x.safetensors") else None
    command = ["convert", "s3://bucket/x.safetensors", str(tmp_path / "y.safetensors"), "--to", "same"]
    assert run([*command, "--workers", "3"]) == 0
    assert (tmp_path / "y.safetensors").read_bytes() == store.objects["bucket", "x.safetensors"].data


def test_a_source_that_is_replaced_before_the_plan_is_not_read_by_workers_that_opened_it(
    store, large, tmp_path, monkeypatch
):
    """They hold the file that was there: what they read of it would stand beside what others read of the new one."""
    for name in ("old", "new"):
        checkpoints.convert(large / "x.npz", tmp_path / f"{name}.safetensors", to_layout="same")
    data = bytearray((tmp_path / "new.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "new.safetensors").write_bytes(data)
    opened = Request.opened

    def late(request):
        begun = time.monotonic()
        while not all(_holds(one, tmp_path / "old.safetensors") for one in _workers()):
            assert time.monotonic() < begun + 300
            time.sleep(0.01)
        (tmp_path / "new.safetensors").replace(tmp_path / "old.safetensors")
        return opened(request)

    def _workers():
        found = [one for child in watch._children(os.getpid()) for one in watch._children(child)]
        return found if len(found) == 2 else [0]

    def _holds(process, path):
        try:
            return any(os.path.realpath(one) == str(path) for one in Path(f"/proc/{process}/fd").iterdir())
        except OSError:
            return False

    monkeypatch.setattr(Request, "opened", late)
    options = {"to_layout": "same", "workers": 3, "task_bytes": 1 << 22}
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoints.convert(tmp_path / "old.safetensors", "s3://bucket/x.safetensors", **options)
    assert "x.safetensors" not in store.contents()


def test_settings_that_are_no_json_are_refused_as_any_are(store, large):
    options = {"to_layout": "same", "workers": 2, "settings": {"num_heads": np.int64(4)}}
    with pytest.raises(ValueError, match="--set num_heads"):
        checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", **options)


def test_workers_that_have_nothing_to_share_end_before_the_work(store, large, tmp_path):
    checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", to_layout="same")
    before, during = {*watch._children(os.getpid())}, []
    options = {"to_layout": "same", "workers": 3}
    checkpoints.convert(
        "s3://bucket/x.safetensors",
        tmp_path / "y.npz",
        progress=lambda *done: during.append(watch._children(os.getpid())),
        **options,
    )
    assert during
    assert all(before.issuperset(found) for found in during)


def test_what_a_library_prints_ends_no_worker(store, large, tmp_path, monkeypatch):
    noisy = f"from {nursery.__name__} import main; print('reading ...\\n100', flush=True); main()"
    monkeypatch.setattr(Nursery, "command", (sys.executable, "-c", noisy))
    monkeypatch.setattr(Processes, "may_fork", lambda: False)
    checkpoints.convert(large / "x.npz", "s3://bucket/x.safetensors", to_layout="same", workers=2)
    assert store.contents() == ours(large / "x.npz", tmp_path, "x.safetensors", to_layout="same")


def test_what_workers_say_is_heard_to_its_end_where_they_are_stopped(monkeypatch):
    """Closed before, it failed in the thread that listens, with a traceback beside the error line."""
    failed, heard = [], []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    class Said:
        def __init__(self):
            self.is_ended, self.is_closed = threading.Event(), threading.Event()

        def __iter__(self):
            yield b'{"done": 1, "name": "first"}\n'
            self.is_ended.wait()
            if self.is_closed.wait(0.2):  # whoever closes it now comes too early
                raise ValueError("readline of closed file")
            yield b'{"done": 2, "name": "last"}\n'

        def close(self):
            self.is_closed.set()

    class Process:
        pid, stdout = 1, Said()
        stdin = types.SimpleNamespace(close=stdout.is_ended.set)

        def wait(self):
            return 0

    nursery = Nursery.__new__(Nursery)
    nursery._child, nursery._expected = Process(), 2
    nursery._child.stdin.write = nursery._child.stdin.flush = lambda *data: None
    job = jobs.Job("plan", "x", 3, 1 << 20)
    request = Request("x", "y", to_layout="same")
    nursery.start(request, None, job, "run", [1, 2], lambda count, name: heard.append(name)).stop()
    assert not failed
    assert heard == ["first", "last"]
    assert nursery._child.stdout.is_closed.is_set()


def test_workers_that_nobody_hears_end_without_a_traceback(tmp_path):
    process = subprocess.Popen(
        [*Nursery.command, "s3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    job = jobs.Job("plan", "x", 3, 1 << 20)
    request = Request(str(tmp_path / "none.npz"), "s3://bucket/x.safetensors", to_layout="same")
    nursery.tell(process, {"request": dataclasses.asdict(request), "count": 2})
    nursery.tell(process, {"job": dataclasses.asdict(job), "run": "run", "indices": [1, 2]})
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stdin.close()
    process.stderr.close()
