"""The suite keeps machine code of kernels by what it was compiled from."""

from __future__ import annotations

import ctypes
import importlib.util

import pytest

from parity_tests import compiled_kernels

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the extra cpu is not installed", allow_module_level=True)

from attn_kernels.compiler import compiling
from attn_kernels.compiler.language import WORD, Code, function


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compile a function that returns a number; it fails where LLVM may not be used and the code is not there."""
    monkeypatch.setattr(compiling, "address_of", compiled_kernels.kept(compiling, tmp_path))

    def call(number: int, *, unrolls: bool = True, may_compile: bool = True) -> int:
        module = compiling.module("test", unrolls=unrolls)
        code = Code(function(module, "answer", [], WORD))
        code.ret(number)
        with monkeypatch.context() as patch:
            if not may_compile:
                patch.setattr(compiling, "optimized", None)
            return ctypes.CFUNCTYPE(ctypes.c_int64)(compiling.address_of(module, "answer"))()

    return call


def test_machine_code_that_is_there_is_loaded(compiled, tmp_path):
    assert compiled(17) == 17
    assert len(list(tmp_path.iterdir())) == 1
    assert compiled(17, may_compile=False) == 17


@pytest.mark.parametrize("change", [{"number": 18}, {"number": 17, "unrolls": False}])
def test_what_changes_the_code_is_compiled_anew(compiled, tmp_path, change):
    compiled(17)
    assert compiled(**change) == change["number"]
    assert len(list(tmp_path.iterdir())) == 2
