"""Checkpoints that are written to object stores: the bytes of a local conversion, all at once, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")

import fsspec

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.checkpoints.containers.remote import faults, joining, staged, to_path
from attn_bridge.checkpoints.workers.places.stored import StoredPlace
from attn_bridge.cli.app import run
from parity_tests.neutral.checkpoints.checkpoints import gpt
from parity_tests.neutral.checkpoints.stores.test_object_stores import ENDINGS, KINDS, now_and_then
from parity_tests.support.calls import cover

from ..stored_checkpoints import ours


@pytest.fixture
def small(monkeypatch):
    """Objects of 12 KB, so that the source makes 40: large tensors are cut, small ones share an object.

    Each is two requests, which take most of the time of these tests.
    """
    monkeypatch.setattr(staged, "LEAST", 12_000)


CASES = [(f"x{ending}", format) for format, ending in ENDINGS.items()] + [("folder", "safetensors")]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_what_is_written_is_what_a_local_conversion_writes(store, source, tmp_path, small, name, format):
    options = {"to_layout": "flax", "format": format}
    wanted = ours(source, tmp_path, name, **options)
    result = checkpoints.convert(source, f"s3://bucket/{name}", **options)
    assert store.contents() == wanted
    assert result.digests == checkpoints.convert(source, tmp_path / f"again-{name}", **options).digests
    assert not store.uploads
    assert checkpoints.verify(source, f"s3://bucket/{name}").passed


@cover.rotated(("name", "workers"), ["x.safetensors", "x.orbax", "x.dcp"], [1, 3])
def test_workers_write_the_same(store, source, tmp_path, name, workers):
    options = {"to_layout": "flax"}
    wanted = ours(source, tmp_path, name, **options)
    checkpoints.convert(source, f"s3://bucket/{name}", workers=workers, task_bytes=1 << 15, **options)
    assert store.contents() == wanted


@pytest.mark.parametrize(("name", "ending"), [("x.npz", "kept"), ("x.orbax", "json")])
def test_files_next_to_a_missing_target_stay_unless_they_may_go(store, source, tmp_path, name, ending):
    wanted = ours(source, tmp_path, name, to_layout="flax")
    beside = f"{name}.attn-bridge.{ending}"
    store.put("bucket", beside, b"the only copy of something")
    before = store.contents()
    for options in ({}, {"workers": 1, "task_bytes": 1 << 15} if name == "x.orbax" else {}):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.convert(source, f"s3://bucket/{name}", to_layout="flax", **options)
        assert str(caught.value) == f"s3://bucket/{beside} exists; --overwrite (in Python, overwrite=True) replaces it"
        assert store.contents() == before
    checkpoints.convert(source, f"s3://bucket/{name}", to_layout="flax", overwrite=True)
    assert store.contents() == wanted


def test_a_large_file_is_copied_together_in_the_store(store, tmp_path, monkeypatch):
    monkeypatch.setattr(staged, "PACK", 6 << 20)
    monkeypatch.setattr(joining, "MOST", 11 << 20)
    np.savez(tmp_path / "x.npz", a=np.arange(5_000_000, dtype=np.float32), b=np.arange(7, dtype=np.int8))
    wanted = ours(tmp_path / "x.npz", tmp_path, "x.safetensors", to_layout="same")
    checkpoints.convert(tmp_path / "x.npz", "s3://bucket/x.safetensors", to_layout="same")
    assert store.contents() == wanted
    copied = [what for method, key, what in store.requests if key == "bucket/x.safetensors" and "partNumber" in what]
    assert len(copied) > 2


def test_a_huge_file_is_made_of_no_more_parts_than_a_store_takes(store, tmp_path, monkeypatch):
    monkeypatch.setattr(staged, "PACK", 1000)
    monkeypatch.setattr(staged, "LEAST", 100)
    monkeypatch.setattr(staged, "PARTS", 50)
    np.savez(tmp_path / "x.npz", a=np.arange(100_000, dtype=np.float32), b=np.arange(7, dtype=np.int8))
    wanted = ours(tmp_path / "x.npz", tmp_path, "x.safetensors", to_layout="same")
    checkpoints.convert(tmp_path / "x.npz", "s3://bucket/x.safetensors", to_layout="same")
    assert store.contents() == wanted
    sent = {key for method, key, _ in store.requests if method == "PUT" and "/parts/" in key}
    assert 40 < len(sent) < 60


def test_a_store_by_others_is_written_too(moto, source, tmp_path, monkeypatch):
    monkeypatch.setattr(staged, "PACK", 6 << 20)
    monkeypatch.setattr(joining, "MOST", 11 << 20)
    np.savez(tmp_path / "x.npz", a=np.arange(5_000_000, dtype=np.float32), b=np.arange(7, dtype=np.int8))
    for given, name, options in (
        (tmp_path / "x.npz", "large.safetensors", {"to_layout": "same"}),
        (source, "folder", {"to_layout": "flax", "workers": 3, "task_bytes": 1 << 15}),
        (source, "x.dcp", {"to_layout": "flax"}),
    ):
        wanted = ours(given, tmp_path, name, **{key: one for key, one in options.items() if key == "to_layout"})
        checkpoints.convert(given, f"s3://bucket/{name}", **options)
        found = {key.removeprefix("bucket/"): moto.cat_file(key) for key in moto.find(f"bucket/{name}")}
        beside = moto.glob(f"bucket/{name}.attn-bridge*")
        assert found | {key.removeprefix("bucket/"): moto.cat_file(key) for key in beside} == wanted
        assert checkpoints.verify(given, f"s3://bucket/{name}").passed
    assert not moto.find("bucket/.large.safetensors.partial")


@pytest.mark.parametrize("count", [9000, 20, 7])
@pytest.mark.parametrize("seed", range(30))
def test_parts_cover_a_file_in_order_and_are_few_and_long_enough_but_for_the_last(seed, count, monkeypatch):
    for name, size in (("LEAST", 50), ("SENT", 80), ("MOST", 1000), ("COUNT", count)):
        monkeypatch.setattr(joining, name, size)
    random = np.random.default_rng(seed)
    cover, wanted = staged.Cover(), np.zeros(int(random.integers(1, 20_000)), np.int64)
    for number in range(1, int(random.integers(2, 60))):
        start = int(random.integers(0, len(wanted)))
        stop = min(len(wanted), start + int(random.choice([3, 40, 60, 700, 5000])))
        cover.paint(staged.Span(start, stop, str(number), 10))
        wanted[start:stop] = number * 100_000 + 10 + np.arange(stop - start)
    parts = list(joining.parts_of(cover.between(0, len(wanted))))
    here, least = 0, max(50, -(-len(wanted) // count))
    for part in parts:
        for span in part.spans:
            assert span.start == here < span.stop
            here = span.stop
            found = int(span.name or 0) * 100_000 + span.at + np.arange(span.stop - span.start)
            assert (wanted[span.start : span.stop] == (found if span.name else 0)).all()
        assert part.size <= max(1000, 2 * least)
        assert part.is_copied or part.size <= max(80, least) + least
        assert part.size >= least or part is parts[-1]
    assert len(parts) <= count + 1
    assert here == len(wanted)


@cover.rotated(("kind", "name"), KINDS, ["folder", "x.npz"])
def test_a_store_that_fails_now_and_then_gets_all_of_it(store, source, tmp_path, small, kind, name):
    wanted = ours(source, tmp_path, name, to_layout="flax")
    store.fault = now_and_then(kind)
    checkpoints.convert(source, f"s3://bucket/{name}", to_layout="flax")
    store.fault = lambda request: ""
    assert store.contents() == wanted


@cover.rotated(("name", "group"), ["folder", "x.safetensors", "x.orbax"], range(10))
def test_whichever_request_fails_nothing_is_there_or_all_of_it_and_resume_ends_it(
    store, source, tmp_path, small, monkeypatch, name, group
):
    options = {"to_layout": "flax"}
    wanted = ours(source, tmp_path, name, **options)
    monkeypatch.setattr(faults, "TRIES", 1)
    url = f"s3://bucket/{name}"
    store.requests.clear()
    checkpoints.convert(source, url, **options)
    count = len(store.requests)
    for number in range(2, count + 9, max(7, count // 20))[group::10]:
        store.objects.clear()
        store.uploads.clear()
        begun = itertools.count()
        store.fault = lambda request, begun=begun, number=number: "500" if next(begun) >= number else ""
        with contextlib.suppress(CheckpointError):
            checkpoints.convert(source, url, **options)
        store.fault = lambda request: ""
        try:
            found = checkpoints.inspect(url)
        except CheckpointError:
            pass
        else:
            assert len(found.tensors) == len(checkpoints.inspect(tmp_path / "local" / name).tensors)
            assert checkpoints.verify(source, url, to_layout="flax").passed
        if store.contents() != wanted:
            checkpoints.convert(source, url, **options, resume=True)
        assert store.contents() == wanted, number
        assert not store.uploads


def test_what_is_there_is_replaced_at_the_end_alone_and_only_if_that_is_wanted(store, source, tmp_path):
    np.savez(tmp_path / "old.npz", old=np.ones(3, np.float32))
    for name in ("x.safetensors", "folder"):
        url = f"s3://bucket/{name}"
        checkpoints.convert(tmp_path / "old.npz", url, to_layout="same")
        with pytest.raises(CheckpointError, match="exists; --overwrite"):
            checkpoints.convert(source, url, to_layout="flax")
        seen = []

        def before(request, url=url, seen=seen):
            if not seen and request[2] == "" and "parts/" in request[1]:
                seen.append({key: data for key, data in store.contents().items() if "partial" not in key})

        old = store.contents()
        store.before = before
        checkpoints.convert(source, url, to_layout="flax", overwrite=True)
        store.before = lambda request: None
        assert seen == [old]
        assert checkpoints.verify(source, url).passed
        assert "old" not in checkpoints.inspect(url).tensors
        store.objects.clear()


@pytest.mark.parametrize("name", ["x.safetensors", "folder"])
def test_a_run_killed_after_publication_does_not_answer_for_another_conversion(
    store, source, tmp_path, name, monkeypatch
):
    """Of a model of the same names and shapes, which nothing but its numbers tells apart."""
    other, target, options = tmp_path / "y.npz", f"s3://bucket/{name}", {"format": "safetensors", "to_layout": "flax"}
    np.savez(other, **gpt(4, width=48, words=301))

    def interrupted(place):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoredPlace, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.convert(source, target, **options)
    with pytest.raises(CheckpointError, match="exists; --overwrite"):
        checkpoints.convert(other, target, **options)
    assert checkpoints.verify(source, target).passed
    assert store.contents() == ours(source, tmp_path, name, **options)
    checkpoints.convert(other, target, overwrite=True, **options)
    assert checkpoints.verify(other, target).passed


def test_a_folder_of_other_things_is_never_replaced(store, source):
    store.put("bucket", "folder/deep/thing.txt", b"mine")
    with pytest.raises(CheckpointError, match="other things than a checkpoint"):
        checkpoints.convert(source, "s3://bucket/folder", to_layout="flax", overwrite=True)
    assert store.contents() == {"folder/deep/thing.txt": b"mine"}


def test_what_cannot_be_written_to_says_so(store, source, tmp_path, capsys):
    assert run(["convert", str(source), f"{store.url}/bucket/x.npz"]) == 2
    assert "a web server can't be written to" in capsys.readouterr().err
    assert run(["convert", str(source), "hf://me/mine/x.npz"]) == 2
    assert "written by its own tools" in capsys.readouterr().err


def test_from_one_store_to_another_place_of_it(store, source, tmp_path):
    wanted = ours(source, tmp_path, "folder", to_layout="flax")
    store.put("bucket", "source/x.npz", source.read_bytes())
    assert run(["convert", "s3://bucket/source/x.npz", "s3://bucket/folder", "--to", "flax"]) == 0
    assert {key: data for key, data in store.contents().items() if key.startswith("folder")} == wanted


def test_other_stores_of_fsspec_are_written_too(source, tmp_path, small):
    memory = fsspec.filesystem("memory")
    try:
        for name in ("folder", "x.npz", "x.dcp"):
            wanted = ours(source, tmp_path, name, to_layout="flax")
            checkpoints.convert(source, f"memory://made/{name}", to_layout="flax")
            found = {key.removeprefix("/made/"): memory.cat_file(key) for key in memory.find("/made")}
            assert {key: data for key, data in found.items() if key.startswith(name)} == wanted
            assert not [key for key in found if "partial" in key]
    finally:
        memory.rm("/made", recursive=True)


def test_pieces_are_read_by_no_thread_that_reading_waits_for():
    memory, seen = fsspec.filesystem("memory"), []
    store = to_path("memory://made/x").store
    store.put("made/part", b"abcd")
    entry = store.entry("made/part")

    def pieces():
        for first in range(2):
            seen.append(threading.current_thread().name)
            piece = bytearray(2)
            store.read("made/part", entry, [(2 * first, memoryview(piece))])
            yield piece

    try:
        store.stream("made/x", pieces, 4)
        assert memory.cat_file("/made/x") == b"abcd"
        assert len(seen) == 2
        assert not any(name.startswith("asyncio_") for name in seen)
    finally:
        memory.rm("/made", recursive=True)


def test_an_upload_that_was_aborted_is_no_earlier_target_of_the_same_size(store):
    staging = to_path("s3://bucket/x").store
    size = (5 << 20) + 10
    joined = []
    for value in (b"a", b"b"):
        parts = staged.Staged(staging, f"bucket/parts-{value.decode()}")
        parts.write("x", 0, memoryview(value * size))
        parts.flush()
        joined.append(joining.join(parts, "x", size, "bucket/x"))
        joined[-1].prepare()
        if value == b"b":
            store.uploads.clear()
            with pytest.raises(CheckpointError, match="can't be written"):
                joined[-1].complete()
        else:
            joined[-1].complete()
    assert store.objects["bucket", "x"].data == b"a" * size


def test_short_objects_are_copied_whole_or_not_at_all(store):
    """S3 copies a range of an object of more than 5 MB alone, but any object as a whole."""
    store.is_strict = True
    parts = staged.Staged(to_path("s3://bucket/x").store, "bucket/parts")
    data = bytes(range(256)) * (1 << 13)
    parts.write("whole", 0, memoryview(data))
    parts.flush()
    parts.write("one", 0, memoryview(data))
    parts.write("two", 0, memoryview(data))
    parts.flush()
    for name in ("whole", "one", "two"):
        joined = joining.join(parts, name, len(data), f"bucket/{name}")
        joined.prepare()
        joined.complete()
        assert store.objects["bucket", name].data == data


def test_who_comes_at_the_same_time_as_another_asks_again(store, monkeypatch):
    """S3 answers 409 where two write a name that has to be absent at once: who was first is not there yet."""
    path = to_path("s3://bucket/x")
    call, answers = path.store.call, ["ConditionalRequestConflict", "OperationAborted"]

    class ClientError(Exception):
        def __init__(self, code):
            self.response = {"ResponseMetadata": {"HTTPStatusCode": 409}, "Error": {"Code": code}}

    async def calls(method, *arguments, **options):
        if method == "put_object" and answers:
            raise ClientError(answers.pop())
        return await call(method, *arguments, **options)

    monkeypatch.setattr(path.store, "call", calls)
    assert path.store.put_if_absent("bucket/x", b"mine")
    assert store.contents() == {"x": b"mine"}


def test_what_is_on_its_way_is_cleared_away_too(store, monkeypatch):
    """An upload goes on when its result is awaited, or when objects are deleted, which leaves it behind."""
    monkeypatch.setattr(staged, "LEAST", 12_000)
    place = StoredPlace(to_path("s3://bucket/x.safetensors"))
    put, delete, goes_on = place._store.put, place._store.delete, threading.Event()

    def slowly(key, data):
        assert goes_on.wait(300)
        return put(key, data)

    def deletes(keys):
        delete(keys)
        goes_on.set()

    monkeypatch.setattr(place._store, "put", slowly)
    monkeypatch.setattr(place._store, "delete", deletes)
    place._staged.write("payload", 0, memoryview(bytes(2 * 12_000)))
    assert place._staged.sent > 1
    jobs = [job for _, job in place._staged._sending]
    for job in jobs:
        for name in ("result", "exception"):
            waits = getattr(job, name)
            monkeypatch.setattr(job, name, lambda *timeout, waits=waits: goes_on.set() or waits(*timeout))
    place.clear()
    place._staged.forget()
    assert not wait(jobs, timeout=300).not_done
    assert store.contents() == {}


class Watched:
    """Counts the threads that hold a semaphore, and those that wait for it."""

    def __init__(self, semaphore):
        self._semaphore, self._lock, self.holding, self.waiting = semaphore, threading.Lock(), 0, 0

    def _count(self, holding, waiting):
        with self._lock:
            self.holding += holding
            self.waiting += waiting

    def __enter__(self):
        if self._semaphore.acquire(blocking=False):
            self._count(1, 0)
        else:
            self._count(0, 1)
            self._semaphore.acquire()
            self._count(1, -1)

    def __exit__(self, *error):
        self._count(-1, 0)
        self._semaphore.release()


def test_few_parts_are_in_memory_however_many_files_are_made(store, monkeypatch):
    """No part is sent before the room in memory is full and a reader waits, or before too many parts are in it."""
    monkeypatch.setattr(joining, "LEAST", 1000)
    monkeypatch.setattr(joining, "SENT", 1000)
    parts = staged.Staged(to_path("s3://bucket/x").store, "bucket/parts")
    names = [f"x{number}" for number in range(4)]
    for start in range(0, 20_000, 250):
        for name in names:
            parts.write(name, start, memoryview(b"01234" * 50))
    parts.flush()
    held, most, is_full, lock = 0, 0, False, threading.Lock()
    room, begun = Watched(joining._IN_MEMORY), time.monotonic()
    read, call = joining.read_part, parts.store.call

    def reads(*arguments):
        nonlocal held, most
        data = read(*arguments)
        with lock:
            held += 1
            most = max(most, held)
        return data

    async def sends(method, *arguments, **options):
        nonlocal held, is_full
        while method == "upload_part" and not is_full:
            is_full = (held == room.holding and room.waiting) or most > 8 or time.monotonic() > begun + 300
            await asyncio.sleep(0.001)
        found = await call(method, *arguments, **options)
        if method == "upload_part":
            with lock:
                held -= 1
        return found

    monkeypatch.setattr(joining, "read_part", reads)
    monkeypatch.setattr(joining, "_IN_MEMORY", room)
    monkeypatch.setattr(parts.store, "call", sends)
    joined = [joining.join(parts, name, 20_000, f"bucket/{name}") for name in names]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: one.prepare(), joined))
    assert sum(len(one.parts) for one in joined) > 32
    assert held == 0
    assert most == 8


def test_what_is_cut_short_in_the_middle_of_a_stream_is_not_kept():
    """fsspec's files are kept as far as they came when they are closed, also by who collects them."""
    store = to_path("memory://made/x").store
    kept = []

    class Streamed(fsspec.spec.AbstractBufferedFile):
        def _initiate_upload(self):
            pass

        def _upload_chunk(self, final=False):
            if final:
                kept.append(self.buffer.getvalue())
            return True

    class System:
        def open(self, name, mode):
            return Streamed(None, name, mode)

    def pieces():
        yield b"one"
        raise faults.FaultError("the source fails")

    store._system = System()
    with pytest.raises(faults.FaultError, match="the source fails"):
        store._stream("x", pieces())
    gc.collect()
    assert kept == []
    store._stream("x", [b"one", b"two"])
    assert kept == [b"onetwo"]


def test_the_memory_of_a_process_is_written_by_it_alone(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"^memory://made/y.* is in the memory of this process"):
        checkpoints.convert(source, "memory://made/y", to_layout="flax", workers=2)
    with pytest.raises(CheckpointError, match="is in the memory of this process"):
        checkpoints.convert_share(source, "memory://made/y", 0, 2, to_layout="flax")
    checkpoints.convert(source, "memory://made/y", to_layout="flax", workers=1)
