"""What the processor at hand has that the kernels are compiled for."""

from __future__ import annotations

import ctypes
import functools
import sys

import llvmlite.binding as llvm

NAME, FEATURES = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
"""What LLVM calls it, and whether it has what LLVM knows names for."""

IS_X86 = llvm.get_process_triple().startswith(("x86_64", "i386", "i686"))

if IS_X86 and not FEATURES.get("f16c"):
    # LLVM would end the process for want of a function.
    raise ImportError("the processor does not convert float16 (F16C)")

LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4
"""Numbers of float32 that a register holds."""

VECTORS = 2 if LANES == 8 else 4
"""Registers per row of a tile of a product: with its `ROWS`, nearly all that there are (32; 16 with AVX2)."""

ROWS = 6
"""Rows of a tile; the memory of a result has room for a whole number of tiles."""

_REQUEST_PERMISSION, _TILES_OF_AMX, _ARCH_PRCTL = 0x1023, 18, 158


def pairs() -> str | None:
    """Return by which of its instructions the processor multiplies pairs of bfloat16, None where it has none for them.

    ``"amx"`` or ``"avx512bf16"``: see `vectors.pairs`, which is what knows them. ``"any"`` and ``"any16"``, which no
    processor is said to have, compute the same on every one; tests put them in the place of this.
    """
    return _pairs()


@functools.cache
def _pairs() -> str | None:
    if FEATURES.get("amx-tile") and FEATURES.get("amx-bf16"):
        # Beside AMX, AVX512-BF16 is half as fast as float32 (libxsmm/tpp-mlir#1025); on Zen 4 twice (iree#15089).
        return "amx" if _may_use_tiles() else None
    return "avx512bf16" if LANES == 16 and FEATURES.get("avx512bf16") else None


def _may_use_tiles() -> bool:
    """Ask the system for leave to use AMX, which it gives to a process, its threads and what it forks."""
    if not (sys.platform == "linux" and llvm.get_process_triple().startswith("x86_64")):
        return False
    numbers = (ctypes.c_long(one) for one in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES_OF_AMX))
    return int(ctypes.CDLL(None).syscall(*numbers)) == 0
