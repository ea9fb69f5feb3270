"""Machine code of kernels is kept on disk by what it was compiled from, for all processes of one user."""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib.util
import multiprocessing
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the extra cpu is not installed", allow_module_level=True)

from attn_kernels.compiler import compiling, storage
from attn_kernels.compiler.language import WORD, Code, function


def answer(number: int, *, unrolls: bool = True) -> int:
    """Return a number by a compiled function."""
    module = compiling.module("test", unrolls=unrolls)
    code = Code(function(module, "answer", [], WORD))
    code.ret(number)
    return ctypes.CFUNCTYPE(ctypes.c_int64)(compiling.address_of(module, "answer"))()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(storage.VARIABLE, str(tmp_path / "code"))
    return tmp_path / "code"


@pytest.fixture
def count(monkeypatch):
    """Count the modules that LLVM compiles."""
    compiled, optimized = [], compiling.optimized
    monkeypatch.setattr(compiling, "optimized", lambda *given: compiled.append(1) or optimized(*given))
    return compiled


def test_machine_code_that_is_there_is_loaded(folder, count):
    assert [answer(17), answer(17)] == [17, 17]
    assert len(count) == 1
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("change", [{"number": 18}, {"number": 17, "unrolls": False}])
def test_changed_code_is_compiled_again(folder, count, change):
    answer(17)
    assert answer(**change) == change["number"]
    assert len(count) == len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("attribute", ["NAME", "FEATURES", "llvm"])
def test_another_processor_or_compiler_does_not_load_it(folder, monkeypatch, attribute):
    module = compiling.module("test")
    before = compiling._stored_as(module)

    class Other:
        llvm_version_info = (1, 2, 3)

        def flatten(self) -> str:
            return "+other"

    monkeypatch.setattr(compiling, attribute, "other" if attribute == "NAME" else Other())
    assert compiling._stored_as(module) != before


@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: b"", lambda code: code[:-1] + b"\xff"])
def test_a_damaged_file_is_compiled_again(folder, count, damage):
    answer(17)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert answer(17) == 17
    assert len(count) == 2
    assert file.read_bytes() == whole


def test_a_folder_that_others_can_write_is_neither_read_nor_written(folder, count):
    folder.mkdir()
    folder.chmod(0o777)
    assert [answer(17), answer(17)] == [17, 17]
    assert len(count) == 2
    assert not list(folder.iterdir())


def test_nothing_is_kept_without_a_folder_or_in_a_file(tmp_path, monkeypatch, count):
    (tmp_path / "file").touch()
    for place in ("", tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(storage.VARIABLE, str(place))
        assert answer(17) == 17
    assert len(count) == 3
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_processes_that_start_together_share_a_folder(folder):
    with concurrent.futures.ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(answer, [5, 6] * 8)) == [5, 6] * 8
    assert len(list(folder.iterdir())) == 2
    assert not list(folder.glob("part-*"))


def test_the_folder_is_in_the_caches_of_the_user(monkeypatch):
    monkeypatch.delenv(storage.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert storage.folder() == Path("/caches/attn_kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert storage.folder() == Path("/home/user/.cache/attn_kernels")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **options: Path("~/.cache/attn_kernels"))  # no home
    assert storage.folder() is None
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert storage.folder() is None
