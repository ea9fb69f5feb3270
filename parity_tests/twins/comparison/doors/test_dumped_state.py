"""Dumps carry what `compare` carries beside parameters: buffers, variables, statistics, frozen and unused weights."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

from attn_parity.dumps.replay import compare_dumps

from ..state.test_state_of_layers import FlaxQuantised, TorchQuantised
from .sides import FlaxTable, NnxNorm, TorchNorm, TorchTable, dumped, linen_norm


@pytest.mark.parametrize("second", [NnxNorm, linen_norm], ids=["nnx", "linen"])
def test_running_statistics_are_carried_to_a_dump(second, tmp_path):
    assert dumped(TorchNorm(), second(), tmp_path).verdict == "equal"


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
def test_a_table_in_a_buffer_is_carried_to_a_dump(kind, tmp_path):
    report = dumped(TorchTable(), FlaxTable(kind), tmp_path)
    assert report.verdict == "equal"
    assert ("table", "table") in {(row.first, row.second) for row in report.pairing}
    assert any("table" in note for note in report.notes)


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
def test_a_wrong_use_of_a_carried_table_is_seen_in_dumps(kind, tmp_path):
    assert dumped(TorchTable(), FlaxTable(kind, 1.01), tmp_path).verdict == "different"


def test_whole_numbers_of_a_quantised_layer_are_carried_to_a_dump(tmp_path):
    assert dumped(TorchQuantised(), FlaxQuantised(), tmp_path).verdict == "equal"


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
def test_a_frozen_table_is_carried_to_a_dump(kind, tmp_path):
    report = dumped(TorchTable(frozen=True), FlaxTable(kind), tmp_path)
    assert report.verdict == "equal"
    assert "frozen in torch, so every sample keeps the given numbers: table" in report.notes


def test_unused_parameters_are_set_aside_in_dumps(tmp_path):
    report = dumped(TorchTable(idle=True), FlaxTable(), tmp_path)
    assert report.verdict == "equal"
    assert "pooler.weight, pooler.bias of torch are left out: no effect on the outputs" in report.notes


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Param])
@pytest.mark.parametrize("like", [True, False], ids=["like", "alone"])
def test_dumps_without_transfer_keep_their_own_state(kind, like, tmp_path):
    first = TorchTable()
    right, wrong = (FlaxTable(kind, numbers=by * first.table.numpy()) for by in (1.0, 2.0))
    for name, second in (("right", right), ("wrong", wrong)):
        second.fc.kernel.set_value(jnp.asarray(first.fc.weight.detach().numpy().T))
        second.fc.bias.set_value(jnp.asarray(first.fc.bias.detach().numpy()))
        (tmp_path / name).mkdir()
        report = dumped(first, second, tmp_path / name, like=like, transfer=False)
        assert report.verdict == ("equal" if name == "right" else "different")


def test_a_rule_reaches_state_of_a_dump(tmp_path):
    first, second = TorchTable(), FlaxTable()
    second.rows, second.table = second.table, nnx.Variable(jnp.ones((2, 2)))
    second.__class__ = type("Renamed", (FlaxTable,), {"__call__": lambda self, x: self.fc(x + self.rows[...])})
    rules = [{"first": "table", "second": "rows"}]
    report = dumped(first, second, tmp_path, rules=rules)
    assert report.verdict == "equal"
    assert {row.how for row in report.pairing if row.second == "rows"} == {"rule"}
    again = compare_dumps(tmp_path / "first", tmp_path / "second", rules=rules)
    assert again.verdict == "equal"
    with pytest.raises(ValueError, match="was made with another pairing than these rules say"):
        compare_dumps(tmp_path / "first", tmp_path / "second", rules=[{"first": "table", "drop": "no reason"}])


def test_a_rule_that_drops_a_drawn_weight_of_a_dump_is_refused(tmp_path):
    class Constant(nnx.Module):
        def __init__(self, table):
            self.fc, self.table = nnx.Linear(8, 6, rngs=nnx.Rngs(0)), nnx.data(jnp.asarray(table))

        def __call__(self, x):
            return self.fc(x + self.table)

    first = TorchTable(frozen=True)
    first.table.requires_grad_(True)
    rules = [{"first": "table", "drop": "a constant"}]
    with pytest.raises(ValueError, match=r"table is dropped \(a constant\), and the samples of .* draw it at random"):
        dumped(first, Constant(first.table.detach().numpy()), tmp_path, rules=rules)


def test_a_module_that_shares_a_stock_layers_name_is_called_as_it_is(tmp_path):
    class MultiheadAttention(TorchTable):
        """Takes no `need_weights`."""

    assert dumped(MultiheadAttention(), FlaxTable(), tmp_path).verdict == "equal"
