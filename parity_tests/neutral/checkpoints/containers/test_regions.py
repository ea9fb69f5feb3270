"""Regions of targets: read alone they hold what the whole holds there, and no more of the source is read."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from attn_bridge.checkpoints.containers.base import Array, TensorInfo
from attn_bridge.checkpoints.copying import Move, move_of
from attn_bridge.checkpoints.elements import Elements, Parts
from attn_bridge.checkpoints.planning import TargetTensor, part_of
from attn_bridge.checkpoints.readers import ArraysReader, NumberedReader, SharedReader
from attn_bridge.weights import Region, slices


class CountingReader(ArraysReader):
    """Arrays, and how many bytes were read of them."""

    def __init__(self, arrays: dict[str, Array]):
        super().__init__(arrays)
        self.count = 0

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of an array."""
        self.count += stop - start
        return super().read_range(name, start, stop)


def drawn(*shape: int) -> Array:
    """Return numbers of which no two are the same."""
    return (np.random.default_rng(7).permutation(math.prod(shape)) + 1).astype(np.float32).reshape(shape)


def placed(source: str, at: tuple[int, ...], sizes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]):
    """Return the move of a whole source, its axes in another order, to a box at a place of a target of that shape."""
    source_sizes = [sizes[order.index(axis)] for axis in range(len(order))]
    here = [math.prod(source_sizes[axis + 1 :]) for axis in range(len(order))]
    there = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = [(size, here[order[number]], there[number]) for number, size in enumerate(sizes)]
    return move_of(source, 0, sum(first * step for first, step in zip(at, there, strict=True)), axes)


def target_of(shape: tuple[int, ...], *moves: Move) -> TargetTensor:
    return TargetTensor(TensorInfo("y", "float32", shape), "float32", moves, "")


A, B = drawn(6, 4, 10), drawn(4, 10, 6) + 1000
CASES = {
    "as it lies": ({"a": A}, target_of((6, 4, 10), placed("a", (0, 0, 0), (6, 4, 10), (0, 1, 2), (6, 4, 10)))),
    "two axes in one": ({"a": A}, target_of((24, 10), Move("a", 0, 0, ((240, 1, 1),)))),
    "one axis in two": ({"a": A}, target_of((6, 2, 2, 10), Move("a", 0, 0, ((240, 1, 1),)))),
    "transposed": ({"a": A}, target_of((10, 6, 4), placed("a", (0, 0, 0), (10, 6, 4), (2, 0, 1), (10, 6, 4)))),
    "transposed into two axes": ({"a": A}, target_of((10, 24), Move("a", 0, 0, ((10, 1, 24), (24, 10, 1))))),
    "fused along the first axis": (
        {"a": A, "b": B},
        target_of(
            (10, 4, 10),
            placed("a", (0, 0, 0), (6, 4, 10), (0, 1, 2), (10, 4, 10)),
            move_of("b", 5, 240, [(4, 50, 40), (4, 10, 10), (10, 1, 1)]),
        ),
    ),
    "fused along the last axis": (
        {"a": A, "b": B},
        target_of(
            (6, 4, 20),
            placed("a", (0, 0, 0), (6, 4, 10), (0, 1, 2), (6, 4, 20)),
            placed("b", (0, 0, 10), (6, 4, 10), (2, 0, 1), (6, 4, 20)),
        ),
    ),
    "interleaved": (
        {"a": A, "b": B},
        target_of((12, 40), Move("a", 0, 0, ((6, 40, 80), (40, 1, 1))), Move("b", 0, 40, ((6, 1, 80), (40, 6, 1)))),
    ),
    "interleaved with a row left over": (
        {"a": A, "b": B},
        target_of(
            (5, 10),
            Move("a", 0, 0, ((2, 10, 20), (10, 1, 1))),
            Move("a", 40, 10, ((2, 10, 20), (10, 1, 1))),
            Move("b", 0, 40, ((10, 1, 1),)),
        ),
    ),
    "interleaved by pairs": (
        {"a": A},
        target_of((10, 24), Move("a", 0, 0, ((10, 1, 24), (6, 40, 4), (2, 20, 1), (2, 10, 2)))),
    ),
    "a part of the source": ({"a": A}, target_of((3, 10), Move("a", 10, 0, ((3, 40, 10), (10, 1, 1))))),
}


def regions(shape: tuple[int, ...]):
    """Yield halves, thirds and odd parts along every axis and pairs of axes."""
    bounds = [
        sorted({(0, size), (0, size // 2), (size // 2, size), (size // 3, size - size // 4), (size - 1, size), (1, 1)})
        for size in shape
    ]
    yield from itertools.product(*bounds)


@pytest.mark.parametrize("name", CASES)
def test_a_region_is_what_the_whole_holds_there(name):
    arrays, target = CASES[name]
    whole = Elements(ArraysReader(arrays), None, 1 << 20).read(target)[0].reshape(target.info.shape)
    for region in regions(target.info.shape):
        reader = CountingReader(arrays)
        part = part_of(target, region)
        assert part is not None
        assert sum(move.size for move in part.moves) == math.prod(stop - start for start, stop in region)
        array = Parts(reader, None).of(target).read(region)
        np.testing.assert_array_equal(array, whole[slices(region)])
        assert array.flags.c_contiguous


def test_nothing_else_is_read_where_gaps_are_wide():
    source = drawn(64, 4096)
    target = target_of((4096, 64), move_of("a", 0, 0, [(4096, 1, 64), (64, 4096, 1)]))
    for region in (((1024, 2048), (0, 64)), ((0, 4096), (16, 32)), ((2048, 3072), (32, 64))):
        reader = CountingReader({"a": source})
        array = Parts(reader, None).of(target).read(region)
        np.testing.assert_array_equal(array, source.T[slices(region)])
        assert reader.count == array.nbytes


def test_what_is_no_box_of_the_target_is_read_whole():
    """A run that begins within a row and ends within another has no region that can be told."""
    target = target_of((4, 6), Move("a", 0, 0, ((3, 1, 1),)), Move("a", 3, 3, ((21, 1, 1),)))
    assert part_of(target, ((0, 2), (0, 6))) is None
    source = drawn(24)
    found = Parts(ArraysReader({"a": source}), None).of(target).read(((1, 3), (2, 5)))
    np.testing.assert_array_equal(found, source.reshape(4, 6)[1:3, 2:5])


@pytest.mark.parametrize("shape", [(7,), (6, 10), (5, 4, 6), (3, 4, 2, 5), ()], ids=str)
def test_a_shared_weight_is_read_by_its_regions(shape):
    """Any bytes of it, and any matrix in it, be its rows those of the weight or not; no row is read for nothing."""
    array = drawn(*shape)
    seen: list[int] = []

    def read(name: str, region: Region) -> Array:
        seen.append(math.prod(stop - start for start, stop in region))
        return np.ascontiguousarray(array[slices(region)])

    reader = SharedReader({"a": (shape, "float32")}, read)
    flat = array.reshape(-1)
    row = max(1, flat.size // (shape[0] if shape else 1))
    for start, stop in itertools.combinations(range(0, array.nbytes + 1, 14), 2):
        seen.clear()
        assert bytes(reader.read_range("a", start, stop)) == flat.tobytes()[start:stop]
        assert sum(seen) <= (stop - start) // 4 + 2 * row
    for step in sorted({1, 3, row, row + 1, *(math.prod(shape[axis:]) for axis in range(len(shape) + 1))}):
        for run, rows, start in itertools.product(range(1, step + 1, 2), (1, 3), range(0, flat.size, 5)):
            if start + (rows - 1) * step + run <= flat.size:
                into = np.zeros((rows, run), np.float32)
                reader.read_rows("a", start, step, into)
                want = np.stack([flat[start + n * step :][:run] for n in range(rows)])
                np.testing.assert_array_equal(into, want)


def test_columns_of_a_shared_weight_are_read_alone():
    array, seen = drawn(8, 4, 16), []

    def read(name: str, region: Region) -> Array:
        seen.append(region)
        return np.ascontiguousarray(array[slices(region)])

    into = np.zeros((6, 20), np.float32)
    SharedReader({"a": (array.shape, "float32")}, read).read_rows("a", 64 + 16, 64, into)
    np.testing.assert_array_equal(into, array.reshape(8, 64)[1:7, 16:36])
    assert seen == [((1, 7), (1, 3), (0, 16))]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "float32", "float16"])
def test_elements_are_their_numbers_in_any_dtype(dtype):
    reader = NumberedReader(ArraysReader({"a": np.zeros(5, np.float32), "b": np.zeros((3, 4), dtype)}))
    found = reader.read("b")
    assert found.dtype == ("float64" if "float" in dtype else dtype)
    np.testing.assert_array_equal(found, np.arange(6, 18).reshape(3, 4))
    width = found.itemsize
    assert bytes(reader.read_range("b", 3 * width, 7 * width)) == found.reshape(-1)[3:7].tobytes()
