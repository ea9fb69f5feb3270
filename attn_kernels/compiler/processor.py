"""Features of the host processor for which the kernels are compiled."""

from __future__ import annotations

import ctypes
import functools
import sys

import llvmlite.binding as llvm

NAME, FEATURES = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
"""LLVM's name of the processor, and LLVM feature -> whether it has it."""

IS_X86 = llvm.get_process_triple().startswith(("x86_64", "i386", "i686"))

if IS_X86 and not FEATURES.get("f16c"):
    # LLVM would end the process for want of a function.
    raise ImportError("the processor does not convert float16 (F16C)")

LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4
"""Numbers of float32 that a register holds."""

VECTORS = 2 if LANES == 8 else 4
"""Registers per row of a tile of a product: with `ROWS`, nearly all that the processor has (32; 16 with AVX2)."""

# With AVX-512 a tile has 6 * 4 sums, and a step needs 4 registers of the right side and 1 of the left: 29 of 32. With
# AVX2 it is 6 * 2 + 2 + 1 = 15 of 16.
ROWS = 6
"""Rows of a tile; the memory of a result has room for a whole number of tiles."""

# ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, and the number of arch_prctl among the system calls of Linux on x86-64.
_REQUEST_PERMISSION, _TILES_OF_AMX, _ARCH_PRCTL = 0x1023, 18, 158


def pairs() -> str | None:
    """Return the processor's instructions for products of bfloat16 pairs, None if it has none.

    ``"amx"`` or ``"avx512bf16"``, which `vectors.pairs` implements. ``"any"`` and ``"any16"`` compute the same on every
    processor; tests substitute them.
    """
    return _pairs()


@functools.cache
def _pairs() -> str | None:
    if FEATURES.get("amx-tile") and FEATURES.get("amx-bf16"):
        # Beside AMX, AVX512-BF16 is half as fast as float32 (libxsmm/tpp-mlir#1025); on Zen 4 twice (iree#15089).
        return "amx" if _may_use_tiles() else None
    return "avx512bf16" if LANES == 16 and FEATURES.get("avx512bf16") else None


def _may_use_tiles() -> bool:
    """Request the system's permission to use AMX, which extends to the process, its threads and its forks."""
    if not (sys.platform == "linux" and llvm.get_process_triple().startswith("x86_64")):
        return False
    numbers = (ctypes.c_long(one) for one in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILES_OF_AMX))
    return int(ctypes.CDLL(None).syscall(*numbers)) == 0
