"""Tensors between devices: which device gets how many rows, and that gradients go the way back."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from torch_attn.parallel import exchange
from torch_attn.parallel.schemes import recurrent
from torch_attn.parallel.schemes.balance import Places
from torch_attn.parallel.schemes.part import Part


@pytest.fixture
def moves(monkeypatch):
    """Every exchange as rows, counts sent and counts got; what comes back is the rows plus 100."""
    calls = []

    def send(rows, sent, got, group):
        calls.append((rows, sent, got))
        return rows + 100

    monkeypatch.setattr(exchange, "send", send)
    return calls


@pytest.mark.parametrize(
    ("rank", "sent", "got"), [(0, [0, 8, 0], [0, 0, 8]), (1, [0, 0, 8], [8, 0, 0]), (2, [8, 0, 0], [0, 8, 0])]
)
def test_arrays_go_to_the_next_device_together(moves, rank, sent, got):
    arrays = [torch.arange(6.0).view(2, 3), torch.arange(2.0)]
    received = exchange.to_next(arrays, None, rank, 3)
    ((rows, *counts),) = moves
    assert counts == [sent, got]
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert [torch.equal(one, array + 100) for one, array in zip(received, arrays, strict=True)] == [True, True]


def test_one_array_goes_without_a_copy(moves):
    array = torch.arange(6.0).view(2, 3)
    (received,) = exchange.to_next([array], None, 0, 2)
    assert moves[0][0].data_ptr() == array.data_ptr()
    assert torch.equal(received, array + 100)


def test_gradients_go_the_way_back(moves):
    rows = torch.arange(3.0).view(3, 1).requires_grad_()
    exchange.exchange(rows, (1, 2), (2, 1), None).backward(torch.ones(3, 1))
    assert [counts for _, *counts in moves] == [[[1, 2], [2, 1]], [[2, 1], [1, 2]]]
    assert rows.grad.tolist() == [[101.0]] * 3


@pytest.mark.parametrize(("is_balanced", "starts"), [(False, [(0,), (8,), (16,)]), (True, [(0, 20), (4, 16), (8, 12)])])
def test_balanced_devices_start_at_an_early_and_a_late_piece(is_balanced, starts):
    at = Places(None, 1, 3, 24, is_balanced)
    assert [at.starts(device) for device in range(3)] == starts
    assert at.starts() == starts[1]


def test_rows_of_a_part_are_those_of_its_queries():
    query, bias, keep = torch.arange(6.0).view(1, 6, 1, 1), torch.arange(12.0).view(1, 1, 6, 2), torch.ones(1, 1, 1, 2)
    part = Part(query, query, query, None, bias, None, keep, 0, 1.0, None, 0.0, False, None).rows(3, 2, 8)
    assert part.start == 8
    assert part.query.flatten().tolist() == [3, 4]
    assert part.bias.flatten().tolist() == [6, 7, 8, 9]
    assert part.keep is keep, "all queries share it"


@dataclasses.dataclass(frozen=True)
class Heads:
    """The sizes of a recurrent layer that devices share."""

    num_heads: int = 6
    num_groups: int = 4
    decay_rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    replace = dataclasses.replace


@pytest.mark.parametrize(("devices", "config"), [(1, Heads()), (2, Heads(3, 2, (4.0, 5.0, 6.0)))])
def test_a_device_has_its_share_of_the_heads(devices, config):
    plan = types.SimpleNamespace(size=lambda role: devices)
    second = types.SimpleNamespace(plan=plan, slice_of=lambda role, size, cut: slice(3, 6) if cut else slice(None))
    assert recurrent._config_of_heads(Heads(), second) == config
