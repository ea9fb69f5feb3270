"""A report is written to a file whole, or the error is one line."""

import json
import stat
from pathlib import Path

import pytest

from attn_bridge import whole_files as files
from attn_parity.rendering.html import as_html
from attn_parity.rendering.json import as_json
from attn_parity.rendering.junit import as_junit
from parity_tests.support.judging.reports import different_report

from .renderings import EMPTY

WRITERS = {"json": as_json, "html": as_html, "junit": as_junit}


@pytest.mark.parametrize("form", WRITERS)
def test_writers_return_the_written_text(form, tmp_path):
    path = tmp_path / "report"
    returned = WRITERS[form](different_report(), path)
    written = path.read_bytes().decode("utf-8")
    assert (json.loads(written) if form == "json" else written) == returned
    assert written.endswith("\n")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("method", ["str", "Path"])
def test_the_methods_of_a_report_write_the_same(form, method, tmp_path):
    path = tmp_path / "report"
    given = str(path) if method == "str" else path
    report = different_report()
    assert getattr(report, f"to_{form}")(given) == WRITERS[form](report)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("form", WRITERS)
def test_writing_to_a_folder_is_refused(form, tmp_path):
    with pytest.raises(ValueError, match=r"^.*report cannot be written: it is a folder$") as caught:
        WRITERS[form](different_report(), folder := made(tmp_path / "report"))
    assert str(caught.value) == f"{folder} cannot be written: it is a folder"
    assert [list(tmp_path.iterdir()), list(folder.iterdir())] == [[folder], []]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("form", WRITERS)
def test_a_missing_folder_is_refused_before_rendering(form, tmp_path):
    path = tmp_path / "absent" / "report"
    with pytest.raises(ValueError, match="there is no folder") as caught:
        WRITERS[form](None, path)  # it is found out before the report is looked at
    assert str(caught.value) == f"{path} cannot be written: there is no folder {path.parent}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["loop", "x" * 300], ids=["a link to itself", "a name too long"])
def test_bad_paths_are_refused_in_one_line(path, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"cannot be written: .+") as caught:
        as_json(EMPTY, tmp_path / path)
    assert str(caught.value).startswith(str(tmp_path / path))
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ValueError, match="report cannot be written: No space left on device"):
        as_html(EMPTY, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_file_modes_are_kept(tmp_path):
    path = tmp_path / "report"
    path.write_text("before")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    as_junit(EMPTY, link)
    assert link.is_symlink()
    assert path.read_text().startswith("<?xml")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    as_json(EMPTY, "/dev/null")
    assert not Path("/dev/null").is_file()
    assert files.checked(None) is None
