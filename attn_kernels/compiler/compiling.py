"""Compiles kernels to machine code for the host processor; the code lives as long as the process."""

from __future__ import annotations

from collections.abc import Mapping

import llvmlite.binding as llvm
from llvmlite import ir

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
    machine = machine_for(NAME, FEATURES.flatten(), jit=True)
    engine = llvm.create_mcjit_compiler(optimized(written, machine), machine)
    engine.finalize_object()
    _ALIVE.append(engine)
    address: int = engine.get_function_address(name)
    return address


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
