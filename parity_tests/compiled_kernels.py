"""Keep the machine code of `attn_kernels` where XLA's is kept: workers, lanes and the next run load what is there.

A pytest plugin, registered by ``parity_tests/conftest.py`` where ``JAX_COMPILATION_CACHE_DIR`` names a folder. What is
not there yet is compiled as in a user's process. A file is named by a digest of the LLVM assembly, of the module that
compiles it and of the processor, so that what changes any of them is compiled anew.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODULE = "attn_kernels.compiler.compiling"


class CompiledKernels:
    """The plugin.

    Args:
        folder: where machine code is kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._is_set = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Replace the function that compiles, once a test has loaded it; nothing else may load LLVM for a test."""
        if not self._is_set and MODULE in sys.modules:
            self._is_set = True
            compiling: Any = sys.modules[MODULE]
            compiling.address_of = kept(compiling, self.folder)


def kept(compiling: Any, folder: Path) -> Callable[[Any, str], int]:
    """Return `compiling.address_of`, which keeps machine code in a folder and takes it from there."""
    llvm, create = compiling.llvm, compiling.llvm.create_mcjit_compiler
    compile_anew = inspect.unwrap(compiling.address_of)
    source = Path(compiling.__file__).read_text(encoding="utf-8")
    made_for = (source, compiling.NAME, compiling.FEATURES.flatten(), repr(llvm.llvm_version_info))

    @functools.wraps(compile_anew)
    def address_of(written: Any, name: str) -> int:
        digest = hashlib.sha256("\0".join((*made_for, str(written.unrolls), str(written))).encode()).hexdigest()
        path = folder / f"llvm-{digest}.o"
        if not path.is_file():
            return compile_and_keep(written, name, path)
        machine = compiling.machine_for(compiling.NAME, compiling.FEATURES.flatten(), jit=True)
        engine = create(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(path.read_bytes()))
        engine.finalize_object()
        compiling._ALIVE.append(engine)
        return int(engine.get_function_address(name))

    def compile_and_keep(written: Any, name: str, path: Path) -> int:
        def keep(module: Any, data: bytes) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            part.replace(path)

        def noted(*arguments: Any) -> Any:
            engine = create(*arguments)
            engine.set_object_cache(notify_func=keep)
            return engine

        llvm.create_mcjit_compiler = noted
        try:
            return compile_anew(written, name)
        finally:
            llvm.create_mcjit_compiler = create

    return address_of


def register(config: pytest.Config) -> None:
    """Add the plugin if a folder is named."""
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        config.pluginmanager.register(CompiledKernels(Path(folder)), "compiled_kernels")
