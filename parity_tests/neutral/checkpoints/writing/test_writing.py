"""Writing by position: through the page cache and past it, the file holds the same bytes."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import writing
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.containers.writing import BLOCK, LARGE, PAGE, Flusher, TargetFile, Threads
from attn_bridge.checkpoints.workers.places.local import LocalPlace

SIZE = 3 * BLOCK + 12345
RANGES = [
    (0, SIZE),
    (8, BLOCK + 1),
    (PAGE, 2 * BLOCK),
    (PAGE - 1, BLOCK + 2),
    (5 * PAGE + 7, LARGE + PAGE),
    (2 * BLOCK + 3, LARGE - 1),
    (SIZE - LARGE - PAGE, LARGE + PAGE),
]


@pytest.fixture
def passes_cache(tmp_path):
    """Skip where the file system has no way past the page cache."""
    try:
        number = os.open(tmp_path / "tried", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        os.pwrite(number, mmap.mmap(-1, PAGE), 0)
        os.close(number)
    except OSError:
        pytest.skip("needs a file system with O_DIRECT")
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("needs a system with O_DIRECT")


def some_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def assert_lands(target, shift=0):
    """Write every range with bytes of its own, and look at the whole file after each."""
    expected = np.zeros(SIZE, np.uint8)
    for number, (start, count) in enumerate(RANGES):
        memory = some_bytes(count + PAGE, number)
        first = (start + shift - memory.__array_interface__["data"][0]) % PAGE
        data = memory[first : first + count]
        target.write(start, data.data)
        expected[start : start + count] = data
        np.testing.assert_array_equal(np.fromfile(target.path, np.uint8), expected)


@pytest.mark.parametrize("shift", [0, 1, 8], ids=["in its page", "a byte off", "a word off"])
def test_every_range_lands_where_it_belongs(tmp_path, shift):
    assert_lands(TargetFile(tmp_path / "x", SIZE), shift)


def test_what_is_large_goes_past_the_page_cache(tmp_path, passes_cache, monkeypatch):
    cached = []
    write = TargetFile._write_cached
    monkeypatch.setattr(TargetFile, "_write_cached", lambda *call: (cached.append(len(call[2])), write(*call)))
    target = TargetFile(tmp_path / "x", SIZE)
    target.write(100, some_bytes(2 * BLOCK))
    assert max(cached) < PAGE
    target.write(100, some_bytes(LARGE - 1))
    assert max(cached) == LARGE - 1


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("answers", [[None], [PAGE, None], [BLOCK, PAGE + 9, None], [BLOCK, BLOCK, 0, None]])
def test_a_system_that_takes_no_more_this_way_is_written_to_through_the_cache(
    tmp_path, passes_cache, monkeypatch, answers, error
):
    pwrite, left = os.pwrite, list(answers)

    def reluctant(number, data, start):
        if number != target._direct:
            return pwrite(number, data, start)
        answer = left[0] if len(left) == 1 else left.pop(0)
        if answer is None:
            raise OSError(error, "not this way")
        if answer:
            pwrite(number, data[: answer // PAGE * PAGE], start)
        return answer

    target = TargetFile(tmp_path / "x", SIZE)
    monkeypatch.setattr(writing, "_WRITERS", Threads(1, "write"))
    monkeypatch.setattr(os, "pwrite", reluctant)
    assert_lands(target)


def test_a_full_disk_is_one_line(tmp_path, passes_cache, monkeypatch):
    target = TargetFile(tmp_path / "x", SIZE)

    def full(number, data, start):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"x: can't be written: No space left on device$"):
        target.write(0, some_bytes(BLOCK))


def test_an_interrupted_write_leaves_nothing_under_way(tmp_path, passes_cache, monkeypatch):
    target = TargetFile(tmp_path / "x", SIZE)
    wait, waits, ended = writing.concurrent.futures.wait, [], []

    def interrupted(jobs):
        waits.append(jobs)
        if len(waits) == 1:
            raise KeyboardInterrupt
        wait(jobs)
        ended.extend(job.done() for job in jobs)

    monkeypatch.setattr(writing.concurrent.futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.write(0, some_bytes(3 * BLOCK))
    assert ended == [True] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_forked_process_writes_too(tmp_path):
    code = f"""
import os, signal
from attn_bridge.checkpoints.containers.writing import BLOCK, TargetFile
from pathlib import Path
TargetFile(Path({str(tmp_path)!r}) / "parent", 3 * BLOCK).write(0, bytes(3 * BLOCK))
if not (child := os.fork()):
    signal.alarm(20)
    TargetFile(Path({str(tmp_path)!r}) / "child", 3 * BLOCK).write(0, b"x" * (3 * BLOCK))
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    assert (tmp_path / "child").read_bytes() == b"x" * (3 * BLOCK)


@pytest.fixture
def flushed(monkeypatch):
    """Return what tells the names of files that the disk was asked to take."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("needs a system that takes advice on its page cache")
    found = []
    flush = os.fdatasync

    def noted(number):
        found.append(Path(f"/proc/self/fd/{number}").readlink().name)
        flush(number)

    def names():
        writing._FLUSHER.submit(int).result()  # whatever was asked for before is done
        return found

    monkeypatch.setattr(os, "fdatasync", noted)
    monkeypatch.setattr(writing, "FLUSH", LARGE)
    return names


def test_the_disk_takes_many_bytes_while_more_is_written(tmp_path, flushed):
    flusher = Flusher()
    for name in "ab":
        (tmp_path / name).write_bytes(some_bytes(LARGE).tobytes())
    flusher.take(tmp_path / "a", 0, LARGE - 1)
    assert flushed() == []
    flusher.take(tmp_path / "gone", 0, 1)  # such as by a publication
    assert flushed() == ["a"]
    flusher.take(tmp_path / "a", LARGE - 1, 1)
    flusher.take(tmp_path / "b", 0, LARGE - 2)
    assert flushed() == ["a"]
    flusher.take(tmp_path / "b", LARGE - 2, 1)
    assert flushed() == ["a", "a", "b"]


def test_the_page_cache_forgets_what_workers_have_read_back_and_nothing_before(tmp_path, flushed, monkeypatch):
    tensors = {f"x{number}": some_bytes(LARGE, number).view(np.float32) for number in range(3)}
    np.savez(tmp_path / "source.npz", **tensors)
    seen, let_go = [], 0
    read, release = LocalPlace.read, LocalPlace.release

    def noted(self, file, offset, count):
        seen.append((offset, offset + count))
        return read(self, file, offset, count)

    def checked(self, file, offset, count):
        nonlocal let_go
        assert sum(stop - start for start, stop in seen if offset <= start < stop <= offset + count) == count
        let_go += count
        release(self, file, offset, count)

    monkeypatch.setattr(LocalPlace, "read", noted)
    monkeypatch.setattr(LocalPlace, "release", checked)
    for index in range(2):
        done = checkpoints.convert_share(
            tmp_path / "source.npz", tmp_path / "x.safetensors", index, 2, to_layout="same", task_bytes=LARGE // 2
        )
    assert done.result is not None
    assert let_go == 3 * LARGE
    assert flushed()
