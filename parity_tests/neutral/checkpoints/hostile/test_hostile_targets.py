"""Targets that a conversion must not write over: devices behind links, files of earlier targets, names too long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.cli.app import run
from parity_tests.fuzz.samples import read

from ..checkpoint_files import folder, interrupted, tree

NEVER = "a device, a pipe, a socket or an open file, which is never replaced"
CONVERSIONS = {
    "alone": lambda source, target, **options: checkpoints.convert(source, target, **options),
    "in tasks": lambda source, target, **options: checkpoints.convert(source, target, task_bytes=1 << 20, **options),
    "a share": lambda source, target, **options: checkpoints.convert_share(source, target, 0, 1, **options),
}


@pytest.fixture
def source(tmp_path):
    """Return a checkpoint of which a conversion keeps something aside."""
    return folder(tmp_path / "hf")


def refused(tmp_path, conversion, source, target, **options):
    """Return why a conversion is refused, once it has changed nothing."""
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    contents = tree(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        CONVERSIONS[conversion](source, target, **options)
    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert after.keys() == before.keys()
    assert all(os.path.samestat(after[path], before[path]) for path in before)
    assert tree(tmp_path) == contents
    assert str(caught.value).isprintable()
    return str(caught.value)


# ---- devices, pipes and descriptors behind links


@pytest.mark.parametrize(("name", "overwrite"), [("x.npz", True), ("x.npz", False), ("x", True)])
def test_links_to_a_pipe_are_never_replaced(tmp_path, source, name, overwrite):
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "sub" / "pipe")
    (tmp_path / "sub" / "link").symlink_to("pipe")
    (tmp_path / "around").symlink_to("sub")
    (tmp_path / name).symlink_to("around/link")
    said = refused(tmp_path, "alone", source, tmp_path / name, overwrite=overwrite)
    assert said == f"{tmp_path / name} is a link to {NEVER}"


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_link_to_a_device_is_never_replaced(tmp_path, source, conversion):
    target = tmp_path / "x.safetensors"
    target.symlink_to(os.devnull)
    said = refused(tmp_path, conversion, source, target, overwrite=True)
    assert said == f"{target} is a link to {NEVER}"


def test_a_link_to_a_descriptor_is_never_replaced(tmp_path, source):
    """What ``/dev/stdout`` is: it leads to a plain file where output goes to one."""
    with (tmp_path / "output").open("wb") as output:
        own = ("/dev/fd", "/proc/self/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd")
        for number, way in enumerate(way for way in own if Path(way).is_dir()):
            (tmp_path / f"{number}.npz").symlink_to(f"{way}/{output.fileno()}")
            said = refused(tmp_path, "alone", source, tmp_path / f"{number}.npz", overwrite=True)
            assert said.endswith(f"is a link to {NEVER}")
        (tmp_path / "two.npz").symlink_to("0.npz")
        assert refused(tmp_path, "alone", source, tmp_path / "two.npz", overwrite=True).endswith(NEVER)


@pytest.mark.parametrize("ending", ["json", "kept"])
def test_pipes_in_place_of_the_files_next_to_a_target_are_never_replaced(tmp_path, source, ending):
    path = tmp_path / f"x.npz.attn-bridge.{ending}"
    os.mkfifo(tmp_path / "pipe")
    path.symlink_to("pipe")
    assert refused(tmp_path, "alone", source, tmp_path / "x.npz", overwrite=True) == f"{path} is a link to {NEVER}"
    path.unlink()
    path.mkdir()
    said = refused(tmp_path, "alone", source, tmp_path / "x.npz", overwrite=True)
    assert said == f"{path} is a folder, which is never replaced"


# ---- files of an earlier target


@pytest.mark.parametrize(
    ("conversion", "name"),
    [("alone", "x.npz"), ("in tasks", "x.safetensors"), ("a share", "x.orbax"), ("alone", "x"), ("a share", "x")],
)
def test_files_next_to_a_missing_target_stay_unless_they_may_go(tmp_path, source, conversion, name):
    for ending, other in (("kept", "json"), ("json", "kept")):
        path = tmp_path / f"{name}.attn-bridge.{ending}"
        path.write_text("the only copy of something")
        said = refused(tmp_path, conversion, source, tmp_path / name)
        assert said == f"{path} exists; --overwrite (in Python, overwrite=True) replaces it"
        path.rename(tmp_path / f"aside.{other}")
    (tmp_path / f"{name}.attn-bridge.kept").write_text("of no use")
    CONVERSIONS[conversion](source, tmp_path / name, overwrite=True)
    assert checkpoints.verify(source, tmp_path / name).passed
    assert (tmp_path / "aside.kept").read_text() == "the only copy of something"


def test_what_a_deleted_target_left_is_refused_by_the_command(tmp_path, source, capsys):
    target = checkpoints.convert(source, tmp_path / "x.npz").target
    target.unlink()
    before = tree(tmp_path)
    assert run(["convert", str(source), str(target)]) == 2
    assert capsys.readouterr().err == (
        f"error: {target}.attn-bridge.json exists; --overwrite (in Python, overwrite=True) replaces it\n"
    )
    assert tree(tmp_path) == before
    assert run(["convert", str(source), str(target), "--overwrite"]) == 0


# ---- names near the file system's limit


@pytest.mark.parametrize(
    ("conversion", "name", "longest"),
    [("alone", "é.safetensors", 238), ("alone", "é", 246), ("in tasks", "é", 246), ("a share", "é.orbax", 238)],
)
def test_a_name_that_leaves_no_room_for_others_is_refused(tmp_path, source, conversion, name, longest):
    name = "x" * (longest - len(os.fsencode(name))) + name
    said = refused(tmp_path, conversion, source, tmp_path / f"x{name}")
    assert f"the name is too long: {'.' if longest == 246 else 'x'}" in said
    assert said.endswith("has 256 bytes, and the file system takes 255")
    CONVERSIONS[conversion](source, tmp_path / name)
    assert checkpoints.verify(source, tmp_path / name).passed
    back = checkpoints.convert(tmp_path / name, tmp_path / "back", to_layout="hf-gpt2").target
    assert read(back).keys() == read(source).keys()


def test_the_longest_name_is_resumed_and_overwritten(tmp_path, source):
    target = tmp_path / ("x" * 226 + ".safetensors")
    interrupted(source, target, is_killed=True)
    assert checkpoints.convert(source, target, resume=True).resumed
    checkpoints.convert(source, target, overwrite=True)
    assert checkpoints.verify(source, target).passed


def test_the_file_systems_own_limit_is_asked_for(tmp_path, source, monkeypatch):
    limits = {"PC_NAME_MAX": 143, "PC_PATH_MAX": 4096}  # of eCryptfs
    monkeypatch.setattr(os, "pathconf", lambda path, name: limits[name])
    said = refused(tmp_path, "alone", source, tmp_path / ("x" * 123 + ".npz"))
    assert said.endswith("has 144 bytes, and the file system takes 143")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".npz", "x" * 5000 + ".orbax", "x" * 300 + "/x.npz"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, source, name, capsys):
    assert run(["convert", str(source), str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert (
        "does not exist; make that folder first to write x.npz to it" if "/" in name else "the name is too long"
    ) in error
    assert error.count("\n") == 1
    assert len(error) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_path_that_leaves_no_room_for_others_is_refused(tmp_path, source, monkeypatch):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    limits = {"PC_NAME_MAX": 255, "PC_PATH_MAX": len(str(deep)) + 40}
    monkeypatch.setattr(os, "pathconf", lambda path, name: limits[name])
    assert "the path is too long" in refused(tmp_path, "alone", source, deep / "x.npz")
