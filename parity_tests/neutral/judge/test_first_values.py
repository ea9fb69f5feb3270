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


def test_random_vectors_are_rarely_taken_for_tables():
    assert np.mean([waits_for_data(random.normal(size=8)) for _ in range(500)]) > 0.85
    assert np.mean([waits_for_data(random.normal(size=(32, 32))) for _ in range(100)]) == 1.0


def test_written_numbers_replace_first_values_alone():
    written = np.asarray([0.229, 0.224, 0.225], np.float32)
    others = np.asarray([0.26862954, 0.26130258, 0.27577711], np.float32)
    assert are_two_constants(written, others)
    assert not are_two_constants(written, np.zeros(3, np.float32))
    assert not are_two_constants(np.ones(3, np.float32), others), "first values of the first side are carried"
    assert are_two_constants(np.full(3, 0.5, np.float32), others)
    assert not are_two_constants(random.normal(size=3).astype(np.float32), others)
