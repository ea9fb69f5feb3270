"""The blocks that a call of `blocked` visits, which are known before any number is.

Up to `UNROLLED` tokens on a CPU a few blocks of rows are written out, each with all keys that it sees: products that
wide share the cores. Beyond that, and on accelerators, rolled loops go over square blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax
from jax import Array

from attn_bridge.backends import usable_cores
from attn_bridge.masks import Mask

SMALL_BLOCK = 128
"""Least rows and columns of a block: smaller blocks compute fewer hidden scores, but start more operations."""

UNROLLED = 2048
"""Longest sequences whose blocks are written out on a CPU: products over all visible keys share the cores."""

ROW_BLOCKS = 8
"""Blocks of rows that are written out: each compiles for itself."""

LARGE_BLOCK = 512
"""Rows and columns of a block in rolled loops."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call: heads are those of queries, in groups that share a key head."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """A call without its arrays, and the sizes of a block."""

    shape: Shape
    mask: Mask | None
    scale: float
    softcap: float | None
    dropout: float
    together: int
    rows: int
    columns: int
    unrolled: bool
    narrow: bool = False
    """Whether forward products of bfloat16 are those of the processor, summed in float32.

    Backward, and where that reads the context that was kept, rounded weights would not cancel in what all keys have in
    common, so operands are widened there."""
    is_differentiated: bool = False
    """Whether gradients may follow."""
    differentiates_bias: bool = False
    """Whether the gradient of a bias is asked for."""
    precision: str | None = dataclasses.field(default_factory=lambda: jax.config.jax_default_matmul_precision)
    """Of products: that of the call, which may have ended when JAX traces derivatives or lowers blocks."""

    @property
    def row_blocks(self) -> int:
        """How many blocks of rows there are."""
        return -(-self.shape.queries // self.rows)

    @property
    def column_blocks(self) -> int:
        """How many blocks of columns there are."""
        return -(-self.shape.keys // self.columns)

    def whole(self) -> BlockPlan:
        """Return the plan with everything in one block."""
        shape = self.shape
        return dataclasses.replace(self, together=shape.batch * shape.heads, rows=shape.queries, columns=shape.keys)

    @functools.cached_property
    def visible(self) -> list[list[bool | None]]:
        """For each block of rows and each of columns whether all rows see all columns, none any, or it differs."""

        def answer(i: int, j: int) -> bool | None:
            rows = range(i * self.rows, min((i + 1) * self.rows, self.shape.queries))
            columns = range(j * self.columns, min((j + 1) * self.columns, self.shape.keys))
            seen = True if self.mask is None else self.mask.visibility(rows, columns)
            return None if seen and len(columns) < self.columns else seen

        return [[answer(i, j) for j in range(self.column_blocks)] for i in range(self.row_blocks)]

    @property
    def tables(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Blocks of columns, and where in that list those of each block of rows begin.

        Those that every row of the block sees come first, up to the second number, those to be masked up to the third.
        """
        listed: list[int] = []
        begins, middles, ends = [], [], []
        for answers in self.visible:
            begins.append(len(listed))
            listed += [j for j, answer in enumerate(answers) if answer]
            middles.append(len(listed))
            listed += [j for j, answer in enumerate(answers) if answer is None]
            ends.append(len(listed))
        return listed, begins, middles, ends

    def runs(self, i: int) -> list[tuple[bool, Columns]]:
        """Return the neighbouring columns that a block of rows sees, and whether they are to be masked."""
        runs = []
        for is_seen, group in itertools.groupby(enumerate(self.visible[i]), lambda pair: pair[1] is not False):
            blocks = list(group)
            if is_seen:
                columns = Columns(blocks[0][0] * self.columns, len(blocks) * self.columns)
                runs.append((any(answer is None for _, answer in blocks), columns))
        return runs


@dataclasses.dataclass(frozen=True)
class Columns:
    """Neighbouring columns: the first, and how many."""

    start: int | Array
    width: int


def block_sizes(shape: Shape, has_bias: bool) -> dict[str, Any]:
    """Return the number of heads per step, the rows and columns of a block, and whether blocks are written out.

    More cores take larger blocks, as they share one matrix product, and one head at a time, as that keeps a block in
    the cache. An accelerator takes all heads at once, and so do several devices: a loop over heads would gather arrays
    that they share.
    """
    cores = usable_cores()
    is_cpu = jax.default_backend() == "cpu"
    one_by_one = has_bias or (is_cpu and jax.device_count() == 1)
    unrolled = is_cpu and one_by_one and max(shape.queries, shape.keys) <= UNROLLED
    # The root, as it multiplies both sides of a block: its scores then grow as the number of cores does.
    factor = max(1, math.isqrt(cores // 2)) if is_cpu else 1
    columns = (SMALL_BLOCK if unrolled else LARGE_BLOCK) * factor
    rows = max(columns, -(-shape.queries // ROW_BLOCKS)) if unrolled else columns
    return {
        "together": 1 if one_by_one else shape.batch * shape.heads,
        "rows": _even(shape.queries, rows),
        "columns": _even(shape.keys, columns),
        "unrolled": unrolled,
        "narrow": unrolled and multiplies_bfloat16(),
    }


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether the processor has matrix products of bfloat16 (AMX), several times as fast as those of float32."""
    with contextlib.suppress(OSError):  # not Linux
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    return False


def _even(size: int, block: int) -> int:
    """Return the size of the blocks that cut `size` into equal parts of at most `block`, in steps of 8."""
    if size <= block:
        return size
    part = -(-size // -(-size // block))
    return -(-part // 8) * 8
