"""Products of pairs of bfloat16: what they compute, and the instructions that they become on other processors."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the extra cpu is not installed", allow_module_level=True)

from attn_kernels import words
from attn_kernels.compiler import compiling, processor
from attn_kernels.compiler.language import WORD, Code, function
from attn_kernels.direct import calls
from attn_kernels.flash import softmax, tiles
from attn_kernels.vectors import packing, pairs

BFLOAT16 = ml_dtypes.bfloat16

HERE = {
    "any": None,
    "avx512bf16": None if processor.FEATURES.get("avx512bf16") else "the processor has no AVX512-BF16",
    "amx": None if processor.pairs() == "amx" else "the processor has no AMX, or the system does not let it be used",
}
"""Instructions, and why they can't be run here, None if they can."""

ways = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
        for way, reason in HERE.items()
    ],
)


def write(routine: Any, count: int, way: str | None) -> Any:
    """Return a module with a function that calls a routine with so many words."""
    module = compiling.module("test", pairs=way)
    code = Code(function(module, "test", [WORD] * count))
    with pairs.ready(code):
        routine(code, *code.arguments)
    code.ret()
    return module


def call(routine: Any, *arguments: Any, way: str | None = None) -> None:
    """Compile a routine for itself and call it with numbers and the addresses of arrays."""
    numbers = [one.ctypes.data if isinstance(one, np.ndarray) else one for one in arguments]
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(numbers))
    kind(compiling.address_of(write(routine, len(numbers), way), "test"))(*numbers)


def sides(rows: int, depth: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=shape).astype(BFLOAT16) for shape in ((rows, depth), (depth, columns)))


def as_pairs(matrix: np.ndarray) -> np.ndarray:
    """Return words whose halves are numbers of two neighbouring rows."""
    low, high = (matrix[n::2].view(np.uint16).astype(np.uint32) for n in range(2))
    return low | high << 16


def multiply(left: np.ndarray, right: np.ndarray, way: str, start: np.ndarray | None = None) -> np.ndarray:
    """Return a product of matrices that lie in larger ones, added to another one if it is given."""
    (rows, depth), columns = left.shape, right.shape[1]
    wide = np.full((rows, depth + 6), np.nan, BFLOAT16)
    wide[:, :depth] = left
    of_pairs = np.full((depth // 2, columns + 5), 0x7FC07FC0, np.uint32)
    of_pairs[:, :columns] = as_pairs(right)
    out = np.full((rows, columns + 3), 7.0, np.float32)
    if start is not None:
        out[:, :columns] = start

    def routine(code: Code, *arguments: Any) -> None:
        pairs.product(code, *arguments, adds=start is not None)

    sizes = (rows, columns, depth)
    call(routine, wide, wide.shape[1], of_pairs, of_pairs.shape[1], out, out.shape[1], *sizes, way=way)
    assert (out[:, columns:] == 7.0).all()
    return out[:, :columns]


@ways
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(32, 32, 32), (96, 64, 64), (64, 160, 96), (32, 0, 32), (48, 80, 112)]
)
def test_products_are_those_of_numpy(rows, depth, columns, way):
    if way == "amx":
        rows, depth, columns = (size // pairs.EDGE * pairs.EDGE for size in (rows, depth, columns))
    left, right = sides(rows, depth, columns, seed=rows)
    start = np.random.default_rng(1).normal(size=(rows, columns)).astype("float32")
    exact = left.astype("float64") @ right.astype("float64")
    for before in (None, start):
        want = exact if before is None else exact + before
        found = multiply(left, right, way, before)
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6 * max(1.0, np.abs(want).max()))


@ways
def test_nan_and_infinity_reach_only_their_products(way):
    left, right = sides(32, 64, 64, seed=2)
    left[3, 5], left[4, 6], left[5, 63], right[10, 7], right[11, 8] = np.nan, np.inf, -np.inf, np.nan, np.inf
    right[6, 9] = left[9, 10] = 0.0
    with np.errstate(invalid="ignore"):
        want = left.astype("float64") @ right.astype("float64")
        assert np.isnan(want[4, 9])
        assert np.isinf(want).any()
    found = multiply(left, right, way)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(found), np.isposinf(want))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(want))
    np.testing.assert_allclose(found[np.isfinite(want)], want[np.isfinite(want)], rtol=0, atol=1e-4)


@ways
def test_numbers_below_full_precision_are_themselves_or_nothing(way):
    """AMX and AVX512-BF16 take them for 0."""
    left, right = np.zeros((32, 32), BFLOAT16), np.zeros((32, 32), BFLOAT16)
    left[0, 0], left[1, 1], right[0, 0], right[1, 1] = 1e-39, 2.0, 2.0**100, 3e-39
    found = multiply(left, right, way)
    exact = left.astype("float64") @ right.astype("float64")
    assert found[0, 0] in (0.0, np.float32(exact[0, 0]))
    assert found[1, 1] in (0.0, np.float32(exact[1, 1]))
    assert (found != 0.0).sum() == (2 if way == "any" else 0)


# ---- what lies in memory how


def test_neighbouring_rows_become_pairs():
    rows = np.random.default_rng(3).integers(0, 2**16, (64, 96), dtype=np.uint16)
    out = np.zeros((32, 96), np.uint32)
    call(packing.pair_rows, rows, 64, 96, out)
    np.testing.assert_array_equal(out, as_pairs(rows))


def test_numbers_are_rounded_and_what_that_took_away_too():
    numbers = (np.random.default_rng(4).normal(size=(32, 64)) * 10.0).astype("float32")
    numbers[0, :5] = np.inf, -np.inf, np.nan, 3.3961775e38, -0.0
    with np.errstate(all="ignore"):
        rounded = numbers.astype(BFLOAT16)
        rest = numbers - rounded.astype("float32")
        rest = np.where(np.isfinite(rest), rest, 0.0).astype(BFLOAT16)
    out, once, rests = (np.zeros((16, 64), np.uint32) for _ in range(3))
    call(packing.round_to_pairs, numbers, 32, 64, once)
    call(packing.round_to_pairs_twice, numbers, 32, 64, out, rests)
    for found, want in ((once, rounded), (out, rounded), (rests, rest)):
        np.testing.assert_array_equal(
            found.view(BFLOAT16).astype("float32"), as_pairs(want).view(BFLOAT16).astype("float32")
        )


@pytest.mark.parametrize(("first", "rows", "columns"), [(0, 7, 19), (5, 8, 32), (32, 0, 3)])
def test_rows_are_read_as_they_are_among_zeros(first, rows, columns):
    given = np.random.default_rng(5).integers(1, 2**16, (rows, 3, columns), dtype=np.uint16)
    out = np.full((32, 32), 9, np.uint16)
    call(packing.read_shorts, given, 3 * columns, rows, columns, out, 32, first, 32)
    want = np.zeros_like(out)
    want[first : first + rows, :columns] = given[:, 0]
    np.testing.assert_array_equal(out, want)


def test_columns_become_rows_and_rows_columns():
    shorts = np.random.default_rng(6).integers(0, 2**16, (96, 70), dtype=np.uint16)
    out = np.zeros((64, 100), np.uint16)
    call(tiles.transpose_shorts, shorts, 70, 96, 64, out, 100)
    np.testing.assert_array_equal(out[:, :96], shorts[:, :64].T)
    assert not out[:, 96:].any()
    numbers = np.random.default_rng(7).normal(size=(32, softmax.QUERIES)).astype("float32")
    back = np.zeros((softmax.QUERIES, 32), np.float32)
    call(tiles.transpose_back, numbers, 32, back)
    np.testing.assert_array_equal(back, numbers.T)


# ---- processors that are not at hand

PROCESSORS = [("amx", "sapphirerapids", "tdpbf16ps"), ("avx512bf16", "cooperlake", "vdpbf16ps")]


@pytest.mark.skipif(not processor.IS_X86, reason="LLVM writes for processors of this family")
@pytest.mark.parametrize(("way", "cpu", "instruction"), PROCESSORS)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_kernels_are_compiled_for_processors_that_have_products(kernel, way, cpu, instruction, monkeypatch):
    """They take LLVM's names for the instructions, which no other processor would try."""
    found = []

    def assemble(module: Any, name: str) -> int:
        machine = compiling.machine_for(cpu)
        found.append(machine.emit_assembly(compiling.optimized(module, machine)))
        return 1

    monkeypatch.setattr(compiling, "address_of", assemble)
    known = tuple(words.KINDS["bfloat16"] * (word == words.KIND) for word in calls._KNOWN)
    calls._compiled.__wrapped__(calls._KERNELS[kernel], known, way)
    names = re.findall(r"^\s+(\w+)", found[0], re.MULTILINE)
    assert instruction in names
    loads, releases = names.count("ldtilecfg"), names.count("tilerelease")
    assert loads == releases == (1 if way == "amx" else 0)
    assert ("vdpbf16ps" in names) is (way != "amx")


def test_the_products_are_those_of_the_processor(monkeypatch):
    """AMX needs the system's leave; without it, and where there is neither, numbers are widened."""
    for features, leave, lanes, want in (
        ({"amx-tile": True, "amx-bf16": True, "avx512bf16": True}, True, 16, "amx"),
        ({"amx-tile": True, "amx-bf16": True, "avx512bf16": True}, False, 16, None),
        ({"amx-tile": False, "amx-bf16": False, "avx512bf16": True}, False, 16, "avx512bf16"),
        ({"amx-tile": True, "amx-bf16": False, "avx512bf16": False}, True, 16, None),
        ({"avx512bf16": True}, False, 8, None),
        ({}, False, 8, None),
    ):
        for name, value in (("FEATURES", features), ("LANES", lanes), ("_may_use_tiles", lambda leave=leave: leave)):
            monkeypatch.setattr(processor, name, value)
        assert processor._pairs.__wrapped__() == want


@pytest.mark.skipif(processor.FEATURES.get("amx-tile", False), reason="the processor has tiles")
def test_no_leave_is_given_where_there_are_no_tiles():
    assert not processor._may_use_tiles()
