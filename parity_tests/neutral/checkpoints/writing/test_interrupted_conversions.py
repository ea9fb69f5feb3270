"""Conversions that fail, are killed or meet another one: what they leave behind, and what resuming goes on from."""

from __future__ import annotations

import errno
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError, DiskFullError
from attn_bridge.checkpoints.containers.safetensors import SafetensorsWriter
from attn_bridge.checkpoints.workers.places.local import LocalPlace
from attn_bridge.cli.app import run
from attn_bridge.printable import shell_word
from parity_tests.support.calls import cover
from parity_tests.support.processes.forks import in_a_process

from ..checkpoint_files import folder, interrupted, made, sharded, tree, write
from ..checkpoints import gpt


@pytest.mark.parametrize("keeps_time", [False, True], ids=["", "with its time kept"])
def test_a_source_that_changes_under_way_is_noticed(tmp_path, keeps_time):
    source = sharded(tmp_path / "hf")
    touched = []

    def touch(done, total, name):
        if name and not touched:
            touched.append(name)
            file = source / "model-00004-of-00004.safetensors"
            data, status = bytearray(file.read_bytes()), file.stat()
            data[-1] ^= 1
            file.write_bytes(data)
            if keeps_time:  # as rsync --inplace does
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoints.convert(source, tmp_path / "flax", progress=touch)
    assert not (tmp_path / "flax").exists()


def test_a_full_disk_leaves_nothing_and_can_be_resumed_from(tmp_path):
    source = sharded(tmp_path / "hf", width=64)
    undisturbed = tree(checkpoints.convert(source, tmp_path / "whole").target)
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        f"from attn_bridge.cli.app import run; sys.exit(run(['convert', {str(source)!r}, {str(tmp_path / 'flax')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "flax").exists()
    checkpoints.convert(source, tmp_path / "flax", resume=True)
    assert tree(tmp_path / "flax") == undisturbed


def failing(monkeypatch, error, after=4):
    """Have the disk fail at a tensor, and return no longer failing."""
    write_range, calls = SafetensorsWriter.write_range, []

    def fail(self, name, start, data):
        calls.append(name)
        if len(calls) > after:
            raise error
        write_range(self, name, start, data)

    monkeypatch.setattr(SafetensorsWriter, "write_range", fail)
    return lambda: monkeypatch.setattr(SafetensorsWriter, "write_range", write_range)


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (CheckpointError("x: can't be written: Input/output error"), "error: x: can't be written: Input/output", 2),
        (KeyboardInterrupt(), "error: interrupted", 130),
        (OSError("no more"), "error: no more", 2),
    ],
)
def test_what_a_failed_run_leaves_is_named_with_what_resumes_and_removes_it(
    tmp_path, monkeypatch, capsys, error, line, status
):
    source, target = sharded(tmp_path / "hf"), tmp_path / "a flax"
    heal = failing(monkeypatch, error)
    assert run(["convert", str(source), str(target)]) == status
    said = capsys.readouterr().err
    staging = tmp_path / ".a flax.partial"
    assert said.startswith(line)
    assert said.endswith(
        f"; {staging} holds what was written: --resume goes on from it, rm -r '{staging}' removes it\n"
    )
    assert said.count("\n") == 1
    heal()
    assert checkpoints.convert(source, target, resume=True).resumed == 4
    assert not staging.exists()


def test_a_run_starts_afresh_unless_told_to_resume(tmp_path, monkeypatch):
    source, target = sharded(tmp_path / "hf"), tmp_path / "flax"
    heal = failing(monkeypatch, CheckpointError("x: can't be written: Input/output error"))
    with pytest.raises(CheckpointError, match="--resume goes on from it"):
        checkpoints.convert(source, target)
    heal()
    assert checkpoints.convert(source, target).resumed == 0


@pytest.mark.parametrize(
    ("error", "after", "name"),
    [
        (DiskFullError("x: can't be written: No space left on device"), 4, "flax"),
        (CheckpointError("x: can't be written: Input/output error"), 0, "flax"),
        (KeyboardInterrupt(), 0, "flax"),
    ],
)
def test_a_full_disk_and_a_run_that_nothing_can_go_on_from_leave_nothing(
    tmp_path, monkeypatch, capsys, error, after, name
):
    source = sharded(tmp_path / "hf")
    failing(monkeypatch, error, after)
    assert run(["convert", str(source), str(tmp_path / name)]) in (2, 130)
    assert ".partial" not in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


def test_an_interrupt_before_anything_is_written_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(place, plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalPlace, "recover", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.convert(sharded(tmp_path / "hf"), tmp_path / "x")
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("target", ["x", "x.npz", "x.pt", "x.msgpack", "x.orbax", "x.dcp"])
def test_a_disk_that_is_really_full_keeps_nothing_of_a_run(tmp_path, monkeypatch, capsys, target):
    source = sharded(tmp_path / "hf", width=32)
    pwrite, written = os.pwrite, []

    def full(number, data, start):
        written.append(len(data))
        if sum(written) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(number, data, start)

    monkeypatch.setattr(os, "pwrite", full)
    assert run(["convert", str(source), str(tmp_path / target)]) == 2
    said = capsys.readouterr().err
    assert said.endswith("can't be written: No space left on device\n")
    assert said.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


def convert_until(reports: int, source, target):
    """Resume a conversion in this process, and kill it when it has reported progress that often."""

    def report(done, total, name):
        nonlocal reports
        reports -= 1
        if not reports:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.convert(source, target, resume=True, progress=report)


@cover.some("target", ["flax", "flax.npz"], always=["flax"])
def test_kills_at_any_moment_leave_all_or_nothing_and_resuming_ends_alike(tmp_path, target):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = checkpoints.convert(source, tmp_path / f"whole{target}").target
    wanted = tree(undisturbed) if undisturbed.is_dir() else undisturbed.read_bytes()
    there = tmp_path / target
    for reports in (1, 3, 8, 2, 30, 5, 200, 10_000):
        status = in_a_process(functools.partial(convert_until, reports, source, there))
        assert status == (0 if there.exists() else -signal.SIGKILL)
        if there.exists():
            break
    assert reports > 8
    assert (tree(there) if there.is_dir() else there.read_bytes()) == wanted
    assert checkpoints.verify(source, there).passed


@pytest.mark.parametrize("file", ["flax.safetensors", "flax.msgpack"])
def test_resuming_a_single_file_skips_what_is_there(tmp_path, file):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = checkpoints.convert(source, tmp_path / f"whole{file}").target.read_bytes()

    def stop(done, total, name):
        if done > total * 0.6:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        checkpoints.convert(source, tmp_path / file, progress=stop)
    result = checkpoints.convert(source, tmp_path / file, resume=True)
    assert result.resumed > 5
    assert result.target.read_bytes() == undisturbed


@pytest.mark.parametrize(("file", "settings"), [("flax.dcp", {}), ("flax.orbax", {"ocdbt": 1})])
def test_resuming_a_folder_of_another_container_skips_what_is_there(tmp_path, file, settings):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = tree(checkpoints.convert(source, tmp_path / f"whole{file}", settings=settings).target)
    interrupted(source, tmp_path / file, settings=settings)
    result = checkpoints.convert(source, tmp_path / file, resume=True, settings=settings)
    assert result.resumed > 5
    assert tree(result.target) == undisturbed
    assert checkpoints.verify(source, tmp_path / file).passed
    again = checkpoints.convert(source, tmp_path / file, overwrite=True, settings=settings)
    assert tree(again.target) == undisturbed


def test_resuming_skips_what_is_there_and_redoes_what_was_damaged(tmp_path):
    source = sharded(tmp_path / "hf", width=32)
    undisturbed = tree(checkpoints.convert(source, tmp_path / "whole").target)

    class StoppedError(Exception):
        pass

    def stop(done, total, name):
        if done > total * 0.6:
            raise StoppedError

    with pytest.raises(StoppedError):
        checkpoints.convert(source, tmp_path / "flax", progress=stop)
    staging = tmp_path / ".flax.partial"
    (journal,) = (staging / "journals").iterdir()
    written = len(journal.read_text().splitlines())
    file = staging / "payload" / "model-00001-of-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    result = checkpoints.convert(source, tmp_path / "flax", resume=True)
    assert 5 < result.resumed == written - 1
    assert tree(tmp_path / "flax") == undisturbed
    assert not staging.exists()


def test_a_resumed_run_counts_the_casts_of_the_one_before(tmp_path):
    source = sharded(tmp_path / "hf", width=32)
    whole = checkpoints.convert(source, tmp_path / "whole", dtype="bf16")
    interrupted(source, tmp_path / "flax", dtype="bf16")
    result = checkpoints.convert(source, tmp_path / "flax", dtype="bf16", resume=True)
    assert result.resumed > 5
    assert result.changed == whole.changed
    assert min(whole.changed.values()) > 0
    assert tree(tmp_path / "flax") == tree(tmp_path / "whole")  # and nothing of it is in the output


def test_what_can_not_be_gone_on_with_is_begun_anew_and_said(tmp_path, capsys):
    source = sharded(tmp_path / "hf", width=32)
    for name, reason in (("x.npz", "a file of npz is written"), ("x", "")):
        interrupted(source, tmp_path / name, is_killed=True)
        assert run(["convert", str(source), str(tmp_path / name), "--resume"]) == 0
        shown = capsys.readouterr().out
        assert ("were there from before" in shown) == (not reason)
        assert ("restarted: " + reason in shown) == bool(reason)
    assert run(["convert", str(source), str(tmp_path / "x"), "--resume", "--overwrite"]) == 0
    assert "restarted: no interrupted run of this very conversion was found" in capsys.readouterr().out
    interrupted(source, tmp_path / "x", overwrite=True)
    payload = tmp_path / ".x.partial" / "payload"
    for file in payload.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    assert run(["convert", str(source), str(tmp_path / "x"), "--resume", "--overwrite"]) == 0
    assert "restarted: nothing of what was written is intact" in capsys.readouterr().out
    assert checkpoints.verify(source, tmp_path / "x").passed


def test_two_conversions_to_one_place_do_not_meet(tmp_path):
    source = folder(tmp_path / "hf")

    def again(done, total, name):
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            checkpoints.convert(source, tmp_path / "x")

    checkpoints.convert(source, tmp_path / "x", progress=again)


def test_a_staging_folder_that_is_a_link_or_someone_elses_is_left_alone(tmp_path):
    source = folder(tmp_path / "hf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("x")
    (tmp_path / ".a.npz.partial").symlink_to(tmp_path / "mine")
    shared = folder(tmp_path / ".b.npz.partial")
    before = tree(tmp_path)
    for name in ("a.npz", "b.npz"):
        with pytest.raises(CheckpointError, match=r"partial is in the way"):
            checkpoints.convert(source, tmp_path / name)
    with pytest.raises(CheckpointError, match="must not be in one another"):
        checkpoints.convert(shared, tmp_path / "b.npz")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "lines\nof two", "back\\slash\t", "\udcff"])
def test_a_name_in_a_command_is_one_word_on_one_line(name):
    word = shell_word(name)
    assert word.isprintable()
    said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert said == os.fsencode(name)


def test_a_refusal_leaves_no_staging_folder(tmp_path):
    arrays = {**gpt(1, tied=False), "tok_emb.weight": gpt(1)["tok_emb.weight"] + 1}
    source = write(tmp_path / "source.safetensors", arrays)
    with pytest.raises(CheckpointError, match="can't be tied"):
        checkpoints.convert(source, tmp_path / "hf", to_layout="hf-gpt2")
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def run_until(renames: int, arguments):
    """Run a command in this process, which ends instead of renaming once more."""
    rename = pathlib.Path.replace

    def replace(self, target):
        nonlocal renames
        renames -= 1
        if renames < 0:
            os._exit(77)
        return rename(self, target)

    pathlib.Path.replace = replace
    sys.exit(run(arguments))


@cover.some("old", ["none", "file", "folder"], always=["folder"])
def test_a_kill_between_any_two_renames_is_undone_or_finished(tmp_path, old):
    source = write(tmp_path / "source.safetensors", made("hf-bert"))
    wanted, before = tmp_path / "wanted", tmp_path / "before"
    for path in (wanted, before):
        path.mkdir()
    if old != "none":
        checkpoints.convert(source, before / "x", format="torch" if old == "file" else "safetensors")
    arguments = ["convert", str(source), "--format", "npz", "--to", "torch", "--overwrite"]
    assert run([*arguments, str(wanted / "x")]) == 0
    for stop in range(6):
        place = tmp_path / f"at {stop}"
        shutil.copytree(before, place)
        ended = in_a_process(functools.partial(run_until, stop, [*arguments, str(place / "x")]))
        assert ended in (0, 77)
        if ended == 77:  # without --overwrite: what was there is back, or the new one is whole
            status = run([*arguments[:-1], str(place / "x"), "--resume"])
            shown = {path: data for path, data in tree(place).items() if ".partial" not in path}
            assert shown == (tree(wanted) if status == 0 else tree(before))
            assert run([*arguments, str(place / "x"), "--resume"]) == 0
        assert tree(place) == tree(wanted)
    assert ended == 0


@pytest.mark.parametrize("target", ["flax", "flax.npz", "flax.orbax"])
def test_resuming_what_was_published_keeps_it(tmp_path, target):
    source = sharded(tmp_path / "hf")
    there = checkpoints.convert(source, tmp_path / target).target
    files = [there, *there.rglob("*")] if there.is_dir() else [there]
    before = {path: path.stat().st_ino for path in files}
    result = checkpoints.convert(source, there, resume=True)  # a run may be killed after it has published
    assert result.digests == checkpoints.convert(source, tmp_path / f"again{target}").digests
    assert {path: path.stat().st_ino for path in files} == before
    assert result.resumed == len(result.digests)
    for options in ({"resume": True, "dtype": "bf16"}, {}):
        with pytest.raises(CheckpointError, match=r"exists; --overwrite"):
            checkpoints.convert(source, there, **options)
