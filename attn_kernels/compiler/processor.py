"""What the processor at hand has that the kernels are compiled for."""

from __future__ import annotations

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
