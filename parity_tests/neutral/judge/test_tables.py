"""What tables are taken to be the same: those of equal values, whatever their order, signs and repetition."""

from __future__ import annotations

import numpy as np

from attn_parity.sides import tables
from attn_parity.sides.tables import Collector, Tables

ANGLES = np.arange(7)[:, None] / 10.0 ** np.arange(4)


def gathered(*arrays):
    collector = Collector()
    for array in arrays:
        collector.add(np.asarray(array))
    return collector.found()


def test_order_signs_repetition_and_whole_numbers_do_not_count():
    one = gathered(np.cos(ANGLES), np.sin(ANGLES))
    other = gathered(np.concatenate([-np.sin(ANGLES), np.cos(ANGLES)], -1).T, np.ones(3), [np.inf, np.nan, -1e9], 2.0)
    assert one.count > 30
    assert one.equals(other)
    assert one.equals(gathered(np.exp(1j * ANGLES)))


def test_tables_are_compared_above_float64_rounding():
    one = gathered(np.cos(ANGLES))
    assert one.equals(gathered(np.cos(ANGLES) * (1 + 2e-16)))
    assert one.equals(gathered(np.cos(ANGLES), np.cos(ANGLES * (1 + 2e-16))))
    assert not one.equals(gathered(np.cos(ANGLES).astype(np.float32)))
    assert not one.equals(gathered(np.cos(ANGLES), 0.3))
    assert gathered().equals(gathered(np.arange(5.0)))


def test_large_tables_are_sampled_and_huge_ones_skipped(monkeypatch):
    many = np.random.default_rng(0).normal(size=5000)
    found = gathered(many)
    assert (found.count, len(found.values)) == (5000, tables.KEPT)
    assert found == Tables(found.count, found.values)
    assert found.equals(gathered(np.flip(many)))
    assert not found.equals(gathered(many * (1 + 1e-8)))
    monkeypatch.setattr(tables, "MAX_VALUES", 4000)
    assert gathered(many) is None
