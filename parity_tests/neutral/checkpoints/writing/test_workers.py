"""Conversions that several workers share: the same bytes for any number of them, in any order, after any kill."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.elements import Elements
from attn_bridge.checkpoints.workers import jobs as planning
from attn_bridge.checkpoints.workers import parse
from attn_bridge.checkpoints.workers.executors.processes import Processes, write_share
from attn_bridge.checkpoints.workers.places.local import LocalPlace
from attn_bridge.cli.app import run
from parity_tests.support.calls import cover

from ..checkpoint_files import sharded, tree
from ..quantised.test_dequantized_files import folder as quantised

TASK = 4096
"""Bytes of a task that cuts the larger tensors of `sharded` of this width."""

WIDTH = 48

CONTAINERS = {"x": {}, "x.safetensors": {}, "x.msgpack": {}, "x.dcp": {}, "x.orbax": {}, "y.orbax": {"ocdbt": 1}}
"""Targets of every container with random access -> its settings."""


def everything(target):
    """Return all files of a target, what stands beside it among them."""
    beside = {one.name.partition(".attn")[2]: one.read_bytes() for one in target.parent.glob(f"{target.name}.attn-*")}
    return (tree(target) if target.is_dir() else target.read_bytes()), beside


def shares(source, target, count, order=None, **options):
    """Have all workers do their shares, one after the other, and return what each did."""
    order = list(range(count)) if order is None else order
    return [checkpoints.convert_share(source, target, index, count, task_bytes=TASK, **options) for index in order]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sharded(tmp_path_factory.mktemp("workers") / "hf", width=WIDTH)


@cover.rotated(("file", "count"), list(CONTAINERS), [4, 1, 2, 8, 32])
def test_any_number_of_workers_writes_the_same_bytes_in_any_order(tmp_path, source, file, count):
    settings = CONTAINERS[file]
    (tmp_path / "plain").mkdir()
    plain = checkpoints.convert(source, tmp_path / "plain" / file, dtype="bf16", settings=settings)
    order = list(range(count))
    random.Random(count).shuffle(order)
    *before, last = shares(source, tmp_path / file, count, order, dtype="bf16", settings=settings)
    assert all(one.result is None and one.waits_for for one in before)
    assert everything(tmp_path / file) == everything(tmp_path / "plain" / file)
    assert (last.result.digests, last.result.changed) == (plain.digests, plain.changed)
    assert min(plain.changed.values()) > 0
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("dtype", [None, "f16"])
def test_tensors_that_are_never_held_whole_give_the_same_bytes(tmp_path, source, monkeypatch, dtype):
    plain = checkpoints.convert(source, tmp_path / "plain", dtype=dtype)
    monkeypatch.setattr("attn_bridge.checkpoints.workers.working.SPARE", 0)
    monkeypatch.setattr("attn_bridge.checkpoints.workers.working.CHUNK", 1000)
    read = []
    in_runs = Elements._in_runs

    def spied(*arguments):
        read.append(arguments)
        return in_runs(*arguments)

    monkeypatch.setattr(Elements, "_in_runs", staticmethod(spied))
    last = shares(source, tmp_path / "x", 3, dtype=dtype)[-1]
    assert everything(tmp_path / "x") == everything(tmp_path / "plain")
    assert last.result.changed == plain.changed
    assert len(read) > 20


def test_processes_write_the_same_bytes_and_say_how_far_they_are(tmp_path, source):
    plain = checkpoints.convert(source, tmp_path / "plain", dtype="f16")
    seen = []
    result = checkpoints.convert(
        source, tmp_path / "x", dtype="f16", workers=3, task_bytes=TASK, progress=lambda *said: seen.append(said[:2])
    )
    assert everything(tmp_path / "x") == everything(tmp_path / "plain")
    assert (result.digests, result.changed) == (plain.digests, plain.changed)
    total = checkpoints.plan(source, tmp_path / "y", dtype="f16").nbytes
    assert (total, total) in seen
    assert all(0 <= done <= whole == total for done, whole in seen)


def test_tasks_say_where_every_element_goes(tmp_path, source, capsys):
    for file, settings in CONTAINERS.items():
        found = checkpoints.tasks(source, tmp_path / file, settings=settings, workers=3, task_bytes=TASK)
        assert not list(tmp_path.iterdir())
        assert max(task["bytes"] for task in found) <= TASK
        target = checkpoints.convert(source, tmp_path / file, settings=settings).target
        there = checkpoints.read(target)
        seen = dict.fromkeys(there, 0)
        for task in found:
            assert task["bytes"] == sum(one["bytes"] for one in task["tensors"])
            for one in task["tensors"]:
                assert one["start"] == seen[one["name"]]
                seen[one["name"]] = one["stop"]
                data = (target / one["file"] if one["file"] else target).read_bytes()
                wanted = there[one["name"]].reshape(-1)[one["start"] : one["stop"]].tobytes()
                assert data[one["offset"] : one["offset"] + one["bytes"]] == wanted
        assert seen == {name: array.size for name, array in there.items()}
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        for one in tmp_path.iterdir():
            one.unlink()
    assert run(["plan", str(source), str(tmp_path / "x"), "--task-bytes", "4KiB", "--workers", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tasks"] == checkpoints.tasks(source, tmp_path / "x", workers=3, task_bytes=TASK)
    assert len(said["tensors"]) == len(there)
    assert [one["offset"] for one in checkpoints.tasks(source, tmp_path / "x.npz")[0]["tensors"]][:2] == [None, None]
    assert run(["plan", str(source), str(tmp_path / "x")]) == 0
    assert "1 task of at most" in capsys.readouterr().out


def huge(path, shapes):
    """Write a header of tensors, and a hole in place of their bytes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + end)
    return path


def test_a_plan_of_a_model_of_a_terabyte_is_made_of_its_header(tmp_path, monkeypatch):
    shapes = {f"model.layers.{i}.mlp.{name}.weight": (8192, 28672) for i in range(700) for name in ("up", "down", "x")}
    source = huge(tmp_path / "x.safetensors", shapes)
    found = checkpoints.tasks(source, tmp_path / "y", to_layout="same", workers=64)
    assert sum(task["bytes"] for task in found) == 2100 * 2 * 8192 * 28672 > 980e9
    assert max(task["bytes"] for task in found) <= 256 << 20


@pytest.mark.parametrize("shape", [(70_000,), (3, 30_000)], ids=str)
def test_tensors_without_short_rows_are_cut_at_pages(tmp_path, shape):
    source = huge(tmp_path / "x.safetensors", {"x": shape})
    found = checkpoints.tasks(source, tmp_path / "y", to_layout="same", task_bytes=1 << 15)
    starts = [2 * entry["start"] for task in found for entry in task["tensors"]]
    assert len(starts) > 4
    assert not any(start % 4096 for start in starts)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("giant", [0, 1, 40])
def test_no_worker_writes_much_more_than_its_share(tmp_path, count, giant):
    sizes = np.random.default_rng(count).integers(1, 3000, 60).tolist()
    shapes = {f"shard of {i % 7}/{i}": (int(size), 16) for i, size in enumerate(sizes)}
    shapes |= {"giant": (giant * 5000, 3, 11)} if giant else {}
    source = huge(tmp_path / "x.safetensors", shapes)
    with containers.open_reader(source):
        plan = checkpoints.plan(source, tmp_path / "y", to_layout="same")
    for task_bytes in (None, 1 << 30):
        found = planning.cut(plan, planning.size_of(plan, count, task_bytes), count)
        parts = [sum(task.nbytes for task in planning.share(found, index, count)) for index in range(count)]
        assert sum(parts) == plan.nbytes
        assert max(parts) <= 1.5 * plan.nbytes / count


def test_workers_that_do_different_things_are_refused(tmp_path, source, capsys):
    target = tmp_path / "x"
    base = ["convert", str(source), str(target), "--task-bytes", "4096"]
    assert run([*base, "--worker", "0/2"]) == 0
    assert "1/2 (" in capsys.readouterr().out
    before = tree(tmp_path / ".x.partial")
    other = sharded(tmp_path / "other", width=WIDTH, seed=3)
    for arguments, said in (
        ([*base, "--worker", "1/3"], "with 2 workers, not 3"),
        ([*base[:3], "--worker", "1/2", "--task-bytes", "8KiB"], "with tasks of 4096 bytes, not 8192"),
        ([*base, "--worker", "1/2", "--dtype", "bf16"], "with --dtype of the source, not bfloat16"),
        ([*base, "--worker", "1/2", "--dtype", "bf16", "--resume"], "with --dtype of the source, not bfloat16"),
        ([*base, "--worker", "1/2", "--to", "same"], ", not same, --to "),
        (["convert", str(other), *base[2:], "--worker", "1/2"], "to be written in another way or of other files"),
        (["convert", str(other), str(target), "--finish"], "of another conversion"),
        ([*base[:3], "--finish", "--dtype", "bf16"], "with --dtype of the source, not bfloat16"),
        ([*base[:3], "--finish"], "these workers have yet to write: 1/2 ("),
    ):
        assert run(arguments) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert tree(tmp_path / ".x.partial") == before
    assert not target.exists()
    assert run([*base, "--worker", "1/2"]) == 0
    assert everything(target) == everything(checkpoints.convert(source, tmp_path / "plain").target)


def test_a_worker_while_another_conversion_runs_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr("attn_bridge.checkpoints.workers.places.staging.PATIENCE", 0.01)
    seen = []

    def again(done, total, name):
        if len(seen) > 3:
            return
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            checkpoints.convert_share(source, tmp_path / "x", 0, 2)
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            checkpoints.convert(source, tmp_path / "x", workers=2)
        seen.append(name)

    checkpoints.convert(source, tmp_path / "x", progress=again)

    def beside(done, total, name):
        if len(seen) > 8:
            return
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            checkpoints.convert(source, tmp_path / "y", workers=2)
        seen.append(name)

    checkpoints.convert_share(source, tmp_path / "y", 0, 1, progress=beside)
    assert len(seen) > 8


def test_whoever_comes_after_publication_ends_well(tmp_path, source, capsys):
    shares(source, tmp_path / "x", 2)
    wanted = everything(tmp_path / "x")
    base = ["convert", str(source), str(tmp_path / "x")]
    for more in (
        ["--worker", "0/2"],
        ["--worker", "1/2", "--overwrite"],
        ["--worker", "2/3", "--resume"],
        ["--finish"],
    ):
        assert run([*base, *more]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'x'} is already written\n"
    assert run([*base, "--workers", "2"]) == 2
    assert "exists; --overwrite" in capsys.readouterr().err
    other = sharded(tmp_path / "other", width=WIDTH, seed=3)
    assert run(["convert", str(other), str(tmp_path / "x"), "--worker", "0/2"]) == 2
    assert "exists; --overwrite" in capsys.readouterr().err
    assert everything(tmp_path / "x") == wanted
    assert not (tmp_path / ".x.partial").exists()


def test_finishing_checks_every_digest(tmp_path, source, capsys, monkeypatch):
    target, staging = tmp_path / "x", tmp_path / ".x.partial"
    with pytest.raises(CheckpointError, match="no workers have written anything"):
        checkpoints.finish(source, target)
    monkeypatch.setattr(LocalPlace, "take_over", lambda self: False)  # as if another worker were still there
    assert shares(source, target, 2)[-1].result is None
    file = staging / "payload" / "model-00002-of-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 16
    file.write_bytes(data)
    assert run(["convert", str(source), str(target), "--finish"]) == 2
    owner = re.search(r"has other bytes than were written; worker ([01])/2 has to run", capsys.readouterr().err)
    assert not target.exists()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has other bytes"):
        shares(source, target, 2, [1 - int(owner[1])])
    assert shares(source, target, 2, [int(owner[1])])[0].result is not None
    assert everything(target) == everything(checkpoints.convert(source, tmp_path / "plain").target)


def test_what_the_disk_does_not_hold_as_it_was_written_is_noticed(tmp_path, source, monkeypatch):
    read = LocalPlace.read

    def flipped(self, file, offset, count):
        data = bytearray(read(self, file, offset, count))
        data[count // 2] ^= 1
        return memoryview(data)

    monkeypatch.setattr(LocalPlace, "read", flipped)
    with pytest.raises(CheckpointError, match="is not there as it was written"):
        checkpoints.convert_share(source, tmp_path / "x", 0, 2)


@cover.some("after", [3, 1, 7], [3])
def test_what_some_workers_left_is_gone_on_with_by_any_number(tmp_path, source, after, monkeypatch):
    wanted = everything(checkpoints.convert(source, tmp_path / "plain").target)
    checkpoints.convert_share(source, tmp_path / "x", 1, 4, task_bytes=TASK)
    written = []
    write = containers.writer_class("safetensors").write_range
    monkeypatch.setattr(
        containers.writer_class("safetensors"),
        "write_range",
        lambda self, name, start, data: (written.append(name), write(self, name, start, data)),
    )
    shares(source, tmp_path / "x", after, resume=True)
    left = len(written)
    assert everything(tmp_path / "x") == wanted
    checkpoints.convert_share(source, tmp_path / "y", 1, 4, task_bytes=TASK)
    result = checkpoints.convert(source, tmp_path / "y", task_bytes=TASK, resume=True)
    assert result.resumed > 3
    assert not result.restart_reason
    assert everything(tmp_path / "y") == wanted
    written.clear()
    shares(source, tmp_path / "z", after)
    assert left < len(written)


def test_what_one_process_left_is_gone_on_with_by_workers(tmp_path, source):
    def stop(done, total, name):
        if done > total * 0.6:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        checkpoints.convert(source, tmp_path / "x", progress=stop)
    result = checkpoints.convert(source, tmp_path / "x", workers=2, resume=True)
    assert result.resumed > 5
    assert everything(tmp_path / "x") == everything(checkpoints.convert(source, tmp_path / "plain").target)


def test_what_another_plan_left_is_not_published(tmp_path, source):
    def stop(done, total, name):
        raise InterruptedError

    for begin in (lambda path: checkpoints.convert_share(source, path, 0, 2, task_bytes=TASK),):
        begin(tmp_path / "x")
        result = checkpoints.convert(source, tmp_path / "x", dtype="bf16", workers=2, resume=True)
        assert "no interrupted run" in result.restart_reason
        assert everything(tmp_path / "x") == everything(
            checkpoints.convert(source, tmp_path / "p", dtype="bf16").target
        )


def test_a_job_that_cant_be_read_is_written_anew(tmp_path, source):
    place = tmp_path / ".x.partial"
    checkpoints.convert_share(source, tmp_path / "x", 0, 2, task_bytes=TASK)
    shutil.rmtree(place / "payload")
    (place / "job").write_text("{")
    done = [checkpoints.convert_share(source, tmp_path / "x", index, 2, task_bytes=TASK) for index in range(2)]
    assert ["0/2" in " ".join(one.waits_for) for one in done] == [False, False]
    assert everything(tmp_path / "x") == everything(checkpoints.convert(source, tmp_path / "p").target)


def test_containers_that_are_written_in_order_are_written_by_one(tmp_path, source, capsys):
    assert run(["convert", str(source), str(tmp_path / "x.npz"), "--workers", "2"]) == 0
    assert "a file of npz is written by one worker" in capsys.readouterr().out
    assert run(["convert", str(source), str(tmp_path / "y.pt"), "--worker", "0/2"]) == 2
    assert "from its beginning to its end, by one worker" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("text", "environment", "wanted"),
    [
        ("0/1", {}, (0, 1)),
        ("3/4", {"RANK": "1"}, (3, 4)),
        ("auto", {"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "9"}, (1, 4)),
        ("auto", {"SLURM_PROCID": "8", "SLURM_NTASKS": "9"}, (8, 9)),
        ("4/4", {}, "counted from 0"),
        ("1", {}, "must be I/N"),
        ("-1/4", {}, "must be I/N"),
        ("0/0", {}, "counted from 0"),
        ("auto", {"RANK": "1"}, "needs RANK and WORLD_SIZE"),
        ("auto", {"RANK": "x", "WORLD_SIZE": "2"}, "must be whole numbers"),
        ("auto", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: workers are counted from 0"),
    ],
)
def test_a_worker_knows_its_number(text, environment, wanted):
    if isinstance(wanted, tuple):
        assert parse(text, environment) == wanted
    else:
        with pytest.raises(CheckpointError, match=wanted):
            parse(text, environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "0/2", "--workers", "2"], "--worker and --workers exclude each other"),
        (["--finish", "--worker", "0/2"], "--worker and --finish exclude each other"),
        (["--workers", "0"], "--workers (0) must be a whole number of at least 1, or auto"),
        (["--task-bytes", "5"], "task-bytes (5) must be at least 4096 bytes"),
        (["--task-bytes", "many"], "--task-bytes (many) must be a size"),
        (["--workers", "2", "--max-memory", "300MiB"], "is too little for 2 workers"),
    ],
)
def test_bad_usage_is_one_line(tmp_path, source, capsys, arguments, message):
    assert run(["convert", str(source), str(tmp_path / "x"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_folders_is_refused_at_once(tmp_path, source, monkeypatch, capsys):
    """As /proc does: the folder is there, and to make one in it finds none."""
    (tmp_path / "full").mkdir()
    make, made = Path.mkdir, []

    def refused(path, *args, **options):
        if path.parent != tmp_path / "full":
            return make(path, *args, **options)
        assert not made, "tried again"
        made.append(path)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert run(["convert", str(source), str(tmp_path / "full" / "x"), "--worker", "0/2"]) == 2
    assert capsys.readouterr().err.endswith("/.x.partial: can't be written: No such file or directory\n")


def test_a_dequantised_source_is_shared_like_any_other(tmp_path):
    source = quantised(tmp_path / "q")
    plain = checkpoints.convert(source, tmp_path / "plain", to_layout="same", dequantize=True)
    last = shares(source, tmp_path / "x", 3, to_layout="same", dequantize=True)[-1]
    assert everything(tmp_path / "x") == everything(tmp_path / "plain")
    assert last.result.changed == plain.changed


MEMORY = """
import sys
import threading
from attn_bridge import checkpoints

checkpoints.convert_share(sys.argv[1], sys.argv[2], 3, 8, task_bytes=int(sys.argv[3]), rules=sys.argv[4] or None,
                          to_layout=None if sys.argv[4] else "same")
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("is_turned", [False, True])
def test_memory_stays_within_two_tasks_whatever_a_tensor_has(tmp_path, is_turned):
    source = huge(tmp_path / "x.safetensors", {"a": (16384, 16384)})  # 512 MiB, a hole
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\ntorch = "a"\nflax = "b"\npattern = "i j -> j i"\n')
    arguments = [str(source), str(tmp_path / "y"), str(16 << 20), str(rules) if is_turned else ""]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 <= 2 * (16 << 20) + (200 << 20)


def test_a_process_with_threads_of_a_library_is_not_forked(monkeypatch):
    for name in ("torch", "jax", "ray", "tensorstore"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    alone = sys.platform.startswith("linux") and threading.active_count() == 1
    assert Processes.may_fork() == alone
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "tensorstore", sys)
    assert not Processes.may_fork()


def test_no_more_processes_are_started_than_there_are_shares(tmp_path, source, monkeypatch):
    started = []

    class Here:
        """Workers that have done their shares, in this process, when they are started."""

        def __init__(self, request, prepared, job, run, indices, advance):
            started.extend(indices)
            for index in indices:
                write_share(prepared, job, run, index, advance)

        def check(self):
            pass

        wait = stop = check

    monkeypatch.setattr("attn_bridge.checkpoints.workers.start", Here)
    np.savez(tmp_path / "x.npz", a=np.arange(3.0), b=np.arange(40.0).reshape(5, 8), c=np.arange(7))
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "one.safetensors", to_layout="same")
    checkpoints.convert(tmp_path / "x.npz", tmp_path / "many.safetensors", to_layout="same", workers=60)
    assert 0 < len(started) <= 3
    assert everything(tmp_path / "many.safetensors") == everything(tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="this machine starts"):
        checkpoints.convert(source, tmp_path / "more", to_layout="flax", workers=100_000)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_worker_that_fails_says_what_it_keeps(tmp_path, source, monkeypatch, capsys, error):
    def write(*arguments, **options):
        raise error

    monkeypatch.setattr("attn_bridge.checkpoints.containers.safetensors.SafetensorsWriter.write_range", write)
    code = run(["convert", str(source), str(tmp_path / "x.safetensors"), "--to", "flax", "--worker", "0/2"])
    said = capsys.readouterr().err
    assert code
    assert f"{tmp_path / '.x.safetensors.partial'} is kept: the same command goes on from it, rm -r" in said
    assert (tmp_path / ".x.safetensors.partial").is_dir()


def test_a_process_that_ignores_its_children_has_workers_too(tmp_path):
    sharded(tmp_path / "source", width=WIDTH)
    script = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from attn_bridge import checkpoints
checkpoints.convert(*sys.argv[1:], to_layout="flax", workers=2)
"""
    paths = [str(tmp_path / "source"), str(tmp_path / "target.safetensors")]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert checkpoints.verify(*paths).passed
