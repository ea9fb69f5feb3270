"""Conversions to object stores that are killed, or that meet another: nothing is there, or all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")


from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.checkpoints.containers.remote import to_path
from attn_bridge.checkpoints.workers.places import leases
from parity_tests.support.calls import cover

from ..stored_checkpoints import ours


def killed(store, command, when):
    """Run a command, kill all of its processes at the first request of a kind, and return whether that came."""
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_bridge", *command],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    seen = []

    def before(request):
        if when(request) and not seen:
            seen.append(request)
            os.killpg(process.pid, signal.SIGKILL)

    store.before = before
    process.communicate()
    store.before = lambda request: None
    return bool(seen)


MOMENTS = {
    "a part is sent": lambda method, key: method == "PUT" and "/parts/" in key,
    "a journal is written": lambda method, key: method == "PUT" and "/journals/" in key,
    "publication begins": lambda method, key: method == "PUT" and key.endswith("/publishing"),
    "the folder is marked": lambda method, key: method == "PUT" and key.endswith("folder/attn-bridge.unfinished"),
    "tensors are there": lambda method, key: method == "PUT" and key.endswith("folder/model.safetensors"),
    "the manifest is there": lambda method, key: method == "PUT" and key.endswith("folder/attn-bridge.json"),
    "all is committed": lambda method, key: method == "PUT" and key.endswith("/committed"),
    "parts are deleted": lambda method, key: method == "POST" and key == "bucket/",
}


@cover.some("moment", list(MOMENTS), always=list(MOMENTS)[1::3])
def test_a_run_that_is_killed_leaves_nothing_readable_or_all_of_it_and_resume_ends_it(store, source, tmp_path, moment):
    wanted = ours(source, tmp_path, "folder", to_layout="flax")
    command = ["convert", str(source), "s3://bucket/folder", "--to", "flax", "--workers", "2", "--task-bytes", "65536"]
    assert killed(store, command, lambda request: MOMENTS[moment](*request[:2]))
    try:
        found = checkpoints.inspect("s3://bucket/folder")
    except CheckpointError:
        pass
    else:
        assert len(found.tensors) == len(checkpoints.inspect(tmp_path / "local" / "folder").tensors)
        assert checkpoints.verify(source, "s3://bucket/folder", to_layout="flax").passed
    checkpoints.convert(source, "s3://bucket/folder", to_layout="flax", resume=True)
    assert store.contents() == wanted
    assert not store.uploads


def test_workers_of_their_own_end_what_a_killed_one_left(store, source, tmp_path):
    wanted = ours(source, tmp_path, "x.safetensors", to_layout="flax")
    url, options = "s3://bucket/x.safetensors", {"to_layout": "flax", "task_bytes": 1 << 15}
    command = ["convert", str(source), url, "--to", "flax", "--task-bytes", "32768", "--worker", "0/2"]
    assert killed(store, command, lambda request: MOMENTS["a part is sent"](*request[:2]))
    second = checkpoints.convert_share(source, url, 1, 2, **options)
    assert second.result is None
    assert second.waits_for
    assert not [key for key in store.contents() if "partial" not in key]
    assert checkpoints.convert_share(source, url, 0, 2, **options).result is not None
    assert store.contents() == wanted
    assert checkpoints.convert_share(source, url, 1, 2, **options).was_there


def test_two_runs_at_once_are_told_apart(store, source, tmp_path):
    url = "s3://bucket/x.safetensors"
    wanted = ours(source, tmp_path, "x.safetensors", to_layout="flax")
    held = leases.Lease(to_path(url).store, "bucket/.x.safetensors.partial/leases/alone")
    with held:
        assert held.take()
        with pytest.raises(CheckpointError, match="another conversion is writing to"):
            checkpoints.convert(source, url, to_layout="flax")
    checkpoints.convert(source, url, to_layout="flax")
    assert store.contents() == wanted


def test_who_is_silent_is_taken_to_be_gone_on_another_machine_alone(store, monkeypatch):
    """A process of this machine that lives may be kept from saying so for any time."""
    monkeypatch.setattr(leases, "BEAT", 1000.0)
    monkeypatch.setattr(leases, "PATIENCE", 0.0)
    there, key = to_path("s3://bucket/x").store, "bucket/leases/alone"
    with leases.Lease(there, key) as held:
        assert held.take()
        assert not leases.Lease(there, key).take()
        assert held.is_held()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(leases.socket, "gethostname", lambda: "another")
        held = leases.Lease(there, key)
        assert held.take()
    with leases.Lease(there, key) as other:
        assert other.take()
        assert not held.is_held()


@pytest.mark.parametrize("settings", [{}, {"ocdbt": 1}])
def test_the_marker_of_a_finished_orbax_folder_comes_last(store, source, tmp_path, settings):
    url, marker = "s3://bucket/x.orbax", "x.orbax/commit_success.txt"
    options = {"to_layout": "flax", "settings": settings}
    wanted = ours(source, tmp_path, "x.orbax", **options)
    made, there = [], []

    def before(request):
        method, key, _ = request
        if method in ("PUT", "POST") and key.removeprefix("bucket/") in wanted:
            made.append(key.removeprefix("bucket/"))
            there.append(store.contents())

    checkpoints.convert(source, url, to_layout="same", format="orbax")  # an earlier target, with a marker
    store.before = before
    checkpoints.convert(source, url, overwrite=True, **options)
    store.before = lambda request: None
    assert store.contents() == wanted
    assert made[-1] == marker
    assert not [key for key, found in zip(made, there, strict=True) if marker in found]
    assert wanted.keys() - {marker} <= there[-1].keys()
