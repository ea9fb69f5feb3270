"""Confined commands: limits, writes that are refused, processes that are left behind, files that they write."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from attn_parity.confinement import landlock, process
from attn_parity.confinement.keeper import Ending, Work

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def keep(tmp_path):
    """Run a shell's script under the keeper, in its own folder, which alone it may write to."""
    folder = tmp_path / "scratch"
    folder.mkdir()

    def run(script, seconds=600.0, memory=None):
        words = ("sh", "-c", script)
        work = Work(words, str(folder), {"PATH": os.environ["PATH"]}, (str(folder),), seconds, memory)
        command = [sys.executable, "-P", "-m", "attn_parity.confinement.keeper"]
        environment = process.environment(folder)
        text = json.dumps(dataclasses.asdict(work))
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, check=True)
        return Ending(**json.loads(done.stdout))

    return run


def is_alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@linux
def test_processes_left_behind_are_ended_and_the_status_is_passed_on(keep, tmp_path):
    ending = keep(
        "setsid sh -c 'echo $$ > orphan; exec sleep 1000' & while [ ! -s orphan ]; do sleep 0.01; done; exit 3"
    )
    assert ending == Ending("exit", 3, "")
    assert not is_alive(int((tmp_path / "scratch/orphan").read_text()))


@linux
def test_limits_end_a_command(keep):
    assert keep("sleep 1000", seconds=0.2).end == "time"
    assert keep("sleep 1000", memory=1).end == "memory"


def test_the_end_of_stderr_is_kept_and_bounded(keep):
    ending = keep("head -c 300000 /dev/zero | tr '\\0' x >&2; echo last >&2")
    assert ending.errors.endswith("xlast\n")
    assert len(ending.errors) <= 1 << 16


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
def test_writes_elsewhere_are_refused_by_the_kernel(keep, tmp_path):
    (tmp_path / "file").write_text("mine")
    keep("echo x > inside; echo x >> ../file; echo x > ../new; rm ../file; mv inside ../moved; cp inside ../copy")
    keep("echo x > /dev/null && echo ok > null")
    assert (tmp_path / "file").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "scratch"}
    assert (tmp_path / "scratch/null").read_text() == "ok\n"


@pytest.mark.skipif(
    not landlock.version() or not os.access("/dev/shm", os.W_OK), reason="no Landlock, or no shared memory"
)
def test_workers_share_memory(keep, tmp_path):
    name = f"/dev/shm/{tmp_path.name}-{os.getpid()}"
    keep(f"echo x > {name} && rm {name} && echo ok > shared")
    assert (tmp_path / "scratch/shared").read_text() == "ok\n"


def test_the_environment_has_a_home_of_its_own_and_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(["", "relative", str(tmp_path / "mine/src"), str(tmp_path / "other")])
    )
    found = process.environment(tmp_path / "scratch", avoid=tmp_path / "mine")
    assert "secret" not in found.values()
    assert found["HOME"] == str(tmp_path / "scratch/home")
    assert found["TMPDIR"] == str(tmp_path / "scratch/tmp")
    entries = found["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path / "other") in entries
    assert not {"", "relative", str(tmp_path / "mine/src")} & set(entries)


def test_links_and_pipes_are_not_read_as_reports(tmp_path):
    (tmp_path / "report").write_text("mine")
    (tmp_path / "link").symlink_to("report")
    os.mkfifo(tmp_path / "pipe")
    contents = [process.content(tmp_path / name) for name in ("report", "link", "pipe", "gone", ".")]
    assert contents == ["mine", "", "", "", ""]


@pytest.mark.parametrize(
    ("ending", "line"),
    [
        (Ending("time", -9, ""), "took longer than 2 s"),
        (Ending("memory", -9, ""), "needed more than 1 GiB of memory"),
        (Ending("exit", 0, "noise"), "its process ended without a result (status 0)"),
        (Ending("exit", 2, "error: a\nnoise\nerror: b\x1b[31m\n"), "b\\x1b[31m"),
    ],
)
def test_an_ending_is_one_line(ending, line):
    assert process.error_line(ending, 2.0, 1 << 30) == line
