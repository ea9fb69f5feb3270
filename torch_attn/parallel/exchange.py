"""Tensors that go from device to device, and whose gradients go back: each device sends to each a number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup


class _Exchange(torch.autograd.Function):
    """All to all: rows for the first device first, and so they come."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return send(rows, sent, got, group)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return send(gradient, ctx.got, ctx.sent, ctx.group), None, None, None


def send(rows: Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> Tensor:
    """Exchange rows between all devices of a group, and return the received ones; without a gradient.

    Args:
        rows: rows to send, by receiver.
        sent: rows for each device.
        got: rows from each device.
        group: the devices.
    """
    received = rows.new_empty((sum(got), *rows.shape[1:]))
    distributed.all_to_all_single(received, rows.contiguous(), got, sent, group=group)
    return received


def exchange(rows: Tensor, sent: Sequence[int], got: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send rows of the first axis to every device.

    Args:
        rows: those for the first device first.
        sent: how many go to each device.
        got: how many come from each device.
        group: the devices.
    """
    received: Tensor = _Exchange.apply(rows, list(sent), list(got), group)
    return received


def to_next(arrays: Sequence[Tensor], group: ProcessGroup, rank: int, devices: int) -> list[Tensor]:
    """Pass arrays to the next device in one move, and return those of the previous one; without a gradient."""
    sent, got = [0] * devices, [0] * devices
    flat = torch.cat([array.reshape(-1) for array in arrays]) if len(arrays) > 1 else arrays[0].reshape(-1)
    sent[(rank + 1) % devices] = got[(rank - 1) % devices] = len(flat)
    received = send(flat, sent, got, group).split([array.numel() for array in arrays])
    return [part.view(array.shape) for part, array in zip(received, arrays, strict=True)]
