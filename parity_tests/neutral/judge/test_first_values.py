"""Numbers that wait for data are told from tables that code computes."""

from __future__ import annotations

import numpy as np
import pytest

from attn_parity.matching.state import are_two_constants, waits_for_data

random = np.random.default_rng(0)
positions = np.arange(12.0)[:, None]
frequencies = 10000.0 ** (-np.arange(16) / 16)
angles = 2 * np.pi * np.outer(np.arange(32), np.arange(32)) / 32

TABLES = {
    "sines": np.sin(positions * frequencies),
    "interleaved": np.stack([np.sin(positions * frequencies), np.cos(positions * frequencies)], -1).reshape(12, 32),
    "few positions": np.sin(np.arange(5)[:, None] * frequencies),
    "frequencies": frequencies,
    "slopes": 2.0 ** -np.arange(1, 9),
    "fourier basis": np.cos(angles),
    "window": np.hanning(16),
    "causal": np.tril(np.ones((6, 6))),
    "upper": np.triu(np.ones((6, 6), bool)),
    "additive": np.where(np.triu(np.ones((6, 6), bool), 1), -np.inf, 0.0),
    "one constant": np.full(6, 0.125),
    "scalar": np.asarray(0.3),
    "positions": np.arange(8),
    "distances": np.abs(np.arange(7)[:, None] - np.arange(7)),
    "cosines": np.cos(np.pi * (np.arange(8)[:, None] + 0.5) * np.arange(8) / 8),
    "cosines in float32": np.cos(np.pi * np.outer(np.arange(8), np.arange(8)) / 8).astype(np.float32),
    "written": np.asarray([0.458, 0.448, 0.455], np.float32),
    "written with a unit axis": np.asarray([0.229, 0.224, 0.225], np.float32)[None, :, None, None],
}
DATA = {
    "zeros": np.zeros((4, 3)),
    "ones": np.ones(7),
    "scalar one": np.asarray(1.0),
    "whole zeros": np.zeros((4, 3), np.int8),
    "unit vector": np.full(6, 6**-0.5, np.float32),
    "unit vector of norms by row": np.full((1, 48), 48**-0.5),
    "vector": random.normal(size=24),
    "matrix": random.normal(size=(16, 40)),
    "whole": random.integers(-127, 127, size=(12, 10)),
    "float32": random.normal(size=(16, 40)).astype(np.float32),
    "uniform": random.integers(0, 2**23, size=(64, 64)).astype(np.float32) / np.float32(2**23),
    "sparse": random.normal(size=(16, 16)) * (random.uniform(size=(16, 16)) < 0.2),
    "half": random.normal(size=(64, 64)).astype(np.float16),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_computed_table_does_not_wait(name):
    assert not waits_for_data(TABLES[name])


@pytest.mark.parametrize("name", DATA)
def test_first_values_wait(name):
    assert waits_for_data(DATA[name])


SHORT = {
    "frequencies": 10000.0 ** (-np.arange(3) / 3),
    "positions": np.linspace(-1.0, 1.0, 3) / 7.0,
    "harmonic": 1.0 / (3.0 + np.arange(4)),
    "logarithms": np.log(2.0 + np.arange(4)),
    "squares": (np.arange(4) / 7.0) ** 2,
    "cosines": np.cos(0.7 + 0.9 * np.arange(5)),
    "sines of four positions": np.sin(np.arange(4)[:, None] * 10000.0 ** (-np.arange(3) / 3)),
    "slopes of six heads": np.asarray([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
    "offsets": np.arange(3),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SHORT)
def test_a_short_table_is_known_by_its_formula(name, dtype):
    table = SHORT[name]
    assert not waits_for_data(table if table.dtype.kind == "i" else table.astype(dtype))


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (6,), (8,), (12,), (16,), (24,), (2, 3), (4, 4), (5, 8)], ids=str)
@pytest.mark.parametrize("draw", [random.normal, random.uniform], ids=["normal", "uniform"])
def test_random_numbers_are_not_taken_for_tables(draw, shape):
    assert np.mean([not waits_for_data(draw(size=shape).astype(np.float32)) for _ in range(400)]) <= 0.01


def test_rising_numbers_next_to_similar_ones_are_a_table():
    second = np.asarray([0.12371193, 0.77191817, 0.91232731], np.float32)
    assert waits_for_data(second)
    assert waits_for_data(second, np.asarray([-1.3, 0.4, 0.2], np.float32))
    assert not waits_for_data(second, 1.01 * second)
    assert not waits_for_data(second, 2 * second)
    assert waits_for_data(second[[1, 0, 2]], 1.01 * second[[1, 0, 2]]), "without a sign they are data"


def test_equal_numbers_of_length_1_are_no_first_values_for_a_constant():
    assert waits_for_data(np.full(4, 0.5), random.normal(size=4))
    assert not waits_for_data(np.full(4, 0.5), np.full(4, 0.25))


def test_written_numbers_replace_first_values_alone():
    written = np.asarray([0.229, 0.224, 0.225], np.float32)
    others = np.asarray([0.26862954, 0.26130258, 0.27577711], np.float32)
    assert are_two_constants(written, others)
    assert not are_two_constants(written, np.zeros(3, np.float32))
    assert not are_two_constants(np.ones(3, np.float32), others), "first values of the first side are carried"
    assert are_two_constants(np.full(3, 0.5, np.float32), others)
    assert not are_two_constants(random.normal(size=3).astype(np.float32), others)
