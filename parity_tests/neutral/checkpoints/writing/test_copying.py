"""Elements moved between memory orders, against NumPy's own transposes: every width, odd sizes, any range."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from attn_bridge.checkpoints import copying
from attn_bridge.checkpoints.containers.base import TensorInfo
from attn_bridge.checkpoints.copying import apply, move_of, pieces, source_runs
from attn_bridge.checkpoints.elements import Elements
from attn_bridge.checkpoints.planning import TargetTensor
from attn_bridge.checkpoints.readers import ArraysReader

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64, np.complex128]
CASES = [
    ((37, 50), (1, 0)),
    ((128, 64), (1, 0)),
    ((64, 128), (1, 0)),
    ((131, 4100), (1, 0)),  # rows beyond the last cache line, columns beyond one piece
    ((3140, 9), (1, 0)),  # enough rows to be cut between packed ones
    ((3, 140, 70), (2, 0, 1)),
    ((2, 130, 3, 65), (3, 1, 0, 2)),
    ((5, 0, 3), (2, 1, 0)),
    ((7,), (0,)),
]


def drawn(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, size=(*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]


def transposing(array, axes):
    steps, step = {}, 1
    for axis in reversed(axes):
        steps[axis], step = step, step * array.shape[axis]
    strides = [stride // array.itemsize for stride in array.strides]
    return move_of("x", 0, 0, [(array.shape[axis], strides[axis], steps[axis]) for axis in axes])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axes"), CASES)
def test_a_transpose_is_numpys(monkeypatch, shape, axes, dtype, threads):
    monkeypatch.setattr(copying, "_threads", lambda: threads)
    monkeypatch.setattr(copying, "WORTH_THREADS", 1)
    array = drawn(shape, dtype)
    target = np.zeros(array.size, dtype)
    apply(transposing(array, axes), array.reshape(-1), target)
    assert target.tobytes() == array.transpose(axes).tobytes()


@pytest.mark.parametrize("step", [1, 7, 100, 1001])
@pytest.mark.parametrize(("shape", "axes"), [((7, 5), (1, 0)), ((4, 5, 6), (2, 0, 1)), ((3, 4, 5, 2), (3, 1, 0, 2))])
def test_the_pieces_of_ranges_are_the_whole(shape, axes, step):
    array = drawn(shape, np.uint16)
    move, target = transposing(array, axes), np.zeros(array.size, np.uint16)
    for start in range(0, array.size, step):
        stop = min(array.size, start + step)
        found = list(pieces(move, start, stop))
        assert sum(piece.size for piece in found) == stop - start
        for piece in found:
            apply(piece, array.reshape(-1), target)
    assert target.tobytes() == array.transpose(axes).tobytes()


def test_runs_of_the_source_are_as_long_as_they_can_be():
    move = move_of("x", 0, 0, [(4, 60, 1), (3, 20, 4), (20, 1, 12)])
    assert source_runs(move) == (240, [])
    assert source_runs(move_of("x", 0, 0, [(4, 60, 1), (10, 1, 4)])) == (10, [(4, 60, 1)])


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["run-by-run", "held"])
def test_elements_that_lie_apart_are_gathered(most):
    array = drawn((40, 90), np.uint32)
    part = array[:, 10:40]
    move = move_of("x", 10, 0, [(40, 90, 1), (30, 1, 40)])
    target = TargetTensor(TensorInfo("y", "uint32", (30, 40)), "uint32", (move,), "")
    elements = Elements(ArraysReader({"x": array}), None, most)
    assert elements.read(target)[0].tobytes() == part.T.tobytes()
    assert elements.read(target, 17, 333)[0].tobytes() == part.T.reshape(-1)[17:333].tobytes()


def test_memory_is_used_again_only_once_it_was_given_back():
    one, two = (drawn((64, 64), np.uint16, seed) for seed in (1, 2))
    elements = Elements(ArraysReader({"a": one, "b": two}), None, 1 << 20)
    targets = [
        TargetTensor(
            TensorInfo(name, "uint16", (64, 64)), "uint16", (move_of(name, 0, 0, [(64, 64, 1), (64, 1, 64)]),), ""
        )
        for name in "ab"
    ]
    first, second = (elements.read(target)[0] for target in targets)
    assert first.tobytes() == one.T.tobytes()
    assert second.tobytes() == two.T.tobytes()
    address = first.ctypes.data
    elements.release(first)
    third = elements.read(targets[1])[0]
    assert third.ctypes.data == address
    assert third.tobytes() == second.tobytes() == two.T.tobytes()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float64])
def test_memory_lies_in_its_page_as_its_bytes_will_in_the_file(kind):
    array = drawn((70, 64), kind)
    move = move_of("x", 0, 0, [(64, 1, 70), (70, 64, 1)])
    target = TargetTensor(TensorInfo("y", array.dtype.name, (64, 70)), array.dtype.name, (move,), "")
    elements = Elements(ArraysReader({"x": array}), None, 1 << 20)
    for place in (0, 8, 4096, 12345 * 8, 1 << 40, 40960 - 8, 8 * 511):
        found, _ = elements.read(target, file_offset=place)
        assert found.tobytes() == array.T.tobytes()
        assert (found.ctypes.data - place) % 4096 == 0
        assert found.flags.aligned
        elements.release(found)
    odd = elements.read(target, file_offset=3)[0]
    assert odd.flags.aligned
    assert odd.tobytes() == array.T.tobytes()


def test_memory_that_is_used_again_has_room_at_any_place():
    arrays = {"a": drawn((64, 64), np.uint8), "b": drawn((128, 64), np.uint8, 1)}
    elements = Elements(ArraysReader(arrays), None, 1 << 20)
    for name, array in arrays.items():  # the memory of the first has as many bytes as the second needs
        rows = len(array)
        move = move_of(name, 0, 0, [(64, 1, rows), (rows, 64, 1)])
        target = TargetTensor(TensorInfo(name, "uint8", (64, rows)), "uint8", (move,), "")
        found, _ = elements.read(target, file_offset=4096 - 64 + 2048)
        assert found.tobytes() == array.T.tobytes()
        elements.release(found)


def test_a_cast_says_how_many_elements_it_changed():
    array = np.float32([1.0, 1.0 + 2**-20, np.nan, np.inf, -0.0, 1e-45])
    move = move_of("x", 0, 0, [(6, 1, 1)])
    target = TargetTensor(TensorInfo("y", "bfloat16", (6,)), "float32", (move,), "")
    found, changed = Elements(ArraysReader({"x": array}), None, 0).read(target)
    assert found.dtype == ml_dtypes.bfloat16
    assert changed == 2
