"""Compiles kernels to machine code for the host processor, or loads the code that an earlier process compiled."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from . import storage
from .processor import FEATURES, IS_X86, NAME


def module(
    name: str, constants: Mapping[int, int] | None = None, *, unrolls: bool = True, pairs: str | None = None
) -> ir.Module:
    """Return an empty module for functions that are compiled together, with job words that are compile-time constants.

    With `unrolls`, LLVM unrolls their loops and vectorises; without, compiling takes a third of the time. `pairs` names
    the instructions that multiply bfloat16 (`processor.pairs`), None if they don't.
    """
    new = ir.Module(name)
    new.unrolls = unrolls
    new.known = constants or {}
    new.pairs = pairs
    new.triple = llvm.get_process_triple()
    return new


def address_of(written: ir.Module, name: str) -> int:
    """Compile a module, and return the address of one of its functions.

    Raises:
        RuntimeError: LLVM rejects the module; the message has the reason.
    """
    machine, stored_as = machine_for(NAME, FEATURES.flatten(), jit=True), _stored_as(written)
    code = storage.read(stored_as)
    if code is None:
        engine = llvm.create_mcjit_compiler(optimized(written, machine), machine)
        engine.set_object_cache(notify_func=lambda _, code: storage.write(stored_as, code))
    else:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ALIVE.append(engine)
    address: int = engine.get_function_address(name)
    return address


def _stored_as(written: ir.Module) -> str:
    """Return the name under which the machine code of a module is stored, which depends on all that makes it."""
    versions = (*llvm.llvm_version_info, llvmlite.__version__)
    return storage.name_of(_options(), NAME, FEATURES.flatten(), repr(versions), str(written.unrolls), str(written))


@functools.cache
def _options() -> str:
    """Return the source of this module, which holds the options of the compiler; nothing where it is not readable."""
    try:
        return Path(__file__).read_text(encoding="utf-8")
    except OSError:
        return ""


def machine_for(processor: str, features: str = "", *, jit: bool = False) -> object:
    """Return LLVM's target machine for a processor by its LLVM name, for code in memory or in files."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=processor,
        features=features,
        opt=3,
        reloc="static" if IS_X86 else "default",
        codemodel="jitdefault" if jit else "default",
        jit=jit,
    )


def optimized(written: ir.Module, machine: object) -> object:
    """Return a module optimised by LLVM for a machine.

    Raises:
        RuntimeError: LLVM rejects the module; the message has the reason.
    """
    parsed = llvm.parse_assembly(str(written))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_vectorization = written.unrolls
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return parsed


_ALIVE: list[object] = []
"""Engines that own machine code, kept alive since XLA may call it until the process ends."""
