"""What the processor has that Numba compiles for, which is the one at hand unless its settings say otherwise."""

from __future__ import annotations

from numba.core.registry import cpu_target

_TRIPLE, _, _LIST = cpu_target.target_context.codegen().magic_tuple()
_FEATURES = _LIST.split(",")

if _TRIPLE.startswith(("x86_64", "i386", "i686")) and "+f16c" not in _FEATURES:
    # LLVM would end the process for want of a function.
    raise ImportError("the processor does not convert float16 (F16C)")

LANES = 16 if "+avx512f" in _FEATURES else 8 if "+avx2" in _FEATURES else 4
"""Numbers of float32 that a register holds."""

VECTORS = 2 if LANES == 8 else 4
"""Registers per row of a tile of a product: with its `ROWS`, nearly all that there are (32; 16 with AVX2)."""

ROWS = 6
"""Rows of a tile; the memory of a result has room for a whole number of tiles."""
